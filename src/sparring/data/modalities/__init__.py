"""Vectors of items from files, texts, pictures and behaviour."""

from sparring.data.modalities.modalities import Modalities
from sparring.data.modalities.sources import load_modalities

__all__ = ["Modalities", "load_modalities"]
