"""Indexes of item vectors: exact, or approximate by FAISS, tuned for a recall and a memory limit, saved beside a run.

Searches, filters, changes in memory, files and tuning are here. The HTTP service and the command line are not.
"""

from __future__ import annotations

from sparring.serving.index.faiss_backends import KINDS, Effort
from sparring.serving.index.recall_tuning import Point, Tuned, tune
from sparring.serving.index.search import Index

__all__ = ["KINDS", "Effort", "Index", "Point", "Tuned", "tune"]
