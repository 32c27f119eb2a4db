"""Types of the coordinator's HTTP API: replies, the join link, and the error codes a client acts on.

Requests that change something are signed messages (``protocol.messages``) in DSSE envelopes; what is here is what
comes back. Spec: ``docs/spec/http-api.md``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Final
from urllib.parse import parse_qsl, urlencode, urlsplit

from pydantic import BaseModel, ConfigDict, PlainSerializer, PlainValidator, WithJsonSchema

from protocol.envelope import Envelope
from protocol.errors import CODES, E_RATE_LIMITED, AssayError, LocalFault, PeerFault, Transient, code

E_JOIN_LINK = code("E_JOIN_LINK", "a join link is malformed", usage=True)
E_JOIN_TOKEN = code("E_JOIN_TOKEN", "a join token is missing, unknown, used up, expired or revoked")
E_NODE_UNKNOWN = code("E_NODE_UNKNOWN", "the node is not registered with this run")
E_NODE_BANNED = code("E_NODE_BANNED", "the node is banned from this run")
E_PROTOCOL_VERSION = code("E_PROTOCOL_VERSION", "the peer speaks a protocol version this run does not accept")
E_PROFILE = code("E_PROFILE", "the engine profile is not one of the run's profiles")
E_CLOCK_SKEW = code("E_CLOCK_SKEW", "a message is dated too far from the coordinator's clock")
E_NODE_VERSION = code("E_NODE_VERSION", "a node claims a checkpoint version that was never published")
E_LEASE_UNKNOWN = code("E_LEASE_UNKNOWN", "no such lease was given to this node")
E_LEASE_EXPIRED = code("E_LEASE_EXPIRED", "the lease's deadline has passed and its unit went to somebody else")
E_LEASE_CLOSED = code("E_LEASE_CLOSED", "the lease was handed back or its unit was cancelled")
E_COMMITMENT_MISMATCH = code("E_COMMITMENT_MISMATCH", "a commitment contradicts its lease or its uploaded object")
E_COMMITMENT_CHECKPOINT = code(
    "E_COMMITMENT_CHECKPOINT", "a commitment names a checkpoint manifest that is not published in this run"
)
E_SECOND_COMMITMENT = code("E_SECOND_COMMITMENT", "a second, different commitment for one lease")
E_OBJECT_MISSING = code("E_OBJECT_MISSING", "a commitment names an object that was not uploaded")
E_WITHHELD = code("E_WITHHELD", "a bundle is not shown yet: another node may still be making the same rollouts")
E_UPLOAD_URL = code("E_UPLOAD_URL", "an upload address is forged, expired or used for another object")
E_VERDICT = code("E_VERDICT", "a verdict contradicts itself or its receipt")
E_DISAGREE = code("E_DISAGREE", "two configurations of the verifier come to different ends; nobody is blamed")
E_UNCALIBRATED = code("E_UNCALIBRATED", "heads of an unlisted profile are outside the run's limits; nobody is blamed")
E_SUSPICION = code("E_SUSPICION", "what a node's audited bundles say against it has added up to the alarm")
E_CHECKPOINT_CHAIN = code("E_CHECKPOINT_CHAIN", "a checkpoint does not follow the newest published one")
E_BATCH = code("E_BATCH", "a batch names groups or receipts that are not admitted or are used already")
E_RANGE = code("E_RANGE", "a range of bytes lies outside the object")
E_ADMIN_TOKEN = code("E_ADMIN_TOKEN", "the admin token is missing or wrong")
E_REMOTE = code("E_REMOTE", "the other side reported an error this release does not know")

#: HTTP status of codes that have a better one than their class's.
STATUS: Final[dict[str, int]] = {
    "E_NOT_FOUND": 404, "E_CONFLICT": 409, "E_TOO_LARGE": 413, "E_RATE_LIMITED": 429, "E_ADMIN_TOKEN": 401,
    E_JOIN_TOKEN: 403, "E_WRONG_KEY": 403, "E_SIGNATURE": 403, E_NODE_UNKNOWN: 403, E_NODE_BANNED: 403,
    E_UPLOAD_URL: 403, E_LEASE_UNKNOWN: 404, E_LEASE_EXPIRED: 410, E_LEASE_CLOSED: 410, E_SECOND_COMMITMENT: 409,
    E_CHECKPOINT_CHAIN: 409, E_BATCH: 409, "E_WRONG_RUN": 409,
    E_RANGE: 416, E_WITHHELD: 425,
}
_FAULTS: Final[dict[str, type[AssayError]]] = {"peer": PeerFault, "local": LocalFault, "transient": Transient}


def _as_envelope(value: Any) -> Envelope:
    return value if isinstance(value, Envelope) else Envelope.from_dict(value)


#: An envelope inside a reply; its JSON form is the DSSE object.
WireEnvelope = Annotated[
    Envelope,
    PlainValidator(_as_envelope),
    PlainSerializer(lambda envelope: envelope.to_dict(), return_type=dict[str, Any]),
    WithJsonSchema(
        {
            "type": "object",
            "title": "Envelope",
            "description": "DSSE envelope (docs/spec/messages.md)",
            "required": ["payloadType", "payload", "signatures"],
            "properties": {
                "payloadType": {"type": "string"},
                "payload": {"type": "string", "contentEncoding": "base64"},
                "signatures": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["keyid", "sig"],
                        "properties": {
                            "keyid": {"type": "string"},
                            "sig": {"type": "string", "contentEncoding": "base64"},
                        },
                    },
                },
            },
        }
    ),
]


class Reply(BaseModel):
    """Base of replies. Unknown fields are ignored, so that a newer coordinator may add some."""

    model_config = ConfigDict(frozen=True, extra="ignore", arbitrary_types_allowed=True)


class Ack(Reply):
    """The request is recorded; ``duplicate`` says that it was recorded before."""

    duplicate: bool = False


class RegisterReply(Reply):
    """Answer to a ``NodeHello``."""

    node_id: str
    state: str  #: active, banned


class LeaseReply(Reply):
    """Answer to a ``LeaseRequest``."""

    leases: list[WireEnvelope]  #: signed by the coordinator
    retry_after_ms: int  #: ask again after this long
    why: str  #: why there are fewer leases than asked for; empty when there are not


class UploadReply(Reply):
    """Where to put an object. ``url`` may be relative to the coordinator's address."""

    url: str
    method: str = "PUT"
    headers: dict[str, str] = {}
    exists: bool  #: the store has the object already; nothing to send


