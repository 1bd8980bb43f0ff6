"""Vectors of all items of a run, kept beside it where a text encoder made them: the second time they are read, not computed."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sparring.towers import Retriever
from sparring.towers_text import text_tower

_FOLDER = "vectors"


def item_vectors(model: Retriever, folder: Path) -> Tensor:
    """All item vectors (N, D) of the model in a run folder.

    Those of text towers are kept in `vectors/items-HASH.npy`, with the hash of the model's file and of the texts: another model, or other
    texts, never finds them. What is damaged or cannot be written is computed, as it was the first time.
    """
    if text_tower(model.item) is None:
        return model.item_vectors()
    path = folder / _FOLDER / f"items-{_key(folder)}.npy"
    with suppress(OSError, ValueError, EOFError):
        kept = np.load(path, allow_pickle=False)
        if kept.shape == (model.n_items, model.dim) and kept.dtype == np.float32:
            return torch.from_numpy(kept)
    vectors = model.item_vectors().float().cpu()
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(beside, "wb") as file:
            np.save(file, vectors.numpy())
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        for old in set(path.parent.glob("items-*")) - {path}:  # of a model that is no longer here
            old.unlink(missing_ok=True)
    except OSError:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
    return vectors


def _key(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in (folder / "model.safetensors", *sorted((folder / "item_texts").glob("*"))):
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]
