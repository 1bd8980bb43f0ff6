"""A custom run: every mistake immediately raises a one-line error that names the bad value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sparring.core.errors import UserError
from sparring.core.types import Bag, Candidates, Step
from sparring.data.interactions import Split
from sparring.losses import sampled_softmax
from sparring.negatives import AllItems, InBatch, Negatives, Popularity, Sampled, Uniform, Union
from sparring.recipes.run import Run, Term, compose
from sparring.recipes.setup import Setup
from sparring.training.fitting import fit
from support.settings import QUICK

SETUP = Setup.of(**QUICK)
IDS = torch.arange(5)


class Own(Negatives):
    def __init__(self, made: Callable[[Step], Any]):
        super().__init__()
        self.made = made

    def forward(self, step: Step) -> Bag:
        return self.made(step)  # type: ignore[no-any-return]


def one_line(error: pytest.ExceptionInfo[ValueError], *mentions: str) -> None:
    assert len(str(error.value).splitlines()) == 1
    for mention in mentions:
        assert mention in str(error.value)


@pytest.mark.parametrize(
    ("loss", "gave"),
    [
        (lambda step, bag: sampled_softmax(step, bag)[:3], "(3,)"),
        (lambda step, bag: sampled_softmax(step, bag).mean(), "()"),
        (lambda step, bag: step.q @ step.q.T, "(64, 64)"),
        (lambda step, bag: sampled_softmax(step, bag).unsqueeze(1), "(64, 1)"),
        (lambda step, bag: 0.5, "float"),
    ],
)
def test_a_loss_has_one_value_per_query(parts: Split, loss: Callable[[Step, Bag], Tensor], gave: str) -> None:
    """A loss of another shape raises an error; a mean would be broadcast and a matrix summed."""
    loss.__name__ = "my_loss"
    with pytest.raises(UserError) as error:
        fit(compose(parts.train, SETUP, Term(1.0, InBatch(), loss)), parts, k=(10,), device="cpu")
    one_line(error, "my_loss", gave, "(64,)")


@pytest.mark.parametrize(
    ("made", "mentions"),
    [
        (
            lambda step: Candidates(IDS, step.encode(IDS), torch.zeros(())),
            ["Own.forward", "Candidates", "Bag((candidates,))"],
        ),
        (lambda step: None, ["Own.forward", "NoneType"]),
        (lambda step: Bag(Candidates(IDS, step.encode(IDS), torch.zeros(()))), ["Bag.blocks", "tuple", "Candidates"]),
        (lambda step: Bag([Candidates(IDS, step.encode(IDS), torch.zeros(()))]), ["Bag.blocks", "tuple", "list"]),
        (lambda step: Bag((IDS,)), ["Bag.blocks", "Tensor"]),
        (lambda step: Bag((Candidates(IDS, step.encode(IDS), 0.0),)), ["log_w", "float"]),
        (lambda step: Bag((Candidates(IDS, step.encode(IDS), torch.zeros(4)),)), ["log_w", "C = 5", "(4,)"]),
        (lambda step: Bag((Candidates(IDS, step.encode(IDS[:4]), torch.zeros(())),)), ["(5,)", "(4, 8)"]),
        (lambda step: Bag((Candidates([1, 2], step.encode(IDS), torch.zeros(())),)), ["ids", "list"]),
    ],
)
def test_a_sampler_gives_a_bag(parts: Split, made: Callable[[Step], Any], mentions: list[str]) -> None:
    """An output that is not a bag, or a bag with tensors that do not fit, raises an error that names it."""
    with pytest.raises(ValueError, match=r".") as error:
        fit(compose(parts.train, SETUP, Term(1.0, Own(made))), parts, k=(10,), device="cpu")
    one_line(error, *mentions)


def test_every_shape_that_is_allowed(parts: Split) -> None:
    """Weights per bag, candidate, query or pair, and candidates shared or per query, all train."""

    def shared(shape: tuple[int, ...]) -> Own:
        return Own(
            lambda step: Bag(
                (Candidates(IDS, step.encode(IDS), torch.zeros([len(step.q) if n == -1 else n for n in shape])),)
            )
        )

    each = Own(
        lambda step: Bag(
            (Candidates(IDS.expand(len(step.q), 5), step.encode(IDS).expand(len(step.q), 5, 8), torch.zeros(5)),)
        )
    )
    for sampler in (shared(()), shared((5,)), shared((1, 5)), shared((-1, 1)), shared((-1, 5)), each):
        assert fit(compose(parts.train, SETUP, Term(1, sampler)), parts, k=(10,), device="cpu").history[0]["loss"] > 0


def test_a_run_is_made_of_terms(parts: Split) -> None:
    """No terms, a sampler without a Term, a Term with wrong parts, and a Split as data raise errors."""
    pop = Popularity(torch.from_numpy(parts.train.counts()))
    cases: list[tuple[Callable[[], object], list[str]]] = [
        (lambda: compose(parts.train, SETUP), ["at least one Term"]),
        (lambda: compose(parts.train, SETUP, InBatch(pop)), ["InBatch", "Term(1.0, negatives)"]),  # type: ignore[arg-type]
        (lambda: compose(parts, SETUP, Term(1.0, InBatch())), ["split.train", "Split"]),  # type: ignore[arg-type]
        (lambda: compose(parts.train, {"dim": 8}, Term(1.0, InBatch())), ["Setup", "dict"]),  # type: ignore[arg-type]
        (lambda: Term(InBatch(), 1.0), ["weight", "InBatch"]),  # type: ignore[arg-type]
        (lambda: Term(1.0, pop), ["negatives", "Popularity"]),  # type: ignore[arg-type]
        (lambda: Term(1.0, InBatch(), "hinge"), ["loss", "'hinge'"]),  # type: ignore[arg-type]
        (lambda: fit(parts, parts), ["Run", "Split"]),  # type: ignore[arg-type]
        (
            lambda: fit(compose(parts.train, SETUP, Term(1.0, InBatch())), parts.train),
            ["Split", "Interactions", "split(data)"],
        ),  # type: ignore[arg-type]
    ]
    for make, mentions in cases:
        with pytest.raises(UserError) as error:
            make()
        one_line(error, *mentions)


@pytest.mark.parametrize(
    "negatives",
    [
        lambda: Sampled(Uniform(90), 8),
        lambda: AllItems(90),
        lambda: Union(InBatch(), Sampled(Popularity(torch.ones(90)), 8)),
    ],
)
def test_negatives_are_of_the_catalogue(parts: Split, negatives: Callable[[], Negatives]) -> None:
    """A source with more items than the catalogue raises an error with both sizes; a source with fewer is allowed."""
    with pytest.raises(UserError) as error:
        compose(parts.train, SETUP, Term(1.0, negatives()))
    one_line(error, "90", "40")
    assert isinstance(compose(parts.train, SETUP, Term(1.0, Sampled(Uniform(30), 8))), Run)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", -1),
        ("epochs", 0),
        ("epochs", 2.5),
        ("optimizer", "sgd"),
        ("dim", "16"),
        ("tau", -1.0),
        ("clip", "none"),
        ("seed", None),
    ],
)
def test_a_setup_is_checked(parts: Split, name: str, value: object) -> None:
    """`compose` rejects Setup values of the wrong type or out of range, like the command line."""
    with pytest.raises(UserError) as error:
        compose(parts.train, SETUP.replaced(**{name: value}), Term(1.0, InBatch()))
    one_line(error, name, repr(value) if isinstance(value, str) else str(value))
