"""The experiments' machinery: stacked runs are single runs, the learner's own step, the real sampler, the real task."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks import account, arms, flock, sorting, sweep, verdict
from learner.config import OptimConfig
from learner.corrections import correction_of
from learner.ess import CapController
from learner.head import LossTokens, head_loss
from learner.losses import token_rule
from learner.optimiser import make_optimiser
from protocol.messages import Environment
from protocol.prng import seed_words
from protocol.sampler import draw, quantise
from protocol.tasks.sort import SYMBOLS, SortTask

SHAPE = flock.Shape(sorting.VOCABULARY, width=16, layers=1)
SIZE = arms.Size(
    shape=SHAPE, warm_steps=30, warm_batch=16, steps=4, groups=4, group_size=4, test_every=2, test_problems=16
)
LETTERS = {sorting.FIRST + index: SYMBOLS[index] for index in range(sorting.ALPHABET)} | {
    sorting.ASCENDING: ">", sorting.EQUALS: "=", sorting.EOS: ""
}


@pytest.fixture(scope="module")
def base() -> flock.Weights:
    return arms.warmed(SIZE, (1, 2), lambda _: None)


@pytest.fixture
def easy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that a hardly taught model gets right at times: the first symbol is of the lower half."""
    monkeypatch.setattr(sorting, "right", lambda _, answers: answers[:, 0] < sorting.FIRST + sorting.ALPHABET // 2)


def test_rewards_are_those_of_the_sorting_task() -> None:
    rng = np.random.default_rng(3)
    params: dict[str, int | str] = {"alphabet": sorting.ALPHABET, "max_length": sorting.LENGTH}
    task = SortTask(Environment(name="s", kind="sort", params=params), "0" * 32)
    rows = sorting.traces(rng, 40)
    rows[::3, sorting.PROMPT] = sorting.EQUALS
    prompts, answers = rows[:, : sorting.PROMPT], rows[:, sorting.PROMPT :]
    for prompt, answer, right in zip(prompts, answers, sorting.right(prompts, answers), strict=True):
        problem = replace(task.problem(0), answer="".join(sorted(LETTERS[int(s)] for s in prompt[1:-1])))
        assert (task.reward_micro(problem, "".join(LETTERS[int(s)] for s in answer)) > 0) == right
    assert 0 < sorting.right(prompts, answers).mean() < 1


def test_the_cache_changes_nothing(base: flock.Weights) -> None:
    ids = torch.from_numpy(sorting.traces(np.random.default_rng(0), 6).reshape(2, 3, -1))[:, :, :-1]
    whole = flock.hidden(base, SHAPE, ids)
    cache = flock.Cache()
    parts = [flock.hidden(base, SHAPE, ids[:, :, :5], 0, cache)]
    parts += [flock.hidden(base, SHAPE, ids[:, :, at : at + 1], at, cache) for at in range(5, ids.shape[2])]
    torch.testing.assert_close(torch.cat(parts, 2), whole, atol=1e-5, rtol=1e-4)


def test_tokens_are_the_seeded_draws_of_the_committed_heads(base: flock.Weights) -> None:
    prompts, draws, _ = arms.rollouts(base, (1, 2), 0, SIZE)
    rng = arms._rng(2, 1, 0)
    sorting.problems(rng, SIZE.groups)
    words = rng.integers(-(2**63), 2**63, (SIZE.groups * SIZE.group_size, 4))
    every = prompts.repeat_interleave(SIZE.group_size, 1)
    ids = torch.cat([every, draws.tokens[:, :, :-1]], 2)
    logits = flock.logits(base, flock.hidden(base, SHAPE, ids)[:, :, sorting.PROMPT - 1 :])
    for row, position in ((0, 0), (5, 2), (15, 5)):
        head = quantise(logits[1, row, position].detach().numpy(), arms.RULES)
        seed = words[row].astype("<i8").tobytes()
        assert (seed_words(seed).view(np.int64) == words[row]).all()
        index = draw(head, seed, position, arms.RULES)
        token = int(draws.tokens[1, row, position])
        assert token == head.ids[index] if index >= 0 else token not in head.ids
    mass = torch.where(draws.head_valid, draws.head_q, 0.0).sum(-1) + draws.tail_q
    torch.testing.assert_close(mass, torch.ones_like(mass))
    assert (draws.log_q < 0).all()


@pytest.mark.parametrize("method", ["pg", "ppo", "tis+sc", "default"])
def test_gradients_are_those_of_the_learners_loss(base: flock.Weights, method: str) -> None:
    """One run of a stack against ``head_loss`` and autograd for that run alone."""
    config, lag = arms.METHODS[method], 3
    sampler = {name: value + 0.05 for name, value in base.items()}
    prompts, draws, rewards = arms.rollouts(sampler, (1, 2), 0, SIZE)
    rewards[:, 0, 0], rewards[:, 0, 1] = 0, 1_000_000
    signal, valid = arms.signals(rewards, draws)
    controllers = [CapController(config.ess_target) for _ in range(2)]
    stacked = flock.gradients_of(base, lambda leaves: _ignore(
        arms.backward_of(leaves, SHAPE, prompts, draws, signal, valid, lag, config, controllers)
    ))

    leaves = {name: value[1:].detach().requires_grad_() for name, value in base.items()}
    every = prompts[1:].repeat_interleave(SIZE.group_size, 1)
    states = flock.hidden(leaves, SHAPE, torch.cat([every, draws.tokens[1:, :, :-1]], 2))[:, :, sorting.PROMPT - 1 :]
    mine = valid[1]
    tokens = LossTokens(
        target_N=draws.tokens[1][mine], log_q_N=draws.log_q[1][mine], signal_N=signal[1][mine],
        lag_N=torch.full((int(mine.sum()),), lag), head_ids_NK=draws.head_ids[1][mine],
        head_q_NK=draws.head_q[1][mine], head_valid_NK=draws.head_valid[1][mine], tail_q_N=draws.tail_q[1][mine],
        sequence_N=torch.zeros(int(mine.sum()), dtype=torch.int64),
    )
    caps = controllers[1].caps(tokens.lag_N, config.cap, config.cap_decay)
    rule = token_rule(tokens.lag_N, tokens.signal_N, correction_of(config), cap_N=caps)
    loss, _ = head_loss(states[0][mine], leaves["embed"][0], tokens, rule, temperature=1.0, rows=7)
    loss.backward()
    for name, gradient in stacked.items():
        torch.testing.assert_close(gradient[1], leaves[name].grad[0], atol=2e-6, rtol=1e-3)
        assert gradient[1].abs().max() > 0


def _ignore(_: object) -> None:
    return None


def test_the_optimiser_is_the_learners_for_each_run() -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(2, 3, 4, generator=generator)
    masters, rates = {"a": start.clone()}, torch.tensor([1e-2, 3e-2])
    adam, alone = flock.Adam(masters), [start[run].clone() for run in range(2)]
    optimisers = [make_optimiser([alone[run]], OptimConfig(lr=float(rates[run]))) for run in range(2)]
    for step in range(4):
        gradient = torch.randn(2, 3, 4, generator=generator) * (0.01 if step % 2 else 1.0)
        adam.step({"a": gradient}, rates, max_norm=1.0)
        for run in range(2):
            norm = float(gradient[run].norm())
            alone[run].grad = gradient[run] * min(1.0, 1.0 / (norm + 1e-6))
            optimisers[run].step()
    torch.testing.assert_close(masters["a"], torch.stack(alone), atol=1e-6, rtol=1e-5)


def test_a_run_without_a_usable_gradient_stays(base: flock.Weights) -> None:
    masters = {"a": torch.ones(3, 2)}
    gradient = torch.tensor([[1.0, 2.0], [torch.nan, 1.0], [0.0, 0.0]])
    flock.Adam(masters).step({"a": gradient}, torch.full((3,), 0.1), max_norm=1.0)
    assert (masters["a"][0] != 1).all()
    assert (masters["a"][1:] == 1).all()


@pytest.mark.usefixtures("easy")
def test_fresh_sc_is_score_centring_at_lag_0(base: flock.Weights) -> None:
    ways = [arms.train(m, base, (1, 2), (1e-3,), SIZE, arms.quantised_to(4)) for m in ("sc", "fresh sc", "default")]
    centred, fresh, default = ([(run.rewards, run.kl, run.ess) for run in runs] for runs in ways)
    assert centred == fresh
    assert centred != default


@pytest.mark.usefixtures("easy")
def test_runs_of_a_stack_do_not_touch_each_other(base: flock.Weights) -> None:
    both = arms.train("default", base, (1, 2), (1e-3, 1e-2), SIZE, arms.refreshed_every(2))
    alone = arms.train("default", flock.pick(base, [1]), (2,), (1e-2,), SIZE, arms.refreshed_every(2))
    mine = next(run for run in both if run.seed == 2 and run.rate == 1e-2)
    assert mine.rewards == alone[0].rewards
    assert len(set(mine.rewards)) > 1
    np.testing.assert_allclose(mine.kl, alone[0].kl, rtol=0.05, atol=1e-6)


def test_a_stale_sampler_keeps_its_weights_and_counts_the_lag(base: flock.Weights) -> None:
    sampler, lag_at = arms.refreshed_every(2)()
    versions = [{"a": torch.tensor(float(step))} for step in range(4)]
    assert [float(sampler(step, versions[step])["a"]) for step in range(4)] == [0, 0, 2, 2]
    assert [lag_at(step) for step in range(4)] == [0, 1, 0, 1]


def test_few_bits_are_few_values(base: flock.Weights) -> None:
    rounded = flock.quantised(base, 3)["0.up"]
    assert max(len(rounded[0, :, column].unique()) for column in range(5)) <= 7
    coarse, fine = ((flock.quantised(base, bits)["0.up"] - base["0.up"]).abs().max() for bits in (3, 8))
    assert 0 < fine < coarse / 10
    with pytest.raises(ValueError, match="at least 2"):
        flock.quantised(base, 1)


def test_a_step_without_signal_changes_nothing(base: flock.Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorting, "right", lambda _, answers: np.ones(len(answers), dtype=bool))
    (run, _) = arms.train("default", base, (1, 2), (1e-3,), SIZE, arms.refreshed_every(2))
    assert run.rewards == [1.0, 1.0, 1.0]
    assert run.kl == [0.0, 0.0]


@pytest.mark.usefixtures("easy")
def test_a_stopped_sweep_goes_on(tmp_path, base: flock.Weights) -> None:
    said: list[str] = []
    small = sweep.Sweep("stale", arms.refreshed_every(2), SIZE, (1, 2), (1e-3,), ("pg",), (("default", "pg"),))
    first = sweep.run(small, tmp_path, said.append)
    more = sweep.run(replace(small, methods=("pg", "tis")), tmp_path, said.append)
    assert sum(line.startswith("pg step 4") for line in said) == 1
    assert more["pg"] == first["pg"]
    assert [run.method for run in more["default"]] == ["default"] * 2
    wider = sweep.run(replace(small, rates=(1e-3, 1e-2)), tmp_path, said.append)
    assert [run.rate for run in wider["pg"]] == [1e-3, 1e-3, 1e-2, 1e-2]
    assert wider["pg"][:2] == first["pg"]
    other = sweep.run(replace(small, size=replace(SIZE, steps=2)), tmp_path, said.append)
    assert other["pg"][0].steps == [0, 2]


def made(method: str, finals: list[float], rate: float = 1.0) -> list[arms.Run]:
    return [
        arms.Run(method, rate, seed, [0, 1, 2], [0.5, final, final], [0.1], [0.9], [0.0])
        for seed, final in enumerate(finals)
    ]


def test_the_verdict_takes_the_best_rate_and_pairs_seeds() -> None:
    found = {
        "default": made("default", [0.8, 0.7, 0.9]) + made("default", [0.1, 0.1, 0.1], rate=2.0),
        "tis": made("tis", [0.81, 0.71, 0.91]), "pg": made("pg", [0.2, 0.2, 0.3]),
    }
    result = verdict.judge(found, (("tis",), ("pg",), ("default",)))
    assert result["order"] == ["tis", "default", "pg"]
    assert result["default_preset_rank"] == 2
    assert not result["default_within_noise"]  # 0.01 behind at every seed
    assert [pair["holds"] for pair in result["pairs"]] == [True, False]
    values = result["methods"]["default"]
    assert (values["best_rate"], values["collapse_rate"], values["collapse_rate_all_rates"]) == (1.0, 0.0, 0.5)
    assert result["methods"]["pg"]["final_low"] <= result["methods"]["pg"]["final"]


def test_the_page_gets_its_block_and_picture(tmp_path) -> None:
    page = tmp_path / account.PAGE
    page.write_text("# Title\n<!-- arm: begin -->\nold\n<!-- arm: end -->\nrest\n", encoding="utf-8")
    found = {"default": made("default", [0.8, 0.7]), "tis <2": made("tis <2", [0.6, 0.7])}
    result = verdict.judge(found, (("tis <2", "default"),))
    account.write("arm", "An arm", ["About."], found, result, tmp_path)
    text = page.read_text(encoding="utf-8")
    assert "old" not in text
    assert text.startswith("# Title")
    assert text.endswith("rest\n")
    assert "| default | 0.750 |" in text
    picture = (tmp_path / "plots" / "arm.svg").read_text(encoding="utf-8")
    assert "tis &lt;2" in picture
    with pytest.raises(ValueError, match="no place for other"):
        account.replaced(text, "other", "")
