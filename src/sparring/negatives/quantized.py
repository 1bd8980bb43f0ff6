"""Negatives drawn from a quantised copy of the query's softmax: QuantizedSoftmax (MIDX)."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from sparring.core.types import Bag, Candidates, Corpus, Provenance, Step
from sparring.models.clusters.kmeans import lloyd, nearest
from sparring.negatives.base import (
    Correction,
    ExcludeKind,
    Negatives,
    check_choice,
    corrected,
    drawable,
    exclude_for,
    within,
    zeros,
)

Codebook = Literal["product", "residual"]
CELLS = 1 << 23  # cells of all queries held at once


class QuantizedSoftmax(Negatives):
    """n items for each query, drawn from the softmax over quantised item vectors (MIDX).

        e~_j = c_a(j) + d_b(j)
        q(j | i) = exp(q_i . e~_j / tau) / sum over the catalogue,   expected count of j = n q(j | i)

    Two codebooks of `words` vectors each: of the two halves of the vectors ("product"), or of the vectors and their
    residuals ("residual", more accurate). All items of a cell (a, b) have the same quantised vector, so a draw picks a
    cell by score times size and then any item in it: words^2 operations per query for any size of the catalogue. B * n
    items are encoded, as with Sampled(per_query=True). Probabilities follow the codebooks of the last refresh exactly,
    so the correction is exact while vectors change. Before the first refresh all items share one cell: uniform. With
    `among`, only these items are quantised and drawn.

        QuantizedSoftmax(n_items, dim, n=64)

    Chen et al., Fast Variational AutoEncoder with Inverted Multi-Index for Collaborative Filtering, WWW 2022.
    """

    encodes = True
    among: Tensor | None
    book: Tensor
    code: Tensor
    items: Tensor
    start: Tensor
    size_of: Tensor

    def __init__(
        self,
        n_items: int,
        dim: int,
        n: int,
        words: int = 32,
        codebook: Codebook = "residual",
        correction: Correction = "count",
        exclude: ExcludeKind = "positive",
        every: int = 1,
        among: Tensor | None = None,
    ):
        super().__init__()
        check_choice("codebook", codebook, Codebook)
        check_choice("correction", correction, Correction)
        check_choice("exclude", exclude, ExcludeKind)
        if min(n, words, every, n_items, dim) < 1:
            raise ValueError(
                f"QuantizedSoftmax needs n, words, every, n_items and dim >= 1; "
                f"got {n}, {words}, {every}, {n_items} and {dim}"
            )
        self.n, self.codebook, self.correction, self.exclude, self.every = n, codebook, correction, exclude, every
        self.register_buffer("book", torch.zeros(2, words, dim))
        self.register_buffer("code", torch.zeros(2, n_items, dtype=torch.long))  # the word of each item in each book
        self.register_buffer("among", drawable(among, n_items), persistent=False)
        items = torch.arange(n_items) if self.among is None else self.among
        self.register_buffer("items", items.clone())  # by cell
        self.register_buffer("start", torch.zeros(words * words, dtype=torch.long))  # of each cell in items
        self.register_buffer("size_of", torch.zeros(words * words, dtype=torch.long))  # items in each cell
        self.size_of[0] = len(items)

    def forward(self, step: Step) -> Bag:
        with torch.no_grad():
            ids = self.sample(step)
        words = Provenance(f"drawn from a softmax over {self.book.shape[1]} x {self.book.shape[1]} cells")
        block = Candidates(ids, step.encode(ids), zeros(step), exclude_for(step, self.exclude), provenance=words)
        return corrected([block], step, self, self.correction)

    def sample(self, step: Step) -> Tensor:
        """(B, n) items: a cell by its mass, then an item of the cell."""
        first, second = self._word_logits(step)
        shape = len(step.q), self.n
        u = torch.rand(2, len(step.batch), self.n, dtype=torch.float64, generator=step.generator, device=step.q.device)
        u = step.batch.own(u.transpose(0, 1)).transpose(0, 1)
        block = max(CELLS // len(self.size_of), 1)
        cells = [
            self._cells(first[low : low + block], second[low : low + block], u[0, low : low + block])
            for low in range(0, shape[0], block)
        ]
        cell = torch.cat(cells)
        size = self.size_of[cell]
        return self.items[self.start[cell] + torch.minimum((u[1] * size).long(), size - 1)]

    def _cells(self, first: Tensor, second: Tensor, u: Tensor) -> Tensor:
        mass = (first.exp().unsqueeze(2) * second.exp().unsqueeze(1)).flatten(1).mul_(self.size_of)
        cdf = torch.cumsum(mass, 1)
        # as in draw_from_cdf: right=True skips empty cells, the bound guards against rounding up to the total
        last = torch.searchsorted(cdf, cdf[:, -1:].contiguous())
        return torch.minimum(torch.searchsorted(cdf, u * cdf[:, -1:], right=True), last)

    def _word_logits(self, step: Step) -> tuple[Tensor, Tensor]:
        """(B, words) each: q . word / tau up to a constant per query; float64, so that weak cells keep their mass."""
        scores = step.scaled.detach().double() @ self.book.flatten(0, 1).double().T
        first, second = scores.chunk(2, 1)
        return torch.log_softmax(first, 1), torch.log_softmax(second, 1)

    def log_prob(self, ids: Tensor, step: Step) -> Tensor:
        """(B, C): log q(j | i) of items (C,) or (B, C)."""
        first, second = self._word_logits(step)
        counts = self.size_of.double().view(self.book.shape[1], -1)
        total = ((first.exp() @ counts) * second.exp()).sum(1, keepdim=True)
        words = self.code[:, ids.expand(len(first), -1)]
        log_prob = (first.gather(1, words[0]) + second.gather(1, words[1]) - total.log()).float()
        return within(log_prob, ids, self.among)

    def log_count(self, ids: Tensor, step: Step) -> Tensor | None:
        return math.log(self.n) + self.log_prob(ids, step)

    def size(self, step: Step) -> float:
        return self.n

    def refresh(self, corpus: Corpus) -> None:
        """Rebuild the codebooks from the current item vectors, every `every` epochs."""
        if corpus.epoch % self.every:
            return
        items, words = corpus.items.to(self.book.dtype), self.book.shape[1]
        code = self.code
        if self.among is not None:
            items, code = items[self.among], code[:, self.among]
        parts = [items.clone(), items.clone()]
        if self.codebook == "product":
            parts[0][:, items.shape[1] // 2 :] = 0
            parts[1][:, : items.shape[1] // 2] = 0
        for which in (0, 1):
            if which == 1 and self.codebook == "residual":
                parts[1] -= self.book[0][code[0]]
            self.book[which] = _centres(parts[which], words, corpus.generator)
            code[which] = nearest(parts[which], self.book[which])
        cell = code[0] * words + code[1]
        order = torch.argsort(cell, stable=True)
        if self.among is not None:
            self.code[:, self.among] = code
            order = self.among[order]
        self.items.copy_(order)
        # scatter_add: bincount would synchronise
        self.size_of.zero_().scatter_add_(0, cell, torch.ones_like(cell))
        self.start.copy_(torch.cumsum(self.size_of, 0) - self.size_of)


def _centres(points: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """(k, D) centres from k random points, on at most 256 points per centre; k may exceed the number of points."""
    order = torch.randperm(len(points), generator=generator, device=points.device)[: k * 256]
    points = points[order]
    return lloyd(points, points[torch.arange(k, device=points.device) % len(points)], steps=10)
