"""Atomic files: written beside their target and renamed, so that a kill or a full disk leaves the previous version.

Tensors are stored as safetensors: nothing executable is ever loaded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from sparring.core.errors import UserError, first_line

AnyPath = str | os.PathLike[str]


def write(
    path: Path, write_to: Callable[[Path], object], advice: str = "earlier files are untouched", shared: bool = False
) -> None:
    """Write a file beside its target, flush it to disk, then rename it: readers see the old file or the new one.

    `shared`: other processes may write the same file at the same time.
    """
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp" if shared else f"{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_to(beside)
        with open(beside, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException as error:  # an interrupt must not leave a partial file either
        try:
            beside.unlink(missing_ok=True)
        except KeyboardInterrupt:  # polars raised it, and now Python does for the same Ctrl-C
            beside.unlink(missing_ok=True)
        except OSError:  # the folder itself is broken: reported below
            pass
        if not isinstance(error, (OSError, safetensors.SafetensorError, pl.exceptions.PolarsError)):
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        raise UserError(f"cannot write {path}: {reason}; {advice}") from error


def write_text(path: Path, text: str) -> None:
    write(path, lambda file: file.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: object) -> None:
    write_text(path, json.dumps(value, indent=2, default=str) + "\n")


def read_json(path: Path, advice: str = "restore it from a copy") -> dict[str, Any]:
    """The object in a JSON file. A file that is missing or not JSON is an error, with advice."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise UserError(f"no such file: {path}; {advice}") from error
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} is corrupt: {first_line(error)}; {advice}") from error


def write_array(
    path: Path, array: np.ndarray, advice: str = "earlier files are untouched", shared: bool = False
) -> None:
    """Write a .npy file."""

    def save(beside: Path) -> None:
        with open(beside, "wb") as file:  # numpy.save adds .npy to a name without it
            np.save(file, array, allow_pickle=False)

    write(path, save, advice, shared)


def write_table(table: pl.DataFrame, path: AnyPath) -> None:
    """Write a Parquet file."""
    write(Path(path), table.write_parquet)


def read_table(path: AnyPath) -> pl.DataFrame:
    """The table in a Parquet file."""
    if not Path(path).is_file():
        raise UserError(f"no such file: {path}")
    try:
        return pl.read_parquet(Path(path))
    except (OSError, pl.exceptions.PolarsError) as error:
        raise UserError(f"{path} is not a readable Parquet file: {first_line(error)}") from error


def write_tensors(path: AnyPath, tensors: Mapping[str, Tensor], meta: Mapping[str, object] | None = None) -> None:
    """Write tensors and a JSON value to one file, so that they can never disagree."""
    plain = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    write(Path(path), lambda file: safetensors.torch.save_file(plain, file, {"state": json.dumps(meta or {})}))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and the JSON value written with them; one read, so both belong to the same version of the file."""
    with _reading(path):
        content = path.read_bytes()
        tensors = safetensors.torch.load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        return tensors, json.loads(header.get("__metadata__", {}).get("state", "{}"))


def map_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """As read_tensors, through a memory map: pages are read as tensors are used."""
    with _reading(path), safetensors.safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, json.loads((file.metadata() or {}).get("state", "{}"))


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    if not path.is_file():
        raise UserError(f"{path} is missing: {path.parent} is not a finished run (or not a run folder)")
    try:
        yield
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} is corrupt: {first_line(error)}; train again, or restore it from a copy") from error


def read_section(path: AnyPath, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors called "name.*", without that prefix, and the JSON value under the key `name`."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no such file: {path}")
    try:
        with safetensors.safe_open(path, "pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys() if key.startswith(f"{name}.")}  # noqa: SIM118
            meta = json.loads((file.metadata() or {}).get("state", "{}"))
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise UserError(f"{path} is not a readable safetensors file: {first_line(error)}") from error
    if not tensors or name not in meta:
        raise UserError(f"{path} holds no {name}: give a file that `sparring cluster` wrote")
    return {key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items()}, dict(meta[name])


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """The state of a module by name, each shared tensor once."""
    first: dict[int, str] = {}
    state = module.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if first.setdefault(id(tensor), name) == name}


def load_tensors(module: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Copy tensors into a module in place; a difference in names or shapes is an error that names the file."""
    state = tensors_of(module)
    for name in sorted(state.keys() ^ tensors.keys()):
        problem = "missing" if name in state else "not expected"
        raise UserError(f"{path} does not fit this run: tensor {name!r} is {problem}")
    with torch.no_grad():
        for name, tensor in state.items():
            if tensor.shape != tensors[name].shape:
                shapes = f"{tuple(tensors[name].shape)} in the file, {tuple(tensor.shape)} in the run"
                raise UserError(f"{path} does not fit this run: {name!r} is {shapes}")
            tensor.copy_(tensors[name])
