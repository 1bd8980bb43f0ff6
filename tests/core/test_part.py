"""The declared interface between a run and its modules: events, properties, and known positives on demand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sparring.core.part import Part, innermost, listeners
from sparring.core.types import Bag, Candidates, Corpus, Outcome, Positives, Step
from sparring.data.interactions import Split
from sparring.losses import Fixed, sampled_softmax
from sparring.negatives import InBatch, Negatives, Streaming
from sparring.recipes.run import Setup, Term, compose
from sparring.training.fitting import fit
from support.settings import quick

QUICK = Setup.of(**quick(epochs=2))


class ReadsPositives(Negatives):
    """A sampler that knows the library only by Step: it has no attribute `exclude` and declares nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[tuple[Tensor, Tensor]] = []

    def forward(self, step: Step) -> Bag:
        assert step.positives is not None
        known = step.positives.of(step.query_ids)
        self.read.append((step.query_ids[known.rows], known.ids))
        return Bag((Candidates(step.item_ids, step.v, torch.zeros(()), known),))


class PlainLoss(nn.Module):
    """A loss without the base class, which takes part in all three events by defining them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def forward(self, step: Step, bag: Bag) -> Tensor:
        return sampled_softmax(step, bag)

    def observe(self, step: Step, outcome: Outcome) -> None:
        self.calls.append("observe")

    def refresh(self, corpus: Corpus) -> None:
        self.calls.append(f"refresh {corpus.epoch}")

    def report(self) -> dict[str, float]:
        return {"calls": len(self.calls)}


def test_every_sampler_gets_the_known_positives(parts: Split) -> None:
    """A sampler that declares nothing gets step.positives: exactly the training pairs of its queries."""
    sampler = ReadsPositives()
    fit(compose(parts.train, QUICK, Term(1.0, sampler)), parts, k=(10,), device="cpu")
    taken: dict[int, set[int]] = {}
    for query, item in zip(parts.train.queries.tolist(), parts.train.items.tolist(), strict=True):
        taken.setdefault(query, set()).add(item)
    queries, items = (torch.cat(column).tolist() for column in zip(*sampler.read, strict=True))
    assert {(q, i) for q, i in zip(queries, items, strict=True)} == {(q, i) for q, own in taken.items() for i in own}


def test_positives_nobody_reads_are_never_built() -> None:
    """Lazy positives call their builder once, when an array is first read, and not before."""
    built: list[int] = []

    def make() -> Positives:
        built.append(1)
        return Positives(torch.tensor([0, 2]), torch.tensor([3, 5]))

    positives = Positives.lazy(make)
    exclude = positives.of(torch.tensor([0]))
    assert built == []
    assert [column.tolist() for column in exclude.hits(torch.tensor([5, 4, 3]))] == [[0, 0], [0, 2]]
    assert positives.to(torch.device("cpu")) is positives
    assert built == [1]
    with pytest.raises(AttributeError):
        positives.other  # noqa: B018


def test_a_plain_module_takes_part_by_its_methods(parts: Split) -> None:
    """A loss that is a plain nn.Module observes every step, refreshes before every epoch and reports after it."""
    loss = PlainLoss()
    fitted = fit(compose(parts.train, QUICK, Term(1.0, InBatch(), loss)), parts, k=(10,), device="cpu")
    steps = -(-len(parts.train) // QUICK.batches.batch_size)
    assert loss.calls == ["refresh 0", *["observe"] * steps, "refresh 1", *["observe"] * steps]
    assert [record["calls"] for record in fitted.history] == [1 + steps, 2 + 2 * steps]


def test_defaults_are_not_listeners() -> None:
    """An event reaches the modules that define it, and no module that only inherits the default."""
    root = nn.ModuleList([InBatch(Streaming((7,))), Fixed(), nn.Linear(2, 2), Part(), PlainLoss()])
    assert [type(part) for part in listeners(root, "observe")] == [Streaming, PlainLoss]
    assert [type(part) for part in listeners(root, "refresh")] == [PlainLoss]
    assert [type(part) for part in listeners(root, "report")] == [PlainLoss]


def test_innermost() -> None:
    """innermost unwraps every tower that names the one it wraps."""

    class Wrap(Part):
        def __init__(self, tower: nn.Module):
            super().__init__()
            self.tower = tower

        def inner(self) -> nn.Module:
            return self.tower

    table = nn.Embedding(3, 2)
    assert innermost(Wrap(Wrap(table))) is table
    assert innermost(table) is table
