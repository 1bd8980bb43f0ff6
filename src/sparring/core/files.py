"""Files that are whole or not there: written beside their target and renamed, so a kill or a full disk leaves the last good one.

Tensors are safetensors: nothing executable is ever loaded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import polars as pl
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from sparring.core.errors import UserError


def write(path: Path, write_to: Callable[[Path], object]) -> None:
    """Write a file beside its target, flush it to disk, then rename: a reader sees the old file or the new one, never half."""
    beside = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_to(beside)
        with open(beside, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException as error:  # an interrupt too leaves nothing half-written
        try:
            beside.unlink(missing_ok=True)
        except KeyboardInterrupt:  # polars has raised it, and now Python does for the same Ctrl-C
            beside.unlink(missing_ok=True)
        except OSError:  # of the folder: it is told below
            pass
        if not isinstance(error, (OSError, safetensors.SafetensorError, pl.exceptions.PolarsError)):
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
        raise UserError(f"cannot write {path}: {reason}; what was saved before is untouched") from error


def write_json(path: Path, value: object) -> None:
    write(path, lambda file: file.write_text(json.dumps(value, indent=2, default=str) + "\n"))


def write_tensors(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, object] | None = None) -> None:
    """Tensors and a JSON value in one file, so that they can never disagree."""
    plain = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    write(path, lambda file: safetensors.torch.save_file(plain, file, {"state": json.dumps(meta or {})}))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and the JSON value written with them. The file is opened once, so that both are of one version even while it is replaced."""
    if not path.is_file():
        raise UserError(f"{path} is missing: {path.parent} is not a finished run (or not a run folder)")
    try:
        content = path.read_bytes()
        tensors = safetensors.torch.load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        return tensors, json.loads(header.get("__metadata__", {}).get("state", "{}"))
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise UserError(
            f"{path} is corrupt: {str(error).splitlines()[0]}; train again, or restore it from a copy"
        ) from error


def map_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The same without reading the file: its pages come as tensors are used, for whoever copies them at once."""
    if not path.is_file():
        raise UserError(f"{path} is missing: {path.parent} is not a finished run (or not a run folder)")
    try:
        with safetensors.safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, json.loads((file.metadata() or {}).get("state", "{}"))
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise UserError(
            f"{path} is corrupt: {str(error).splitlines()[0]}; train again, or restore it from a copy"
        ) from error


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """The state of a module under flat names, each shared tensor once."""
    found: dict[int, str] = {}
    state = module.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if found.setdefault(id(tensor), name) == name}


def load_tensors(module: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Copy tensors into a module in place; any difference in names or shapes is an error that names the file."""
    own = tensors_of(module)
    for name in sorted(own.keys() ^ tensors.keys()):
        raise UserError(
            f"{path} does not fit this run: tensor {name!r} is {'missing' if name in own else 'not expected'}"
        )
    with torch.no_grad():
        for name, tensor in own.items():
            if tensor.shape != tensors[name].shape:
                shapes = f"{tuple(tensors[name].shape)} in the file, {tuple(tensor.shape)} in the run"
                raise UserError(f"{path} does not fit this run: {name!r} is {shapes}")
            tensor.copy_(tensors[name])
