"""The steps' numbers as TensorBoard event files, for those who ask for them; needs the extra ``tensorboard``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from learner.disk import disk_faults
from learner.exposition import is_number
from learner.metrics import Metrics
from protocol.errors import E_CONFIG, LocalFault


class EventFiles:
    """Writes scalars into a folder; the step is the version. A version that is shown again is written again.

    Raises:
        LocalFault: ``E_CONFIG`` without TensorBoard; ``E_WORK_DIR``.
    """

    def __init__(self, folder: Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise LocalFault(
                E_CONFIG, "process.tensorboard needs TensorBoard", expected="the package tensorboard", got=str(error),
                hint="pip install tensorboard, or leave process.tensorboard out",
            ) from None
        self._folder = folder
        with disk_faults(f"write {folder}"):
            self._writer: Any = SummaryWriter(str(folder))

    def show(self, metrics: Metrics) -> None:
        """Write the numbers of one version.

        Raises:
            LocalFault: ``E_WORK_DIR``.
        """
        step = int(metrics["version"])
        with disk_faults(f"write {self._folder}"):
            for tag, value in scalars(metrics).items():
                self._writer.add_scalar(tag, value, step)
            self._writer.flush()


def scalars(metrics: Metrics) -> dict[str, float]:
    """Tag -> finite number: ``step/NAME``, ``by_lag/NAME/BUCKET``, ``lag_tokens/BUCKET``, ``left_out/REASON``."""
    found: dict[str, Any] = {f"step/{name}": value for name, value in metrics.items() if name != "version"}
    for bucket, values in metrics.get("by_lag", {}).items():
        found |= {f"by_lag/{name}/{bucket}": value for name, value in values.items()}
    for name, source in (("lag_tokens", "lag_histogram"), ("left_out", "groups_left_out")):
        found |= {f"{name}/{key}": value for key, value in metrics.get(source, {}).items()}
    return {tag: float(value) for tag, value in found.items() if is_number(value)}
