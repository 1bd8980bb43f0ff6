"""Interactions: reading, splitting, batching, public sets, and worlds whose truth is known."""

from sparring.data.batches import RandomBatches
from sparring.data.interactions import Ids, Interactions, Split, Vocabulary
from sparring.data.reading import describe, read, show
from sparring.data.splits import split
from sparring.data.table import from_frame

__all__ = [
    "Ids",
    "Interactions",
    "RandomBatches",
    "Split",
    "Vocabulary",
    "describe",
    "from_frame",
    "read",
    "show",
    "split",
]
