"""Calls of the operator that were wrong from the start."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator import admin_client
from coordinator.cli import app
from protocol.errors import E_NOT_FOUND, LocalFault, exit_status
from tests.fakes.coordinator import World


@pytest.mark.parametrize("verb", [["ban", "ab" * 32], ["unban", "ab" * 32], ["drill", "ab" * 32, "int8"], ["invite"]])
@pytest.mark.parametrize("reason", ["", "x", "x" * 401])
def test_a_reason_that_says_nothing_is_a_wrong_call(verb: list[str], reason: str) -> None:
    done = CliRunner().invoke(app, [*verb, "--reason", reason])
    assert done.exit_code == 2
    assert "3 to 400 characters" in done.output


@pytest.mark.parametrize("verb", ["ban", "unban"])
def test_an_unknown_node_is_a_wrong_call_that_says_where_the_ids_are(
    world: World, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(_: object, verb: str, **body: Any) -> None:
        answer = world.admin(verb, **body).json()
        raise LocalFault(answer["code"], answer["detail"])

    monkeypatch.setattr(admin_client.AdminClient, "act", act)
    done = CliRunner().invoke(app, [verb, "ab" * 32, "--reason", "a test", "--dir", str(world.directory)])
    assert isinstance(done.exception, LocalFault)
    assert (exit_status(done.exception), done.exception.got) == (2, "ab" * 32)
    assert "coordinator nodes" in (done.exception.hint or "")
    assert E_NOT_FOUND not in str(done.exception)
