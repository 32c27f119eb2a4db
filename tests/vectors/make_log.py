"""Writes the known answers of the transparency log: trees, proofs, heads.

Trees and proofs are made here from RFC 6962, section 2.1, word for word, over the eight leaves that the
certificate-transparency project tests with; heads from the C2SP pages ``signed-note`` and ``tlog-checkpoint`` with
PyNaCl alone.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Any

from nacl.signing import SigningKey

from tests.vectors.write import write

LEAVES = ["", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f"]
DATA = [bytes.fromhex(leaf) for leaf in LEAVES]
RUN_ID = "0123456789abcdef" * 2
ORIGIN = f"assay-log/{RUN_ID}"
KEY = SigningKey(hashlib.sha256(b"assay test vector: log").digest())
OTHER = SigningKey(bytes(32))
ZERO = "00" * 32


def split(count: int) -> int:
    k = 1
    while 2 * k < count:
        k *= 2
    return k


def mth(data: list[bytes]) -> bytes:
    if not data:
        return hashlib.sha256(b"").digest()
    if len(data) == 1:
        return hashlib.sha256(b"\x00" + data[0]).digest()
    k = split(len(data))
    return hashlib.sha256(b"\x01" + mth(data[:k]) + mth(data[k:])).digest()


def path(m: int, data: list[bytes]) -> list[str]:
    if len(data) == 1:
        return []
    k = split(len(data))
    if m < k:
        return [*path(m, data[:k]), mth(data[k:]).hex()]
    return [*path(m - k, data[k:]), mth(data[:k]).hex()]


def subproof(m: int, data: list[bytes], whole: bool) -> list[str]:
    if m == len(data):
        return [] if whole else [mth(data).hex()]
    k = split(len(data))
    if m <= k:
        return [*subproof(m, data[:k], whole), mth(data[k:]).hex()]
    return [*subproof(m - k, data[k:], False), mth(data[:k]).hex()]


def proof(old: int, new: int) -> list[str]:
    return subproof(old, DATA[:new], True) if old else []


def make() -> None:
    roots = [mth(DATA[:size]).hex() for size in range(9)]
    write("log", "roots", {"kind": "roots", "leaves": LEAVES, "roots": roots})
    write("log", "inclusion", {
        "kind": "inclusion", "leaves": LEAVES, "roots": roots,
        "proofs": [[index, size, path(index, DATA[:size])] for size in range(1, 9) for index in range(size)],
    })
    write("log", "consistency", {
        "kind": "consistency", "leaves": LEAVES, "roots": roots,
        "proofs": [[old, new, proof(old, new)] for new in range(9) for old in range(new + 1)],
    })
    make_inclusion(roots)
    make_consistency(roots)
    make_heads(roots)


def make_inclusion(roots: list[str]) -> None:
    good = {"leaf": LEAVES[5], "index": 5, "size": 8, "proof": path(5, DATA), "root": roots[8]}
    left, right = mth(DATA[:1]), mth(DATA[1:2])
    cases: dict[str, dict[str, Any]] = {
        "entry-rewritten": {"leaf": "ff"},
        "entry-elsewhere": {"index": 4},
        "entry-past-the-end": {"index": 8},
        "entry-of-a-smaller-log": {"size": 6},
        "entry-under-another-root": {"root": roots[7]},
        "proof-cut": {"proof": good["proof"][:-1]},
        "proof-padded": {"proof": [*good["proof"], ZERO]},
        "proof-reordered": {"proof": good["proof"][::-1]},
        "proof-of-short-hashes": {"proof": [node[:-2] for node in good["proof"]]},
        "node-as-entry": {"leaf": (left + right).hex(), "index": 0, "proof": path(0, DATA)[1:]},
    }
    for name, change in cases.items():
        write("log", f"{name}_fail", {"kind": "inclusion", **good, **change, "error": "E_LOG_INCLUSION"})


def make_consistency(roots: list[str]) -> None:
    good = {"old": 6, "old_root": roots[6], "new": 8, "new_root": roots[8], "proof": proof(6, 8)}
    forged = [*DATA[:2], b"rewritten", *DATA[3:]]
    fork = {size: mth(forged[:size]).hex() for size in range(9)}
    forged_proof = subproof(6, forged, True)
    power = {"old": 4, "old_root": roots[4], "proof": proof(4, 8)}
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "fork-same-size": ("E_LOG_FORK", {"old": 8, "old_root": fork[8], "proof": []}),
        "fork-grown": ("E_LOG_CONSISTENCY", {"new_root": fork[8], "proof": forged_proof}),
        "fork-grown-with-the-true-proof": ("E_LOG_CONSISTENCY", {"new_root": fork[8]}),
        "fork-with-a-forged-start": ("E_LOG_CONSISTENCY", {"proof": forged_proof}),
        "rollback": ("E_LOG_ROLLBACK", {"old": 8, "old_root": roots[8], "new": 6, "new_root": roots[6]}),
        "rollback-to-nothing": ("E_LOG_ROLLBACK", {"new": 0, "new_root": roots[0], "proof": []}),
        "consistency-cut": ("E_LOG_CONSISTENCY", {"proof": good["proof"][:-1]}),
        "consistency-headless": ("E_LOG_CONSISTENCY", {"proof": good["proof"][1:]}),
        "consistency-padded": ("E_LOG_CONSISTENCY", {"proof": [*good["proof"], ZERO]}),
        "consistency-reordered": ("E_LOG_CONSISTENCY", {"proof": good["proof"][::-1]}),
        "consistency-empty": ("E_LOG_CONSISTENCY", {"proof": []}),
        "consistency-of-short-hashes": ("E_LOG_CONSISTENCY", {"proof": [node[2:] for node in good["proof"]]}),
        "consistency-from-five": ("E_LOG_CONSISTENCY", {"old": 5}),
        "consistency-to-nine": ("E_LOG_CONSISTENCY", {"new": 9}),
        "consistency-of-powers-with-old-root": ("E_LOG_CONSISTENCY", {**power, "proof": [roots[4], *proof(4, 8)]}),
        "consistency-of-equals-with-proof": (
            "E_LOG_CONSISTENCY", {"old": 8, "old_root": roots[8], "proof": [ZERO]}),
        "consistency-from-nothing-with-proof": (
            "E_LOG_CONSISTENCY", {"old": 0, "old_root": roots[0], "proof": [ZERO]}),
        "consistency-from-a-false-nothing": ("E_LOG_CONSISTENCY", {"old": 0, "old_root": ZERO, "proof": []}),
        "consistency-beyond-all-sizes": ("E_LOG_CONSISTENCY", {"new": 2**48 + 1}),
        "consistency-from-a-negative-size": ("E_LOG_CONSISTENCY", {"old": -1}),
    }
    for name, (error, change) in cases.items():
        write("log", f"{name}_fail", {"kind": "consistency", **good, **change, "error": error})


def note(text: str, key: SigningKey = KEY, name: str = ORIGIN, signed: str | None = None) -> str:
    public = bytes(key.verify_key)
    hint = hashlib.sha256(name.encode() + b"\n\x01" + public).digest()[:4]
    line = base64.b64encode(hint + key.sign((signed or text).encode()).signature).decode()
    return f"{text}\n— {name} {line}\n"


def body(size: object, root: str, origin: str = ORIGIN) -> str:
    return f"{origin}\n{size}\n{base64.b64encode(bytes.fromhex(root)).decode()}\n"


def make_heads(roots: list[str]) -> None:
    def case(name: str, text: str, error: str | None = None, **fields: Any) -> None:
        write("log", name + ("_fail" if error else ""), {
            "kind": "head", "run_id": RUN_ID, "public_key": bytes(KEY.verify_key).hex(), "note": text, **fields,
            **({"error": error} if error else {}),
        })

    good = note(body(8, roots[8]))
    signature = good.split("\n\n")[1]
    case("head", good, size=8, root=roots[8], seed=bytes(KEY).hex())
    case("head-of-nothing", note(body(0, roots[0])), size=0, root=roots[0], seed=bytes(KEY).hex())
    witness = note(body(8, roots[8]), OTHER, "witness.example/w1").split("\n\n")[1]
    case("head-with-a-witness", good + witness, size=8, root=roots[8])
    case("head-with-an-extension", note(body(8, roots[8]) + "more\n"), size=8, root=roots[8])
    case("head-of-another-run", note(body(8, roots[8], "assay-log/" + "f" * 32), name="assay-log/" + "f" * 32),
         "E_LOG_ORIGIN")
    case("head-by-another-key", note(body(8, roots[8]), OTHER), "E_SIGNATURE")
    case("head-of-another-size", good.replace("\n8\n", "\n9\n"), "E_SIGNATURE")
    case("head-signed-twice", good + signature, "E_SIGNATURE")
    case("head-signed-over-another", note(body(8, roots[8]), signed=body(8, roots[7])), "E_SIGNATURE")
    case("head-without-signature", body(8, roots[8]) + "\n", "E_NOTE")
    case("head-with-a-leading-zero", note(body("08", roots[8])), "E_NOTE")
    case("head-with-a-sign", note(body("+8", roots[8])), "E_NOTE")
    case("head-with-a-short-root", note(body(8, roots[8][:-2])), "E_NOTE")
    case("head-beyond-all-sizes", note(body(2**48 + 1, roots[8])), "E_NOTE")
    case("head-with-an-empty-line", note(body(8, roots[8]) + "\nmore\n"), "E_NOTE")
    case("head-with-carriage-returns", good.replace("\n", "\r\n"), "E_NOTE")
    case("head-with-a-hyphen", good.replace("—", "-"), "E_NOTE")
    case("head-of-seventeen-signatures", good + witness * 16, "E_NOTE")
