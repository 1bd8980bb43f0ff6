"""Indexes of item vectors: exact, or approximate through FAISS, tuned for a recall and a memory limit; saved beside a run."""

from __future__ import annotations

from sparring.serving.index.faiss_backends import KINDS, Effort
from sparring.serving.index.search import Index
from sparring.serving.index.tuning import Point, Tuned, tune

__all__ = ["KINDS", "Effort", "Index", "Point", "Tuned", "tune"]
