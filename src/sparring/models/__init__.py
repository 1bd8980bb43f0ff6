"""Models: towers that map ids to vectors, the retriever that compares them, text encoders, and item clusters.

Nothing here chooses negatives or knows how models are trained.
"""

from sparring.models.fusion import Fused
from sparring.models.histories import HistoryTower
from sparring.models.item_corrections import Augmented, Centroids
from sparring.models.retriever import Retriever
from sparring.models.sequences import SequenceTower
from sparring.models.text import BagEncoder, TextTower, TransformerEncoder
from sparring.models.towers import FeatureTower, IdTower

__all__ = [
    "Augmented",
    "BagEncoder",
    "Centroids",
    "FeatureTower",
    "Fused",
    "HistoryTower",
    "IdTower",
    "Retriever",
    "SequenceTower",
    "TextTower",
    "TransformerEncoder",
]
