"""Interactions: reading, cleaning, splitting, batching; public sets, synthetic worlds, texts and modalities.

Data knows nothing of models or training.
"""

from sparring.data.batches import BlockBatches, RandomBatches
from sparring.data.interactions import Ids, Interactions, Split, Vocabulary
from sparring.data.modalities import Modalities, load_modalities
from sparring.data.prepared.preparation import prepare
from sparring.data.public_sets import load as load_set
from sparring.data.reading import describe, read, show
from sparring.data.splits import split
from sparring.data.synthetic import World, make_world
from sparring.data.table import from_frame

__all__ = [
    "BlockBatches",
    "Ids",
    "Interactions",
    "Modalities",
    "RandomBatches",
    "Split",
    "Vocabulary",
    "World",
    "describe",
    "from_frame",
    "load_modalities",
    "load_set",
    "make_world",
    "prepare",
    "read",
    "show",
    "split",
]
