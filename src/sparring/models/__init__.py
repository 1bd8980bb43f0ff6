"""Models: towers that map ids to vectors, the retriever that compares them, text encoders, and item clusters.

Nothing here chooses negatives or knows how models are trained.
"""

from sparring.models.build import finished, item_tower, query_tower
from sparring.models.fusion import Fused
from sparring.models.graph import Graph, GraphItems
from sparring.models.hashed import HashedIds
from sparring.models.histories import HistoryTower
from sparring.models.inputs import Inputs
from sparring.models.item_corrections import Augmented, Centroids
from sparring.models.named import MODELS, model
from sparring.models.parts import Categories, Concat, Dense, FeatureTower, Perceptron, Sum, Tags
from sparring.models.retriever import Retriever
from sparring.models.sequences import SequenceTower
from sparring.models.settings import ModelSettings
from sparring.models.text import BagEncoder, TextTower, TransformerEncoder
from sparring.models.towers import IdTower

__all__ = [
    "MODELS",
    "Augmented",
    "BagEncoder",
    "Categories",
    "Centroids",
    "Concat",
    "Dense",
    "FeatureTower",
    "Fused",
    "Graph",
    "GraphItems",
    "HashedIds",
    "HistoryTower",
    "IdTower",
    "Inputs",
    "ModelSettings",
    "Perceptron",
    "Retriever",
    "SequenceTower",
    "Sum",
    "Tags",
    "TextTower",
    "TransformerEncoder",
    "finished",
    "item_tower",
    "model",
    "query_tower",
]
