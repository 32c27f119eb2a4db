"""Who may import whom, and what must stay light (ARCHITECTURE.md, "Parts")."""

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PARTS = ("node", "verifier", "learner", "coordinator")
#: Never imported by protocol outside protocol/reference, not even inside a function.
HEAVY = ("torch", "transformers", "vllm", "fastapi")
#: Third parties that only their carrier module may import.
CARRIERS = {"boto3": "protocol/store_s3.py", "botocore": "protocol/store_s3.py", "libp2p": "protocol/swarm/"}
#: The one torch form of the sampler; it is imported only by those who have torch already.
TORCH_FORMS = ("protocol/sampler_torch.py",)
#: What runs in the swarm's own loop; it is imported only where the extra "swarm" is installed.
IN_THE_SWARM = ("ask", "host", "line", "serve")


@cache
def imports(file: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of every import in a file, wherever it stands."""
    return list(_imports(file))


def _imports(file: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno} relative import"
            yield node.lineno, node.module or ""
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, argument.value


def offences(root: Path, part: str, forbidden: tuple[str, ...]) -> list[str]:
    """Imports in ``part`` whose top-level package is forbidden."""
    return [
        f"{file.relative_to(root)}:{line} imports {name}"
        for file in sorted((root / part).rglob("*.py"))
        for line, name in imports(file)
        if name.split(".")[0] in forbidden
    ]


@pytest.mark.parametrize("part", PARTS)
def test_no_part_imports_a_sibling(root: Path, part: str) -> None:
    others = tuple(other for other in PARTS if other != part)
    assert offences(root, part, (*others, "assay", "tests")) == []


def test_protocol_imports_no_part(root: Path) -> None:
    assert offences(root, "protocol", (*PARTS, "assay", "tests")) == []


def test_protocol_is_light_outside_reference(root: Path) -> None:
    found = [line for line in offences(root, "protocol", HEAVY) if not line.startswith("protocol/reference/")]
    assert [line for line in found if not line.startswith(TORCH_FORMS)] == []


@pytest.mark.parametrize("package", sorted(CARRIERS))
def test_carriers_are_imported_only_by_their_module(root: Path, package: str) -> None:
    found = [line for part in ("protocol", *PARTS) for line in offences(root, part, (package,))]
    assert [line for line in found if not line.startswith(CARRIERS[package])] == []


def test_the_rule_can_fail(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    (tmp_path / "node" / "bad.py").write_text("def f():\n    from learner.losses import pg\n")
    assert offences(tmp_path, "node", ("learner",)) == ["node/bad.py:2 imports learner.losses"]


def run(code: str, *arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def light_modules(root: Path) -> list[str]:
    files = sorted((root / "protocol").rglob("*.py"))
    names = [".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__") for file in files]
    skipped = tuple(Path(form).with_suffix("").as_posix().replace("/", ".") for form in TORCH_FORMS)
    if importlib.util.find_spec("libp2p") is None:
        skipped += tuple(f"protocol.swarm.{name}" for name in IN_THE_SWARM)
    return [name for name in names if not name.startswith(("protocol.reference", *skipped))]


def test_importing_protocol_loads_nothing_heavy(root: Path) -> None:
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    assert run(code, *light_modules(root)).strip() == "[]"


@pytest.mark.parametrize(
    "command",
    [[], ["node"], ["coordinator"], ["verifier"], ["learner"], ["audit"], ["weights"], ["up"], ["node", "run"]],
)
def test_help_loads_nothing_heavy(command: list[str]) -> None:
    code = (
        "import sys, assay\n"
        "try: assay.main([*sys.argv[1:], '--help'])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "print('LOADED', sorted({'torch', 'transformers', 'numba', 'pandas'} & set(sys.modules)))"
    )
    assert run(code, *command).splitlines()[-1] == "LOADED []"


def test_the_front_door_opens_no_part_for_its_help() -> None:
    code = (
        "import sys, assay\n"
        "try: assay.main(['--help'])\n"
        "except SystemExit: pass\n"
        f"print('LOADED', sorted(name for name in sys.modules if name.split('.')[0] in {PARTS!r} or name == 'rich'))"
    )
    assert run(code).splitlines()[-1] == "LOADED []"


def test_files_stay_small(root: Path) -> None:
    long = [
        f"{file.relative_to(root)}: {lines} lines"
        for part in ("protocol", *PARTS)
        for file in sorted((root / part).rglob("*.py"))
        if (lines := len(file.read_text(encoding="utf-8").splitlines())) > 400
    ]
    assert long == []
