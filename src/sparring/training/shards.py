"""Tables in shards: one safetensors file per rank, and index.json, which rank 0 writes last.

    0-of-2.safetensors, 1-of-2.safetensors   the rows of each rank; the first also has the tensors that all ranks share
    index.json   of every shard the hash of its content; of every tensor its dtype, shape and rows by shard

Any number of ranks reads what any number wrote: each reads the rows that it holds, a block at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
import torch.distributed as dist
from torch import Tensor

from sparring.core import files
from sparring.core.errors import UserError, first_line, one_line
from sparring.core.manifest import read_sealed, write_sealed
from sparring.core.ranks import Group
from sparring.core.types import Ranks
from sparring.models.rowwise_tables import RowWiseTable

INDEX = "index.json"
_ADVICE = "train again, or restore it from a backup"
_FORMAT = 1
_ROWS = 1 << 16  # rows of a table that are sent, written or read at a time


@dataclass(frozen=True, eq=False)
class Rows:
    """This rank's rows of a table: rows `first` and up of `n`."""

    local: Tensor
    first: int
    n: int

    @property
    def shape(self) -> list[int]:
        """The shape of the complete table."""
        return [self.n, *self.local.shape[1:]] if self.local.ndim else []

    @property
    def last(self) -> int:
        """The row after the last one of this rank."""
        return self.first + (len(self.local) if self.local.ndim else 1)


def write_tables(folder: Path, tensors: Mapping[str, Tensor | Rows], ranks: Ranks) -> None:
    """Write this rank's rows, and on rank 0 the tensors that every rank has, to a folder. All ranks take part."""
    own = {name: _rows(tensor) for name, tensor in tensors.items() if isinstance(tensor, Rows) or ranks.rank == 0}
    path = folder / f"{ranks.rank}-of-{ranks.world}.safetensors"
    written: dict[str, Any] | UserError
    try:
        shapes = {name: (rows.local.dtype, list(rows.local.shape)) for name, rows in own.items()}
        blocks = {name: _blocks(rows.local) for name, rows in own.items()}
        digest = files.write_tensor_blocks(path, shapes, blocks)
        tables = {
            name: [files.KINDS[rows.local.dtype], rows.shape, rows.first, rows.last] for name, rows in own.items()
        }
        written = {"name": path.name, "hash": digest, "tables": tables}
    except UserError as error:
        written = error
    shards = _gathered(written, ranks)
    problem: UserError | None = None
    if ranks.rank == 0:
        try:
            write_sealed(folder / INDEX, _description(shards))
        except UserError as error:
            problem = error
    _gathered(problem, ranks)


