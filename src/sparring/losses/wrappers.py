"""Losses around a loss: Symmetric, both directions of a pair; Matryoshka, prefixes of the vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from sparring.core.exclusion import KnownQueries
from sparring.core.part import Part, loss_output
from sparring.core.types import Bag, Batch, Candidates, Exclude, LossOutput, Provenance, Step
from sparring.losses.softmax import Loss, sampled_softmax
from sparring.negatives.distributions import Frequency


class Symmetric(Part):
    """The mean of a loss and the same loss from items to queries (symmetric InfoNCE).

        loss_i = (loss(q_i, v_i, bag_i) + loss(v_i, q_i, queries of the batch)) / 2

    In the second half the row's item is contrasted with the queries of all rows and ranks; queries that are known to
    have the item never count. With a `frequency` of the queries they are corrected like in-batch items, by
    -log((B - 1) p_j); without one they are not. The bag of the first half may come from any negatives.

        Term(1.0, InBatch(item_frequency(data)), Symmetric())

    Guenther et al., Jina Embeddings 2: 8192-Token General-Purpose Text Embeddings for Long Documents, 2023.
    """

    def __init__(self, loss: Loss = sampled_softmax, frequency: Frequency | None = None) -> None:
        super().__init__()
        self.loss, self.frequency = loss, frequency

    def forward(self, step: Step, bag: Bag) -> Tensor:
        return self.detailed(step, bag).losses

    def detailed(self, step: Step, bag: Bag) -> LossOutput:
        """The losses, and the by-products of the first half."""
        there = loss_output(self.loss, step, bag)
        return there._replace(losses=(there.losses + self.loss(*self.turned(step))) / 2)

    def turned(self, step: Step) -> tuple[Step, Bag]:
        """The step with items as queries, and the queries of the batch as its bag."""
        batch = step.batch
        ids = batch.query_ids
        exclude = Exclude(step.query_ids) if step.positives is None else KnownQueries(step.known(ids), step.item_ids)
        log_w, weighting = torch.zeros((), device=step.q.device), "none"
        if self.frequency is not None:
            log_w = -self.frequency.log_prob(ids) - torch.tensor(float(max(len(batch) - 1, 1))).log()
            weighting = "-log expected count"
        block = Candidates(ids, batch.q, log_w, exclude, provenance=Provenance("queries of the batch", weighting))
        whole = Batch(batch.item_ids, ids, step.v, step.q, batch.ranks, batch.grouped)
        turned = replace(
            step,
            query_ids=step.item_ids,
            item_ids=step.query_ids,
            q=step.v,
            v=step.q,
            positives=None,
            whole=whole,
            shared=None,
            biased=False,
        )
        return turned, Bag((block,))


class Matryoshka(Part):
    """The mean of a loss over the complete vectors and over their first `dims` dimensions.

        loss_i = 1 / (1 + K)  (loss(q_i, v_i, e) + sum_k loss(q_i[:d_k], v_i[:d_k], e[:d_k]))

    So that vectors cut to d_k dimensions rank well too, and an index can hold those. With `cosine` every cut vector is
    scaled to length 1. Negatives are chosen once, by the complete vectors. An item bias counts at every width.

        Term(1.0, InBatch(item_frequency(data)), Matryoshka((64, 128)))

    Kusupati et al., Matryoshka Representation Learning, NeurIPS 2022.
    """

    def __init__(self, dims: Sequence[int], loss: Loss = sampled_softmax, cosine: bool = True) -> None:
        super().__init__()
        if not dims or min(dims) < 1:
            raise ValueError(f"Matryoshka needs one or more dimensions of at least 1, got {tuple(dims)}")
        self.dims, self.loss, self.cosine = tuple(dims), loss, cosine

    def forward(self, step: Step, bag: Bag) -> Tensor:
        return self.detailed(step, bag).losses

    def detailed(self, step: Step, bag: Bag) -> LossOutput:
        """The losses, and the by-products at the complete width."""
        complete = loss_output(self.loss, step, bag)
        cuts = [self.loss(*self.cut(step, bag, dim)) for dim in self.dims]
        return complete._replace(losses=torch.stack([complete.losses, *cuts]).mean(0))

    def cut(self, step: Step, bag: Bag, dim: int) -> tuple[Step, Bag]:
        """The step and the bag with the first `dim` dimensions of every vector."""
        width = step.q.shape[-1] - step.biased
        if dim > width:
            raise ValueError(f"Matryoshka cuts to {dim} dimensions, but the vectors have {width}")

        def short(vectors: Tensor) -> Tensor:
            kept = vectors[..., :dim]
            kept = F.normalize(kept, dim=-1) if self.cosine else kept
            return torch.cat([kept, vectors[..., -1:]], -1) if step.biased else kept

        batch = step.batch
        q, v = short(step.q), short(step.v)
        whole = Batch(batch.query_ids, batch.item_ids, q, v, batch.ranks, batch.grouped)
        shared = None if step.shared is None else step.shared._replace(q=short(step.shared.q))
        encode = step.encode
        small = replace(step, q=q, v=v, whole=whole, shared=shared, encode=lambda ids: short(encode(ids)))
        return small, replace(bag, blocks=tuple(replace(block, emb=short(block.emb)) for block in bag.blocks))
