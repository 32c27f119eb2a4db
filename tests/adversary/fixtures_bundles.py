"""Fixtures of what is a bundle, a commitment (``tests.adversary.attacks``) or a patch of the node's engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from node.drill import BestOfN, EditedAnswer
from protocol.api import SubmitReply
from protocol.client import CoordinatorClient
from protocol.envelope import Envelope
from protocol.identity import Identity
from tests.adversary import cheats
from tests.adversary.attack import Attack
from tests.adversary.attacks import ATTACKS
from tests.adversary.bench import Bench, Catch, sealing
from tests.adversary.pipeline import Cheat
from tests.adversary.registry import fixture
from tests.adversary.world import EOS, identity

MODEL: Final = (
    "E_HEAD_KL", "E_TOKEN_KL", "E_HEAD_ENTRY", "E_HEAD_MEMBERSHIP", "E_TAIL_MASS", "E_TOKEN_MARGIN",
    "E_TAIL_TOKEN", "E_TAIL_DRAW",
)
#: Attacks whose point is the signature, which a patched node makes in another place.
_SIGNED: Final = frozenset({
    "signed by another key", "signature by another key under the node's name", "commitment of another run",
})


def _register(attack: Attack) -> None:
    setting = "new" if attack.tier == "T3" else "undrawn"
    places = ("door", attack.tier) if attack.door else (attack.tier,)
    codes = (attack.door, *attack.codes) if attack.door else attack.codes

    @fixture(attack.row, attack.name, places, *codes)
    def trial(bench: Bench, seed: int) -> Catch:
        return bench.chase(setting, seed, sealing(attack.cheat), later=attack.later)


for _attack in ATTACKS:
    if _attack.name not in _SIGNED:
        _register(_attack)


# -- signatures ---------------------------------------------------------------------------------------------


def _sending(sign: Callable[[object, Identity], Envelope]) -> Cheat:
    """A node whose commitments are signed by ``sign(commitment, its key)``."""

    def client(honest: CoordinatorClient) -> CoordinatorClient:
        def submit(commitment: object) -> object:
            answer = honest._post("/v1/submissions", sign(commitment, node_key(honest)))
            return SubmitReply.model_validate(answer)

        honest.submit = submit  # type: ignore[method-assign, assignment]
        return honest

    return Cheat(client=client)


def node_key(client: CoordinatorClient) -> Identity:
    assert client.identity is not None
    return client.identity


def _forged(commitment: object, key: Identity) -> Envelope:
    """Signed by somebody, in the node's name."""
    made = commitment.sign(identity("somebody"))  # type: ignore[attr-defined]
    return Envelope(made.payload_type, made.payload, {key.id: next(iter(made.signatures.values()))})


def _stripped(commitment: object, key: Identity) -> Envelope:
    made = commitment.sign(key)  # type: ignore[attr-defined]
    return Envelope(made.payload_type, made.payload, {key.id: b"\0" * 64})


def _other_domain(commitment: object, key: Identity) -> Envelope:
    """The signature is of the same bytes under another payload type."""
    made = commitment.sign(key)  # type: ignore[attr-defined]
    lease_request = "application/vnd.assay.lease-request.v1+json"
    return Envelope(made.payload_type, made.payload, Envelope.sign(key, lease_request, made.payload).signatures)


def _other_run(commitment: object, key: Identity) -> Envelope:
    made: Envelope = commitment.model_copy(update={"run_id": "cd" * 16}).sign(key)  # type: ignore[attr-defined]
    return made


_SIGNATURES: Final[dict[str, tuple[Callable[[object, Identity], Envelope], str]]] = {
    "signed by another key": (lambda c, _: c.sign(identity("somebody")), "E_WRONG_KEY"),  # type: ignore[attr-defined]
    "signature by another key under the node's name": (_forged, "E_SIGNATURE"),
    "signature stripped": (_stripped, "E_SIGNATURE"),
    "signature from another domain": (_other_domain, "E_SIGNATURE"),
    "commitment of another run": (_other_run, "E_WRONG_RUN"),
}


def _register_signature(name: str) -> None:
    sign, code = _SIGNATURES[name]

    @fixture(24, name, "door", code)
    def trial(bench: Bench, seed: int) -> Catch:
        return bench.chase("undrawn", seed, _sending(sign))


