"""Client of the coordinator's HTTP API: signs, sends, retries, and turns problems back into our errors.

Every call ends within ``deadline_s``. :class:`~protocol.errors.Transient` trouble is retried with exponential backoff
and jitter (the server's ``Retry-After`` wins); all writes are idempotent, so a retry is always safe.
Spec: ``docs/spec/http-api.md``.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from typing import Any, Final, Self, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from protocol.address import http_address
from protocol.api import (
    Ack,
    AdmittedGroup,
    AdmittedReply,
    AuditJob,
    BatchReply,
    CheckpointsReply,
    ClaimReply,
    LeaseReply,
    PeersReply,
    RegisterReply,
    SubmitReply,
    UploadReply,
    error_of,
)
from protocol.clock import Clock, SystemClock
from protocol.envelope import Envelope
from protocol.errors import (
    E_KEY_FILE,
    E_NOT_FOUND,
    E_OBJECT_HASH,
    E_SCHEMA,
    E_TOO_LARGE,
    E_UNREACHABLE,
    E_WRONG_RUN,
    AssayError,
    LocalFault,
    PeerFault,
    Transient,
)
from protocol.identity import Identity
from protocol.messages import (
    AdmittedRequest,
    AuditClaim,
    BatchPlan,
    Commitment,
    LeaseRequest,
    LeaseReturn,
    Message,
    NodeHello,
    ScreenReport,
    UpdateReceipt,
    UploadRequest,
    Verdict,
)
from protocol.store import MAX_ANNOUNCEMENT_BYTES
from protocol.swarm.announce import PeerAnnounce
from protocol.validation import expectation

#: Largest JSON answer read, in bytes.
MAX_REPLY_BYTES: Final = 64 * 2**20
#: Largest object ``fetch`` reads unless told otherwise, in bytes.
MAX_OBJECT_BYTES: Final = 256 * 2**20
#: Longest wait for one answer, in seconds; the deadline of the call may be nearer.
REQUEST_TIMEOUT_S: Final = 30.0
#: Never asked for through the proxy that the environment may name.
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_FIRST_BACKOFF_S: Final = 0.1
_LAST_BACKOFF_S: Final = 5.0

_R = TypeVar("_R")
_M = TypeVar("_M", bound=BaseModel)


class CoordinatorClient:
    """One party's connection to a coordinator; safe to use from several threads.

    Args:
        base_url: for example ``http://127.0.0.1:8700``.
        identity: signs the messages; None for a client that only reads.
        run_id: when given, messages of another run are refused before they are sent.
        transport: replaces the network (tests).
        deadline_s: longest time any call takes, retries included.
        seed: of the jitter; None draws it from the operating system.

    Making one raises ``LocalFault`` ``E_CONFIG`` when ``base_url`` is no address. Every method raises
    :class:`~protocol.errors.AssayError`: what the coordinator answered, or ``Transient`` ``E_UNREACHABLE`` once the
    deadline has passed.
    """

    def __init__(
        self,
        base_url: str,
        identity: Identity | None,
        *,
        run_id: str | None = None,
        transport: httpx.BaseTransport | None = None,
        clock: Clock | None = None,
        deadline_s: float = 30.0,
        seed: int | None = None,
    ):
        self.base_url = http_address(base_url)
        self.identity = identity
        self.run_id = run_id
        self._clock: Clock = clock or SystemClock()
        self._deadline_s = deadline_s
        self._random = random.Random(seed)
        self._http = httpx.Client(
            base_url=self.base_url, transport=transport, follow_redirects=True, timeout=REQUEST_TIMEOUT_S,
            trust_env=httpx.URL(self.base_url).host not in _LOOPBACK,
            limits=httpx.Limits(max_connections=16, max_keepalive_connections=8),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the connections."""
        self._http.close()

    # -- reads -------------------------------------------------------------------------------------------

    def run_manifest(self) -> Envelope:
        """The run manifest, signed by the root key (unchecked)."""
        return Envelope.from_dict(self._get("/v1/run"))

    def head(self) -> Envelope:
        """The newest checkpoint head, signed by the learner (unchecked)."""
        return Envelope.from_dict(self._get("/v1/head"))

    def checkpoint(self, version: int) -> Envelope:
        """The manifest of one version, signed by the learner (unchecked)."""
        return Envelope.from_dict(self._get(f"/v1/checkpoints/{version}"))

    def checkpoints(self, first: int, last: int) -> list[Envelope]:
        """Manifests ``first`` to ``last``, both included, as far as they are published."""
        reply = self._get("/v1/checkpoints", {"from": first, "to": last})
        return _parse(CheckpointsReply, reply).manifests

    def fetch(self, sha256: str, max_bytes: int = MAX_OBJECT_BYTES) -> bytes:
        """The object with this hash.

        Raises:
            LocalFault: ``E_NOT_FOUND``; ``E_TOO_LARGE`` when more than ``max_bytes`` arrive.
            Transient: ``E_OBJECT_HASH`` when no try within the deadline gave the right bytes.
        """

        def once(timeout_s: float) -> bytes:
            data = self._read("GET", f"/v1/objects/{sha256}", timeout_s, max_bytes)
            got = hashlib.sha256(data).hexdigest()
            if got != sha256:
                raise Transient(E_OBJECT_HASH, "fetched bytes do not match their hash", expected=sha256, got=got)
            return data

        return self._retry(f"fetch object {sha256[:16]}", once)

    def skips(self, name: str) -> bytes | None:
        """The announcement of skips under a name of the store's index (unchecked); None when there is none."""
        path = f"/v1/skips/{name}"
        try:
            return self._retry(
                f"GET {path}", lambda timeout_s: self._read("GET", path, timeout_s, MAX_ANNOUNCEMENT_BYTES)
            )
        except LocalFault as error:
            if error.code != E_NOT_FOUND:
                raise
            return None

    def admitted(self, limit: int) -> list[AdmittedGroup]:
        """Complete, verified, unconsumed groups, oldest first; only the learner is told, of the run of ``run_id``."""
        if self.run_id is None:
            raise LocalFault(E_WRONG_RUN, "this question names its run", got="a client without run_id")
        request = AdmittedRequest(run_id=self.run_id, limit=limit, issued_at_ms=self._clock.now_ms())
        return _parse(AdmittedReply, self._send("/v1/admitted", request)).groups

    def batch(self, version: int) -> BatchReply:
        """The plan of a version, the groups it consumed and its update receipt."""
        return _parse(BatchReply, self._get(f"/v1/batches/{version}"))

    def status(self) -> dict[str, Any]:
        """What the dashboard shows."""
        return _as_dict(self._get("/v1/status"))

    def node(self, node_id: str) -> dict[str, Any]:
        """One node's record."""
        return _as_dict(self._get(f"/v1/nodes/{node_id}"))

    def evidence(self, receipt_id: str) -> bytes:
        """The self-contained audit file of one receipt (docs/spec/evidence.md)."""
        return self.get_bytes(f"/v1/evidence/{receipt_id}", MAX_OBJECT_BYTES)

    def get_bytes(self, path: str, max_bytes: int) -> bytes:
        """The body of any answer (unchecked), never more than ``max_bytes`` of it."""
        return self._retry(f"GET {path}", lambda timeout_s: self._read("GET", path, timeout_s, max_bytes))

    def get_object(self, path: str, query: dict[str, int] | None = None) -> dict[str, Any]:
        """Any answer that is a JSON object (unchecked)."""
        return _as_dict(self._get(path, query))

    # -- nodes -------------------------------------------------------------------------------------------

    def register(self, hello: NodeHello) -> RegisterReply:
        """Register, or say again who we are."""
        return _parse(RegisterReply, self._send("/v1/nodes", hello))

    def lease(self, request: LeaseRequest) -> LeaseReply:
        """Ask for work; the same nonce gives the same leases."""
        return _parse(LeaseReply, self._send("/v1/leases", request))

    def return_leases(self, message: LeaseReturn) -> Ack:
        """Hand leases back unfinished."""
        return _parse(Ack, self._send("/v1/lease-returns", message))

    def announce(self, message: PeerAnnounce) -> PeersReply:
        """Say where our swarm host listens, and hear where others do."""
        return _parse(PeersReply, self._send("/v1/peers", message))

    def upload(self, request: UploadRequest, data: bytes) -> None:
        """Put ``data`` in the object store; nothing is sent when the store has it.

        Raises:
            LocalFault: ``E_OBJECT_HASH`` when ``data`` is not what the request names.
        """
        if hashlib.sha256(data).hexdigest() != request.object_sha256 or len(data) != request.object_bytes:
            raise LocalFault(E_OBJECT_HASH, "the data is not the object that the request names")
        reply = _parse(UploadReply, self._send("/v1/uploads", request))
        if reply.exists:
            return
        self._retry(
            f"upload object {request.object_sha256[:16]}",
            lambda timeout_s: self._read(
                reply.method, reply.url, timeout_s, MAX_REPLY_BYTES, content=data, headers=reply.headers
            ),
        )

    def submit(self, commitment: Commitment) -> SubmitReply:
        """Commit to a finished lease; a repeated commitment gives the same receipt."""
        return _parse(SubmitReply, self._send("/v1/submissions", commitment))

    # -- verifiers ---------------------------------------------------------------------------------------

    def claim_audit(self, claim: AuditClaim) -> AuditJob | None:
        """The next bundle to check, or None when there is none."""
        return _parse(ClaimReply, self._send("/v1/audits/claim", claim)).job

    def verdict(self, verdict: Verdict) -> Ack:
        """Report what was found."""
        return _parse(Ack, self._send("/v1/verdicts", verdict))

    # -- learner -----------------------------------------------------------------------------------------

    def publish_checkpoint(self, manifest: Envelope) -> Ack:
        """Publish a checkpoint manifest; its chunks are in the store already."""
        return _parse(Ack, self._post("/v1/checkpoints", manifest))

    def publish_head(self, head: Envelope) -> Ack:
        """Say which version is the newest."""
        return _parse(Ack, self._post("/v1/head", head))

    def post_batch(self, plan: BatchPlan) -> Ack:
        """Write down the batch about to be trained on."""
        return _parse(Ack, self._send("/v1/batches", plan))

    def post_update(self, receipt: UpdateReceipt) -> Ack:
        """Report a finished step."""
        return _parse(Ack, self._send("/v1/updates", receipt))

    def post_screen(self, report: ScreenReport) -> Ack:
        """Report what the learner's forward pass says about the nodes of a batch (T1'); the same one again is fine."""
        return _parse(Ack, self._send("/v1/screens", report))

    # -- carriage ----------------------------------------------------------------------------------------

    def _send(self, path: str, message: Message) -> Any:
        if self.identity is None:
            raise LocalFault(E_KEY_FILE, f"{path} needs a signing key", got="a client without identity")
        if self.run_id is not None and message.run_id != self.run_id:
            raise LocalFault(E_WRONG_RUN, "our message names another run", expected=self.run_id, got=message.run_id)
        return self._post(path, message.sign(self.identity))

    def _post(self, path: str, envelope: Envelope) -> Any:
        body = envelope.to_bytes()
        headers = {"content-type": "application/json"}
        return self._retry(
            f"POST {path}",
            lambda timeout_s: _json(
                self._read("POST", path, timeout_s, MAX_REPLY_BYTES, content=body, headers=headers)
            ),
        )

    def _get(self, path: str, query: dict[str, int] | None = None) -> Any:
        return self._retry(
            f"GET {path}", lambda timeout_s: _json(self._read("GET", path, timeout_s, MAX_REPLY_BYTES, params=query))
        )

    def _retry(self, what: str, once: Callable[[float], _R]) -> _R:
        """``once(timeout_s)`` until it gives something else than ``Transient``, or the deadline has passed."""
        deadline = self._clock.monotonic() + self._deadline_s
        backoff_s = _FIRST_BACKOFF_S
        while True:
            remaining = deadline - self._clock.monotonic()
            try:
                return once(max(0.05, min(REQUEST_TIMEOUT_S, remaining)))
            except Transient as error:
                wait_s = max(backoff_s * (0.5 + self._random.random()), error.retry_after_s)
                if self._clock.monotonic() + wait_s >= deadline:
                    error.add_note(f"{what} of {self.base_url} gave up after {self._deadline_s:g} s")
                    raise
            self._clock.sleep(wait_s)
            backoff_s = min(2 * backoff_s, _LAST_BACKOFF_S)

    def _read(
        self,
        method: str,
        url: str,
        timeout_s: float,
        max_bytes: int,
        *,
        content: bytes | None = None,
        headers: dict[str, str] | None = None,
        params: dict[str, int] | None = None,
    ) -> bytes:
        """The body of one answer, never more than ``max_bytes`` of it."""
        try:
            with self._http.stream(
                method, url, content=content, headers=headers, params=params, timeout=timeout_s
            ) as response:
                body = _bounded(response, max_bytes)
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            raise Transient(
                E_UNREACHABLE, f"{method} {url} got no answer from {self.base_url}",
                got=f"{type(error).__name__}: {error}", hint="is the coordinator running and the address right?",
            ) from error
        if response.status_code >= 400:
            raise _failure(response, body)
        return body


def _bounded(response: httpx.Response, max_bytes: int) -> bytes:
    parts, total = [], 0
    for part in response.iter_bytes():
        total += len(part)
        if total > max_bytes:
            raise LocalFault(E_TOO_LARGE, f"answer of {response.url.path} too large", expected=f"<= {max_bytes} bytes")
        parts.append(part)
    return b"".join(parts)


def _failure(response: httpx.Response, body: bytes) -> AssayError:
    try:
        problem = _json(body)
    except PeerFault:
        problem = None
    error = error_of(problem, response.status_code)
    retry_after = response.headers.get("retry-after", "")
    if isinstance(error, Transient) and retry_after.isdecimal():
        error.retry_after_s = float(retry_after)
    return error


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise PeerFault(E_SCHEMA, "the coordinator's answer is not JSON", got=str(error)) from None


def _parse(cls: type[_M], value: Any) -> _M:
    try:
        return cls.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise PeerFault(
            E_SCHEMA, f"the coordinator's {cls.__name__} does not fit", expected=expectation(first),
            got=".".join(str(part) for part in first["loc"]),
        ) from None


def _as_dict(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise PeerFault(E_SCHEMA, "the coordinator's answer is not an object", got=type(value).__name__)
    return value