class PeerRecord(Reply):
    """Where one node's swarm host listens, as that node said."""

    node_id: str
    public_key: str  #: hex; the host must prove that it holds it
    name: str
    addresses: list[str]  #: multiaddrs without the peer's id
    age_ms: int  #: time since it said so


class PeersReply(Reply):
    """Answer to a ``PeerAnnounce``."""

    peers: list[PeerRecord]  #: others that said so lately, at most as many as asked for
    seen_from: str  #: IP address the request came from, as the coordinator sees it; empty when unknown
    announce_again_ms: int  #: say it again after this long, or be forgotten


class SubmitReply(Reply):
    """Answer to a ``Commitment``."""

    receipt: WireEnvelope  #: signed by the coordinator
    duplicate: bool  #: this commitment was recorded before; the receipt is the same one


class ReplicaRef(Reply):
    """What another node made of the same unit."""

    receipt: WireEnvelope
    commitment: WireEnvelope
    lease: WireEnvelope
    node_public_key: str  #: hex


class AuditJob(Reply):
    """One bundle for a verifier to check."""

    receipt: WireEnvelope
    commitment: WireEnvelope
    lease: WireEnvelope
    drawn: bool  #: the audit draw selected it: recompute with the model as well (T2)
    node_profile: str  #: engine profile the node registered
    node_public_key: str  #: hex; the commitment must be signed by it
    replica: ReplicaRef | None = None  #: compare with this one (T2')
    confirm: bool = False  #: suspicion of the node is high: confirm what speaks against it by T3
    attempt: int = 1  #: 1 + number of earlier inconclusive verdicts or lapsed claims
    deadline_ms: int = 0  #: afterwards the job goes to another verifier


class ClaimReply(Reply):
    """Answer to an ``AuditClaim``."""

    job: AuditJob | None
    retry_after_ms: int


class _Sample(Reply):
    sample: int  #: index within the group
    receipt_sha256: str  #: digest of the receipt's payload
    lease: WireEnvelope
    reward_micro: int  #: recomputed by the verifier, 1e-6
    node_id: str


class _Group(Reply):
    group: int
    environment: str
    start_version: int
    prompt_tokens: list[int]


class AdmittedSample(_Sample):
    """One verified sample of an admitted group."""

    object_sha256: str  #: the bundle that holds it (with the other samples of its lease)


class BundleProof(Reply):
    """What stands behind one bundle of an admitted group, besides its lease (``protocol.provenance``)."""

    node_public_key: str  #: hex; its key id is the node id
    commitment: WireEnvelope  #: signed by the node
    receipt: WireEnvelope  #: signed by the coordinator; samples name it by its digest
    verdict: WireEnvelope  #: the pass whose rewards count, signed by a verifier


