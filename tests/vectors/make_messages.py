"""Writes the known answers of canonical JSON, envelopes and messages.

Good envelopes are built here from RFC 8032 and the DSSE specification with PyNaCl alone.
"""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

from nacl.signing import SigningKey

from tests.vectors.write import write

SEED = hashlib.sha256(b"assay test vector: signer").digest()
KIND = "application/vnd.assay.checkpoint-head.v1+json"
HEAD: dict[str, Any] = {
    "expires_at_ms": 1_800_000_060_000, "issued_at_ms": 1_800_000_000_000, "manifest_sha256": "ab" * 32,
    "run_id": "0123456789abcdef" * 2, "version": 7,
}
NOW_MS = 1_800_000_030_000
COMMITMENT_KIND = "application/vnd.assay.commitment.v1+json"
COMMITMENT: dict[str, Any] = {
    "bundle_root": "03" * 32,
    "checkpoints": [{"manifest_sha256": "05" * 32, "version": 6}, {"manifest_sha256": "06" * 32, "version": 8}],
    "issued_at_ms": 1_800_000_000_000, "lease_id": "01" * 16, "lease_sha256": "02" * 32, "node_id": "07" * 32,
    "object_bytes": 1000, "object_sha256": "04" * 32, "profile": "torch-cpu-fp32", "rollouts": 2,
    "run_id": HEAD["run_id"], "tokens": 40,
}
CLASSES = {KIND: "CheckpointHead", COMMITMENT_KIND: "Commitment"}


