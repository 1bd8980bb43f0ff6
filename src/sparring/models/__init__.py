"""Models: towers that map ids to vectors, the retriever that compares them, text encoders, and item clusters.

Nothing here chooses negatives or knows how models are trained.
"""

from sparring.models.fusion import Fused
from sparring.models.item_corrections import Augmented, Centroids
from sparring.models.retriever import Retriever
from sparring.models.text import BagEncoder, TextTower, TransformerEncoder
from sparring.models.towers import FeatureTower, HistoryTower, IdTower

__all__ = [
    "Augmented",
    "BagEncoder",
    "Centroids",
    "FeatureTower",
    "Fused",
    "HistoryTower",
    "IdTower",
    "Retriever",
    "TextTower",
    "TransformerEncoder",
]
