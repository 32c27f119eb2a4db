"""The reference model in its two configurations, built when first needed; the only way to torch in this part."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from protocol.weights.layout import Layout
from verifier.session import Recomputer
from verifier.states import States


class ModelShelf:
    """Makes the recomputer of a tier (see ``session.Recomputers``).

    T2: float32, fused attention, rollouts side by side. T3: float64, plain attention, one rollout at a time: another
    arithmetic, another kernel and another batch shape. T2's model is kept, T3's is dropped again, for it is rare.
    """

    def __init__(self, model_dir: Path, layout: Layout, states: States, *, device: str = "cpu", threads: int = 1):
        self._model_dir, self._layout, self._states = model_dir, layout, states
        self._device, self._threads = device, threads
        self._first: Recomputer | None = None

    def __call__(self, tier: Literal["T2", "T3"]) -> Recomputer:
        """The recomputer of a tier.

        Raises:
            LocalFault: ``E_MODEL_CONFIG``.
        """
        if tier == "T3":
            return self._build(tier)
        self._first = self._first or self._build(tier)
        return self._first

    def _build(self, tier: Literal["T2", "T3"]) -> Recomputer:
        import torch

        from protocol.reference import ReferenceModel
        from verifier.recompute import TorchRecomputer

        torch.set_num_threads(self._threads)
        second = tier == "T3"
        reference = ReferenceModel.load(
            self._model_dir, self._layout, device=self._device, dtype=torch.float64 if second else torch.float32,
            attention="eager" if second else "sdpa",
        )
        return TorchRecomputer(reference, self._states, alone=second)
