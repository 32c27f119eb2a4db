"""A learner that is called wrongly is told so before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from learner.places import read_model, run_store
from protocol.errors import LocalFault, exit_status
from protocol.store import DirectoryStore
from tests.unit.node.office import run_manifest


def test_a_store_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(LocalFault, match="no such object store") as caught:
        run_store(f"dir:{tmp_path / 'typo' / 'store'}", run_manifest())
    assert exit_status(caught.value) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_store_of_another_run_is_refused(tmp_path: Path) -> None:
    DirectoryStore(tmp_path).put(b"something else")
    with pytest.raises(LocalFault, match="not the run's") as caught:
        run_store(f"dir:{tmp_path}", run_manifest())
    assert exit_status(caught.value) == 2
    assert "DIR/store" in str(caught.value.hint)


@pytest.mark.parametrize("url", ["run/store", "ftp://host", "s3://"])
def test_an_address_that_is_none_is_a_wrong_call(url: str) -> None:
    with pytest.raises(LocalFault, match="E_STORE_URL") as caught:
        run_store(url, run_manifest())
    assert exit_status(caught.value) == 2


def test_a_folder_without_weights_is_a_wrong_call(tmp_path: Path) -> None:
    with pytest.raises(LocalFault, match="no weights") as caught:
        read_model(tmp_path)
    assert exit_status(caught.value) == 2
