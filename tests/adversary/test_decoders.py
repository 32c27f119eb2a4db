"""Every decoder answers any bytes with what they mean or with a named error of ours, and with nothing else."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocol import bundle as bundles
from protocol import canonical, evidence
from protocol.api import JoinLink
from protocol.envelope import Envelope
from protocol.errors import CODES, AssayError
from protocol.messages import ChunkRef, SamplingRules
from protocol.weights.diff import decode_anchor, decode_diff
from protocol.weights.layout import Layout
from tests.adversary.mutation import damaged

VECTORS = Path(__file__).resolve().parents[1] / "vectors"
Decode = Callable[[bytes], Any]


def cases(folder: str) -> Iterator[dict[str, Any]]:
    for path in sorted((VECTORS / folder).glob("*.json")):
        yield json.loads(path.read_text(encoding="utf-8"))


def good_cases(folder: str) -> list[dict[str, Any]]:
    return [case for case in cases(folder) if "error" not in case]


def bundle_format() -> tuple[list[bytes], Decode]:
    case = good_cases("rollout-bundle")[0]
    rules = SamplingRules(**case["rules"])
    known = [base64.b64decode(c["data"]) for c in cases("rollout-bundle") if c.get("rules") == case["rules"]]
    return [data for data in known if data], lambda data: bundles.decode(data, rules, max_bytes=1 << 20)


def committed_bundle_format() -> tuple[list[bytes], Decode]:
    """As verifiers read it: nothing beyond what was committed to."""
    case = good_cases("rollout-bundle")[0]
    rules = SamplingRules(**case["rules"])
    rollouts = bundles.decode(base64.b64decode(case["data"]), rules).rollouts
    most = (len(rollouts), sum(map(len, rollouts)))
    return bundle_format()[0], lambda data: bundles.decode(data, rules, max_bytes=1 << 20, most=most)


def chunk_format(kind: str) -> tuple[list[bytes], Decode]:
    case = max((c for c in good_cases("weight-diff") if c["kind"] == kind and c["chunks"]),
               key=lambda c: len(c["chunks"][0]))
    layout = Layout.from_bytes(case["layout"].encode())
    chunks = [bytes.fromhex(chunk) for chunk in case["chunks"]]
    decode = decode_diff if kind == "diff" else lambda c, r: decode_anchor(c, layout, r)

    def run(data: bytes) -> Any:
        most = max(case["max_output_bytes"])
        refs = [ChunkRef(sha256="0" * 64, size_bytes=max(1, len(data)), max_output_bytes=most)]
        return decode(layout, [data], refs) if kind == "diff" else decode([data], refs)

    return chunks, run


def layout_format() -> tuple[list[bytes], Decode]:
    return [case["layout"].encode() for case in good_cases("layout")], Layout.from_bytes


def envelope_format() -> tuple[list[bytes], Decode]:
    return [base64.b64decode(case["data"]) for case in good_cases("envelope")], Envelope.from_bytes


def json_format() -> tuple[list[bytes], Decode]:
    good = [canonical.encode({"a": [1, -2, None, True, "é\u2028"], "b": {"c": 2**52}}), canonical.encode([[]] * 9)]
    return good, canonical.decode


def evidence_format() -> tuple[list[bytes], Decode]:
    envelope = Envelope.from_bytes(envelope_format()[0][0]).to_dict()
    good = canonical.encode({"format": "assay.evidence.v1", "receipt": envelope, "checkpoints": [envelope]})
    return [good, *envelope_format()[0], *bundle_format()[0]], evidence.decode


def link_format() -> tuple[list[bytes], Decode]:
    link = JoinLink("127.0.0.1", 8700, "ab" * 32, "cd" * 16, "token-token-token-token").format()
    return [link.encode()], lambda data: JoinLink.parse(data.decode("utf-8", "surrogateescape"))


FORMATS: dict[str, Callable[[], tuple[list[bytes], Decode]]] = {
    "bundle": bundle_format, "committed bundle": committed_bundle_format,
    "diff": lambda: chunk_format("diff"), "anchor": lambda: chunk_format("anchor"),
    "layout": layout_format, "envelope": envelope_format, "json": json_format, "evidence": evidence_format,
    "link": link_format,
}


def hammer(name: str, seed: int, count: int) -> int:
    """Feed ``count`` damaged messages to a decoder; how many it refused."""
    good, decode = FORMATS[name]()
    rng = np.random.default_rng(seed)
    return sum(refused(name, decode, damaged(good, rng)) for _ in range(count))


def refused(name: str, decode: Decode, data: bytes) -> bool:
    try:
        decode(data)
    except AssayError as error:
        return error.code in CODES
    except Exception as error:
        raise AssertionError(f"{name}: {type(error).__name__}: {error} on {data[:200].hex()}...") from error
    return False


@pytest.mark.parametrize("name", FORMATS)
def test_any_bytes_get_a_named_answer(name: str) -> None:
    assert hammer(name, seed=1, count=10_000) > 2_500


@pytest.mark.slow
@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", FORMATS)
def test_any_bytes_at_length(name: str, seed: int) -> None:
    assert hammer(name, seed=1000 + seed, count=10_000) > 2_500
