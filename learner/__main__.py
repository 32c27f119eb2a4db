"""``python -m learner``, for launchers that start a module: ``torchrun --nproc-per-node 2 -m learner run ...``."""

from __future__ import annotations

import os
import sys

from learner.cli import app
from protocol.errors import E_CONFIG, E_USAGE, AssayError


def main() -> None:
    """Run the command line of the learner and exit as ``assay learner`` does."""
    rank = os.environ.get("RANK")
    try:
        app(prog_name="assay learner")
    except AssayError as error:
        where = "" if rank is None else f"rank {rank}: "
        print(f"{where}error {error.code}: {error}", file=sys.stderr)  # noqa: T201 - the front of this command
        sys.exit(2 if error.code in {E_USAGE, E_CONFIG} else 1)


if __name__ == "__main__":
    main()
