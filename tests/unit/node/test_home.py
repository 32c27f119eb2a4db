"""The home folder: pinned once, atomic files, a status with its age."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from node.home import Home, Pin, status_age_s
from protocol.errors import AssayError, LocalFault
from protocol.identity import Identity
from tests.unit.node.office import NODE, ROOT, RUN_ID, make_home, run_manifest


def pin(**changes: str) -> Pin:
    values = {"coordinator": "http://a", "root": ROOT.public_key.hex(), "run_id": RUN_ID, "name": "me"}
    return Pin(**(values | changes))


def code_of(act: object, *arguments: object) -> str:
    assert callable(act)
    with pytest.raises(AssayError) as caught:
        act(*arguments)
    return caught.value.code


def test_a_folder_that_was_never_joined_says_how_to(tmp_path: Path) -> None:
    home = Home(tmp_path / "nothing")
    with pytest.raises(LocalFault, match="assay node join LINK") as caught:
        home.pin()
    assert caught.value.code == "E_NO_HOME"
    assert home.read_status() is None


def test_joining_the_same_run_again_is_harmless_and_another_is_refused(tmp_path: Path) -> None:
    home = make_home(tmp_path, run_manifest())
    home.remember(pin(coordinator="http://moved"), run_manifest().sign(ROOT))
    assert home.pin().coordinator == "http://moved"
    assert code_of(home.remember, pin(run_id="00" * 16), run_manifest().sign(ROOT)) == "E_HOME"
    assert code_of(home.remember, pin(root="00" * 32), run_manifest().sign(ROOT)) == "E_HOME"


def test_a_lost_key_is_explained(tmp_path: Path) -> None:
    home = make_home(tmp_path, run_manifest())
    assert home.identity().id == NODE.id
    home.key.unlink()
    with pytest.raises(LocalFault, match="a lost key cannot be recovered"):
        home.identity()


def test_an_open_key_is_refused(tmp_path: Path) -> None:
    home = make_home(tmp_path, run_manifest())
    home.key.chmod(0o644)
    assert code_of(home.identity) == "E_KEY_FILE"


def test_a_damaged_pin_is_explained(tmp_path: Path) -> None:
    home = make_home(tmp_path, run_manifest())
    (tmp_path / "node.json").write_text("{}")
    assert code_of(home.pin) == "E_HOME"


def test_state_and_status_are_whole_files(tmp_path: Path) -> None:
    home = make_home(tmp_path, run_manifest())
    home.write_state(4, "ab" * 32, 1000)
    assert json.loads((tmp_path / "state.json").read_text()) == {
        "version": 4, "state_root": "ab" * 32, "updated_at_ms": 1000
    }
    home.write_status({"state": "idle", "updated_at_ms": 5_000})
    found = home.read_status()
    assert found is not None
    assert status_age_s(found, 7_500) == 2.5
    assert not list(tmp_path.glob("*.tmp"))
    (tmp_path / "status.json").write_text("half a li")
    assert home.read_status() is None


def test_pausing_is_a_file(tmp_path: Path) -> None:
    home = make_home(tmp_path, run_manifest())
    assert not home.paused
    home.pause(paused=True)
    assert Home(tmp_path).paused
    home.pause(paused=False)
    home.pause(paused=False)
    assert not Home(tmp_path).paused


def test_a_folder_that_cannot_be_written_is_a_local_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    home = Home(tmp_path / "file")
    assert code_of(home.write_state, 1, "ab" * 32, 1) == "E_HOME"


def test_a_key_below_a_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(LocalFault) as caught:
        Identity.generate().save(tmp_path / "file" / "key")
    assert caught.value.code == "E_KEY_FILE"


def test_threads_that_write_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    home = make_home(tmp_path, run_manifest())
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda number: home.write_status({"state": number}), range(100))) == [None] * 100
    written = home.read_status()
    assert written is not None
    assert written["state"] in range(100)
    assert not list(tmp_path.glob(".*.tmp"))
