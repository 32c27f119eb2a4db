"""What ``assay up`` reads from a coordinator's ``GET /v1/status``."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class _Seen(BaseModel):
    """Base: a newer coordinator may say more."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class RunSeen(_Seen):
    """The run as a whole."""

    id: str
    name: str = ""
    max_versions: int | None = None
    complete: bool = False


class RolloutsSeen(_Seen):
    """Rollouts by outcome."""

    accepted: int = 0
    rejected: int = 0
    inconclusive: int = 0
    pending: int = 0
    cancelled: int = 0


class NodeSeen(_Seen):
    """One node."""

    id: str
    name: str
    state: str
    drill: str | None = None  #: name of the attack it plays
    version: int | None = None
    lag: int | None = None
    accepted: int = 0
    rejected: int = 0
    inconclusive: int = 0
    reasons: dict[str, int] = {}
    tokens: int = 0
    last_seen_ms: int = 0


class DrillSeen(_Seen):
    """One cheating node of ours, and whether the network noticed."""

    node: str
    attack: str
    caught: bool
    rollouts_before_caught: int | None = None
    code: str | None = None
    receipt_id: str | None = None  #: of the bundle that gave it away


class Status(_Seen):
    """One look at the run."""

    run: RunSeen
    version: int | None = None  #: newest published version
    reward_mean: list[float | None] = []  #: per version, of the batch that made it
    tokens_generated: int = 0
    tokens_trained: int = 0
    tokens_per_s: float = 0.0
    rollouts: RolloutsSeen = RolloutsSeen()
    nodes: list[NodeSeen] = []
    audit_queue: int = 0
    drills: list[DrillSeen] = []
    diff_bytes_mean: float | None = None
    diff_ratio_to_bound: float | None = None  #: mean over the newest steps
    full_bytes: int | None = None
    server_time_ms: int = 0

    @property
    def rewards(self) -> list[float]:
        """Mean reward of each batch trained on so far, oldest first."""
        return [reward for reward in self.reward_mean if reward is not None]
