"""Shards: tables that several ranks wrote are read by any other number of ranks, a block at a time."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sparring.core.errors import UserError
from sparring.core.manifest import read_sealed, write_sealed
from sparring.core.types import ALONE, Ranks
from sparring.training import shards
from sparring.training.shards import Rows

N, DIM = 23, 3


@dataclass(frozen=True)
class Turn(Ranks):
    """One of several ranks; the test plays them one after the other."""

    rank: int = 0
    world: int = 1


def bounds(world: int) -> list[int]:
    block = -(-N // world)
    return [min(block * rank, N) for rank in range(world + 1)]


def whole() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "table": torch.randn(N, DIM, generator=generator),
        "sums": torch.rand(N, generator=generator),
        "half": torch.randn(N, DIM, generator=generator).bfloat16(),
        "tau": torch.tensor(0.5),
        "step": torch.arange(5),
    }


def part(tensors: dict[str, Tensor], rank: int, world: int) -> dict[str, Tensor | Rows]:
    low, high = bounds(world)[rank : rank + 2]
    return {
        name: Rows(tensor[low:high].clone(), low, N) if len(tensor.shape) and len(tensor) == N else tensor.clone()
        for name, tensor in tensors.items()
    }


def write(folder: Path, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every rank write its shard, rank 0 last, as if they met where they gather."""
    gathered: dict[int, Any] = {}

    def meet(value: Any, ranks: Ranks) -> list[Any]:
        gathered.setdefault(ranks.rank, value)
        return [gathered[rank] for rank in range(world)] if ranks.rank == 0 else []

    with monkeypatch.context() as patch:
        patch.setattr(shards, "_gathered", meet)
        for rank in reversed(range(world)):
            shards.write_tables(folder, part(whole(), rank, world), Turn(rank, world))


@pytest.mark.parametrize("writers", [1, 2, 4])
@pytest.mark.parametrize("readers", [1, 3, 4])
def test_any_number_of_ranks_reads_what_any_number_wrote(
    writers: int, readers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows, numbers and other tensors come back bit by bit; blocks of 4 rows cross the borders of shards."""
    monkeypatch.setattr(shards, "_ROWS", 4)
    write(tmp_path / "t", writers, monkeypatch)
    assert len(list((tmp_path / "t").glob("*.safetensors"))) == writers
    for rank in range(readers):
        wanted = part({name: torch.zeros_like(tensor) for name, tensor in whole().items()}, rank, readers)
        shards.read_tables(tmp_path / "t", wanted, Turn(rank, readers))
        for name, expected in part(whole(), rank, readers).items():
            found = wanted[name]
            one, other = (each.local if isinstance(each, Rows) else each for each in (found, expected))
            assert torch.equal(one, other), name


def test_every_damage_of_a_shard_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flipped bit anywhere in a shard, a missing shard, one of another checkpoint, or missing rows are errors."""
    folder = tmp_path / "t"
    write(folder, 2, monkeypatch)
    path = folder / "1-of-2.safetensors"
    content = path.read_bytes()
    for place in range(0, len(content), 7):
        path.write_bytes(content[:place] + bytes([content[place] ^ 16]) + content[place + 1 :])
        with pytest.raises(UserError, match="1-of-2"):
            shards.check_tables(folder)
    path.unlink()
    with pytest.raises(UserError, match=r"1-of-2.*missing"):
        shards.check_tables(folder)
    path.write_bytes(content)
    index = read_sealed(folder / "index.json", "")
    for rows in (
        [],
        index["tensors"]["table"]["rows"][:1],
        index["tensors"]["table"]["rows"][1:],
        [[7, 0, N]],
        [[0, 0]],
    ):
        changed = {**index, "tensors": {**index["tensors"], "table": {**index["tensors"]["table"], "rows": rows}}}
        write_sealed(folder / "index.json", changed)
        with pytest.raises(UserError, match=r"index\.json is corrupt: .*(rows|unpack)"):
            shards.check_tables(folder)
    for change, word in (
        ({"format": 9}, "format 9"),
        ({"shards": 5}, "int"),
        ({"shards": [{"name": "../t/1-of-2.safetensors", "hash": ""}]}, "plain name"),
        ({"shards": [{**shard, "hash": "0" * 32} for shard in index["shards"]]}, "another checkpoint"),
    ):
        write_sealed(folder / "index.json", {**index, **change})
        with pytest.raises(UserError, match=word):
            shards.check_tables(folder)
    (folder / "index.json").unlink()
    with pytest.raises(UserError, match=r"index\.json"):
        shards.check_tables(folder)


@pytest.mark.parametrize("wrong", [torch.zeros(N, DIM + 1), torch.zeros(N - 1, DIM), torch.zeros(N, DIM).double()])
def test_tables_of_another_run_do_not_fit(wrong: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of another shape or type, or a missing one, is an error that names it."""
    write(tmp_path, 2, monkeypatch)
    with pytest.raises(UserError, match="'table'"):
        shards.read_tables(tmp_path, {"table": wrong}, ALONE)
    with pytest.raises(UserError, match=r"'other' is missing"):
        shards.read_tables(tmp_path, {"other": wrong}, ALONE)


def test_one_rank_that_fails_stops_all(tmp_path: Path) -> None:
    """The error of a rank that cannot write reaches the others, and no index is written."""
    blocked = tmp_path / "t"
    blocked.write_text("a file, not a folder")
    with pytest.raises(UserError, match="cannot write"):
        shards.write_tables(blocked, {"x": torch.arange(3)}, ALONE)
    assert not dist.is_initialized()
    assert os.listdir(tmp_path) == ["t"]


def test_a_shard_with_other_rows_than_the_index_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index that gives a shard more rows than it has is refused before any is copied wrongly."""
    write(tmp_path, 2, monkeypatch)
    index = read_sealed(tmp_path / "index.json", "")
    (_, _, middle), (_, _, last) = index["tensors"]["table"]["rows"]
    index["tensors"]["table"]["rows"] = [[0, 0, middle - 1], [1, middle - 1, last]]
    write_sealed(tmp_path / "index.json", index)
    with pytest.raises(UserError, match="the shard has"):
        shards.read_tables(tmp_path, {"table": torch.zeros(N, DIM)}, ALONE)


def test_an_index_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full when the index is due is an error, and the shards alone are no checkpoint."""

    def full(*_: object) -> None:
        raise UserError("cannot write index.json: No space left on device")

    monkeypatch.setattr(shards, "write_sealed", full)
    with pytest.raises(UserError, match="No space"):
        shards.write_tables(tmp_path, {"x": torch.arange(3)}, ALONE)
    with pytest.raises(UserError, match=r"index\.json"):
        shards.check_tables(tmp_path)
