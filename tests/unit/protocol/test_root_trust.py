from __future__ import annotations

from pathlib import Path

import pytest

from protocol.errors import PeerFault
from protocol.identity import Identity
from protocol.root_trust import open_run_manifest
from tests.fakes.clock import FakeClock
from tests.fakes.coordinator import ROLES, make_manifest

KEYS = {name: Identity(name.encode().ljust(32, b"-")) for name in ROLES}


def test_another_root_key_is_named_with_what_to_do(clock: FakeClock, tmp_path: Path) -> None:
    manifest = make_manifest(KEYS, clock)
    envelope = manifest.sign(KEYS["root"])
    root = KEYS["root"].public_key
    assert open_run_manifest(envelope, root) == open_run_manifest(envelope, root.hex()) == manifest
    other = KEYS["learner"].public_key
    for given in (other, other.hex()):
        with pytest.raises(PeerFault) as caught:
            open_run_manifest(envelope, given)
        assert caught.value.code == "E_SIGNATURE"
        assert other.hex() in caught.value.expected
        assert "join link" in (caught.value.hint or "")
    with pytest.raises(PeerFault) as caught:
        open_run_manifest(envelope, root, now_ms=manifest.expires_at_ms + 1)
    assert caught.value.code == "E_EXPIRED"
