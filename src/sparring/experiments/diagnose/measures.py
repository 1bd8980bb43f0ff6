"""How well a run's negatives stand for the whole catalogue: gradients against the full softmax, effective sample size, hits, hardness."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sparring.core.errors import UserError
from sparring.core.types import Candidates, Outcome, Step
from sparring.data.interactions import Split
from sparring.data.synthetic import SyntheticWorld
from sparring.experiments.diagnose.profile import profile
from sparring.kernels.reference import logits
from sparring.models.towers import evaluating
from sparring.recipes.run import Run
from sparring.training.step import contrast

BINS = 10
_SHARE = 8  # at most 1 / _SHARE of a batch are sampled pairs: the others are drawn anew for each draw


@dataclass(frozen=True)
class Gradient:
    """What a sampler's gradient with respect to the query vectors is, against that of the full softmax, over all sampled pairs together.

    With t the exact gradients, g_d those of draw d of R and m their mean, each stacked over the sampled pairs:

        bias = |m - t| / |t|,   noise = sqrt(E |g_d - m|^2) / |t|,   cosine = m . t / (|m| |t|),   length = m . t / |t|^2

    What R draws leave of the noise in |m - t|^2 and |m|^2, the variance over R, is taken out. `error` is the jackknife standard error of
    the cosine over the pairs; `step_cosine` is the cosine of one draw, which a training step sees. The pull to the positive is common to
    all and most of the length; `across` is the cosine without it, of the parts at right angles to each pair's positive, which the
    negatives alone make.
    """

    cosine: float
    error: float
    step_cosine: float
    across: float
    bias: float
    noise: float
    length: float


@dataclass(frozen=True)
class Drawn:
    """What was drawn for the sampled pairs, each place counted as often as it was drawn; shares are of the places that hold an item.

    candidates       that count against a query, in the mean
    ess              (sum w)^2 / sum w^2 of w_ij = exp(q_i . e_j / tau + log_w_ij), the terms of the partition function, in the mean: how
                     many candidates carry the gradient
    own_positive     share that is the query's own positive, before any is masked; in a batch its own column is one
    other_positive   share that is another known positive of the query, before any is masked
    unmasked         share of what counts that is the query's own or another known positive
    false_negatives  share of what counts that the query would like and never took; None unless a world tells
    hardness         share of what counts by the rank of its score among the query's scores of the whole catalogue, lowest tenth first
    """

    candidates: float
    ess: float
    own_positive: float
    other_positive: float
    unmasked: float
    false_negatives: float | None
    hardness: tuple[float, ...]


@dataclass(frozen=True)
class Diagnosis:
    """One sampler on one model: its gradient, its draws, and the profile of what it draws (see draws.profile)."""

    sampler: str
    gradient: Gradient
    drawn: Drawn
    profile: dict[str, float]
    recipe: str = "custom"


def diagnose(
    name: str, run: Run, split: Split, *, queries: int = 256, draws: int = 20, seed: int = 0, world: SyntheticWorld | None = None
) -> Diagnosis:
    """Measure a run's negatives on some training pairs, with the towers and the temperature as they are; the run is left as it was found.

    Each draw puts every sampled pair into a batch of the run's size, the rest of which is drawn anew from the training pairs. Two runs
    with the same seed and batch size meet the same batches. What negatives remember (a cache, a memory) stays as it is, so that the chance
    in it shows as bias, not as noise. `world` tells the truth that the data was made from.

        diagnose("own", run, split).gradient.cosine
    """
    if draws < 2:
        raise UserError(f"draws is {draws}: a variance needs at least 2")
    if queries < 1:
        raise UserError(f"queries is {queries}: sample at least 1 training pair")
    with evaluating(run.modules()):  # a run that has just been trained would still drop some of its dimensions
        return _measured(name, run, split, queries, draws, seed, world)


def _measured(name: str, run: Run, split: Split, queries: int, draws: int, seed: int, world: SyntheticWorld | None) -> Diagnosis:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(split.train), generator=generator)[:queries]
    target, edges = exact(run, split, rows)
    if not float(target.norm()) > 0:
        raise UserError(
            "the gradient of the full softmax is 0: this model has nothing left to learn, or the catalogue holds one item"
        )
    counts = _Counts(edges, world)
    device = target.device
    found = torch.zeros(draws, *target.shape, dtype=torch.float64, device=device)
    own = torch.Generator(device).manual_seed(seed + 1)
    pairs, positives = _pairs(split, device), split.train.positives().to(device)
    for draw, places, batch in _batches(len(split.train), run.setup.batches.batch_size, rows, draws, generator):
        at = batch.to(device)
        losses, step, outcome = contrast(run, pairs[0][at], pairs[1][at], own, positives)
        found[draw, places] = _query_gradient(losses[: len(places)], step)[: len(places)]
        with torch.no_grad():
            counts.add(run, step, outcome, places.to(device))
    positive = run.model.item_vectors()[pairs[1][rows.to(device)]].double()
    return Diagnosis(name, compared(found, target, positive), counts.result(), profile(run, split), run.recipe)


@torch.no_grad()
def exact(run: Run, split: Split, rows: Tensor, block: int = 64) -> tuple[Tensor, Tensor]:
    """Of training pairs: the gradient (Q, D) of the full softmax with respect to the query vector, and the edges (Q, 9) of the tenths
    of each query's logits over the catalogue; float64.

        loss_i = -log softmax_j(q_i . e_j / tau_i)[+],   gradient = (sum_j p_ij e_j - e_+) / tau_i,   the positive counted once
    """
    vectors = run.model.item_vectors().double()
    n = len(vectors)
    queries, items = _pairs(split, vectors.device)
    # an edge lies midway between the scores on its two sides, so that a score computed in another order falls on the same side
    below = torch.tensor([-(-k * n // BINS) for k in range(1, BINS)], device=vectors.device)
    gradients, edges = [], []
    for at in rows.to(vectors.device).split(block):
        q = run.model.encode_queries(queries[at], items[at]).double()
        tau = run.temperature(queries[at]).double().unsqueeze(-1)
        scores = (q / tau) @ vectors.T
        gradients.append((scores.softmax(-1) @ vectors - vectors[items[at]]) / tau)
        ordered = torch.nn.functional.pad(scores.sort(-1).values, (0, 1), value=math.inf)
        edges.append((ordered[:, below - 1] + ordered[:, below]) / 2)
    return torch.cat(gradients), torch.cat(edges)


def _query_gradient(losses: Tensor, step: Step) -> Tensor:
    """d loss_i / d q_i, every other vector held fixed."""
    if not losses.requires_grad:  # a bag in which nothing counts
        return torch.zeros_like(step.q, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(losses.sum(), step.q, allow_unused=True)
    return torch.zeros_like(step.q).double() if gradient is None else gradient.double()


def compared(found: Tensor, target: Tensor, positive: Tensor) -> Gradient:
    """Gradients of R draws (R, Q, D) against the exact ones (Q, D); `positive` (Q, D) are the vectors of the positives."""
    variance = found.var(0).sum(-1)
    dot, norm, exact_norm = _products(found, target)
    wrong = (found.mean(0) - target).square().sum(-1) - variance / len(found)
    size = exact_norm.sum()
    single = (found * target).sum((1, 2)) / (found.square().sum((1, 2)) * size).sqrt().clamp(min=1e-300)
    away = torch.nn.functional.normalize(positive, dim=-1)
    parts = (g - (g * away).sum(-1, keepdim=True) * away for g in (found, target))
    return Gradient(
        cosine=float(_cosine(dot.sum(), norm.sum(), size)),
        error=_jackknife(dot, norm, exact_norm),
        step_cosine=float(single.mean()),
        across=float(_cosine(*(each.sum() for each in _products(*parts)))),
        bias=float((wrong.sum().clamp(min=0) / size).sqrt()),
        noise=float((variance.sum() / size).sqrt()),
        length=float(dot.sum() / size),
    )


def _products(found: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """m . t, |m|^2 without the noise that is left in it, and |t|^2, each (Q,)."""
    mean, left = found.mean(0), found.var(0).sum(-1) / len(found)
    norm = mean.square().sum(-1) - left
    if not float(norm.sum()) > 0:  # nothing but noise
        norm = norm + left
    return (mean * target).sum(-1), norm, target.square().sum(-1)


def _cosine(dot: Tensor, norm: Tensor, other: Tensor) -> Tensor:
    return (dot / (norm * other).clamp(min=1e-300).sqrt()).clamp(-1, 1)


def _jackknife(dot: Tensor, norm: Tensor, other: Tensor) -> float:
    without = _cosine(dot.sum() - dot, norm.sum() - norm, other.sum() - other)
    return float(((without - without.mean()).square().mean() * (len(dot) - 1)).sqrt())


class _Counts:
    """Running sums over the draws of what Drawn tells."""

    def __init__(self, edges: Tensor, world: SyntheticWorld | None):
        self.edges, self.world = edges, world
        self.sums = dict.fromkeys(
            ("rows", "candidates", "ess", "real", "own", "other", "counted", "unmasked", "false"), 0.0
        )
        self.bins = torch.zeros(BINS, dtype=torch.float64, device=edges.device)

    def add(self, run: Run, step: Step, outcome: Outcome, places: Tensor) -> None:
        """The sampled pairs are the first rows of the batch; `places` are theirs among all sampled pairs."""
        c = len(places)
        shares, sums = [], self.sums
        for term, bag in zip(run.terms, outcome.bags, strict=True):
            terms = []
            for block in bag.plain().blocks:
                ids, scores, weight, drawn, counted = offered(step, block, c)
                terms.append(weight)
                self._hits(step, ids, drawn, counted)
                bin_of = torch.searchsorted(self.edges[places], scores, right=True)
                self.bins += torch.bincount(bin_of.flatten(), counted.flatten(), BINS)
            logit = torch.cat(terms, -1)
            sums["candidates"] += float((~torch.isneginf(logit)).sum())
            shares.append(term.weight * logit.softmax(-1).nan_to_num(nan=0.0))
        share = torch.cat(shares, -1)
        sums["ess"] += float((share.sum(-1).square() / share.square().sum(-1).clamp(min=1e-300)).sum())
        sums["rows"] += c

    def _hits(self, step: Step, ids: Tensor, drawn: Tensor, counted: Tensor) -> None:
        c = len(ids)
        own = ids == step.item_ids[:c].unsqueeze(1)
        assert step.positives is not None
        known = torch.zeros_like(own).index_put_(
            step.positives.of(step.query_ids[:c]).hits(ids), torch.tensor(True, device=own.device)
        )
        real = ids >= 0
        self.sums["real"] += float(drawn[real].sum())
        self.sums["own"] += float(drawn[own].sum())
        self.sums["other"] += float(drawn[known & ~own].sum())
        self.sums["counted"] += float(counted[real].sum())
        self.sums["unmasked"] += float(counted[known | own].sum())
        if self.world is not None:
            wrong = self.world.false_negatives(step.query_ids[:c].cpu(), ids.cpu())
            self.sums["false"] += float(counted.cpu()[wrong].sum())

    def result(self) -> Drawn:
        sums, real, counted = self.sums, max(self.sums["real"], 1e-300), max(self.sums["counted"], 1e-300)
        return Drawn(
            candidates=sums["candidates"] / sums["rows"],
            ess=sums["ess"] / sums["rows"],
            own_positive=sums["own"] / real,
            other_positive=sums["other"] / real,
            unmasked=sums["unmasked"] / counted,
            false_negatives=None if self.world is None else sums["false"] / counted,
            hardness=tuple((self.bins / self.bins.sum().clamp(min=1e-300)).tolist()),
        )


def offered(step: Step, block: Candidates, c: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of the first c queries, each (c, C): ids, logits, logits with their weights, how often drawn, and how often of that it counts."""
    shape = (len(step.q), block.ids.shape[-1])
    ids = block.ids.long().expand(shape)[:c]
    scores = logits(step.scaled[:c].double(), (block.emb if block.emb.dim() == 2 else block.emb[:c]).double())
    log_w = block.log_w.double().expand(shape)[:c]
    masked = torch.zeros_like(ids, dtype=torch.bool)
    if block.exclude is not None:
        row, column = block.exclude.hits(block.ids)
        masked[row[row < c], column[row < c]] = True
    weighed = (scores + log_w).masked_fill(masked, -math.inf)
    if block.draws is not None:
        drawn = block.draws * weighed.softmax(-1).nan_to_num(nan=0.0)
        return ids, scores, scores + drawn.log(), drawn, drawn
    # draws of a shared bag are known in sum only; each query's own counts are its weights
    drawn = log_w.exp() if block.drawn is not None else (~torch.isneginf(log_w)).double()
    return ids, scores, weighed, drawn, drawn.masked_fill(masked, 0.0)


def _batches(
    n: int, size: int, rows: Tensor, draws: int, generator: torch.Generator
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(draw, which of the sampled rows, the batch: those first): every draw meets each sampled row once, in new company."""
    most = max(1, min(size // _SHARE, -(-len(rows) // 2)))
    for draw in range(draws):
        for places in torch.randperm(len(rows), generator=generator).split(most):
            others = torch.randperm(n, generator=generator)[:size]
            others = others[~torch.isin(others, rows[places])][: max(size - len(places), 0)]
            yield draw, places, torch.cat([rows[places], others])


def _pairs(split: Split, device: torch.device) -> tuple[Tensor, Tensor]:
    queries, items = split.train.pairs()
    return queries.long().to(device), items.long().to(device)