def dumps(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def signed(payload: bytes, kind: str = KIND, signed_kind: str = KIND, seed: bytes = SEED) -> dict[str, Any]:
    key = SigningKey(seed)
    text = b"DSSEv1 %d %b %d %b" % (len(signed_kind), signed_kind.encode(), len(payload), payload)
    signer = hashlib.sha256(bytes(key.verify_key)).hexdigest()
    return {"payloadType": kind, "payload": b64(payload),
            "signatures": [{"keyid": signer, "sig": b64(key.sign(text).signature)}]}


def make() -> None:
    make_json()
    make_envelopes()
    make_messages()


def make_json() -> None:
    for name, value in {
        "values": {"a": [1, -1, 0, True, False, None], "b": {"": "é😀"}, "é": 2**63 - 1, "😀": -(2**63)},
        "escapes": '"\\/\b\f\n\r\t\x00\x1f\x7f\u2028',
        "sixteen-deep": [[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]],
    }.items():
        data = dumps(value)
        write("canonical-json", name, {"data": b64(data), "value": value, "sha256": hashlib.sha256(data).hexdigest()})
    for name, data in {
        "empty": b"", "white-space": b'{"a": 1}', "newline": b"1\n", "float": b"1.0", "exponent": b"1e3",
        "minus-zero": b"-0", "leading-zero": b"01", "nan": b"NaN", "infinity": b"-Infinity",
        "unsorted": b'{"b":1,"a":1}',
        "key-twice": b'{"a":1,"a":1}', "needless-escape": b'"\\u0041"', "escaped-slash": b'"\\/"',
        "lone-surrogate": b'"\\ud800"', "not-utf-8": b'"\xff"', "byte-order-mark": b"\xef\xbb\xbf1",
        "raw-control": b'"\x01"', "65-bits": b"9223372036854775808", "5000-digits": b"9" * 5000,
        "seventeen-deep": b"[" * 17 + b"]" * 17, "bottomless": b"[" * 2_000, "trailing-data": b"1 2",
    }.items():
        write("canonical-json", f"{name}_fail", {"data": b64(data), "error": "E_JSON"})


def make_envelopes() -> None:
    key = SigningKey(SEED)
    public = bytes(key.verify_key)
    payload = dumps(HEAD)
    good = signed(payload)
    signature = good["signatures"][0]
    write("envelope", "checkpoint-head", {
        "seed": SEED.hex(), "public_key": public.hex(), "key_id": hashlib.sha256(public).hexdigest(), "type": KIND,
        "data": b64(dumps(good)), "payload_sha256": hashlib.sha256(payload).hexdigest(),
    })
    other = signed(payload, seed=bytes(32))
    reshaped = base64.b64decode(signature["sig"])
    order = 2**252 + 27742317777372353535851937790883648493
    s = int.from_bytes(reshaped[32:], "little") + order
    unsorted = sorted([signature, other["signatures"][0]], key=lambda item: item["keyid"], reverse=True)
    cases: dict[str, tuple[str, bytes]] = {
        "another-payload": ("E_SIGNATURE", dumps({**good, "payload": b64(dumps({**HEAD, "version": 8}))})),
        "another-key": ("E_SIGNATURE", dumps(other)),
        "anothers-signature-under-the-key": ("E_SIGNATURE", dumps(
            {**good, "signatures": [{**signature, "sig": other["signatures"][0]["sig"]}]})),
        "signed-as-another-kind": ("E_SIGNATURE", dumps(signed(payload, signed_kind="application/x"))),
        "another-kind": ("E_PAYLOAD_TYPE", dumps(signed(payload, "application/x", "application/x"))),
        "reshaped-signature": ("E_SIGNATURE", dumps(
            {**good, "signatures": [{**signature, "sig": b64(reshaped[:32] + s.to_bytes(32, "little"))}]})),
        "short-signature": ("E_SIGNATURE", dumps({**good, "signatures": [{**signature, "sig": b64(reshaped[:63])}]})),
        "stripped": ("E_ENVELOPE", dumps({**good, "signatures": []})),
        "same-key-twice": ("E_ENVELOPE", dumps({**good, "signatures": [signature, signature]})),
        "signatures-unsorted": ("E_ENVELOPE", dumps({**good, "signatures": unsorted})),
        "nine-signatures": ("E_ENVELOPE", dumps(
            {**good, "signatures": [{**signature, "keyid": f"{n:064x}"} for n in range(9)]})),
        "extra-field": ("E_ENVELOPE", dumps({**good, "note": "x"})),
        "missing-field": ("E_ENVELOPE", dumps({k: v for k, v in good.items() if k != "payloadType"})),
        "unpadded-base64": ("E_ENVELOPE", dumps({**good, "payload": good["payload"].rstrip("=") + "A"})),
        "url-safe-base64": ("E_ENVELOPE", dumps({**good, "payload": "_-8="})),
        "loose-base64-bits": ("E_ENVELOPE", dumps({**good, "payload": "e31="})),
        "not-an-object": ("E_ENVELOPE", b"[]"),
        "white-space": ("E_JSON", dumps(good) + b"\n"),
    }
    for name, (error, data) in cases.items():
        write("envelope", f"{name}_fail", {
            "public_key": public.hex(), "type": KIND, "data": b64(data), "error": error,
        })


def make_messages() -> None:
    public = bytes(SigningKey(SEED).verify_key).hex()

    def case(name: str, value: dict[str, Any], error: str | None = None, kind: str = KIND) -> None:
        write("messages", name + ("_fail" if error else ""), {
            "class": CLASSES[kind], "public_key": public, "run_id": HEAD["run_id"], "now_ms": NOW_MS,
            "data": b64(dumps(signed(dumps(value), kind, kind))), "value": value, **({"error": error} if error else {}),
        })

    def commitment(name: str, checkpoints: list[dict[str, Any]] | None) -> None:
        left_out = {} if checkpoints is None else {"checkpoints": checkpoints}
        value = {k: v for k, v in COMMITMENT.items() if k != "checkpoints"} | left_out
        case(f"commitment-{name}", value, "E_SCHEMA", COMMITMENT_KIND)

    case("checkpoint-head", HEAD)
    case("another-run", {**HEAD, "run_id": "f" * 32}, "E_WRONG_RUN")
    case("expired", {**HEAD, "expires_at_ms": NOW_MS - 1}, "E_EXPIRED")
    case("negative-version", {**HEAD, "version": -1}, "E_SCHEMA")
    case("version-of-49-bits", {**HEAD, "version": 2**48}, "E_SCHEMA")
    case("version-as-text", {**HEAD, "version": "7"}, "E_SCHEMA")
    case("version-as-truth", {**HEAD, "version": True}, "E_SCHEMA")
    case("upper-case-hash", {**HEAD, "manifest_sha256": "AB" * 32}, "E_SCHEMA")
    case("hash-with-newline", {**HEAD, "manifest_sha256": "ab" * 32 + "\n"}, "E_SCHEMA")
    one, two = COMMITMENT["checkpoints"]
    case("commitment", COMMITMENT, kind=COMMITMENT_KIND)
    commitment("without-checkpoints", None)
    commitment("of-no-checkpoint", [])
    commitment("checkpoints-descending", [two, one])
    commitment("checkpoint-twice", [one, one])
    commitment("two-manifests-of-a-version", [one, {**two, "version": one["version"]}])
    commitment("513-checkpoints", [{**one, "version": version} for version in range(513)])
    commitment("checkpoint-by-root", [{**one, "state_root": "09" * 32}])
    case("unknown-field", {**HEAD, "note": 1}, "E_SCHEMA")
    case("missing-field", {k: v for k, v in HEAD.items() if k != "version"}, "E_SCHEMA")
    case("null", {**HEAD, "version": None}, "E_SCHEMA")