class AdmittedGroup(_Group):
    """A complete, verified, unconsumed group."""

    samples: list[AdmittedSample]  #: ascending by sample
    proofs: list[BundleProof] = []  #: one for each receipt; none only in records of a release that had none


class TrainedSample(_Sample):
    """One sample that a version was trained on."""

    object_sha256: str | None  #: its bundle; null while somebody could hand in a copy


class TrainedGroup(_Group):
    """A group that a version was trained on."""

    samples: list[TrainedSample]  #: ascending by sample


class AdmittedReply(Reply):
    """Answer to an ``AdmittedRequest``: oldest groups first."""

    groups: list[AdmittedGroup]


class BatchReply(Reply):
    """Answer to ``GET /v1/batches/{version}``: what a version was trained on."""

    plan: WireEnvelope  #: signed by the learner
    groups: list[TrainedGroup]  #: the groups it consumed, ascending
    update: WireEnvelope | None  #: the learner's update receipt, once the step is done


class CheckpointsReply(Reply):
    """Answer to ``GET /v1/checkpoints``: manifests in ascending order of version."""

    manifests: list[WireEnvelope]


@dataclass(frozen=True)
class JoinLink:
    """All that a newcomer needs: where the coordinator is, which root key to pin, which run, and a token."""

    host: str
    port: int
    root: str  #: root public key, hex; everything else is checked against it
    run_id: str
    token: str
    tls: bool = False  #: talk HTTPS

    @property
    def base_url(self) -> str:
        """The coordinator's address."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"

    def format(self) -> str:
        """The link as text; the inverse of :meth:`parse`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        query = {"root": self.root, "run": self.run_id, "token": self.token} | ({"tls": "1"} if self.tls else {})
        return f"assay://{host}:{self.port}/?{urlencode(query)}"

    @classmethod
    def parse(cls, text: str) -> JoinLink:
        """Read a join link.

        Raises:
            LocalFault: ``E_JOIN_LINK``, naming the part that does not fit.
        """
        try:
            parts = urlsplit(text.strip())
            pairs = parse_qsl(parts.query, strict_parsing=True, max_num_fields=8)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise _bad_link("assay://HOST:PORT/?root=..&run=..&token=..", str(error)) from None
        query = dict(pairs)
        if parts.scheme != "assay" or not host or port is None:
            raise _bad_link("assay://HOST:PORT/...", repr(text.strip().partition("?")[0][:80]))
        if len(query) != len(pairs) or not {"root", "run", "token"} <= set(query) <= {"root", "run", "token", "tls"}:
            raise _bad_link("each of root, run, token once", ", ".join(name for name, _ in pairs))
        for name, pattern in (("root", "[0-9a-f]{64}"), ("run", "[0-9a-f]{32}"), ("token", "[A-Za-z0-9_-]{8,200}")):
            if not re.fullmatch(pattern, query[name]):
                raise _bad_link(f"{name} like {pattern}", f"{len(query[name])} characters")
        return cls(host, port, query["root"], query["run"], query["token"], query.get("tls") == "1")


def problem_of(error: AssayError) -> dict[str, Any]:
    """``error`` as a problem object with its HTTP status and the member ``fault`` (peer, local, transient)."""
    fault = next(name for name, cls in _FAULTS.items() if isinstance(error, cls))
    return error.problem() | {"status": STATUS.get(error.code, error.status), "fault": fault}


def error_of(problem: Any, status: int) -> AssayError:
    """The error that a problem object stands for; the inverse of :func:`problem_of`.

    Args:
        problem: decoded JSON body, or anything else when the answer was not JSON.
        status: HTTP status, used when the body does not say whose fault it was.
    """
    fields = problem if isinstance(problem, dict) else {}
    default = "transient" if status in (429, 502, 503, 504) else "local" if status >= 500 else "peer"
    cls = _FAULTS.get(str(fields.get("fault")), _FAULTS[default])
    name, detail = str(fields.get("code", "")), str(fields.get("detail") or f"HTTP status {status}")[:400]
    if name not in CODES:
        name, detail = (E_RATE_LIMITED, detail) if status == 429 else (E_REMOTE, f"{name or 'no code'}: {detail}")
    error = cls(name, detail, expected=fields.get("expected"), got=fields.get("got"), hint=fields.get("hint"))
    error.status = status
    return error


def _bad_link(expected: str, got: str) -> LocalFault:
    return LocalFault(
        E_JOIN_LINK, "the join link is malformed", expected=expected, got=got,
        hint="copy the whole link, in quotes, as the operator gave it",
    )
