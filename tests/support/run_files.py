"""The files of a run folder, for comparing two runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sparring.core import files


def contents(folder: Path) -> dict[str, Any]:
    """Everything in a run folder except times: model and training state, metrics, test result."""

    def timeless(record: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in record.items() if "seconds" not in name}

    found: dict[str, Any] = {}
    for name in ("model", "checkpoint"):
        tensors, state = files.read_tensors(folder / f"{name}.safetensors")
        found |= {f"{name}.{key}": tensor for key, tensor in tensors.items()}
        found[name] = {**timeless(state), "history": [timeless(record) for record in state.get("history", [])]}
    found["metrics"] = [timeless(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found["result"] = json.loads((folder / "result.json").read_text())["test"]["metrics"]
    return found
