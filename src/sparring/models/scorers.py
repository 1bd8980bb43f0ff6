"""Pretrained text models that score: vectors of texts by an encoder, and scores of pairs by a cross-encoder."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sparring.core import files
from sparring.core.devices import pick_device
from sparring.core.errors import UserError, first_line
from sparring.core.extras import optional
from sparring.data.texts.encoder import TextEncoder, check_encoder, text_folder
from sparring.data.texts.texts import Role, tokenize
from sparring.models.encoders import is_bag, open_encoder

_BLOCK = 8192  # texts encoded between two reports of progress
_WORDS = 512  # tokens of a text that a bag reads at most

Vectors = Callable[[Sequence[str], Role], Tensor]


def text_vectors(name: str, device: str = "auto") -> Vectors:
    """A function of texts and their role to vectors (n, D) of length 1, by the encoder of this name.

    A folder of sentence-transformers is opened by that library where it is installed, with its pooling, its layers and
    the prompts of each role. Other names are those of text towers (models/encoders.py). No code that comes with a model
    is run.

        text_vectors("minilm")(["red shoes"], "query")
    """
    if is_bag(name):
        return _bag_vectors(name)
    folder = text_folder(name)
    modules = folder / "modules.json"
    if (folder / "config.json").is_file() or not modules.is_file():
        check_encoder(folder)
    if not modules.is_file() or importlib.util.find_spec("sentence_transformers") is None:
        encoder = TextEncoder(folder, device)
        return lambda texts, role: torch.from_numpy(encoder.encode(texts)).float()
    model = _opened("SentenceTransformer", folder, device)

    def encode(texts: Sequence[str], role: Role) -> Tensor:
        by_role = model.encode_query if role == "query" else model.encode_document
        return torch.from_numpy(by_role(list(texts), normalize_embeddings=True, show_progress_bar=False)).float()

    return encode


def is_cross_encoder(name: str) -> bool:
    """Whether a folder holds a model that scores a pair of texts."""
    config = Path(name) / "config.json"
    kinds = files.read_json(config).get("architectures") if config.is_file() else None
    return isinstance(kinds, list) and any(str(kind).endswith("ForSequenceClassification") for kind in kinds)


def pair_scores(name: str, device: str = "auto") -> Callable[[Sequence[tuple[str, str]]], np.ndarray]:
    """A function of pairs of texts (query, item) to scores (n,), by the cross-encoder in a folder.

    A model with one output gives the sigmoid of it, as in sentence-transformers, unless its settings say otherwise.

        pair_scores("models/reranker")([("red shoes", "a pair of shoes")])
    """
    check_encoder(Path(name))
    model = _opened("CrossEncoder", Path(name), device)
    if model.num_labels != 1:
        raise UserError(f"the cross-encoder in {name} has {model.num_labels} outputs: a guide needs one")

    def score(pairs: Sequence[tuple[str, str]]) -> np.ndarray:
        scores: np.ndarray = model.predict(list(pairs), show_progress_bar=False, convert_to_numpy=True)
        return scores.astype(np.float32)

    return score


def _opened(kind: str, folder: Path, device: str) -> Any:
    """A model of sentence-transformers, from the folder alone."""
    library = optional("sentence_transformers", "sentence-transformers", f"the model in {folder}")
    try:
        safely = {"local_files_only": True, "trust_remote_code": False}
        return getattr(library, kind)(str(folder), device=str(pick_device(device)), **safely)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, AttributeError) as error:
        raise UserError(f"cannot load the model in {folder}: {first_line(error)}") from error


def _bag_vectors(name: str) -> Vectors:
    encoder = open_encoder(name).eval()

    @torch.no_grad()
    def encode(texts: Sequence[str], role: Role) -> Tensor:
        parts = [torch.zeros(0, encoder.dim)]
        for begin in range(0, len(texts), _BLOCK):
            tokens = tokenize(texts[begin : begin + _BLOCK], encoder.tokenizer, _WORDS)
            parts.append(F.normalize(encoder(tokens, torch.arange(len(tokens)), _WORDS), dim=1))
        return torch.cat(parts)

    return encode
