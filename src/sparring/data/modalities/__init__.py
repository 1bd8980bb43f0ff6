"""Modalities: vectors of items from files, texts, pictures and behaviour, computed once and read in blocks.

Encoders only encode here; nothing is trained.
"""

from sparring.data.modalities.modalities import Modalities, Modality
from sparring.data.modalities.sources import load_modalities, parse_modalities

__all__ = ["Modalities", "Modality", "load_modalities", "parse_modalities"]
