"""Inputs: all that a model may be built from, before training and when a run is opened."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from sparring.core.errors import UserError
from sparring.core.types import Positives
from sparring.data.cache import load_array
from sparring.data.histories import Histories
from sparring.data.interactions import Ids
from sparring.data.modalities.vector_files import id_vectors
from sparring.data.texts.texts import Role
from sparring.models.settings import TextSettings


def no_past() -> Histories:
    """The past where there are no interactions: an error."""
    raise UserError("this model reads histories, and there are no interactions to take them from")


def no_pairs() -> Positives:
    """The training pairs where there are no interactions: an error."""
    raise UserError("this model reads the graph of the training pairs, and there are no interactions to take it from")


@dataclass(frozen=True)
class Inputs:
    """Ids with their tables, and the past and the pairs of the training part; a model reads nothing else.

    `recall` returns the past. It is called when a model first reads `past`: before training the past is computed from
    the training part, and a run folder holds it. `saved` is that folder. `known` does the same for the training pairs.
    """

    ids: Ids
    text: TextSettings = TextSettings()
    seed: int = 0
    sparse: bool = True  # tables have row-sparse gradients
    shards: int = 1  # ranges of items that the item table is split into
    saved: Path | None = None
    recall: Callable[[], Histories] = field(default=no_past, repr=False)
    known: Callable[[], Positives] = field(default=no_pairs, repr=False)

    @property
    def n_queries(self) -> int:
        return len(self.ids.query_ids)

    @property
    def n_items(self) -> int:
        return len(self.ids.item_ids)

    def vectors(self, side: Role, place: str) -> np.ndarray:
        """(n, D) the vectors in a file, FILE.npy or FILE.npy:IDS, one row per id of a side; a run folder has a copy."""
        if self.saved is not None:
            return load_array(self.saved / f"{side}_vectors.npy")
        return id_vectors(place, self.ids.query_ids if side == "query" else self.ids.item_ids, side)

    @cached_property
    def past(self) -> Histories:
        """The items of each query in time order, at least the `history` most recent ones."""
        return self.recall()

    @cached_property
    def pairs(self) -> Positives:
        """The items of each query in the training part, each once, in no order of time."""
        return self.known()
