import threading
from pathlib import Path

import pytest

from protocol.disk import append_line, create_private, json_lines, replace_file


def test_a_torn_line_is_ended_before_the_next_and_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"n": 1}\n{"n": 2, "te')
    assert [line["n"] for line in json_lines(path)] == [1]
    append_line(path, '{"n": 3}')
    assert path.read_text().splitlines() == ['{"n": 1}', '{"n": 2, "te', '{"n": 3}']
    assert [line["n"] for line in json_lines(path)] == [1, 3]


def test_what_is_no_object_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'[1]\n7\n\n\xff\xfe\n{"n": 1}\n"text"\n')
    assert list(json_lines(path)) == [{"n": 1}]
    assert list(json_lines(tmp_path / "nowhere")) == []


def test_lines_that_are_being_written_are_read_whole_or_not_yet(tmp_path: Path) -> None:
    path, text, stop = tmp_path / "lines.jsonl", "x" * 20_000, threading.Event()

    def write() -> None:
        with path.open("ab", buffering=0) as file:
            for number in range(60):
                line = f'{{"n": {number}, "text": "{text}"}}\n'.encode()
                for at in range(0, len(line), 4096):  # a page at a time, as a reader may see it
                    file.write(line[at : at + 4096])
        stop.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not stop.is_set():
        found = list(json_lines(path))
        assert [line["n"] for line in found] == list(range(len(found)))
        assert all(line["text"] == text for line in found)
    writer.join()
    assert len(list(json_lines(path))) == 60


def test_a_file_is_replaced_or_stays(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    replace_file(path, b"one")
    replace_file(path, b"two")
    assert path.read_bytes() == b"two"
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="directory"):
        replace_file(tmp_path / "folder", b"three")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["deep", "folder"]
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


def test_a_private_file_is_made_once(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "key"
    create_private(path, b"secret")
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        create_private(path, b"other")
    assert path.read_bytes() == b"secret"
    assert [entry.name for entry in path.parent.iterdir()] == ["key"]
