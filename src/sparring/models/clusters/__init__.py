"""Clusters of items: their codes, and how they are learned from several modalities (MSAC)."""

from sparring.models.clusters.codes import Codes, default_clusters
from sparring.models.clusters.msac import MSAC, Drift
from sparring.models.clusters.quantizer import LITERAL, PRESETS, ROBUST, MSACSettings

__all__ = ["LITERAL", "MSAC", "PRESETS", "ROBUST", "Codes", "Drift", "MSACSettings", "default_clusters"]
