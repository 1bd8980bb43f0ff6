"""Tensors and a JSON value in one safetensors file: written beside its target and renamed, read without executing anything."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from sparring.core.errors import UserError, first_line

Where = str | os.PathLike[str]


def save_tensors(path: Where, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Write the file; a reader sees the old one or the new one, never half."""
    path = Path(path)
    beside = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        plain = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
        safetensors.torch.save_file(plain, beside, {"state": json.dumps(meta)})
        os.replace(beside, path)
    except (OSError, safetensors.SafetensorError) as error:
        with suppress(OSError):
            beside.unlink()
        raise UserError(f"cannot write {path}: {first_line(error)}; what was saved before is untouched") from error


def load_tensors(path: Where, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors whose names begin with "kind.", without it, and the JSON value under the key `kind`."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no such file: {path}")
    try:
        with safetensors.safe_open(path, "pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys() if name.startswith(f"{kind}.")}  # noqa: SIM118
            meta = json.loads((file.metadata() or {}).get("state", "{}"))
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise UserError(f"{path} is not a readable safetensors file: {first_line(error)}") from error
    if not found or kind not in meta:
        raise UserError(f"{path} holds no {kind}: give a file that `sparring cluster` wrote")
    return {name.removeprefix(f"{kind}."): tensor for name, tensor in found.items()}, dict(meta[kind])
