"""Saving and loading: a restart goes on from verified bytes, whatever moment it was killed at."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from protocol.errors import AssayError, LocalFault
from protocol.weights import snapshot
from protocol.weights.follower import CheckpointFollower
from protocol.weights.layout import Layout, write_safetensors
from tests.fakes.checkpoints import LAYOUT, LEARNER, RUN_ID, FakeLearner, same_bits


@pytest.fixture
def learner() -> FakeLearner:
    learner = FakeLearner()
    learner.publish_many(4)
    return learner


def _saved(learner: FakeLearner, path: Path, version: int) -> CheckpointFollower:
    follower = learner.follower()
    follower.verify_head(learner.head(version), learner.clock.now_ms())
    follower.advance(learner.envelopes[: version + 1])
    follower.save(path)
    return follower


def test_a_restart_goes_on(learner: FakeLearner, tmp_path: Path) -> None:
    _saved(learner, tmp_path / "home", 2)
    follower = learner.follower()
    assert follower.load(tmp_path / "home")
    assert follower.version == 2
    assert same_bits(follower.state, learner.states[2])
    assert follower.advance(learner.envelopes[3:]) == 3
    assert same_bits(follower.state_at(2), learner.states[2])
    assert same_bits(follower.state_at(0), learner.states[0])


def test_a_restart_does_not_forget_the_newest_head(learner: FakeLearner, tmp_path: Path) -> None:
    follower = _saved(learner, tmp_path, 1)
    follower.verify_head(learner.head(3), learner.clock.now_ms())
    follower.save(tmp_path)
    again = learner.follower()
    again.load(tmp_path)
    with pytest.raises(AssayError) as caught:
        again.verify_head(learner.head(2), learner.clock.now_ms())
    assert caught.value.code == "E_CHECKPOINT_ROLLBACK"


def test_nothing_saved_is_no_error(learner: FakeLearner, tmp_path: Path) -> None:
    follower = learner.follower()
    assert not follower.load(tmp_path / "nothing")
    assert follower.version is None
    with pytest.raises(LocalFault):
        follower.save(tmp_path / "nothing")


def test_only_one_state_file_is_kept(learner: FakeLearner, tmp_path: Path) -> None:
    for version in range(3):
        _saved(learner, tmp_path / "home", version)
    assert sorted(p.name for p in (tmp_path / "home").iterdir()) == [
        "checkpoint.json", f"state-{learner.envelopes[2].digest}.safetensors"
    ]


class _Killed(BaseException):
    pass


@pytest.mark.parametrize("fail_at", range(12))
def test_a_kill_at_any_moment_leaves_a_whole_snapshot(
    learner: FakeLearner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail_at: int
) -> None:
    """Every step that touches the disk dies in turn; what is loaded is the old version or the new one."""
    _saved(learner, tmp_path / "home", 1)
    follower = learner.follower()
    follower.advance(learner.envelopes[:3])
    steps = iter(range(1000))

    def dying(original: object) -> object:
        def call(*args: object, **options: object) -> object:
            if next(steps) == fail_at:
                raise _Killed
            return original(*args, **options)  # type: ignore[operator]

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", dying(os.fsync))
        patch.setattr(snapshot, "write_safetensors", dying(write_safetensors))
        patch.setattr(Path, "replace", dying(Path.replace))
        patch.setattr(Path, "unlink", dying(Path.unlink))
        patch.setattr(Path, "write_bytes", dying(Path.write_bytes))
        try:
            follower.save(tmp_path / "home")
            finished = True
        except _Killed:
            finished = False
    again = learner.follower()
    assert again.load(tmp_path / "home")
    assert again.version is not None
    assert again.version == 2 if finished else again.version in (1, 2)
    assert same_bits(again.state, learner.states[again.version])
    follower.save(tmp_path / "home")
    assert again.load(tmp_path / "home")
    assert again.version == 2


def test_damage_is_noticed(learner: FakeLearner, tmp_path: Path) -> None:
    _saved(learner, tmp_path, 2)
    state = tmp_path / f"state-{learner.envelopes[2].digest}.safetensors"
    pointer = tmp_path / "checkpoint.json"
    whole, pointed = state.read_bytes(), pointer.read_bytes()
    cases = [
        (state, whole[:-1] + bytes([whole[-1] ^ 1]), "E_STATE_DAMAGED"),
        (state, whole[:-1], "E_STATE"),
        (state, b"", "E_STATE"),
        (pointer, pointed[:-1], "E_SNAPSHOT"),
        (pointer, b"{}", "E_SNAPSHOT"),
        (pointer, b"", "E_SNAPSHOT"),
        (pointer, pointed.replace(b'"head":{', b'"head":{"x":1,'), "E_SNAPSHOT"),
    ]
    for file, content, code in cases:
        kept = file.read_bytes()
        file.write_bytes(content)
        follower = learner.follower()
        with pytest.raises(LocalFault) as caught:
            follower.load(tmp_path)
        assert caught.value.code == code
        assert follower.version is None
        file.write_bytes(kept)
    state.unlink()
    with pytest.raises(LocalFault):
        learner.follower().load(tmp_path)


def test_a_snapshot_of_another_run_or_layout_is_refused(learner: FakeLearner, tmp_path: Path) -> None:
    _saved(learner, tmp_path, 2)
    other = CheckpointFollower(learner.store.get, LEARNER.public_key, "00" * 16, LAYOUT)
    with pytest.raises(AssayError) as caught:
        other.load(tmp_path)
    assert caught.value.code == "E_WRONG_RUN"
    other = CheckpointFollower(learner.store.get, LEARNER.public_key, RUN_ID, Layout.of({"a": ("BF16", (1,))}))
    with pytest.raises(AssayError) as caught:
        other.load(tmp_path)
    assert caught.value.code == "E_SNAPSHOT"
