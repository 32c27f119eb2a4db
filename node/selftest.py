"""``assay node selftest``: generate a few rollouts and verify them on the spot, with no effect on anybody's trust.

Structure and sampler replay as every bundle is checked, and the divergence of the committed heads from a prefill of the
same tokens by the reference implementation, compared with the run's thresholds.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from node.assemble import EngineFactory, check_run, open_pool, open_weights, torch_engine
from node.config import NodeConfig
from node.engine import Engine, Finished, Request
from node.home import Home
from node.join import PROFILE
from node.weights import Weights, fetch_model
from protocol.bundle import decode, encode
from protocol.client import CoordinatorClient
from protocol.clock import Clock
from protocol.messages import Environment, RunManifest, SamplingRules
from protocol.rollout import Bundle, Rollout
from protocol.sampler import check_head, head_logprobs, replay, tail_logprobs
from protocol.tasks.registry import make_task
from protocol.tokenizer import Tokenizer

if TYPE_CHECKING:
    from protocol.weights.layout import Layout

#: Groups the prompts are made from; far from those of a run, so that nothing is learned about them.
_FIRST_GROUP: Final = 2**40
#: A token is stochastic when the likeliest entry of its head has less than this probability.
_STOCHASTIC_BELOW: Final = 0.99


@dataclass(frozen=True)
class Report:
    """What a self-test found."""

    version: int
    rollouts: int
    tokens: int
    tokens_per_s: float
    replay_mismatches: int  #: rollouts whose tokens are not what heads and seeds select
    mean_kl: float  #: worst rollout's mean divergence per stochastic token, nats
    max_mean_kl: float  #: the run's threshold for it
    token_kl: float  #: worst token's divergence, nats
    max_token_kl: float  #: the run's threshold for it

    @property
    def passed(self) -> bool:
        """Whether a verifier would pass this work."""
        return not self.replay_mismatches and self.mean_kl <= self.max_mean_kl and self.token_kl <= self.max_token_kl


def selftest(
    home: Home, config: NodeConfig, client: CoordinatorClient, clock: Clock, *, rollouts: int = 8,
    make_engine: EngineFactory = torch_engine,
) -> Report:
    """Generate with the newest weights and check.

    Raises:
        AssayError: the home, the run, the weights or the engine are not usable; the code says what.
    """
    run = home.manifest()
    check_run(run, clock)
    layout = fetch_model(client, run, home.model)
    weights = open_weights(home, config, run, layout, client, open_pool(home, config, client, clock), clock)
    weights.poll(clock.now_ms())
    engine = make_engine(home.model, layout, run.sampling, weights, slots=config.batch, threads=config.threads)
    requests = _requests(home, run, client, weights.newest(), rollouts)
    started = clock.monotonic()
    finished = _generate(engine, requests)
    seconds = max(clock.monotonic() - started, 1e-9)
    engine.close()
    divergences = _divergences(home, layout, weights, run.sampling, finished)
    means = [
        _stochastic_mean(done.rollout, kl_T, run.sampling) for done, kl_T in zip(finished, divergences, strict=True)
    ]
    profile = next(profile for profile in run.profiles if profile.name == PROFILE)
    tokens = sum(len(done.rollout) for done in finished)
    return Report(
        version=weights.newest(), rollouts=len(finished), tokens=tokens, tokens_per_s=round(tokens / seconds, 1),
        replay_mismatches=sum(_replays_wrong(done, run.sampling) for done in finished),
        mean_kl=max(means), max_mean_kl=profile.max_mean_kl_nano / 1e9,
        token_kl=max(float(d.max()) for d in divergences), max_token_kl=profile.max_token_kl_micro / 1e6,
    )


def _requests(
    home: Home, run: RunManifest, client: CoordinatorClient, version: int, rollouts: int
) -> list[Request]:
    tokenizer = Tokenizer.load(home.model)

    def prompt(environment: Environment, group: int) -> tuple[int, ...]:
        task = make_task(environment, client.fetch, run.run_id)
        return tuple(task.prompt_tokens(task.problem(group), tokenizer))

    return [
        Request(
            key=f"selftest/{i}", sample=i, start_version=version, seed=hashlib.sha256(b"selftest %d" % i).digest(),
            prompt=prompt(run.environments[i % len(run.environments)], _FIRST_GROUP + i),
        )
        for i in range(rollouts)
    ]


def _generate(engine: Engine, requests: list[Request]) -> list[Finished]:
    engine.submit(requests)
    finished: list[Finished] = []
    while engine.open_requests:
        finished += engine.step()
    return finished


def _replays_wrong(done: Finished, rules: SamplingRules) -> bool:
    """Whether the rollout fails the checks every bundle gets, after a journey through its wire form."""
    (rollout,) = decode(encode(Bundle((done.rollout,))), rules).rollouts
    check_head(rollout, rules)
    return replay(rollout, done.request.seed, rules) is not None


def _divergences(
    home: Home, layout: Layout, weights: Weights, rules: SamplingRules, finished: list[Finished]
) -> list[NDArray[np.float64]]:
    """(T,) KL(committed head || reference) per token of each rollout, nats, over head and tail."""
    from protocol.reference.model import ReferenceModel

    model = ReferenceModel.load(home.model, layout)
    with weights.state(weights.newest()) as state:
        states = {weights.newest(): state}
        logits = [model.logits_for(done.request.prompt, done.rollout, states.__getitem__) for done in finished]
    found = []
    for done, logits_TV in zip(finished, logits, strict=True):
        x_TV = logits_TV.double().numpy() * (1000 / rules.temperature_milli)
        x_TV -= x_TV.max(axis=1, keepdims=True)
        logp_TV = x_TV - np.log(np.exp(x_TV).sum(axis=1, keepdims=True))
        found.append(kl_of_heads(done.rollout, logp_TV, rules))
    return found


def _stochastic_mean(rollout: Rollout, kl_T: NDArray[np.float64], rules: SamplingRules) -> float:
    """Mean of ``kl_T`` over the stochastic tokens, as a verifier takes it; 0 when there are none."""
    starts_T = np.cumsum(rollout.head_lengths, dtype=np.int64) - rollout.head_lengths
    chosen_T = np.exp(head_logprobs(rollout, rules)[starts_T]) < _STOCHASTIC_BELOW
    return float(kl_T[chosen_T].mean()) if chosen_T.any() else 0.0


def kl_of_heads(rollout: Rollout, logp_TV: NDArray[Any], rules: SamplingRules) -> NDArray[np.float64]:
    """(T,) KL(q || p) in nats of the heads' q, tail as one symbol, against log-probabilities (T, V)."""
    rows_N = np.repeat(np.arange(len(rollout)), rollout.head_lengths)
    logq_N, logp_N = head_logprobs(rollout, rules), logp_TV[rows_N, rollout.head_ids]
    kl_T, held_T = np.zeros(len(rollout)), np.zeros(len(rollout))
    np.add.at(kl_T, rows_N, np.exp(logq_N) * (logq_N - logp_N))
    np.add.at(held_T, rows_N, np.exp(logp_N))
    logq_T, logp_T = tail_logprobs(rollout, rules), np.log(np.clip(1 - held_T, 1e-300, None))
    tails = np.isfinite(logq_T)
    kl_T[tails] += np.exp(logq_T[tails]) * (logq_T[tails] - logp_T[tails])
    return kl_T
