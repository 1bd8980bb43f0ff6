"""Distil: the divergence and the margins of a teacher, against loops over named candidates."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sparring.core.types import Step
from sparring.data.interactions import Split
from sparring.losses import Distil, sampled_softmax
from sparring.negatives import (
    InBatch,
    Negatives,
    OwnScores,
    Popularity,
    Sampled,
    TableScores,
    Uniform,
    Union,
    Unless,
    VectorScores,
)
from sparring.recipes.run import Term, compose
from sparring.recipes.setup import Setup
from sparring.testing import World, weights
from sparring.training.fitting import fit

WORLD = World.build()
SCALE = 1.7


def teacher_scores(seed: int = 3) -> Tensor:
    """(Q, N), nan for a seventh of the pairs."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(len(WORLD.queries), WORLD.n_items, generator=generator)
    return scores.masked_fill(torch.rand(scores.shape, generator=generator) < 1 / 7, math.nan)


def table() -> TableScores:
    scores = teacher_scores()
    query, item = torch.nonzero(~scores.isnan()).unbind(1)
    return TableScores(query, item, scores[query, item])


def by_hand(step: Step, negatives: Negatives, form: str) -> list[float]:
    """The loss of each row by a loop over its candidates."""
    bag, scores, tau = negatives(step), teacher_scores().double(), float(step.tau)
    losses = []
    for i in range(len(step.q)):
        taught = scores[int(step.query_ids[i])]
        q, positive = step.q[i].double(), int(step.item_ids[i])
        own = 0.0 if bag.log_w_positive is None else float(bag.log_w_positive[i])
        rows = [(positive, math.exp(own))]
        for block in bag.blocks:
            ids = block.ids.expand(len(step.q), -1)[i].tolist()
            rows += list(zip(ids, weights(block, step)[i].tolist(), strict=True))
        known = [(item, w) for item, w in rows if w > 0 and not math.isnan(float(taught[item]))]
        dot = {item: float(q.detach() @ WORLD.items[item].double()) for item, _ in rows}
        if form == "kl":
            t = [w * math.exp(SCALE * float(taught[item])) for item, w in known]
            p = [w * math.exp(dot[item] / tau) for item, w in known]
            losses.append(
                sum(a / sum(t) * math.log((a / sum(t)) / (b / sum(p))) for a, b in zip(t, p, strict=True))
                if known
                else 0.0
            )
        else:
            total = mass = 0.0
            for item, w in known[1:] if not math.isnan(float(taught[positive])) else []:
                wanted = SCALE * float(taught[positive] - taught[item])
                total += w * (dot[positive] - dot[item] - wanted) ** 2
                mass += w
            losses.append(total / mass if mass else 0.0)
    return losses


@pytest.mark.parametrize("form", ["kl", "margin_mse"])
@pytest.mark.parametrize("kind", ["in-batch", "mixed", "per query", "filtered", "textbook"])
def test_value_and_gradient(kind: str, form: str) -> None:
    """Values equal a loop over the weighted candidates that have a score; gradients equal finite differences."""
    pop = Popularity(WORLD.counts)
    sources: dict[str, Negatives] = {
        "in-batch": InBatch(exclude="known"),
        "mixed": Union(InBatch(pop), Sampled(Uniform(WORLD.n_items), 30)),
        "per query": Sampled(Uniform(WORLD.n_items), 12, per_query=True),
        "filtered": Unless(Sampled(Uniform(WORLD.n_items), 30), table(), margin=0.5),
        "textbook": InBatch(pop, "both"),
    }
    loss = Distil(table(), form, SCALE)  # type: ignore[arg-type]
    step = WORLD.step(12, 4)
    found = loss(step, sources[kind](WORLD.step(12, 4)))
    want = torch.tensor(by_hand(WORLD.step(12, 4), sources[kind], form))
    assert float(want.max()) > 0.01
    torch.testing.assert_close(found.double(), want.double(), rtol=1e-4, atol=1e-5)
    bag = sources[kind](WORLD.step(12, 4))
    wide = replace(
        bag, blocks=tuple(replace(b, emb=b.emb.detach().double(), log_w=b.log_w.double()) for b in bag.blocks)
    )
    exact = replace(step, q=step.q.detach().double().requires_grad_(), v=step.v.detach().double())
    (slope,) = torch.autograd.grad(loss(exact, wide).sum(), exact.q)
    moved = exact.q.detach().clone()
    for at in ((0, 0), (5, 2), (11, 3)):
        values = []
        for change in (1e-5, -1e-5):
            q = moved.clone()
            q[at] += change
            values.append(float(loss(replace(exact, q=q), wide).sum()))
        assert float(slope[at]) == pytest.approx((values[0] - values[1]) / 2e-5, abs=1e-4)


def test_a_model_that_agrees_with_its_teacher_has_no_loss() -> None:
    """With its own scores as teacher, at its own temperature, both losses are 0."""
    step = WORLD.step(12, 4)
    bag = Sampled(Uniform(WORLD.n_items), 30)(step)
    divergence = Distil(OwnScores(), "kl", 1 / WORLD.tau)(step, bag)
    torch.testing.assert_close(divergence, torch.zeros(12), atol=1e-6, rtol=0)
    torch.testing.assert_close(Distil(OwnScores(), "margin_mse")(step, bag), torch.zeros(12), atol=1e-6, rtol=0)


def test_as_a_term_it_brings_the_model_nearer_to_the_teacher(parts: Split) -> None:
    """Beside the softmax of a run, a term of it lowers the distance to the teacher's margins."""
    generator = torch.Generator().manual_seed(0)
    queries, items = (torch.randn(n, 4, generator=generator) / 2 for n in (parts.train.n_queries, parts.train.n_items))
    loss = Distil(VectorScores(queries, items), "margin_mse")
    setup = Setup.of(dim=8, epochs=8, batch_size=64, lr=0.05, score="dot", tau=1.0)
    negatives = Sampled(Uniform(parts.train.n_items), 20)
    distances = []
    for weight in (0.0, 1.0):
        run = compose(
            parts.train, setup, Term(1 - 0.9 * weight, negatives, sampled_softmax), Term(weight, negatives, loss)
        )
        fit(run, parts, k=(10,), device="cpu")
        with torch.no_grad():
            scores = run.model.encode_queries(torch.arange(len(queries))) @ run.model.item_vectors().T
            wanted = queries @ items.T
            centred = [each - each.mean(1, keepdim=True) for each in (scores, wanted)]
            distances.append(float((centred[0] - centred[1]).square().mean()))
    assert distances[1] < distances[0] / 2


def test_wrong_arguments() -> None:
    """An unknown form and a scale that is not positive are refused by name."""
    with pytest.raises(ValueError, match="form"):
        Distil(table(), "l2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="scale"):
        Distil(table(), scale=0.0)
