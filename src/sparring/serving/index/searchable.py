"""The interface that every index has: of vectors (search.py), of scores and of several sources (scored.py)."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from sparring.serving.index.filters import Lists


class Searchable(Protocol):
    """Items by dense id, searched with exact filters; removals take effect at the next search."""

    ids: np.ndarray  # ascending
    kind: str
    meta: dict[str, Any]

    @property
    def dim(self) -> int: ...

    def __len__(self) -> int: ...

    def has(self, item: int) -> bool:
        """Whether a search can find an item."""

    def remove(self, ids: np.ndarray) -> int:
        """Remove items, from the next search on; returns how many were present."""

    def restore(self, ids: np.ndarray) -> None:
        """Undo the removal of items."""

    def search(
        self,
        q: np.ndarray,
        k: int,
        exclude: Lists | None = None,
        allow: np.ndarray | None = None,
        deny: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Scores and ids (B, k) of the best items; id -1 where there are no more."""
