"""Towers, the retriever that compares their vectors, and clusters of items.

A model knows nothing of negatives, losses or training.
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
