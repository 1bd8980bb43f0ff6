"""Measures of negatives on a model: gradient against the full softmax, sample size, hits, hardness."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sparring.core.errors import UserError
from sparring.core.types import Candidates, Outcome, Step
from sparring.data.interactions import Split
from sparring.data.synthetic_world import SyntheticWorld
from sparring.experiments.diagnose.profile import profile
from sparring.kernels.reference import logits
from sparring.models.towers import evaluating
from sparring.recipes.run import Run
from sparring.training.step import TrainingRows, sample_steps

BINS = 10
_SHARE = 8  # at most 1 / _SHARE of a batch are sampled pairs; each draw has other rows beside them


@dataclass(frozen=True)
class Gradient:
    """A sampler's gradient with respect to the query vectors against that of the full softmax, over all sampled pairs.

    With t the exact gradients, g_d those of draw d of R and m their mean, each stacked over the sampled pairs:

        bias = |m - t| / |t|,         noise = sqrt(E |g_d - m|^2) / |t|
        cosine = m . t / (|m| |t|),   length = m . t / |t|^2

    The variance of the mean of R draws is subtracted from |m - t|^2 and |m|^2. `error` is the jackknife standard error
    of the cosine over the pairs; `step_cosine` is the cosine of a single draw, as in a training step. The pull to the
    positive is common to all samplers and most of the length; `across` is the cosine without it, of the parts
    orthogonal to each pair's positive, to which only the negatives contribute.
    """

    cosine: float
    error: float
    step_cosine: float
    across: float
    bias: float
    noise: float
    length: float


@dataclass(frozen=True)
class DrawSummary:
    """The candidates of the sampled pairs, weighted by their draws; shares are of those that are items.

    candidates       unmasked candidates of a query, on average
    ess              (sum w)^2 / sum w^2 of w_ij = exp(q_i . e_j / tau + log_w_ij), the terms of the partition function,
                     on average: the number of candidates that carry the gradient
    own_positive     share of the query's own positive, before masking; in a batch, its own column is one
    other_positive   share of other known positives of the query, before masking
    unmasked         share of both among unmasked candidates
    false_negatives  share of items that the query would like and never took among unmasked candidates; None unless a
                     world has the truth
    hardness         shares of unmasked candidates by the rank of their score among the query's scores of the complete
                     catalogue, lowest tenth first
    dropped          share of offered candidates that a filter dropped (Unless); None without a filter
    """

    candidates: float
    ess: float
    own_positive: float
    other_positive: float
    unmasked: float
    false_negatives: float | None
    hardness: tuple[float, ...]
    dropped: float | None = None


@dataclass(frozen=True)
class Diagnosis:
    """One sampler on one model: its gradient, its draws, and the profile of its negatives (see profile.profile)."""

    sampler: str
    gradient: Gradient
    draws: DrawSummary
    profile: dict[str, float]
    recipe: str = "custom"


def diagnose(
    name: str,
    run: Run,
    split: Split,
    *,
    queries: int = 256,
    draws: int = 20,
    seed: int = 0,
    world: SyntheticWorld | None = None,
) -> Diagnosis:
    """Measure a run's negatives on a sample of training pairs, with its current towers and temperature.

    Each draw puts every sampled pair into a batch of the run's size with other rows, drawn as in training: at random,
    or from its cluster if the run composes its batches (NGAME). Runs with the same seed, batch size, kind of rows and
    kind of batches have the same batches. Caches and memories keep their content, so its randomness shows as bias, not
    as noise. The run is left unchanged. `world` has the true preferences.

        diagnose("own", run, split).gradient.cosine
    """
    if draws < 2:
        raise UserError(f"draws is {draws}: a variance needs at least 2")
    if queries < 1:
        raise UserError(f"queries is {queries}: sample at least 1 training pair")
    with evaluating(run.modules()):  # a run that was just trained would still apply dropout
        return _measured(name, run, split, queries, draws, seed, world)


def _measured(
    name: str, run: Run, split: Split, queries: int, draws: int, seed: int, world: SyntheticWorld | None
) -> Diagnosis:
    generator = torch.Generator().manual_seed(seed)
    training = TrainingRows(run, split.train)
    sampled = training.sample(queries, generator)
    target, edges = exact(run, split, sampled)
    if not float(target.norm()) > 0:
        raise UserError(
            "the gradient of the full softmax is 0: the model has nothing left to learn, or the catalogue has one item"
        )
    counts = _Counts(edges, world)
    device = target.device
    gradients = torch.zeros(draws, *target.shape, dtype=torch.float64, device=device)
    planned = list(_batches(training, run.setup.batches.batch_size, sampled, draws, generator))
    steps = sample_steps(run, split, seed=seed + 1, batches=(batch for _, _, batch in planned))
    for (draw, places, _), (losses, step, outcome) in zip(planned, steps, strict=True):
        gradients[draw, places] = _query_gradient(losses[: len(places)], step)[: len(places)]
        with torch.no_grad():
            counts.add(run, step, outcome, places.to(device))
    positive = run.model.item_vectors()[training.ids(sampled)[1].to(device)].double()
    return Diagnosis(name, compared(gradients, target, positive), counts.result(), profile(run, split), run.recipe)


@torch.no_grad()
def exact(run: Run, split: Split, rows: Tensor, block: int = 64) -> tuple[Tensor, Tensor]:
    """The gradient (Q, D) of the full softmax with respect to the query vector of each training pair, and the edges
    (Q, 9) of the tenths of each query's logits over the catalogue; float64.

        loss_i = -log softmax_j(q_i . e_j / tau_i)[+],   gradient = (sum_j p_ij e_j - e_+) / tau_i

    The positive is counted once.
    """
    vectors = run.model.item_vectors().double()
    n = len(vectors)
    training = TrainingRows(run, split.train, vectors.device)
    queries, items = training.queries.long(), training.items.long()
    # midway between the scores on both sides: a score computed in another order falls on the same side
    below = torch.tensor([-(-k * n // BINS) for k in range(1, BINS)], device=vectors.device)
    gradients, edges = [], []
    for pairs in rows.to(vectors.device).split(block):
        q = run.model.encode_queries(queries[pairs], training.before(pairs)).double()
        tau = run.temperature(queries[pairs]).double().unsqueeze(-1)
        scores = (q / tau) @ vectors.T
        gradients.append((scores.softmax(-1) @ vectors - vectors[items[pairs]]) / tau)
        ordered = torch.nn.functional.pad(scores.sort(-1).values, (0, 1), value=math.inf)
        edges.append((ordered[:, below - 1] + ordered[:, below]) / 2)
    return torch.cat(gradients), torch.cat(edges)


def _query_gradient(losses: Tensor, step: Step) -> Tensor:
    """d loss_i / d q_i, every other vector held fixed."""
    if not losses.requires_grad:  # every candidate is masked
        return torch.zeros_like(step.q, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(losses.sum(), step.q, allow_unused=True)
    return torch.zeros_like(step.q).double() if gradient is None else gradient.double()


def compared(gradients: Tensor, target: Tensor, positive: Tensor) -> Gradient:
    """Gradients of R draws (R, Q, D) against the exact ones (Q, D); `positive` (Q, D) are the positives' vectors."""
    variance = gradients.var(0).sum(-1)
    dot, norm, exact_norm = _products(gradients, target)
    squared_error = (gradients.mean(0) - target).square().sum(-1) - variance / len(gradients)
    total = exact_norm.sum()
    step_cosines = (gradients * target).sum((1, 2)) / (gradients.square().sum((1, 2)) * total).sqrt().clamp(min=1e-300)
    direction = torch.nn.functional.normalize(positive, dim=-1)
    parts = (g - (g * direction).sum(-1, keepdim=True) * direction for g in (gradients, target))
    return Gradient(
        cosine=float(_cosine(dot.sum(), norm.sum(), total)),
        error=_jackknife(dot, norm, exact_norm),
        step_cosine=float(step_cosines.mean()),
        across=float(_cosine(*(product.sum() for product in _products(*parts)))),
        bias=float((squared_error.sum().clamp(min=0) / total).sqrt()),
        noise=float((variance.sum() / total).sqrt()),
        length=float(dot.sum() / total),
    )


