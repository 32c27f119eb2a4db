"""Real processes, but nobody's parts: only the front door."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.up_process import Child, environment, run_command, tail
from protocol.errors import LocalFault
from tests.fakes.waiting import until


def test_a_command_is_run_and_its_output_returned(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "prepare.log"
    assert run_command(["--version"], log, 200).startswith("assay ")
    assert log.read_text().startswith("$ assay --version\nassay ")


def test_a_failing_command_quotes_its_log(tmp_path: Path) -> None:
    with pytest.raises(LocalFault, match="No such command") as caught:
        run_command(["fly"], tmp_path / "log", 200)
    assert caught.value.code == "E_UP_COMMAND"


def test_every_process_gets_one_thread_and_this_tree(root: Path) -> None:
    assert environment()["OMP_NUM_THREADS"] == "1"
    assert environment()["PYTHONPATH"].split(os.pathsep)[0] == str(root)


def test_a_child_reports_its_end(tmp_path: Path) -> None:
    child = Child("door", ["fly"], tmp_path / "log")
    before = child.exit_status
    child.start()
    assert child.wait(200)
    assert (before, child.exit_status) == (None, 2)
    assert "No such command" in tail(tmp_path / "log")


@pytest.mark.skipif(sys.platform != "linux", reason="the leash is Linux's")
def test_the_leash_ends_a_child_with_its_parent(tmp_path: Path) -> None:
    """A parent killed with SIGKILL takes the child with it."""
    note = tmp_path / "pid"
    sleeper = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(400)"
    parent = (
        "import os, subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-m', 'coordinator.up_leash', str(os.getpid()), sys.executable, '-c', "
        "sys.argv[1]])\n"
        "time.sleep(400)"
    )
    process = subprocess.Popen([sys.executable, "-c", parent, sleeper], env=environment())
    try:
        until(lambda: note.exists() and note.read_text())
        pid = int(note.read_text())
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    until(lambda: _is_gone(pid))


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second when it is reaped between opening and reading
        return True


def test_logs_are_json_lines(tmp_path: Path) -> None:
    code = (
        "import logging, sys; from pathlib import Path; from protocol.logs import setup_logging\n"
        "from protocol.errors import E_STORE, LocalFault\n"
        "setup_logging(Path(sys.argv[1])); setup_logging(Path(sys.argv[1]))\n"
        "log = logging.getLogger('assay.test'); log.info('lease %s', 'taken', extra={'lease_id': 'ab'})\n"
        "logging.getLogger('httpx').info('chatter')\n"
        "try: raise LocalFault(E_STORE, 'no disk')\n"
        "except LocalFault: log.exception('failed')"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "log")], check=True, timeout=200)
    first, second = (json.loads(line) for line in (tmp_path / "log").read_text().splitlines())
    assert {k: first[k] for k in ("level", "logger", "msg", "lease_id")} == {
        "level": "info", "logger": "assay.test", "msg": "lease taken", "lease_id": "ab",
    }
    assert second["code"] == "E_STORE"
    assert "Traceback" in second["traceback"]


def test_a_calibration_is_looked_at_before_a_folder_remembers_it(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("no record")
    command = [sys.executable, "-m", "assay", "up", str(tmp_path / "run"), "--calibration", str(tmp_path / "notes.md")]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert run.returncode == 2
    assert "cannot use the calibration" in run.stderr
    assert not (tmp_path / "run").exists()
