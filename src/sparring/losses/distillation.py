"""Losses that follow a teacher: Distil, a teacher's scores over the positive and the bag."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from sparring.core.part import Part
from sparring.core.types import Bag, Step
from sparring.losses.pairwise import weighed
from sparring.negatives.guides import Guide

DistilForm = Literal["kl", "margin_mse"]


class Distil(Part):
    """The distance of the model's scores to those of a teacher, over the positive and the candidates of the bag.

        kl           loss_i = sum_j t_ij (log t_ij - log p_ij) over the positive and the candidates j
                     t_i = softmax(scale g_ij + log_w_ij),   p_i = softmax(q_i . e_j / tau_i + log_w_ij)
        margin_mse   loss_i = sum_j w_ij ((q_i . v_i - q_i . e_j) - scale (g_i+ - g_ij))^2 / sum_j w_ij

    The teacher is a guide (negatives/guides.py): a cross-encoder, a fused ranking or any other scores as a table,
    vectors of another model. `scale` multiplies its scores g: 1 / temperature of the teacher in `kl`, the ratio of the
    two scales of scores in `margin_mse`, which compares plain inner products. A candidate without a score (nan) is
    left out; a row whose positive has none is left out of `margin_mse`, and compares its candidates alone in `kl`. No
    gradient flows to the teacher.

        Term(0.5, InBatch(exclude="known"), Distil(TableScores(queries, items, scores), "margin_mse"))

    Hinton et al., Distilling the Knowledge in a Neural Network, 2015 (kl); Hofstätter et al., Improving Efficient
    Neural Ranking Models with Cross-Architecture Knowledge Distillation, arXiv 2010.02666 (margin_mse).
    """

    def __init__(self, teacher: Guide, form: DistilForm = "kl", scale: float = 1.0):
        super().__init__()
        if form not in get_args(DistilForm):
            raise ValueError(f"form must be one of {', '.join(get_args(DistilForm))}; got {form!r}")
        if not scale > 0:
            raise ValueError(f"the scale of a teacher's scores must be positive, got {scale}")
        self.teacher, self.form, self.scale = teacher, form, scale

    def forward(self, step: Step, bag: Bag) -> Tensor:
        bag = bag.plain()
        with torch.no_grad():
            positive = self.scale * self.teacher(step, step.item_ids.unsqueeze(1), step.v.unsqueeze(1))
            taught = torch.cat([self.scale * self.teacher(step, each.ids, each.emb) for each in bag.blocks], 1)
        return (self._kl if self.form == "kl" else self._margins)(step, bag, positive, taught)

    def _kl(self, step: Step, bag: Bag, positive: Tensor, taught: Tensor) -> Tensor:
        scores, log_w = (torch.cat(parts, 1) for parts in zip(*weighed(step.scaled, bag), strict=True))
        own = torch.zeros_like(step.positive_logits) if bag.log_w_positive is None else bag.log_w_positive
        weight = torch.cat([own.unsqueeze(1), log_w], 1)
        teacher = torch.cat([positive, taught], 1).to(weight.dtype) + weight
        student = torch.cat([step.positive_logits.unsqueeze(1), scores], 1) + weight
        counts = torch.isfinite(teacher)
        low = torch.finfo(student.dtype).min
        log_t, log_p = (each.masked_fill(~counts, low).log_softmax(1) for each in (teacher, student))
        terms = log_t.exp() * (log_t - log_p)
        return torch.where(counts, terms, 0.0).sum(1)

    def _margins(self, step: Step, bag: Bag, positive: Tensor, taught: Tensor) -> Tensor:
        scores, log_w = (torch.cat(parts, 1) for parts in zip(*weighed(step.q, bag), strict=True))
        wanted = positive - taught
        known = torch.isfinite(wanted)
        margin = (step.q * step.v).sum(-1, keepdim=True) - scores
        squares = (margin - wanted.masked_fill(~known, 0.0)).square()
        weights = log_w.exp().masked_fill(~known, 0.0)
        return (weights * squares).sum(1) / weights.sum(1).clamp(min=torch.finfo(weights.dtype).tiny)
