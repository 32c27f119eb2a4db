"""Pages point at what is there, and commands they show exist."""

import importlib
import re
from pathlib import Path
from typing import Any

import typer

import assay

LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def pages(root: Path) -> list[Path]:
    return sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "deploy").rglob("*.md")])


def test_relative_links_lead_somewhere(root: Path) -> None:
    broken = [
        f"{page.relative_to(root)}: {target}"
        for page in pages(root)
        for target in LINK.findall(page.read_text(encoding="utf-8"))
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert broken == []


def test_commands_shown_in_pages_exist(root: Path) -> None:
    unknown = []
    for page in pages(root):
        for words in re.findall(r"^\s*assay ((?:[a-z][a-z-]* ?)+)", page.read_text(encoding="utf-8"), re.MULTILINE):
            path = words.split()
            if not _exists(path):
                unknown.append(f"{page.relative_to(root)}: assay {' '.join(path)}")
    assert unknown == []


def _exists(path: list[str]) -> bool:
    """Whether the leading words name a command; what follows the command are its arguments."""
    if path[0] not in assay.PARTS:
        return False
    command: Any = typer.main.get_command(importlib.import_module(assay.PARTS[path[0]][0]).app)
    for word in path[1:]:
        members = getattr(command, "commands", None)
        if not members:
            return True
        if word not in members:
            return hasattr(command, "default")  # a group whose first word may be left out
        command = members[word]
    return True
