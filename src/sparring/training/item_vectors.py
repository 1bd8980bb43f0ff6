"""Item vectors of a run, cached where a text encoder computes them; and the mean of several items as one vector."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sparring.core import files
from sparring.core.errors import UserError
from sparring.core.manifest import file_hash, text_hash
from sparring.models.item_to_item import ItemSums
from sparring.models.popularity import ConstantTower
from sparring.models.retriever import Retriever
from sparring.models.text import text_tower
from sparring.training.folder import model_hash

_FOLDER = "cache"
log = logging.getLogger(__name__)


def item_vectors(model: Retriever, folder: Path) -> Tensor:
    """All item vectors (N, D) of the model in a run folder.

    Those of text towers are cached in `cache/items-HASH.safetensors`, with the hash of the model file and of the texts,
    so that another model or other texts never match. A damaged cache is recomputed; one that cannot be written is left
    out. Biases are not cached: novelty changes them.
    """
    if text_tower(model.item) is None:
        return model.item_vectors()
    if model.whole is not model:  # the cache holds complete vectors
        return model.shortened(item_vectors(model.whole, folder))
    if model.item_bias is not None:
        vectors = item_vectors(model.with_bias(None), folder)
        with torch.no_grad():
            biases = model.biases(torch.arange(model.n_items, device=model.device))
        return torch.cat([vectors, biases.to(vectors)], 1)
    key = _key(folder)
    path = folder / _FOLDER / f"items-{key}.safetensors"
    if path.is_file():
        try:
            tensors, state = files.read_tensors(path)
            if state == {"key": key} and tensors["items"].shape == (model.n_items, model.dim):
                return tensors["items"]
        except UserError as error:
            log.warning("%s; its vectors are computed again", str(error).split(";")[0])
    vectors = model.item_vectors().float().cpu()
    with suppress(OSError, UserError):  # a folder that cannot be written is no error: the vectors are computed again
        files.write_tensors(path, {"items": vectors}, {"key": key})
        for old in set(path.parent.glob("items-*")) - {path}:  # of an earlier model
            old.unlink(missing_ok=True)
    return vectors


def mean_item(model: Retriever, vectors: np.ndarray) -> np.ndarray:
    """(D,) the mean of item vectors (n, D) at length 1 under cosine, else at their mean length.

    The dimensions of a closed form and of the bias are plain means.
    """
    mean = vectors.mean(0)
    width = model.width
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


def item_queries(model: Retriever, items: Tensor) -> Tensor:
    """Items (n,) as queries (n, D) for similar items, by the towers; popularity, a bias or a model, does not count."""
    with torch.no_grad():
        if isinstance(model.query, ItemSums):
            return model.query.rows(items)
        if model.scores_items:
            return model.encode_histories(items.unsqueeze(1))
        vectors = model.encode_items(items).float()
    vectors[:, model.width :] = 0.0
    return torch.zeros_like(vectors) if isinstance(model.query, ConstantTower) else vectors


def _key(folder: Path) -> str:
    texts = sorted((folder / "item_texts").glob("*"))
    return text_hash(" ".join([model_hash(folder), *map(file_hash, texts)]))[:16]
