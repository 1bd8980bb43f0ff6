"""Interactions: reading, cleaning, splitting, batching; public and synthetic sets, texts, features and modalities.

Data knows no models and no training: it hands out arrays, tables and row indices.
"""

from sparring.data.batches import BlockBatches, RandomBatches
from sparring.data.columns import Columns
from sparring.data.features import Features
from sparring.data.histories import Histories, histories
from sparring.data.interactions import Ids, Interactions, Split, Vocabulary
from sparring.data.modalities import Modalities, load_modalities
from sparring.data.prepared.preparation import prepare
from sparring.data.public_sets import PUBLIC_SETS, load_set
from sparring.data.reading import describe, read, show
from sparring.data.scores import read_graph, read_scores
from sparring.data.splits import split
from sparring.data.synthetic_world import SyntheticWorld, make_world
from sparring.data.table import from_frame
from sparring.data.texts import Texts, text_of, tokenized

__all__ = [
    "PUBLIC_SETS",
    "BlockBatches",
    "Columns",
    "Features",
    "Histories",
    "Ids",
    "Interactions",
    "Modalities",
    "RandomBatches",
    "Split",
    "SyntheticWorld",
    "Texts",
    "Vocabulary",
    "describe",
    "from_frame",
    "histories",
    "load_modalities",
    "load_set",
    "make_world",
    "prepare",
    "read",
    "read_graph",
    "read_scores",
    "show",
    "split",
    "text_of",
    "tokenized",
]