def _products(gradients: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """m . t, |m|^2 without the variance of the mean, and |t|^2, each (Q,)."""
    mean, noise = gradients.mean(0), gradients.var(0).sum(-1) / len(gradients)
    norm = mean.square().sum(-1) - noise
    if not float(norm.sum()) > 0:  # pure noise
        norm = norm + noise
    return (mean * target).sum(-1), norm, target.square().sum(-1)


def _cosine(dot: Tensor, norm: Tensor, other: Tensor) -> Tensor:
    return (dot / (norm * other).clamp(min=1e-300).sqrt()).clamp(-1, 1)


def _jackknife(dot: Tensor, norm: Tensor, other: Tensor) -> float:
    without = _cosine(dot.sum() - dot, norm.sum() - norm, other.sum() - other)
    return float(((without - without.mean()).square().mean() * (len(dot) - 1)).sqrt())


class _Counts:
    """Running sums over the draws for a DrawSummary."""

    def __init__(self, edges: Tensor, world: SyntheticWorld | None):
        self.edges, self.world = edges, world
        self.sums: dict[str, float] = defaultdict(float)
        self.bins = torch.zeros(BINS, dtype=torch.float64, device=edges.device)

    def add(self, run: Run, step: Step, outcome: Outcome, places: Tensor) -> None:
        """Add a step: its first rows are the sampled pairs at `places`."""
        c = len(places)
        shares, sums = [], self.sums
        for term, bag in zip(run.terms, outcome.bags, strict=True):
            terms = []
            for filtered in (block.provenance.filtered for block in bag.blocks):
                if filtered is not None:
                    sums["dropped"] += float(filtered.dropped)
                    sums["offered"] += float(filtered.offered)
            for block in bag.plain().blocks:
                ids, scores, weight, drawn, counted = block_terms(step, block, c)
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

    def result(self) -> DrawSummary:
        sums, real, counted = self.sums, max(self.sums["real"], 1e-300), max(self.sums["counted"], 1e-300)
        return DrawSummary(
            candidates=sums["candidates"] / sums["rows"],
            ess=sums["ess"] / sums["rows"],
            own_positive=sums["own"] / real,
            other_positive=sums["other"] / real,
            unmasked=sums["unmasked"] / counted,
            false_negatives=None if self.world is None else sums["false"] / counted,
            dropped=sums["dropped"] / sums["offered"] if sums["offered"] else None,
            hardness=tuple((self.bins / self.bins.sum().clamp(min=1e-300)).tolist()),
        )


def block_terms(step: Step, block: Candidates, c: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """For the first c queries, each (c, C): ids, logits, weighted logits, draws, and draws that are not masked."""
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
    # the draws of a shared bag are known in sum only; the counts of a query are its weights
    drawn = log_w.exp() if block.drawn is not None else (~torch.isneginf(log_w)).double()
    return ids, scores, weighed, drawn, drawn.masked_fill(masked, 0.0)


def _batches(
    training: TrainingRows, size: int, sampled: Tensor, draws: int, generator: torch.Generator
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(draw, places of sampled pairs, the batch with these first): each draw has every sampled pair once."""
    most = max(1, min(size // max(_SHARE, training.batches.largest_group), -(-len(sampled) // 2)))
    for draw in range(draws):
        for places in torch.randperm(len(sampled), generator=generator).split(most):
            yield draw, places, training.around(sampled[places], size, generator)
