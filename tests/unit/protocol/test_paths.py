"""Paths that somebody typed: an output never destroys an input, and is there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from protocol.errors import LocalFault, PeerFault
from protocol.paths import (
    check_input_file,
    check_input_folder,
    check_output_file,
    check_output_folder,
    read_input_file,
    replacing,
)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    path = tmp_path / "kept"
    path.write_bytes(b"evidence")
    return path


def refused(check: object, *arguments: object) -> str:
    with pytest.raises(LocalFault) as caught:
        check(*arguments)  # type: ignore[operator]
    error = caught.value
    assert error.code == "E_USAGE"
    assert error.expected
    assert error.got
    assert error.hint
    return str(error)


def test_an_input_has_to_be_there_and_of_its_kind(tmp_path: Path, kept: Path) -> None:
    check_input_file("FILE", kept)
    check_input_folder("--checkpoint", tmp_path)
    assert "no such file" in refused(check_input_file, "FILE", tmp_path / "missing")
    assert "no such folder" in refused(check_input_folder, "--checkpoint", tmp_path / "missing")
    assert "is a folder" in refused(check_input_file, "FILE", tmp_path)
    assert "is a file" in refused(check_input_folder, "--checkpoint", kept)
    assert "no such file" in refused(check_input_file, "FILE", tmp_path / ("x" * 5000))


def test_a_pipe_or_a_device_is_no_input(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        assert "a pipe or a device" in refused(check_input_file, "FILE", path)


def test_no_more_than_the_limit_is_read(tmp_path: Path, kept: Path) -> None:
    assert read_input_file(kept, 8) == b"evidence"
    with pytest.raises(PeerFault, match="E_TOO_LARGE"):
        read_input_file(kept, 7)
    sparse = tmp_path / "sparse"
    with sparse.open("wb") as file:
        file.truncate(60 * 2**30)
    with pytest.raises(PeerFault, match="E_TOO_LARGE"):
        read_input_file(sparse, 2**20)
    with pytest.raises(LocalFault, match="E_FILE"):
        read_input_file(tmp_path / "missing", 1)


def test_an_output_is_not_an_input_under_any_name(tmp_path: Path, kept: Path) -> None:
    (tmp_path / "link").symlink_to(kept)
    os.link(kept, tmp_path / "hard")
    (tmp_path / "sub").mkdir()
    for name in ("kept", "link", "hard", "sub/../kept"):
        assert "overwrite FILE" in refused(check_output_file, "--html", tmp_path / name, [("FILE", kept)])
    check_output_file("--html", tmp_path / "other", [("FILE", kept)])
    missing = tmp_path / "missing"
    assert "overwrite FILE" in refused(check_output_file, "--html", missing, [("FILE", missing)])


def test_no_file_in_a_folder_of_inputs_is_overwritten(tmp_path: Path) -> None:
    model, away = tmp_path / "model", tmp_path / "away"
    model.mkdir()
    for name in ("config.json", "page.html"):
        (model / name).write_text("{}")
    away.symlink_to(model)
    for path in (model / "config.json", away / "config.json"):
        words = refused(check_output_file, "--html", path, [("--checkpoint", model)])
        assert "overwrite a file of --checkpoint" in words
    check_output_file("--html", model / "new.html", [("--checkpoint", model)])
    check_output_file("--html", model / "page.html", [("--checkpoint", model)])  # made by an earlier call


def test_an_output_needs_a_place(tmp_path: Path, kept: Path) -> None:
    assert "does not exist" in refused(check_output_file, "--html", tmp_path / "no" / "x.html")
    assert "does not exist" in refused(check_output_file, "--html", kept / "x.html")
    assert "is a folder" in refused(check_output_file, "--html", tmp_path)


def test_an_output_folder_is_outside_every_input(tmp_path: Path, kept: Path) -> None:
    cache = tmp_path / "cache"
    check_output_folder("--out", tmp_path / "out", [("--cache", cache)])
    for path in (cache, cache / "inner"):
        assert "overwrite --cache" in refused(check_output_folder, "--out", path, [("--cache", cache)])
    assert "is a file" in refused(check_output_folder, "--out", kept)


def test_a_file_is_replaced_when_it_is_whole_and_not_before(tmp_path: Path, kept: Path) -> None:
    (tmp_path / "link").symlink_to(kept)
    with pytest.raises(ZeroDivisionError), replacing(kept) as file:
        file.write(b"%d" % (1 // 0))
    assert kept.read_bytes() == b"evidence"
    with replacing(tmp_path / "link") as file:
        file.write(b"whole")
    assert kept.read_bytes() == b"whole"
    assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "link"]
    with replacing(Path(os.devnull)) as file:
        file.write(b"to a device")
    with pytest.raises(LocalFault, match="E_FILE"), replacing(tmp_path / "no" / "x") as file:
        file.write(b"nowhere")
