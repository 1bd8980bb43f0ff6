"""Tokenised texts of sentence-transformers: encoded in groups of similar length, and a gradient cache over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import get_device_states, set_device_states

from sparring.core.errors import UserError
from sparring.data.texts.encoder import group_sizes

Features = dict[str, Any]  # the tokens of a column of texts, as SentenceTransformer.preprocess returns them
Encode = Callable[[Features], Tensor]

TOKENS = {"cpu": 2048, "cuda": 1 << 17}  # tokens that a transformer reads at once, padding included
_BASE = 6364136223846793005  # odd, so that multiplication modulo 2^64 is invertible


def in_groups(encode: Encode, features: Features, most: int | None = None) -> Tensor:
    """Vectors (n, D) of texts, encoded in groups of similar length to limit padding, at most `most` texts at a time.

    Static embeddings, whose tokens are one flat list, are encoded at once.
    """
    groups, back = _groups(features, most)
    vectors = [encode(group) for group in groups]
    return vectors[0] if back is None else torch.cat(vectors)[back]


def _groups(features: Features, most: int | None) -> tuple[list[Features], Tensor | None]:
    """The groups of texts, longest first, and the place of each text in them; None if there is one group."""
    mask = features.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        if most is not None and "offsets" not in features:
            raise UserError("chunk needs texts that are padded to one length: leave it out, or do not flatten them")
        return [features], None
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
    return groups, order.argsort()


def _rows(value: Any, mask: Tensor, rows: Tensor, width: int) -> Any:
    """The rows of a tensor over the texts, without padding that they share; any other value unchanged."""
    if not isinstance(value, Tensor) or not value.dim() or len(value) != len(mask):
        return value
    return value[rows, :width] if value.dim() > 1 and value.shape[1] == mask.shape[1] else value[rows]


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


class _Part(NamedTuple):
    texts: Features
    state: tuple[Tensor, list[int], list[Tensor]]  # of the random generators before the texts were encoded
    vectors: Tensor  # a leaf


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
        self.parts: list[_Part] = []

    def encode(self, features: Features) -> Tensor:
        """Vectors (n, D) of a column."""
        return in_groups(self._without_graph, features, self.size)

    def _without_graph(self, texts: Features) -> Tensor:
        tensors = [value for value in texts.values() if isinstance(value, Tensor)]
        state = (torch.get_rng_state(), *get_device_states(*tensors))
        with torch.no_grad():
            vectors = self.forward(texts)
        leaf = vectors.detach().requires_grad_()
        self.parts.append(_Part(texts, state, leaf))
        return leaf

    def finish(self, loss: Tensor, parameters: Iterable[nn.Parameter] = ()) -> Tensor:
        """The loss, whose backward pass reaches the model and these parameters."""
        others = [parameter for parameter in parameters if parameter.requires_grad]
        leaves = [part.vectors for part in self.parts]
        grads = torch.autograd.grad(loss, [*leaves, *others], allow_unused=True)
        result = loss.detach().requires_grad_()
        of_others = list(zip(others, grads[len(leaves) :], strict=True))
        result.register_hook(lambda scale: self._replay(scale, grads[: len(leaves)], of_others))
        return result

    def _replay(
        self, scale: Tensor, grads: tuple[Tensor | None, ...], others: Iterable[tuple[nn.Parameter, Tensor | None]]
    ) -> None:
        for parameter, grad in others:
            if grad is not None:
                parameter.grad = grad * scale if parameter.grad is None else parameter.grad + grad * scale
        used = [(part, grad) for part, grad in zip(self.parts, grads, strict=True) if grad is not None]
        for at, (part, grad) in enumerate(used):
            waits = isinstance(self.model, DistributedDataParallel) and at < len(used) - 1
            state, devices, states = part.state
            with (
                self.model.no_sync() if waits else nullcontext(),  # type: ignore[operator]
                torch.enable_grad(),
                torch.random.fork_rng(devices=devices),
            ):
                torch.set_rng_state(state)
                set_device_states(devices, states)
                vectors = self.forward(part.texts)
                if vectors.requires_grad:
                    torch.autograd.backward(vectors, (grad * scale).to(vectors.dtype))
