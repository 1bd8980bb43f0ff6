"""Tokenised texts of sentence-transformers: encoded in groups of similar length, and a gradient cache over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import get_device_states, set_device_states

from sparring.core.errors import UserError
from sparring.data.texts.encoder import group_sizes
from sparring.data.texts.words import WordCache

Features = dict[str, Any]  # the tokens of a column of texts, as SentenceTransformer.preprocess returns them
Encode = Callable[[Features], Tensor]

TOKENS = {"cpu": 2048, "cuda": 1 << 17}  # tokens that a transformer reads at once, padding included
_SLICE = 1024  # texts of a flat column that are tokenised at a time
_BASE = 6364136223846793005  # odd, so that multiplication modulo 2^64 is invertible


def in_groups(encode: Encode, features: Features) -> Tensor:
    """Vectors (n, D) of texts, encoded in groups of similar length to limit padding.

    Static embeddings, whose tokens are one flat list, have no padding: their texts stay in order.
    """
    groups, order = _groups(features, None)
    return _joined([encode(group) for group in groups], order)


def _joined(vectors: list[Tensor], order: Tensor | None) -> Tensor:
    """The vectors (n, D) of groups in the order of their texts, given the place of each in it (None: as they are)."""
    whole = vectors[0] if len(vectors) == 1 else torch.cat(vectors)
    return whole if order is None else whole[order.argsort()]


def _groups(features: Features, most: int | None) -> tuple[list[Features], Tensor | None]:
    """The groups of texts, longest first, and which text each place of them holds; None if in the order given."""
    mask = features.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        if most is not None and "offsets" not in features:
            raise UserError("chunk needs texts that are padded to one length: leave it out, or do not flatten them")
        return [features] if most is None else list(_flat_groups(features, most)), None
    length, order = mask.sum(1).sort(descending=True, stable=True)
    longest = length.tolist()
    sizes = group_sizes(longest, TOKENS.get(mask.device.type, TOKENS["cpu"]))
    if most is not None:
        sizes = [min(most, size - done) for size in sizes for done in range(0, size, most)]
    if len(sizes) == 1:
        return [features], None
    right = bool(mask[:, 0].all())  # padding on the right can be cut off; on the left it keeps positions
    groups, first = [], 0
    for size, rows in zip(sizes, order.split(sizes), strict=True):
        width = longest[first] if right else mask.shape[1]
        groups.append({name: _rows(value, mask, rows, width) for name, value in features.items()})
        first += size
    return groups, order


def _flat_groups(features: Features, most: int) -> Iterator[Features]:
    """Groups of `most` successive texts of a flat list of tokens."""
    tokens, offsets = features["input_ids"], features["offsets"]
    for first in range(0, len(offsets), most):
        begin = offsets[first]
        end = int(offsets[first + most]) if first + most < len(offsets) else len(tokens)
        yield {**features, "input_ids": tokens[begin:end], "offsets": offsets[first : first + most] - begin}


def _rows(value: Any, mask: Tensor, rows: Tensor, width: int) -> Any:
    """The rows of a tensor over the texts, without padding that they share; any other value unchanged."""
    if not isinstance(value, Tensor) or not value.dim() or len(value) != len(mask):
        return value
    return value[rows, :width] if value.dim() > 1 and value.shape[1] == mask.shape[1] else value[rows]


def preprocessing(model: Any) -> Callable[..., Features]:
    """The tokens of a column as `model.preprocess` makes them, in less time and memory where texts are not padded.

    A StaticEmbedding with a tokenizer that never looks beyond a space gets the tokens of its words (WordCache).
    """
    first: Any = model[0] if len(model) else None
    if type(first).__name__ == "StaticEmbedding":
        inner = type(first.tokenizer).from_str(first.tokenizer.to_str())  # a copy, since the cache sets the truncation
        cut = inner.truncation or {"max_length": 2**31 - 1}
        cache = WordCache.of(inner)
        if cache is not None and cut.get("direction", "right") == "right":
            return partial(_by_words, cache, cut["max_length"])
    return partial(in_slices, model.preprocess)


def _by_words(cache: WordCache, max_len: int, texts: list[str], prompt: str | None = None, **settings: Any) -> Features:
    tokens, length = cache.encode([f"{prompt or ''}{text}" for text in texts], max_len)
    return {
        "input_ids": torch.from_numpy(tokens.astype(np.int64)),
        "offsets": torch.from_numpy(np.cumsum(length) - length),
    }


def in_slices(preprocess: Callable[..., Features], texts: list[Any], **settings: Any) -> Features:
    """The tokens of a column; flat ones are made of 1,024 texts at a time, since a tokenizer returns far more."""
    first = preprocess(texts[:_SLICE], **settings)
    if len(texts) <= _SLICE:
        return first
    if "offsets" not in first:  # padded to the longest text
        return preprocess(texts, **settings)
    parts = [first, *(preprocess(texts[at : at + _SLICE], **settings) for at in range(_SLICE, len(texts), _SLICE))]
    ends = torch.tensor([0, *(len(part["input_ids"]) for part in parts)]).cumsum(0)
    offsets = [part["offsets"] + end for part, end in zip(parts, ends, strict=False)]
    return {**first, "input_ids": torch.cat([part["input_ids"] for part in parts]), "offsets": torch.cat(offsets)}


def text_keys(features: Mapping[str, Tensor]) -> Tensor:
    """A 64-bit hash (n,) of the tokens of each text, independent of its padding."""
    tokens = features["input_ids"]
    if "offsets" in features:  # static embeddings: one flat list
        offsets = features["offsets"]
        text = torch.searchsorted(offsets, torch.arange(len(tokens), device=tokens.device), right=True) - 1
        place = torch.arange(len(tokens), device=tokens.device) - offsets[text] + 1
        keys = torch.zeros(len(offsets), dtype=torch.long, device=tokens.device)
        return keys.index_add_(0, text, (tokens.long() + 1) * _powers(place))
    mask = features["attention_mask"].long()
    return ((tokens.long() + 1) * _powers(mask.cumsum(1)) * mask).sum(1)


def _powers(place: Tensor) -> Tensor:
    base = torch.full((int(place.max()) + 1 if place.numel() else 1,), _BASE, dtype=torch.long, device=place.device)
    base[0] = 1
    return base.cumprod(0)[place]


class _Group(NamedTuple):
    texts: Features
    state: tuple[Tensor, list[int], list[Tensor]]  # of the random generators before the texts were encoded
    size: int


class GradientCache:
    """Texts encoded `size` at a time, of which only the vectors are kept; the backward pass encodes them again.

    `encode` returns the vectors of any number of columns, and of texts drawn in between. `finish` takes the gradient of
    a loss at all these vectors and returns the loss. Its own backward pass encodes each group a second time, with the
    same random state, and passes the gradient of its vectors into the model. Under DistributedDataParallel gradients
    are exchanged once, with the last group.

        cache = GradientCache(model, forward, 64)
        loss = cache.finish(loss_of(cache.encode(anchors), cache.encode(positives)))

    Gao et al., Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup, RepL4NLP 2021.
    """

    def __init__(self, model: nn.Module, forward: Encode, size: int) -> None:
        self.model, self.forward, self.size = model, forward, size
        self.columns: list[tuple[list[_Group], Tensor | None]] = []  # groups, and their order as in _groups
        self.leaves: list[Tensor] = []  # the vectors of each column

    def encode(self, features: Features) -> Tensor:
        """Vectors (n, D) of a column."""
        groups, order = _groups(features, self.size)
        kept, vectors = [], []
        for texts in groups:
            tensors = [value for value in texts.values() if isinstance(value, Tensor)]
            state = (torch.get_rng_state(), *get_device_states(*tensors))
            with torch.no_grad():
                vectors.append(self.forward(texts))
            kept.append(_Group(texts, state, len(vectors[-1])))
        self.columns.append((kept, order))
        self.leaves.append(_joined(vectors, order).detach().requires_grad_())
        return self.leaves[-1]

    def finish(self, loss: Tensor, parameters: Iterable[nn.Parameter] = ()) -> Tensor:
        """The loss, whose backward pass reaches the model and these parameters."""
        others = [parameter for parameter in parameters if parameter.requires_grad]
        n = len(self.leaves)
        grads = torch.autograd.grad(loss, [*self.leaves, *others], allow_unused=True)
        self.leaves = []
        result = loss.detach().requires_grad_()
        of_others = list(zip(others, grads[n:], strict=True))
        result.register_hook(lambda scale: self._replay(scale, grads[:n], of_others))
        return result

    def _replay(
        self, scale: Tensor, grads: Sequence[Tensor | None], others: Iterable[tuple[nn.Parameter, Tensor | None]]
    ) -> None:
        for parameter, grad in others:
            if grad is not None:
                parameter.grad = grad * scale if parameter.grad is None else parameter.grad + grad * scale
        used = [(column, grad) for column, grad in zip(self.columns, grads, strict=True) if grad is not None]
        left = sum(len(groups) for (groups, _), _ in used)
        for (groups, order), grad in used:
            rows = torch.arange(len(grad), device=grad.device) if order is None else order
            for group, at in zip(groups, rows.split([group.size for group in groups]), strict=True):
                left -= 1
                self._backward(group, grad[at] * scale, waits=left > 0)

    def _backward(self, group: _Group, grad: Tensor, waits: bool) -> None:
        """Encode a group again and pass the gradient of its vectors into the model."""
        waits = waits and isinstance(self.model, DistributedDataParallel)
        state, devices, states = group.state
        with (
            self.model.no_sync() if waits else nullcontext(),  # type: ignore[operator]
            torch.enable_grad(),
            torch.random.fork_rng(devices=devices),
        ):
            torch.set_rng_state(state)
            set_device_states(devices, states)
            vectors = self.forward(group.texts)
            if vectors.requires_grad:
                torch.autograd.backward(vectors, grad.to(vectors.dtype))