def _description(shards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The content of index.json."""
    tensors: dict[str, Any] = {}
    for number, shard in enumerate(shards):
        for name, (kind, shape, first, last) in shard["tables"].items():
            about = tensors.setdefault(name, {"dtype": kind, "shape": shape, "rows": []})
            about["rows"].append([number, first, last])
    facts = [{key: shard[key] for key in ("name", "hash")} for shard in shards]
    return {"format": _FORMAT, "shards": facts, "tensors": tensors}


def check_tables(folder: Path, which: slice = slice(None)) -> dict[str, Any]:
    """The content of index.json; raises if it or a shard (of those chosen by `which`) is missing or damaged."""
    index = read_sealed(folder / INDEX, _ADVICE)
    with one_line(f"{folder / INDEX} is corrupt", KeyError, TypeError, ValueError, AttributeError, then=_ADVICE):
        if index["format"] != _FORMAT:
            raise ValueError(f"format {index['format']!r} is unknown")
        shards = [(files.inside(folder, shard["name"]), shard["hash"]) for shard in index["shards"]]
        for name, about in index["tensors"].items():
            ends = [0]
            for number, first, last in about["rows"]:
                if first != ends[-1] or not 0 <= number < len(shards):
                    raise ValueError(f"rows of {name!r} are missing")
                ends.append(last)
            if ends[-1] != (about["shape"][0] if about["shape"] else 1):
                raise ValueError(f"rows of {name!r} are missing")
    for path, digest in shards[which]:
        if not path.is_file():
            raise UserError(f"{path} is missing; {_ADVICE}")
        if files.tensors_hash(path) != digest:
            raise UserError(f"{path} is corrupt: it belongs to another checkpoint; {_ADVICE}")
    return index


def read_tables(folder: Path, tensors: Mapping[str, Tensor | Rows], ranks: Ranks) -> None:
    """Fill tensors, and this rank's rows of tables, from a folder that any number of ranks wrote.

    All ranks take part: each checks some of the shards before any is read.
    """
    problem: UserError | None = None
    try:
        index = check_tables(folder, slice(ranks.rank, None, ranks.world))
    except UserError as error:
        problem = error
    _gathered(problem, ranks)
    try:
        with ExitStack() as stack:
            paths = [files.inside(folder, shard["name"]) for shard in index["shards"]]
            opened: dict[int, Any] = {}
            for name, tensor in tensors.items():
                wanted = _rows(tensor)
                about = index["tensors"].get(name)
                if about is None or about["shape"] != wanted.shape or about["dtype"] != files.KINDS[wanted.local.dtype]:
                    found = "missing" if about is None else f"{about['dtype']} of shape {about['shape']}"
                    raise ValueError(f"the tensor {name!r} is {found}")
                for number, first, last in about["rows"]:
                    if number not in opened and first < wanted.last and last > wanted.first:
                        opened[number] = stack.enter_context(safetensors.safe_open(paths[number], "pt"))
                    _copy(opened.get(number), name, wanted, first, last)
    except (OSError, ValueError, RuntimeError, safetensors.SafetensorError) as error:
        problem = UserError(f"{folder} does not fit this run: {first_line(error)}")
    _gathered(problem, ranks)


def _copy(shard: Any, name: str, wanted: Rows, first: int, last: int) -> None:
    """Copy the wanted rows among rows `first` to `last` of a table, which a shard holds."""
    begin, end = max(first, wanted.first), min(last, wanted.last)
    if begin >= end:
        return
    if not wanted.local.ndim:
        wanted.local.copy_(shard.get_tensor(name))
        return
    part = shard.get_slice(name)
    if part.get_shape() != [last - first, *wanted.shape[1:]]:
        raise ValueError(f"the shard has {part.get_shape()} of {name!r}")
    for at in range(begin, end, _ROWS):
        stop = min(at + _ROWS, end)
        wanted.local[at - wanted.first : stop - wanted.first].copy_(part[at - first : stop - first])


def _rows(tensor: Tensor | Rows) -> Rows:
    """A complete tensor as the rows of a table that one rank holds."""
    return tensor if isinstance(tensor, Rows) else Rows(tensor, 0, len(tensor) if tensor.ndim else 1)


def _blocks(tensor: Tensor) -> Iterator[Tensor]:
    """The rows of a tensor in order, block by block."""
    yield from tensor.split(_ROWS) if tensor.ndim else [tensor]


def _gathered(value: Any, ranks: Ranks) -> list[Any]:
    """The values of all ranks; an error among them is raised on every rank. Threads may use it beside training."""
    values = [value]
    if isinstance(ranks, Group):
        values = [None] * ranks.world
        dist.all_gather_object(values, value, group=ranks.aside)
    for each in values:
        if isinstance(each, UserError):
            raise each
    return values


def write_model(
    path: Path,
    tensors: Mapping[str, Tensor],
    tables: Mapping[str, RowWiseTable],
    meta: Mapping[str, object],
    ranks: Ranks,
) -> None:
    """Write model.safetensors with complete tables, of which rank 0 holds one block at a time.

    `tensors` are those that every rank has.
    """
    if ranks.rank:
        for table in tables.values():
            for _ in _sent(table):
                pass
        return
    shapes: dict[str, tuple[torch.dtype, Sequence[int]]] = {
        name: (tensor.dtype, list(tensor.shape)) for name, tensor in tensors.items()
    }
    blocks: dict[str, Iterable[Tensor]] = {name: _blocks(tensor) for name, tensor in tensors.items()}
    for name, table in tables.items():
        shapes[name], blocks[name] = (table.weight.dtype, [table.n, table.dim]), _sent(table)
    files.write_tensor_blocks(path, shapes, blocks, meta)


def _sent(table: RowWiseTable) -> Iterator[Tensor]:
    """All rows of a table in order, block by block, on rank 0; the other ranks send theirs."""
    ranks = table.ranks
    for source in range(ranks.world):
        low, high = table.bounds[source : source + 2]
        for first in range(low, high, _ROWS):
            size = min(_ROWS, high - first)
            if source == ranks.rank:
                block = table.weight[first - low : first - low + size].contiguous()
                if source:
                    dist.send(block, group=ranks.group, group_dst=0)
            elif ranks.rank == 0:
                block = torch.empty(size, table.dim, dtype=table.weight.dtype, device=table.where.device)
                dist.recv(block, group=ranks.group, group_src=source)
            else:
                continue
            yield block
