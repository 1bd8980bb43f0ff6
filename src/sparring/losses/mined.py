"""Hinge losses against the hardest candidates: OnlineHard (NGAME's encoder), HardPairs (its classifiers)."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparring.core.part import Part
from sparring.core.types import Bag, LossOutput, Outcome, Step
from sparring.kernels import logits
from sparring.losses.pairwise import weighed

Reduction = Literal["mean", "sum"]


class OnlineHard(Part):
    """Hinge loss against the k hardest candidates of each query, harder ones weighted more (loss of NGAME and DEXA).

        n_i1 .. n_ik = the k largest q_i . e_j,   h_ij = max(0, n_ij - q_i . v_i + margin)
        loss_i = sum_j p_ij h_ij  ("sum"),  or that over k  ("mean")
        p_i = softmax of n_ij / tau over the j with h_ij > 0

    For cosine scores; tau is the step's. A weight of 0 drops a candidate; other weights are ignored. The gradient also
    flows through p, as in the release, unless constant_weights. The release uses "mean", its successors "sum", which is
    k times as large; AdamW notices only through its eps. With `least`, the margin of a pair is the constant |q_i . v_i
    - n_ij|, clamped to [least, margin]. With both_ways, the loss of the row's item against the queries of the batch
    that do not have it is added (both as in PRIME). Each epoch reports `violators`: how many of the k violate the
    margin, per row.

        Term(1.0, InBatch(exclude="known"), OnlineHard(k=10, margin=0.3))

    Dahiya et al., NGAME: Negative Mining-aware Mini-batching for Extreme Classification, WSDM 2023; weights as in the
    code of DEXA.
    """

    violators: Tensor
    rows: Tensor

    def __init__(
        self,
        k: int = 10,
        margin: float = 0.3,
        reduction: Reduction = "sum",
        least: float | None = None,
        constant_weights: bool = False,
        both_ways: bool = False,
    ):
        super().__init__()
        if k < 1 or not margin > 0:
            raise ValueError(f"the hinge loss needs k >= 1 and margin > 0, got {k} and {margin}")
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction must be one of mean, sum; got {reduction!r}")
        if least is not None and not 0 <= least <= margin:
            raise ValueError(f"least must be between 0 and margin={margin}, got {least}")
        self.k, self.margin, self.reduction, self.least = k, margin, reduction, least
        self.constant_weights, self.both_ways = constant_weights, both_ways
        self.register_buffer("violators", torch.zeros((), dtype=torch.float64))
        self.register_buffer("rows", torch.zeros((), dtype=torch.float64))

    def forward(self, step: Step, bag: Bag) -> Tensor:
        return self.detailed(step, bag).losses

    def detailed(self, step: Step, bag: Bag) -> LossOutput:
        """The losses, and the number of violators of the margin as a note to observe()."""
        positive = (step.q * step.v).sum(-1, keepdim=True)
        scores = masked_scores(step.q, bag)
        loss, violates = self._hinge(scores, positive, step.tau)
        notes: dict[nn.Module, Tensor] = {self: violates.sum().detach()}
        if not self.both_ways:
            return LossOutput(loss, notes=notes)
        if bag.blocks[0].ids is not step.batch.item_ids:
            raise ValueError("both_ways needs the positives of the batch as first candidates: use InBatch")
        square = step.batch.gather(scores[:, : len(step.batch)])  # this rank's items against the queries of all ranks
        loss = loss + self._hinge(step.batch.own(square.T), positive, step.tau)[0]
        return LossOutput(loss, notes=notes)

    def _hinge(self, scores: Tensor, positive: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of each row of scores (B, C), -inf for dropped ones, and its violators of the margin (B, K)."""
        hardest = scores.topk(min(self.k, scores.shape[1]), dim=1).values
        margin: float | Tensor = self.margin
        if self.least is not None:
            margin = (positive - hardest).detach().abs().clamp(self.least, self.margin)
        hinge = F.relu(hardest - positive + margin)
        violates = hinge > 0
        weights = masked_softmax(hardest / tau.reshape(-1, 1), violates)
        loss = ((weights.detach() if self.constant_weights else weights) * hinge).sum(1)
        return loss / hinge.shape[1] if self.reduction == "mean" else loss, violates

    def observe(self, step: Step, outcome: Outcome) -> None:
        for violators in (output.notes[self] for output in outcome.outputs if self in output.notes):
            self.violators += step.batch.sum(violators)
            self.rows += len(step.batch)

    def report(self) -> dict[str, float]:
        """Violators per row since the last report."""
        mean = float(self.violators / self.rows.clamp(min=1))
        self.violators.zero_()
        self.rows.zero_()
        return {"violators": round(mean, 4)}


class HardPairs(nn.Module):
    """Hinge loss of each query's hardest positives against its hardest negatives (the classifiers of NGAME).

        h_ipn = max(0, s_in - s_ip + margin)   for the lowest known positives p and the highest other items n
        loss_i = sum_pn w_ipn h_ipn / (positives * negatives),   w_i = softmax of the positive h_ipn

    The bag holds positives of many queries. Those that Step.positives lists for a query are its positives, and all
    others its negatives. A query with fewer positives has fewer pairs; missing pairs count 0 in the mean.

        Term(1.0, BatchPositives(), HardPairs(3, 5, margin=0.2))

    Dahiya et al., NGAME: Negative Mining-aware Mini-batching for Extreme Classification, WSDM 2023, module 4.
    """

    def __init__(self, positives: int = 3, negatives: int = 5, margin: float = 0.2):
        super().__init__()
        if positives < 1 or negatives < 1 or not margin > 0:
            raise ValueError(
                f"HardPairs needs positives, negatives >= 1 and margin > 0; got {positives}, {negatives}, {margin}"
            )
        self.positives, self.negatives, self.margin = positives, negatives, margin

    def forward(self, step: Step, bag: Bag) -> Tensor:
        if len(bag.blocks) != 1 or not bag.blocks[0].shared:
            raise ValueError("HardPairs needs one block of candidates that all queries share: use BatchPositives")
        block = bag.blocks[0]
        scores = logits(step.q, block.emb)
        known = torch.zeros_like(scores, dtype=torch.bool)
        known[step.known().hits(block.ids)] = True
        c = scores.shape[1]
        low = scores.masked_fill(~known, math.inf).topk(min(self.positives, c), dim=1, largest=False).values
        high = scores.masked_fill(known, -math.inf).topk(min(self.negatives, c), dim=1).values
        exists = torch.isfinite(low).unsqueeze(2) & torch.isfinite(high).unsqueeze(1)
        difference = high.nan_to_num(neginf=0.0).unsqueeze(1) - low.nan_to_num(posinf=0.0).unsqueeze(2)
        hinge = (F.relu(difference + self.margin) * exists).flatten(1)
        return (masked_softmax(hinge, hinge > 0) * hinge).sum(1) / (self.positives * self.negatives)


def masked_scores(q: Tensor, bag: Bag) -> Tensor:
    """(B, C): q_i . e_j of all candidates of the bag, -inf for dropped and excluded ones."""
    parts = [scores.masked_fill(torch.isneginf(log_w), -math.inf) for scores, log_w in weighed(q, bag)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def masked_softmax(x: Tensor, mask: Tensor) -> Tensor:
    """The softmax of each row over the masked-in places, 0 elsewhere; an empty row is 0."""
    x = torch.where(mask, x, torch.finfo(x.dtype).min)
    return torch.softmax(x, 1) * mask
