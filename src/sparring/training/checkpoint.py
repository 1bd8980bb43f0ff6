"""The checkpoint of a training: one file, and until the training is done the one before it, for when the last is torn.

    checkpoint.safetensors, checkpoint.previous.safetensors    modules, optimisers, generators and state
    checkpoint.EPOCH.STEP.tables/, best.EPOCH.tables/          with tables=sharded: by torch.distributed.checkpoint, each rank its rows

What is written with one number of ranks is read with any other. Files name the folders that belong to them and are written after these.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparring.core import files
from sparring.core.errors import UserError, first_line
from sparring.core.ranks import Group
from sparring.core.types import Ranks
from sparring.models.rowwise_tables import RowWiseTable

NAME, PREVIOUS = "checkpoint.safetensors", "checkpoint.previous.safetensors"
_ROWS = 1 << 16  # of a table that are sent and written at a time


def write(folder: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Write a checkpoint, keeping the one before it unless the training is done."""
    path, previous = folder / NAME, folder / PREVIOUS
    if path.is_file():
        with suppress(OSError):  # a file system without hard links has no previous one
            beside = previous.with_name(PREVIOUS + ".tmp")
            beside.unlink(missing_ok=True)
            os.link(path, beside)
            os.replace(beside, previous)
            beside.unlink(
                missing_ok=True
            )  # two links of one file are not renamed: so after a kill between here and the next line
    files.write_tensors(path, tensors, state)
    if state["done"]:
        previous.unlink(missing_ok=True)
    if state["tables"]:
        _forget(folder, "checkpoint.*.tables", {_tables_of(file) for file in (path, previous) if file.is_file()})
        _forget(folder, "best.*.tables", {best_tables(state["best_epoch"])})


def find(folder: Path, ranks: Ranks) -> tuple[Path, str] | None:
    """The newest checkpoint that is whole, as rank 0 finds it, and what to say of it; None where there is none. A torn one is replaced."""
    found: tuple[Path, str] | UserError | None = None
    if ranks.rank == 0:
        try:
            found = _find(folder)
        except UserError as error:
            found = error
    found = ranks.share(found)
    if isinstance(found, UserError):
        raise found
    return found


def _find(folder: Path) -> tuple[Path, str] | None:
    path, previous = folder / NAME, folder / PREVIOUS
    if not path.is_file():
        return (previous, "") if previous.is_file() else None
    try:
        if _check_whole(path).get("done"):
            previous.unlink(missing_ok=True)  # a kill came before it was
    except UserError as error:
        if not previous.is_file():
            raise
        _check_whole(previous)
        os.replace(previous, path)  # a torn file must not become the one before the next
        return path, f"{str(error).split(';')[0]}; going back to the checkpoint before it"
    return path, ""


def _check_whole(path: Path) -> dict[str, Any]:
    """The state in a checkpoint, or an error that names what is torn."""
    state = files.map_tensors(path)[1]
    tables = state.get("tables")
    if tables and not (path.parent / tables / ".metadata").is_file():
        raise UserError(
            f"{path.parent / tables} is corrupt: it has no .metadata; train again, or restore it from a copy"
        )
    return state


def _tables_of(path: Path) -> str:
    with suppress(UserError):
        return str(files.map_tensors(path)[1].get("tables"))
    return ""


def _forget(folder: Path, pattern: str, kept: set[str]) -> None:
    for old in folder.glob(pattern):
        if old.name not in kept:
            shutil.rmtree(old, ignore_errors=True)


def clear(folder: Path) -> None:
    """Delete the tables that an earlier run left."""
    _forget(folder, "*.tables", set())


def write_tables(folder: Path, name: str, tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Write tensors, of which each rank may have its rows (`rows_of`), as a folder; every rank writes its own part. May run in a thread."""
    from torch.distributed import checkpoint as dcp

    group = ranks.aside if isinstance(ranks, Group) else None
    try:
        dcp.save(dict(tensors), checkpoint_id=folder / name, no_dist=group is None, process_group=group)
    except (dcp.CheckpointException, OSError) as error:
        line = next(
            (line for line in str(error).splitlines() if "Error" in line or "No space" in line),
            first_line(error),
        )
        raise UserError(f"cannot write {folder / name}: {line.strip()}; what was saved before is untouched") from error


def read_tables(folder: Path, name: str, tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Fill tensors, whole or rows of this rank, from such a folder, whatever number of ranks wrote it."""
    from torch.distributed import checkpoint as dcp

    group = ranks.group if isinstance(ranks, Group) else None
    try:
        dcp.load(dict(tensors), checkpoint_id=folder / name, no_dist=ranks.world == 1, process_group=group)
    except (dcp.CheckpointException, OSError, RuntimeError) as error:
        raise UserError(f"{folder / name} does not fit this run: {str(error).splitlines()[-1]}") from error


def best_tables(epoch: int) -> str:
    """The folder of the model of the best epoch."""
    return f"best.{epoch}.tables"


def rows_of(table: RowWiseTable, local: Tensor) -> Tensor:
    """The rows of this rank as a part of the whole (n, ...), as torch.distributed.checkpoint knows it."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = DeviceMesh.from_group(table.ranks.group or dist.distributed_c10d._get_default_group(), local.device.type)
    shape = torch.Size((table.n, *local.shape[1:]))
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=local.stride())


def write_model(
    path: Path, tensors: Mapping[str, Tensor], tables: Mapping[str, RowWiseTable], meta: object, ranks: Ranks
) -> None:
    """model.safetensors with the whole tables, of which rank 0 never holds more than a block; `tensors` are those that every rank has."""
    if ranks.rank:
        for table in tables.values():
            for _ in _blocks(table):
                pass
        return
    header: dict[str, Any] = {"__metadata__": {"state": json.dumps(meta)}}
    at = 0
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()} | {
        name: [t.n, t.dim] for name, t in tables.items()
    }
    kinds = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64", torch.int32: "I32"}
    for name, shape in shapes.items():
        kind = tensors[name].dtype if name in tensors else tables[name].weight.dtype
        size = int(torch.tensor(shape).prod()) * kind.itemsize
        header[name] = {"dtype": kinds[kind], "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    def write_to(file: Path) -> None:
        with open(file, "wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for tensor in tensors.values():
                out.write(tensor.detach().cpu().contiguous().numpy().tobytes())
            for table in tables.values():
                for block in _blocks(table):
                    out.write(block.cpu().numpy().tobytes())

    files.write(path, write_to)


def _blocks(table: RowWiseTable) -> Iterator[Tensor]:
    """The rows of a table from the first on, some at a time, on rank 0; the other ranks send theirs."""
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
