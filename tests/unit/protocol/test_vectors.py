"""Known answers of the sampler, bundles, Merkle trees, canonical JSON, envelopes and messages."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard

from protocol import bundle as bundles
from protocol import canonical, messages, sampler, sampler_torch
from protocol.envelope import Envelope
from protocol.errors import CODES, PeerFault
from protocol.identity import Identity
from protocol.merkle import check_inclusion, counted_root, inclusion_proof, merkle_root
from protocol.messages import SamplingRules
from protocol.prng import exponential, row_keys, seed_words, uniforms
from protocol.rollout import (
    NO_CODE,
    Bundle,
    Finish,
    Rollout,
    Segment,
    SwapMode,
    prompt_digest,
    rollout_seed,
)
from protocol.sampler import TAIL, draw, draw_tail, quantise, replay
from protocol.weight_table import float_weights, weight_table

VECTORS = Path(__file__).resolve().parents[2] / "vectors"
TYPES = {"tokens": np.uint32, "head_lengths": np.uint8, "head_ids": np.uint32, "head_codes": np.uint16,
         "tail_codes": np.uint16, "token_codes": np.uint16}


def _load(path: Path) -> dict[str, Any]:
    case: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert path.stem.endswith("_fail") == ("error" in case)
    assert case["origin"].startswith("tests/vectors/make_")
    return case


def _cases(folder: str, kind: str | None = None) -> Any:
    cases = [(path.stem, _load(path)) for path in sorted((VECTORS / folder).glob("*.json"))]
    chosen = [pytest.param(case, id=name) for name, case in cases if kind is None or case["kind"] == kind]
    assert chosen
    return pytest.mark.parametrize("case", chosen)


def _rollout(columns: dict[str, Any]) -> Rollout:
    return Rollout(
        sample=columns["sample"], finish=Finish(columns["finish"]),
        segments=tuple(Segment(start, version, SwapMode(mode)) for start, version, mode in columns["segments"]),
        **{name: np.array(columns[name], dtype) for name, dtype in TYPES.items()},
        routes=np.array(columns["routes"], np.uint8) if "routes" in columns else None,
    )


def _same(a: Rollout, b: Rollout) -> None:
    assert (a.sample, a.segments, a.finish) == (b.sample, b.segments, b.finish)
    for name in (*TYPES, "routes"):
        assert np.array_equal(getattr(a, name), getattr(b, name)), name


# -- sampler -----------------------------------------------------------------------------------------------


@_cases("sampler", "seeds")
def test_seeds(case):
    assert prompt_digest(case["prompt"]) == case["prompt_sha256"]
    for group, sample, seed in case["seeds"]:
        assert rollout_seed(case["run_id"], case["beacon"], case["prompt_sha256"], group, sample).hex() == seed


@_cases("sampler", "weights")
def test_weights(case):
    table = weight_table(case["steps_per_nat"])
    assert [[code, str(table[code])] for code, _ in case["weights"]] == case["weights"]


@_cases("sampler", "noise")
def test_noise(case):
    words = seed_words(bytes.fromhex(case["seed"]))
    for position, domain, token, u_hex, e_hex in case["noise"]:
        u = uniforms(words, row_keys(words, np.array([position]), domain), np.array([token]))
        assert (float(u[0]).hex(), float(exponential(u)[0]).hex()) == (u_hex, e_hex)
        e = sampler_torch._noise(
            torch.from_numpy(words.view(np.int64))[None], torch.tensor([position]), domain, torch.tensor([[token]])
        )
        assert float(e).hex() == e_hex


@_cases("sampler", "exponential")
def test_exponential(case):
    u = np.array([float.fromhex(u) for u, _ in case["values"]])
    expected = [e for _, e in case["values"]]
    kernels = sampler.compiled()
    assert kernels is not None
    for e in (exponential(u), kernels.exponentials(u), sampler_torch.exponential(torch.from_numpy(u)).numpy()):
        assert [float(x).hex() for x in e] == expected


@_cases("sampler", "quantise")
def test_heads_and_winners(case):
    rules, seed = SamplingRules(**case["rules"]), bytes.fromhex(case["seed"])
    head = quantise(np.array(case["logits"]), rules)
    assert {"ids": head.ids.tolist(), "codes": head.codes.tolist(), "tail_code": head.tail_code} == case["head"]
    heads = sampler_torch.heads_from_logits(torch.tensor([case["logits"]]), rules)
    assert heads.ids_BK[0, : int(heads.lengths_B)].tolist() == case["head"]["ids"]
    assert heads.codes_BK[0, : int(heads.lengths_B)].tolist() == case["head"]["codes"]
    assert int(heads.tail_codes_B) == case["head"]["tail_code"]
    indices = [draw(head, seed, position, rules) for position in range(len(case["winners"]))]
    assert [0xFFFFFFFF if i == TAIL else int(head.ids[i]) for i in indices] == case["winners"]


@_cases("sampler", "replay")
def test_replays(case):
    rules, seed, rollout = SamplingRules(**case["rules"]), bytes.fromhex(case["seed"]), _rollout(case["rollout"])
    sampler.check_head(rollout, rules)
    assert replay(rollout, seed, rules) == case["first_wrong"]
    wrong = sampler._replay_numpy(rollout, seed_words(seed), float_weights(rules.steps_per_nat))
    assert wrong == (-1 if case["first_wrong"] is None else case["first_wrong"])


def test_the_honest_rollout_is_drawn_again_from_its_logits():
    case = _load(VECTORS / "sampler" / "rollout.json")
    rules, seed, rollout = SamplingRules(**case["rules"]), bytes.fromhex(case["seed"]), _rollout(case["rollout"])
    assert np.any(rollout.token_codes != NO_CODE)
    drawn = sampler_torch.sample_batch(
        torch.tensor(case["logits"]), torch.from_numpy(seed_words(seed).view(np.int64)).expand(len(rollout), 4),
        torch.arange(len(rollout)), rules,
    )
    assert drawn.tokens_B.tolist() == rollout.tokens.tolist()
    assert drawn.token_codes_B.tolist() == rollout.token_codes.tolist()
    assert drawn.tail_codes_B.tolist() == rollout.tail_codes.tolist()
    for position, logits in enumerate(case["logits"]):
        if rollout.token_codes[position] != NO_CODE:
            head = quantise(np.array(logits), rules)
            token, code = draw_tail(np.array(logits), head.ids, seed, position, rules)
            assert (token, code) == (rollout.tokens[position], rollout.token_codes[position])


@_cases("sampler", "head")
def test_heads_are_refused(case):
    with pytest.raises(PeerFault) as caught:
        sampler.check_head(_rollout(case["rollout"]), SamplingRules(**case["rules"]))
    assert caught.value.code == case["error"]


# -- bundles and Merkle trees ------------------------------------------------------------------------------


@_cases("rollout-bundle")
def test_bundles(case):
    rules, data = SamplingRules(**case["rules"]), base64.b64decode(case["data"])
    if "error" in case:
        with pytest.raises(PeerFault) as caught:
            bundles.decode(data, rules, max_bytes=case["max_bytes"])
        assert caught.value.code == case["error"]
        return
    bundle = bundles.decode(data, rules)
    expected = [_rollout(columns) for columns in case["rollouts"]]
    for ours, theirs in zip(bundle.rollouts, expected, strict=True):
        _same(ours, theirs)
    content = zstandard.ZstdDecompressor().decompress(bundles.encode_simple(Bundle(tuple(expected))))
    assert hashlib.sha256(content).hexdigest() == case["content_sha256"]
    lease = bytes.fromhex(case["lease_sha256"])
    roots = [bundles.rollout_root(r, lease + r.sample.to_bytes(4, "little")) for r in bundle.rollouts]
    assert [root.hex() for root in roots] == case["rollout_roots"]
    assert bundles.bundle_root(bundle, case["lease_sha256"]) == case["bundle_root"]


@_cases("packed-bundle")
def test_packed_bundles(case):
    rules, data = SamplingRules(**case["rules"]), base64.b64decode(case["data"])
    if "error" in case:
        with pytest.raises(PeerFault) as caught:
            bundles.decode(data, rules, max_bytes=case["max_bytes"])
        assert caught.value.code == case["error"]
        return
    expected = [_rollout(columns) for columns in case["rollouts"]]
    for ours, theirs in zip(bundles.decode(data, rules).rollouts, expected, strict=True):
        _same(ours, theirs)
    assert bundles.encode(Bundle(tuple(expected))) == data


@_cases("merkle")
def test_merkle(case):
    if "error" in case:
        with pytest.raises(PeerFault) as caught:
            check_inclusion(bytes.fromhex(case["leaf"]), case["index"], case["count"],
                            [bytes.fromhex(p) for p in case["proof"]], bytes.fromhex(case["root"]))
        assert caught.value.code == case["error"]
        return
    leaves = [bytes.fromhex(leaf) for leaf in case["leaves"]]
    for n in range(1, len(leaves) + 1):
        assert merkle_root(leaves[:n]).hex() == case["roots"][n - 1]
        assert counted_root(leaves[:n]).hex() == case["counted_roots"][n - 1]
        assert [p.hex() for p in inclusion_proof(leaves, n - 1)] == case["proofs"][n - 1]


# -- messages ----------------------------------------------------------------------------------------------


@_cases("canonical-json")
def test_canonical_json(case):
    data = base64.b64decode(case["data"])
    if "error" in case:
        with pytest.raises(PeerFault) as caught:
            canonical.decode(data)
        assert caught.value.code == case["error"]
        return
    assert canonical.decode(data) == case["value"]
    assert canonical.encode(case["value"]) == data
    assert canonical.digest(case["value"]) == case["sha256"]


@_cases("envelope")
def test_envelopes(case):
    data, key = base64.b64decode(case["data"]), bytes.fromhex(case["public_key"])
    if "error" in case:
        with pytest.raises(PeerFault) as caught:
            Envelope.from_bytes(data).verify(key, case["type"])
        assert caught.value.code == case["error"]
        return
    identity = Identity(bytes.fromhex(case["seed"]))
    assert (identity.public_key, identity.id) == (key, case["key_id"])
    envelope = Envelope.from_bytes(data)
    assert envelope.digest == case["payload_sha256"]
    assert Envelope.sign(identity, case["type"], envelope.verify(key, case["type"])).to_bytes() == data


@_cases("messages")
def test_messages(case):
    envelope = Envelope.from_bytes(base64.b64decode(case["data"]))
    kind = getattr(messages, case["class"])
    if "error" in case:
        with pytest.raises(PeerFault) as caught:
            kind.open(envelope, case["public_key"], run_id=case["run_id"], now_ms=case["now_ms"])
        assert caught.value.code == case["error"]
        return
    message = kind.open(envelope, case["public_key"], run_id=case["run_id"], now_ms=case["now_ms"])
    assert message == kind(**case["value"])
    assert message.to_payload() == envelope.payload


def test_every_refused_case_names_a_registered_code():
    folders = ("sampler", "rollout-bundle", "packed-bundle", "merkle", "canonical-json", "envelope", "messages")
    errors = [_load(path)["error"] for folder in folders for path in (VECTORS / folder).glob("*_fail.json")]
    assert len(errors) >= 100
    assert set(errors) - {"E_REPLAY"} <= set(CODES)
