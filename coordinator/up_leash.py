"""Start a command that ends when its parent ends: ``python -m coordinator.up_leash PARENT_PID COMMAND...``.

A network of real processes must not outlive the ``assay up`` that watches it, even when that one is killed with
SIGKILL. The kernel sends us SIGTERM at the parent's death (Linux ``prctl(PR_SET_PDEATHSIG)``); the setting survives
``exec``, so the command itself runs as if started directly. Elsewhere the command is started without the leash.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

#: From ``linux/prctl.h``.
PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    """Tie this process to its parent, then become the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it died before the leash was on
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
