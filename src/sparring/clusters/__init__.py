"""Clusters of items: their codes, and how they are learned from several modalities (MSAC)."""

from sparring.clusters.codes import Codes
from sparring.clusters.model import LITERAL, PRESETS, ROBUST, Settings
from sparring.clusters.msac import MSAC, Drift

__all__ = ["LITERAL", "MSAC", "PRESETS", "ROBUST", "Codes", "Drift", "Settings"]
