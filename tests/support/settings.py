"""Settings of trainings that take a fraction of a second, for Python and for the command line."""

from __future__ import annotations

import os
from typing import Any


def effort(quick: int, full: int) -> int:
    """The length of a long proof: `full` if the environment variable SPARRING_PROOF is "full", else `quick`."""
    return full if os.environ.get("SPARRING_PROOF") == "full" else quick


def quick(**changes: Any) -> dict[str, Any]:
    """Flat settings of a small, short training; `changes` replace or add some."""
    return {"dim": 8, "epochs": 1, "batch_size": 64, **changes}


def quick_words(**changes: Any) -> list[str]:
    """The words of a command that trains with `quick(**changes)` on the CPU."""
    settings = quick(**changes)
    epochs = settings.pop("epochs")
    words = ["--device", "cpu", "--epochs", str(epochs)]
    return words + [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]


QUICK = quick()
