"""How the bytes of a stream are stored, and what stands before them. Spec: ``docs/spec/weight-diff.md``, "Streams"."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

#: A stream's header: its coder, and how many bytes follow.
STREAM_HEAD: Final = struct.Struct("<BI")


class Coder(IntEnum):
    """How a stream's bytes are stored."""

    RAW = 0
    ZSTD = 1
    RANS = 2
    FILL = 3  #: one byte, as often as needed
