"""Evidence files of a test module's ``world``."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol.evidence import encode


@pytest.fixture
def write(world, tmp_path):
    """Writes the evidence file of a submission, with some of its parts replaced, and says where."""

    def to_file(submission, **changes):
        path = tmp_path / "one.evidence"
        path.write_bytes(encode(replace(world.evidence(submission), **changes)))
        return str(path)

    return to_file


@pytest.fixture
def honest(world):
    """What an honest node hands in for the first lease."""
    return world.submission(world.lease(), world.honest(world.lease()))
