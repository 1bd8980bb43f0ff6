"""Settings of trainings that take a fraction of a second, for Python and for the command line."""

from __future__ import annotations

from typing import Any


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
