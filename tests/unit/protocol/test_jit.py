"""Compiled kernels are thrown away with any source that is in them."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from protocol import jit

PACKAGE = Path(jit.__file__).parent


def _imported(path: Path) -> set[str]:
    """Files of the package that one of its files imports from."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "protocol":
            parts = node.module.split(".")[1:]
            names = ["/".join([*parts, alias.name]) for alias in node.names] + ["/".join(parts)]
            found |= {f"{name}.py" for name in names if (PACKAGE / f"{name}.py").is_file()}
    return found


def _kernel_files() -> dict[str, Path]:
    """Files in which something is compiled."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        called = [node.func if isinstance(node, ast.Call) else node for f in ast.walk(tree)
                  if isinstance(f, ast.FunctionDef) for node in f.decorator_list]
        names = {node.id for node in called if isinstance(node, ast.Name)}
        if names & {"kernel", "_kernel", "inlined", "compiled", "_operation"}:
            found[path.relative_to(PACKAGE).as_posix()] = path
    return found


def test_whatever_kernels_are_made_of_is_named() -> None:
    files = _kernel_files()
    assert set(files) >= {"bit_coder.py", "packed_tokens.py", "sampler_jit.py", "weights/vector_jit.py"}
    assert len(files) >= 9
    assert set(jit.SOURCES) >= set(files)
    for name, path in files.items():
        assert set(jit.SOURCES) >= _imported(path), name
    assert all((PACKAGE / name).is_file() for name in jit.SOURCES)


def test_nothing_is_compiled_without_a_place_of_its_own() -> None:
    users = [path.name for path in PACKAGE.rglob("*.py") if "njit(" in path.read_text(encoding="utf-8")]
    assert sorted(users) == ["bit_coder.py", "jit.py"]  # the first where there is no place at all


_HELPER = """
from protocol.jit import inlined
@inlined
def step(x):
    return x + 1
"""
_KERNEL = """
from numba import int64
from protocol.helper import step
from protocol.jit import kernel
@kernel(int64(int64))
def twice(x):
    return step(step(x))
print(twice(0), sum(twice.stats.cache_hits.values()))
"""


@pytest.mark.parametrize("chosen", [True, False])
def test_an_edited_helper_is_compiled_anew(tmp_path: Path, chosen: bool) -> None:
    """It stands in another file than the kernel that calls it: the answer follows the edit all the same."""
    package = tmp_path / "protocol"
    package.mkdir()
    (package / "__init__.py").touch()
    text = (PACKAGE / "jit.py").read_text(encoding="utf-8")
    (package / "jit.py").write_text(text.replace("SOURCES: Final = (", 'SOURCES: Final = ("helper.py",) or (', 1))
    (package / "helper.py").write_text(_HELPER)
    (package / "asked.py").write_text(_KERNEL)
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environment["PYTHONPATH"] = str(tmp_path)
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # whose age is told in whole seconds; the edit may be sooner
    if chosen:
        environment["NUMBA_CACHE_DIR"] = str(tmp_path / "cache")

    def answer() -> str:
        command = [sys.executable, "-c", "import protocol.asked"]
        run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        return run.stdout.strip()

    assert answer() == "2 0"
    assert answer() == "2 1"
    (package / "helper.py").write_text(_HELPER.replace("x + 1", "x + 4"))
    assert answer() == "8 0"
    assert answer() == "8 1"
    base = tmp_path / "cache" if chosen else package / "__pycache__"
    assert len(list(base.glob("kernels-*"))) == 2
