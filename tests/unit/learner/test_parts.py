"""State in parts: any number of writers, any number of readers."""

from __future__ import annotations

import pytest
import torch

from learner.disk import E_WORK_DIR
from learner.parts import part_names, read_part, rows_of, write_part
from protocol.errors import LocalFault

FULL = {
    "masters": {"a": torch.arange(35.0).reshape(7, 5), "b": torch.arange(3.0), "c": torch.arange(1.0)},
    "optimiser": {"a": {"step": torch.tensor(4.0), "exp_avg": torch.arange(35.0).reshape(7, 5) / 3}},
    "steps": 4, "norms": [0.5, 0.25],
}


def part_of(value, rank, size):
    if isinstance(value, dict):
        return {key: part_of(entry, rank, size) for key, entry in value.items()}
    return rows_of(value, rank, size).clone() if isinstance(value, torch.Tensor) and value.ndim else value


@pytest.mark.parametrize("writers", [1, 2, 3, 4])
@pytest.mark.parametrize("readers", [1, 2, 3, 5])
def test_parts_are_divided_anew(tmp_path, writers, readers):
    for rank in range(writers):
        write_part(tmp_path, rank, writers, part_of(FULL, rank, writers))
    for rank in range(readers):
        got, expected = read_part(tmp_path, rank, readers), part_of(FULL, rank, readers)
        assert got["steps"] == 4
        assert got["norms"] == [0.5, 0.25]
        for name in ("a", "b", "c"):
            assert torch.equal(got["masters"][name], expected["masters"][name])
        assert torch.equal(got["optimiser"]["a"]["exp_avg"], expected["optimiser"]["a"]["exp_avg"])
        assert got["optimiser"]["a"]["step"] == 4


@pytest.mark.parametrize("rank", range(4))
def test_rows_are_those_of_fsdp(rank):
    """The division is torch's: equal chunks, the last ones smaller or empty."""
    for length in range(1, 10):
        chunks = torch.arange(length).chunk(4)
        expected = chunks[rank] if rank < len(chunks) else torch.arange(0)
        assert torch.equal(rows_of(torch.arange(length), rank, 4), expected)


def test_a_missing_part_is_named(tmp_path):
    for rank in (0, 2):
        write_part(tmp_path, rank, 3, FULL)
    with pytest.raises(LocalFault) as caught:
        part_names(tmp_path)
    assert caught.value.code == E_WORK_DIR
    with pytest.raises(LocalFault):
        part_names(tmp_path / "nothing")


def test_a_part_that_would_execute_something_is_refused(tmp_path):
    torch.save({"steps": pytest.raises}, tmp_path / "part-0-of-1.pt")
    with pytest.raises(LocalFault) as caught:
        read_part(tmp_path, 0, 1)
    assert caught.value.code == E_WORK_DIR
