"""The spool survives what a kill leaves behind, and the real kill itself."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from node.spool import Receipts, Spool, Spooled
from protocol.errors import LocalFault
from protocol.messages import Commitment, UsedCheckpoint


def item(number: int) -> Spooled:
    data = bytes([number]) * 100
    return Spooled(
        Commitment(
            run_id="7a" * 16, node_id="01" * 32, lease_id=f"{number:032x}", lease_sha256="02" * 32,
            bundle_root="03" * 32, object_sha256=hashlib.sha256(data).hexdigest(), object_bytes=100, rollouts=1,
            tokens=7, checkpoints=[UsedCheckpoint(version=4, manifest_sha256="04" * 32)], profile="torch-cpu-fp32",
            issued_at_ms=5,
        ),
        data,
    )


def test_items_come_back_in_their_order(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    assert spool.ids() == []
    for number in (3, 1, 2):
        spool.put(item(number))
    again = Spool(tmp_path / "spool")
    assert again.ids() == [f"{number:032x}" for number in (3, 1, 2)]
    assert again.get(f"{1:032x}") == item(1)
    again.drop(f"{1:032x}")
    again.drop("nobody")
    assert len(spool.ids()) == 2


def test_what_is_half_written_is_never_read(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.put(item(1))
    draft = tmp_path / ".half.1"
    draft.mkdir()
    (draft / "bundle.bin").write_bytes(b"half")
    assert spool.ids() == [f"{1:032x}"]
    spool.sweep()
    assert not draft.exists()


@pytest.mark.parametrize("damage", ["bundle", "commitment", "gone"])
def test_damage_is_a_local_fault(tmp_path: Path, damage: str) -> None:
    spool = Spool(tmp_path)
    spool.put(item(1))
    folder = tmp_path / f"{1:032x}"
    if damage == "bundle":
        (folder / "bundle.bin").write_bytes(b"\1" * 99 + b"\2")
    elif damage == "commitment":
        (folder / "commitment.json").write_bytes(b"{}")
    else:
        (folder / "bundle.bin").unlink()
    with pytest.raises(LocalFault) as caught:
        spool.get(folder.name)
    assert caught.value.code == "E_SPOOL"


def test_a_full_disk_is_a_local_fault_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("node.spool.write_durable", full)
    with pytest.raises(LocalFault, match="No space left"):
        Spool(tmp_path).put(item(1))
    assert list(tmp_path.iterdir()) == []


def test_kill_9_at_any_write_leaves_whole_items_only(tmp_path: Path, root: Path) -> None:
    """A process that spools is killed inside a write."""
    script = (
        "import os, signal, sys, node.spool as s\n"
        "from tests.unit.node.test_spool import item\n"
        "from pathlib import Path\n"
        "left = int(sys.argv[2]); write = s.write_durable\n"
        "def counted(path, data):\n"
        "    global left\n"
        "    left -= 1\n"
        "    if left < 0:\n"
        "        path.write_bytes(data[: len(data) // 2]); os.kill(os.getpid(), signal.SIGKILL)\n"
        "    write(path, data)\n"
        "s.write_durable = counted\n"
        "for n in range(1, 9): s.Spool(Path(sys.argv[1])).put(item(n))\n"
    )
    for writes in (0, 3):
        folder = tmp_path / str(writes)
        done = subprocess.run([sys.executable, "-c", script, str(folder), str(writes)], cwd=root, timeout=100)
        assert done.returncode == -9
        spool = Spool(folder)
        assert [spool.get(lease_id) for lease_id in spool.ids()] == [item(n) for n in range(1, writes // 2 + 1)]


def test_receipts_are_lines(tmp_path: Path) -> None:
    receipts = Receipts(tmp_path / "receipts.jsonl")
    receipts.add("a", "1", {"payload": "x"})
    receipts.add("b", "2", {"payload": "y"})
    assert len((tmp_path / "receipts.jsonl").read_text().splitlines()) == 2
    with pytest.raises(LocalFault):
        Receipts(tmp_path / "nowhere" / "r.jsonl").add("a", "1", {})
