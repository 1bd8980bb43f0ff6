"""Pretrained text models that score: vectors of texts by an encoder, and scores of pairs by a cross-encoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sparring.core import files
from sparring.core.devices import pick_device
from sparring.core.errors import UserError, one_line
from sparring.core.extras import optional
from sparring.data.texts.encoder import check_encoder, own_prompt
from sparring.data.texts.texts import Role, tokenize
from sparring.models.encoders import encoder_place, open_encoder
from sparring.models.text import BagEncoder, prompted

_BLOCK = 8192  # texts tokenised at a time
_WORDS = 512  # tokens of a text that a bag reads at most

Vectors = Callable[[Sequence[str], Role], Tensor]


def text_vectors(name: str, device: str = "auto") -> Vectors:
    """A function of texts and their role to vectors (n, D) of length 1, by the encoder of this name.

    Names are those of text towers (models/encoders.py): a folder of sentence-transformers has its own pooling, its
    layers and the prompts of each role. No code that comes with a model is run.

        text_vectors("minilm")(["red shoes"], "query")
    """
    encoder, folder = open_encoder(name, pooling=None), encoder_place(name)
    place = pick_device(device)
    encoder = encoder.eval().to(place)
    longest = _WORDS if isinstance(encoder, BagEncoder) else encoder.longest

    @torch.no_grad()
    def encode(texts: Sequence[str], role: Role) -> Tensor:
        prompt = "" if folder is None else own_prompt(folder, role)
        parts = [torch.zeros(0, encoder.dim)]
        for begin in range(0, len(texts), _BLOCK):
            tokens = tokenize(prompted(texts[begin : begin + _BLOCK], prompt), encoder.tokenizer, longest)
            vectors = encoder(tokens, torch.arange(len(tokens), device=place), longest)
            parts.append(F.normalize(vectors, dim=1).cpu())
        return torch.cat(parts)

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
    library = optional("sentence_transformers", "sentence-transformers", f"the model in {name}")
    with one_line(
        f"cannot load the model in {name}", OSError, ValueError, KeyError, RuntimeError, ImportError, AttributeError
    ):
        safely = {"local_files_only": True, "trust_remote_code": False}
        model = library.CrossEncoder(name, device=str(pick_device(device)), **safely)
    if model.num_labels != 1:
        raise UserError(f"the cross-encoder in {name} has {model.num_labels} outputs: a guide needs one")

    def score(pairs: Sequence[tuple[str, str]]) -> np.ndarray:
        scores: np.ndarray = model.predict(list(pairs), show_progress_bar=False, convert_to_numpy=True)
        return scores.astype(np.float32)

    return score
