"""Item vectors of a run, cached where a text encoder computes them; and the mean of several items as one vector."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sparring.core import files
from sparring.core.errors import UserError
from sparring.models.retriever import Retriever
from sparring.models.text import text_tower

_FOLDER = "vectors"


def item_vectors(model: Retriever, folder: Path) -> Tensor:
    """All item vectors (N, D) of the model in a run folder.

    Those of text towers are cached in `vectors/items-HASH.npy`, with the hash of the model file and of the texts, so
    that another model or other texts never match. A damaged cache is recomputed; one that cannot be written is left
    out.
    """
    if text_tower(model.item) is None:
        return model.item_vectors()
    path = folder / _FOLDER / f"items-{_key(folder)}.npy"
    with suppress(UserError):
        cached = files.read_array(path, np.float32)
        if cached.shape == (model.n_items, model.dim):
            return torch.from_numpy(cached)
    vectors = model.item_vectors().float().cpu()
    with suppress(OSError, UserError):  # a folder that cannot be written is no error: the vectors are computed again
        files.write_array(path, vectors.numpy())
        for old in set(path.parent.glob("items-*")) - {path}:  # of an earlier model
            old.unlink(missing_ok=True)
    return vectors


def mean_item(model: Retriever, vectors: np.ndarray) -> np.ndarray:
    """(D,) the mean of item vectors (n, D) at length 1 under cosine, else at their mean length; the bias is a mean."""
    mean = vectors.mean(0)
    width = model.dim - (model.item_bias is not None)
    vector, length = mean[:width], float(np.linalg.norm(mean[:width]))
    wanted = 1.0 if model.score == "cosine" else float(np.linalg.norm(vectors[:, :width], axis=1).mean())
    if length > 1e-12:
        vector = vector * (wanted / length)
    return np.concatenate([vector, mean[width:]]).astype(np.float32)


def mean_query(model: Retriever, vectors: np.ndarray) -> np.ndarray:
    """(1, D) `mean_item` as a query, for a history that no tower reads; item biases count in full."""
    query = mean_item(model, vectors)[None]
    if model.item_bias is not None:
        query[:, -1] = 1.0
    return query


def _key(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in (folder / "model.safetensors", *sorted((folder / "item_texts").glob("*"))):
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]
