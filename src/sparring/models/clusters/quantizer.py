"""The equations of MSAC: projections, alignment, two codebooks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparring.core.errors import UserError
from sparring.models.clusters.kmeans import nearest
from sparring.models.clusters.stream import ModalityBatch


@dataclass(frozen=True)
class MSACSettings:
    """Settings of MSAC; ROBUST is the default, LITERAL follows the paper's equations exactly.

    replace(ROBUST, k_primary=100, dim=64)
    """

    k_primary: int = 300
    k_secondary: int = 15
    dim: int = 512  # width of the projections: d_m
    normalize: bool = True  # unit projections of centred inputs; otherwise the squared error favours shrinking them
    temperature: float = 0.07  # of the alignment
    learn_temperature: bool = True
    symmetric: bool = True  # align in both directions, not only from the earlier modality to the later one
    align: float = 2.0  # weight of each pair of modalities: beta
    reduce: Literal["mean", "sum"] = "mean"  # squared error over a batch
    lr: float = 2e-4
    codebook_rate: float = 10.0  # learning rate of codewords, relative to lr
    decay: bool = True  # learning rates fall to 0 over the joint steps
    batch_size: int = 512
    warmup: int = 500  # steps of alignment alone, before k-means
    steps: int = 1500  # joint steps
    revive_every: int = 500  # joint steps between revivals of empty codewords; 0: never
    min_size: int = 5  # least items of a primary cluster, if codewords are revived: m_o
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("k_primary", "k_secondary", "dim", "batch_size", "min_size"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("warmup", "steps", "revive_every", "align"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least 0")
        for name in ("temperature", "lr", "codebook_rate"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name} is {getattr(self, name)}; it must be above 0")
        if self.k_secondary >= 2**15:
            raise UserError(f"k_secondary is {self.k_secondary}; it must be below 32768")
        if self.reduce not in ("mean", "sum"):
            raise UserError(f"reduce is {self.reduce!r}; it must be mean or sum")


ROBUST = MSACSettings()
LITERAL = replace(
    ROBUST,
    normalize=False,
    temperature=1.0,
    learn_temperature=False,
    symmetric=False,
    reduce="sum",
    codebook_rate=1.0,
    decay=False,
    warmup=0,
    revive_every=0,
)
PRESETS = {"robust": ROBUST, "literal": LITERAL}


@dataclass(frozen=True)
class Parts:
    """Loss terms of a batch: alignment of each pair, squared errors and codes of each item, primary vectors."""

    align: Tensor  # (pairs,)
    primary_error: Tensor  # (B,)
    secondary_error: Tensor  # (B,)
    primary: Tensor  # (B,)
    vectors: Tensor  # (B, dim)
    norm: Tensor  # mean length of the projections


class Quantizer(nn.Module):
    """Linear projections of some modalities, and two codebooks for them (the equations of MSAC).

        M_x = H_x(x);   R_p = mean_x M_x;   C_p = argmin_k |R_p - z_p^k|
        R_s = [M_x - z_p^C_p for each x];   C_s = argmin_k |R_s - z_s^k|
        loss = align * sum over pairs (x, y) of -log softmax_j(cos(M_x^i, M_y^j) / tau)_i
               + |R_p - z_p^C_p|^2 + |R_s - z_s^C_s|^2

    R_p is the mean over the modalities that an item has. The residual of a missing modality is zero, and the item is
    left out of its alignment. A single modality is not aligned. No gradient is stopped: projections follow codewords
    and vice versa.

    Xing et al., ESANS, WWW 2025, equations 3 to 8.
    """

    alive: Tensor
    centre: Tensor
    scale: Tensor
    log_tau: Tensor

    def __init__(self, widths: Mapping[str, int], settings: MSACSettings = ROBUST) -> None:
        super().__init__()
        if not widths:
            raise UserError("there are no modalities: name at least one")
        self.names, self.widths, self.settings = tuple(widths), dict(widths), settings
        generator = torch.Generator().manual_seed(settings.seed)
        s, d = len(self.names), settings.dim
        self.project = nn.ModuleList(nn.Linear(width, d) for width in widths.values())
        for linear, width in zip(self.project, widths.values(), strict=True):
            nn.init.uniform_(linear.weight, -(width**-0.5), width**-0.5, generator=generator)  # type: ignore[arg-type]
            nn.init.zeros_(linear.bias)  # type: ignore[arg-type]
        self.register_buffer("centre", torch.zeros(sum(widths.values())))  # of all modalities' inputs, concatenated
        self.register_buffer("scale", torch.ones(s))  # factor of the centred inputs
        self.log_tau = nn.Parameter(
            torch.tensor(math.log(settings.temperature)), requires_grad=settings.learn_temperature
        )
        self.primary = nn.Parameter(torch.zeros(settings.k_primary, d))
        self.secondary = nn.Parameter(torch.zeros(settings.k_secondary, s * d))
        self.register_buffer("alive", torch.ones(settings.k_primary, dtype=torch.bool))  # codewords that take items

    @property
    def tau(self) -> Tensor:
        return self.log_tau.exp().clamp(min=0.01) if self.settings.learn_temperature else self.log_tau.exp()

    def projections(self, batch: ModalityBatch) -> Tensor:
        """(modalities, B, dim): M of equation 3, zero where missing."""
        if not self.settings.normalize:
            each = [linear(rows) for linear, rows in zip(self.project, batch.rows, strict=True)]
        else:
            inputs = zip(
                self.project, batch.rows, self.centre.split(tuple(self.widths.values())), self.scale, strict=True
            )
            each = [F.normalize(_linear(linear, rows, centre, scale), dim=1) for linear, rows, centre, scale in inputs]
        projected = torch.stack(each)
        return projected if batch.complete else projected * batch.present.unsqueeze(2)

    def primary_vectors(self, projected: Tensor, batch: ModalityBatch) -> Tensor:
        """(B, dim): R_p of equation 5."""
        return (
            projected.mean(0) if batch.complete else projected.sum(0) / batch.present.sum(0).clamp(min=1).unsqueeze(1)
        )

    def residuals(self, projected: Tensor, batch: ModalityBatch, words: Tensor) -> Tensor:
        """(B, modalities * dim): R_s of equation 6, from the primary codeword (B, dim) of each item."""
        left = projected - words
        return (left if batch.complete else left * batch.present.unsqueeze(2)).transpose(0, 1).flatten(1)

    def primary_codes(self, vectors: Tensor) -> Tensor:
        """(B,): C_p of equation 5, among the codewords that are alive."""
        return nearest(vectors.detach(), self.primary.detach(), self.alive)

    def secondary_codes(self, residuals: Tensor) -> Tensor:
        """(B,): C_s of equation 6."""
        return nearest(residuals.detach(), self.secondary.detach())

    def alignment(self, projected: Tensor, batch: ModalityBatch) -> Tensor:
        """(pairs,): equation 4 of every pair of modalities, over the items that have both."""
        unit = projected if self.settings.normalize else F.normalize(projected, dim=2)
        pairs = []
        for x, y in self.pairs:
            both = None if batch.complete else batch.present[x] & batch.present[y]
            pairs.append(_contrast(unit[x] / self.tau, unit[y], both, self.settings.symmetric))
        return torch.stack(pairs) if pairs else projected.new_zeros(0)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return list(combinations(range(len(self.names)), 2))

    def parts(self, batch: ModalityBatch, quantise: bool = True) -> Parts:
        """All terms of the loss."""
        projected = self.projections(batch)
        vectors = self.primary_vectors(projected, batch)
        align = self.alignment(projected, batch)
        norm = projected.detach().norm(dim=2).sum() / batch.present.sum().clamp(min=1)
        if not quantise:
            nothing = vectors.new_zeros(len(vectors))
            return Parts(align, nothing, nothing, nothing.long(), vectors, norm)
        primary = self.primary_codes(vectors)
        words = self.primary[primary]
        residuals = self.residuals(projected, batch, words)
        first = (vectors - words).square().sum(1)
        second = (residuals - self.secondary[self.secondary_codes(residuals)]).square().sum(1)
        return Parts(align, first, second, primary, vectors, norm)

    def loss(self, parts: Parts) -> Tensor:
        """Equation 8; the squared errors of equation 7 as a mean over the batch, or as their sum (literal)."""
        errors = parts.primary_error + parts.secondary_error
        return self.settings.align * parts.align.sum() + (
            errors.mean() if self.settings.reduce == "mean" else errors.sum()
        )


def _linear(linear: nn.Module, rows: Tensor, centre: Tensor, scale: Tensor) -> Tensor:
    """H((x - centre) * scale), folded into the weights, which are fewer than the rows."""
    assert isinstance(linear, nn.Linear)
    weight = linear.weight * scale
    return F.linear(rows, weight, linear.bias - weight @ centre)


def _contrast(x: Tensor, y: Tensor, both: Tensor | None, symmetric: bool) -> Tensor:
    """Mean over items (those in `both`) of -log softmax_j(x_i . y_j) at j = i; 0 if there are none."""
    logits = x @ y.T
    own = logits.diagonal()
    if both is None:
        loss = (logits.logsumexp(1) - own).mean()
        return (loss + (logits.logsumexp(0) - own).mean()) / 2 if symmetric else loss
    logits = logits.masked_fill(~(both.unsqueeze(1) & both), -1e9)  # not -inf: empty rows would be NaN
    n = both.sum().clamp(min=1)
    loss = torch.where(both, logits.logsumexp(1) - own, 0).sum() / n
    return (loss + torch.where(both, logits.logsumexp(0) - own, 0).sum() / n) / 2 if symmetric else loss
