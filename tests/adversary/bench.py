"""Runs to attack, made when first asked for: each setting with several sets of weights, an honest node in every one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from protocol.messages import Commitment, Environment, Lease, Profile
from tests.adversary.answering import AnsweringWorld
from tests.adversary.honest_zoo import calibrate_alone
from tests.adversary.pipeline import Cheat, Handed, NodeAtWork, Pipeline
from tests.adversary.registry import Catch
from tests.adversary.stacks import Stack
from tests.adversary.world import RestlessWorld, ShortWorld, World
from verifier.submission import Submission

ONE = {"samples_per_lease": 1}
NEVER = {"ramp": 0, "floor_ppm": 0}
ALL_TWICE = {"replicate_ppm": 1_000_000}
#: Two nodes share every group, versions differ much, and random models earn something: all that steering needs.
STEERED: dict[str, Any] = {
    "batch": ONE | {"group_size": 2}, "max_new_tokens": 16, "sampling": {"swap_grid": 4},
    "environments": [Environment(name="sort", kind="letters")], "audit": {"ramp": 0},
}
#: Settings of a run: changes of its manifest, and the class of its world.
SETTINGS: dict[str, dict[str, Any]] = {
    "new": {},  # as shipped: a new node is audited twenty times
    "single": {"batch": ONE, "max_new_tokens": 16},  # the same, one rollout per bundle
    "undrawn": {"audit": NEVER},  # nothing is recomputed unless somebody asks for it
    "single undrawn": {"audit": NEVER, "batch": ONE, "max_new_tokens": 16},
    "floor": {"audit": {"ramp": 0}, "batch": ONE, "max_new_tokens": 8},  # what a trusted node meets: 5 %
    "half": {"audit": {"ramp": 0, "floor_ppm": 500_000}, "batch": ONE, "max_new_tokens": 8},
    "replicated": {"audit": NEVER | ALL_TWICE},
    "collusion": {"audit": {"ramp": 0} | ALL_TWICE, "batch": ONE, "max_new_tokens": 8},
    # profiles with null distributions; everything is recomputed, and a lone node's bundles are of different groups
    "calibrated": {"audit": {"ramp": 100_000}, "batch": {"group_size": 4}},
    "dropping": {},  # where leases are dropped and versions come out, apart from the others
    "liar": {},
    "steered": STEERED | {"world": RestlessWorld},
    "stretched": STEERED | {"world": ShortWorld},
    "answering": {"world": AnsweringWorld},
}
#: Bundles after which a cheat gives up.
MOST = 400


class Bench:
    """Pipelines by setting and number.

    Args:
        worlds: sets of weights per setting; trials take turns.
        calibrating: groups of which one rollout each calibrates a profile; 300 of 8 tokens or more are needed.
    """

    def __init__(self, folder: Path, *, worlds: int = 1, calibrating: int = 340):
        self._folder, self._worlds, self._calibrating = folder, worlds, calibrating
        self._pipelines: dict[tuple[str, int], Pipeline] = {}
        self._honest: dict[int, NodeAtWork] = {}
        self.scratch: dict[str, Any] = {}  #: what fixtures keep between trials
        self.profiles = cache(self._profiles)

    def _profiles(self) -> list[Profile]:
        """Calibrated profiles for the weights of the first world."""
        return calibrate_alone(self._folder / "calibrating", self._calibrating)

    def pipeline(self, setting: str = "undrawn", seed: int = 0) -> Pipeline:
        """The run of a trial."""
        number = 0 if setting == "calibrated" else seed % self._worlds
        if (setting, number) not in self._pipelines:
            changes = dict(SETTINGS[setting])
            if setting == "calibrated":
                changes |= {"profiles": self.profiles(), "salt": "attacked"}
            changes["batch"] = {"groups_per_batch": 65_536} | changes.get("batch", {})
            make = changes.pop("world", World)
            world = make(self._folder / f"{setting}-{number}".replace(" ", "-"), seed=7 + number, **changes)
            self._pipelines[setting, number] = Pipeline(world)
        return self._pipelines[setting, number]

    def close(self) -> None:
        for pipeline in self._pipelines.values():
            pipeline.close()

    def honest(self, pipeline: Pipeline) -> tuple[int, int]:
        """Let the honest node of a run work once; its rollouts, and those of them that were refused."""
        node = self._honest.get(id(pipeline))
        if node is None:
            node = self._honest[id(pipeline)] = pipeline.node("honest")
        node.daemon._parts.weights.poll(pipeline.clock.now_ms())
        handed = node.turn()
        pipeline.verify()
        assert handed, f"the honest node could not work: {node.refusals} {node.row}"
        refused = [one for one in handed if pipeline.verdicts(one.receipt_id)[-1].outcome != "pass"]
        hurt = node.banned or bool(node.refusals)
        return sum(one.rollouts for one in handed), sum(one.rollouts for one in refused) + hurt

    def chase(
        self, setting: str, seed: int, cheat: Cheat, *, later: int = 0, most: int = MOST, stack: Stack | None = None,
        after: Callable[[Pipeline], object] = lambda _: None,
    ) -> Catch:
        """A new node cheats in every bundle until it is caught; then the honest node has its turn.

        Args:
            later: versions published between leasing and handing in.
            most: bundles after which the cheat has got away.
            after: what else happens in the run after each turn.
        """
        pipeline = self.pipeline(setting, seed)
        if later:
            pipeline.start_afresh()
        node = pipeline.node(f"cheat {seed}", cheat, stack=stack)
        found: Catch | None = None
        while found is None and len(node.handed) < most:
            handed = node.turn(lambda: pipeline.show(pipeline.shown + later))
            if not handed:
                assert node.refusals, "the cheat could not even work"
                found = Catch(True, next(iter(node.refusals)), "door", pipeline.world.run.batch.samples_per_lease)
                break
            pipeline.verify()
            after(pipeline)
            found = caught(pipeline, node)
        found = found or Catch(False, None, "nobody", *_sums(node.handed))
        honest, alarms = self.honest(pipeline)
        return replace(found, honest=honest, alarms=alarms)


def caught(pipeline: Pipeline, node: NodeAtWork) -> Catch | None:
    """How a node was caught, if it was."""
    for number, one in enumerate(node.handed):
        verdicts = pipeline.verdicts(one.receipt_id)
        failed = next((verdict for verdict in verdicts if verdict.outcome == "fail"), None)
        if failed is not None:
            where = next(f.check for f in failed.findings if not f.ok).partition(".")[0]
            where = "T3" if (where == "T2" and "T3" in failed.tiers) or any(
                f.check.startswith("T3") and not f.ok for f in failed.findings
            ) else where
            return Catch(True, failed.code, where, *_sums(node.handed[: number + 1]))
    row = node.row
    if row["state"] == "banned":
        return Catch(True, row["ban_code"], "sum", *_sums(node.handed))
    return None


def _sums(handed: list[Handed]) -> tuple[int, int]:
    return sum(one.rollouts for one in handed), sum(one.tokens for one in handed)


def sealing(cheat: Callable[[World, Lease], Submission]) -> Cheat:
    """A node whose finished units are replaced by what ``cheat`` makes of their leases."""

    def seal(world: World, unit: Any, spooled: Any) -> Any:
        made = cheat(world, unit.lease)
        return replace(spooled, commitment=Commitment.from_payload(made.commitment.payload), data=made.bundle)

    return Cheat(seal=seal)


