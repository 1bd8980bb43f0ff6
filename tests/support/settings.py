"""Settings of trainings that take a fraction of a second."""

from __future__ import annotations

from typing import Any

QUICK: dict[str, Any] = {"dim": 8, "epochs": 1, "batch_size": 64}
