"""The files of a run folder: compared between two runs, changed as if training had written them, or damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sparring.core import files
from sparring.training import folder as run_folder


def contents(folder: Path) -> dict[str, Any]:
    """Everything in a run folder except times and its id: model and training state, metrics, test result."""

    def timeless(record: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in record.items() if "seconds" not in name and name != "run"}

    found: dict[str, Any] = {}
    for name in ("model", "checkpoint"):
        tensors, state = files.read_tensors(folder / f"{name}.safetensors")
        found |= {f"{name}.{key}": tensor for key, tensor in tensors.items()}
        found[name] = {**timeless(state), "history": [timeless(record) for record in state.get("history", [])]}
    found["metrics"] = [timeless(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found["result"] = json.loads((folder / "result.json").read_text())["test"]["metrics"]
    return found


def approve(folder: Path, finished: bool = True) -> None:
    """Write the manifest of a run for its files as they are now, whatever a test has changed."""
    run_folder.manifest.write_manifest(folder, finished, apart=run_folder.APART)


def change_tensors(folder: Path, name: str, **changes: Any) -> None:
    """Replace tensors in a file of a run (None deletes one), as if training had written it so."""
    path = folder / f"{name}.safetensors"
    tensors, state = files.read_tensors(path)
    changed = {key: tensor for key, tensor in {**tensors, **changes}.items() if tensor is not None}
    files.write_tensors(path, changed, state)
    approve(folder)


def flip(path: Path, bit: int) -> bytes:
    """Flip one bit of a file in place; its content before."""
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[bit // 8] ^= 1 << bit % 8
    path.write_bytes(damaged)
    return whole