for _name in _SIGNATURES:
    _register_signature(_name)


# -- patched engines ----------------------------------------------------------------------------------------


def _engine(row: int, name: str, where: str, cheat: Cheat, *codes: str, setting: str = "single") -> None:
    @fixture(row, name, where, *codes)
    def trial(bench: Bench, seed: int) -> Catch:
        return bench.chase(setting, seed, cheat)


_engine(1, "another model", "T3", cheats.weights(cheats.other_model), *MODEL)
_engine(1, "the model without its last layer", "T3", cheats.weights(cheats.smaller_model), *MODEL)
_engine(1, "made-up log-probabilities: everything even", "T3", cheats.hooked(lambda logits, *_: 0 * logits), *MODEL)
_engine(2, "another model, own randomness, heads by prefill", "T1",
        cheats.proved_by_prefill(cheats.other_model, free=True), "E_REPLAY", setting="single undrawn")
_engine(2, "the model without its last layer, own randomness, heads by prefill", "T1",
        cheats.proved_by_prefill(cheats.smaller_model, free=True), "E_REPLAY", setting="single undrawn")
_engine(3, "another model, the right seed, heads by prefill", "T1",
        cheats.proved_by_prefill(cheats.other_model, free=False), "E_REPLAY", setting="single undrawn")
_engine(3, "the model without its last layer, the right seed, heads by prefill", "T1",
        cheats.proved_by_prefill(cheats.smaller_model, free=False), "E_REPLAY", setting="single undrawn")
_engine(3, "int8 weights, the right seed, heads by prefill", "T1",
        cheats.proved_by_prefill(cheats.rounded(8), free=False), "E_REPLAY", setting="single undrawn")
_engine(4, "int8 weights in the node's engine", "T3", cheats.weights(cheats.rounded(8)), *MODEL)
_engine(4, "int4 weights in the node's engine", "T3", cheats.weights(cheats.rounded(4)), *MODEL)
_engine(4, "fp8 weights in the node's engine", "T3", cheats.weights(cheats.fp8), *MODEL)
_engine(4, "8-bit key-value cache", "T3", cheats.quantised_cache(), *MODEL)
_engine(5, "one version stale, in the node's engine", "T3", cheats.weights(cheats.older(1)), *MODEL)
_engine(5, "three versions stale", "T3", cheats.weights(cheats.older(3)), *MODEL)
_engine(6, "temperature .999", "T3", cheats.hooked(lambda logits, *_: logits / 0.999), *MODEL)
_engine(6, "temperature .7", "T3", cheats.hooked(lambda logits, *_: logits / 0.7), *MODEL)
_engine(6, "top-p .95", "T3", cheats.hooked(cheats.top_p(0.95)), *MODEL)
_engine(6, "repetition penalty 1.05", "T3", cheats.hooked(cheats.repetition_penalty(1.05)), *MODEL)
_engine(7, "best of four by log-probability (the drill)", "T1",
        Cheat(engine=lambda world, honest: BestOfN(honest, world.rules)), "E_REPLAY", setting="single undrawn")
_engine(11, "answer prefix in the prompt", "T3",
        cheats.asking(lambda request: cheats.replace(request, prompt=(*request.prompt, 7))), *MODEL)
_engine(11, "edited prompt", "T3",
        cheats.asking(lambda request: cheats.replace(request, prompt=(*request.prompt[:-1], 9))), *MODEL)
_engine(12, "end of sequence made .5 nats likelier", "T3", cheats.hooked(cheats.bonus(EOS, 0.5)), *MODEL)
_engine(13, "end of sequence made .1 nats less likely", "T3", cheats.hooked(cheats.bonus(EOS, -0.1)), *MODEL)
_engine(15, "the last word exchanged (the drill)", "T1",
        Cheat(engine=lambda world, honest: EditedAnswer(honest, world.rules)), "E_REPLAY", setting="single undrawn")
_engine(19, "all log-probabilities off by .02 nats", "T3", cheats.hooked(cheats.tilt(0.02)), *MODEL)
_engine(22, "a seed of the node's own, in its engine", "T1", cheats.asking(cheats.own_seed), "E_REPLAY",
        setting="single undrawn")
