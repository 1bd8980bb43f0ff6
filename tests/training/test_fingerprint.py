"""The canonical description of a run's terms that resume compares."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sparring.core.types import Bag, Step
from sparring.data.interactions import Split
from sparring.losses import bpr, hinge
from sparring.negatives import InBatch, Negatives, Popularity, Resample, Sampled, Uniform, Union
from sparring.recipes import RECIPES
from sparring.recipes.settings import build, known
from sparring.training.fingerprint import described, method
from sparring.training.fitting import fit

POP = Popularity(torch.arange(1, 41))


class Own(Negatives):
    """A custom sampler: arguments as attributes, state in a buffer, and another attribute that changes."""

    def __init__(self, n: int, share: float, counts: Tensor):
        super().__init__()
        self._n, self.share, self.counts, self.steps = n, share, counts, 0
        self.register_buffer("seen", torch.zeros(3))


def weighted(step: Step, bag: Bag, power: float = 1.0) -> Tensor:
    return step.positive_logits * power


def test_arguments_are_named_and_nothing_else() -> None:
    """The description has classes, functions and arguments; no tensor, buffer or other attribute."""
    uniform = "Sampled(distribution=Uniform(n_items=40), n=8, per_query=False, correction='count', exclude='positive')"
    assert described(Sampled(Uniform(40), 8)) == uniform
    batch = "InBatch(frequency=Popularity(alpha=1.0), correction='count', exclude='positive')"
    mixed = described(Union(InBatch(POP), Sampled(Uniform(40), 8)))
    assert mixed.startswith("Union(sources=ModuleList(")
    assert batch in mixed
    assert uniform in mixed
    own = Own(4, 0.5, torch.arange(5))
    assert described(own) == "Own(n=4, share=0.5, counts=Tensor)"
    own.steps, own.seen = 7, torch.ones(3)
    assert described(own) == "Own(n=4, share=0.5, counts=Tensor)"
    assert described(nn.Sequential(nn.Linear(2, 3), nn.ReLU())).startswith(
        "Sequential(0=Linear(in_features=2, out_features=3)"
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Sampled(Uniform(40), 8), Sampled(Uniform(40), 9)),
        (Sampled(Uniform(40), 8), Sampled(Uniform(39), 8)),
        (Sampled(Uniform(40), 8), Sampled(POP, 8)),
        (InBatch(POP), InBatch(Popularity(torch.arange(1, 41), alpha=0.5))),
        (InBatch(POP), InBatch(POP, exclude="none")),
        (Resample(InBatch(POP), 5), Resample(InBatch(POP), 5, "multinomial")),
        (Own(4, 0.5, torch.zeros(1)), Own(5, 0.5, torch.zeros(1))),
        (hinge(0.3), hinge(0.4)),
        (hinge(0.3), bpr),
        (weighted, partial(weighted, power=2.0)),
        (partial(weighted, power=1.0), partial(weighted, power=2.0)),
    ],
)
def test_other_arguments_are_other_words(one: object, other: object) -> None:
    """Every changed argument of a sampler or loss changes the description."""
    assert described(one) != described(other)


@pytest.mark.parametrize("name", [name for name in sorted(RECIPES) if name != "esans"])
def test_training_changes_no_word(name: str, parts: Split) -> None:
    """Training, or building the same run again, leaves every recipe's description unchanged; it has no addresses or
    tensors."""
    settings = {
        "epochs": 1,
        "batch_size": 64,
        "dim": 8,
        **({"clf_epochs": 0} if RECIPES[name].__module__.endswith("extreme") else {}),
    }
    settings = known(RECIPES[name], settings)
    run = build(name, parts.train, settings)
    before = method(run)
    fit(run, parts, k=(10,), device="cpu")
    assert method(run) == before == method(build(name, parts.train, settings))
    for words in before.values():
        assert not re.search("0x[0-9a-f]{4}|tensor\\(|<", words), words


def test_another_process_says_the_same() -> None:
    """The description depends neither on addresses nor on hash order."""
    code = "import torch; from sparring.training.fingerprint import described; from sparring.losses import hinge; "
    code += "from sparring.negatives import *; bag = InBatch(Popularity(torch.arange(1, 41))); "
    code += "print(described(Union(bag, Sampled(Uniform(40), 8))), described(hinge(0.4)))"
    path = str(Path(__file__).parents[2] / "src")
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "1"}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert out.stdout.strip() == f"{described(Union(InBatch(POP), Sampled(Uniform(40), 8)))} {described(hinge(0.4))}"
