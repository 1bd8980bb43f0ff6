"""The contract notices a wrong sampler, and says what it had nothing to test with."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import unittest
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparring.core.types import Bag, Candidates, Exclude, Step
from sparring.negatives import Negatives
from sparring.testing import NegativesContract, World


class Even(Negatives):
    """n items of the first `share` of the catalogue, all alike, weighed `factor` times as they should be."""

    def __init__(self, n_items: int, n: int = 8, factor: float = 1.0, share: float = 1.0):
        super().__init__()
        self.n, self.factor, self.reach = n, factor, max(int(share * n_items), 1)

    def forward(self, step: Step) -> Bag:
        ids = torch.randint(self.reach, (self.n,), generator=step.generator)
        return Bag(
            (
                Candidates(
                    ids,
                    step.encode(ids),
                    torch.tensor(math.log(self.factor * self.reach / self.n)),
                    Exclude(step.item_ids),
                ),
            )
        )


class Counted(Even):
    """The same, and it claims to draw from the whole catalogue."""

    claimed: float = 1.0  # of its true number of candidates

    def log_count(self, ids: Tensor, step: Step) -> Tensor:
        return torch.full(ids.shape, math.log(self.n / 24))

    def size(self, step: Step) -> float:
        return self.n * self.claimed


class WrongSize(Counted):
    claimed = 2.0


class NoSize(Counted):
    def size(self, step: Step) -> float | Tensor:
        return Negatives.size(self, step)


def outcomes(negatives: type[Even], **how: float) -> dict[str, str]:
    """What each test of the contract says of a sampler: passed, failed or why it was skipped."""

    class Proof(NegativesContract):
        draws, trials = 20_000, 200

        def make(self, world: World) -> Negatives:
            return negatives(world.n_items, **how)  # type: ignore[arg-type]

    found = {}
    for name in (name for name in dir(Proof) if name.startswith("test_")):
        try:
            getattr(Proof(), name)()
            found[name] = "passed"
        except unittest.SkipTest as reason:
            found[name] = str(reason)
        except (AssertionError, TypeError):  # the latter from a Union that asks for a size
            found[name] = "failed"
    return found


ALWAYS = {"test_log_count_is_the_formula", "test_gradient_bias_falls"}  # nothing was stated to hold against
BY_COUNT = {"test_distribution", "test_partition_function", "test_size_is_the_sum_of_counts"}


def test_without_log_count_nothing_passes_in_silence() -> None:
    """What cannot be known without log_count is skipped, with its reason; the rest passes, also in a Union."""
    found = outcomes(Even, factor=2.0)
    assert {name for name, said in found.items() if said != "passed"} == ALWAYS | BY_COUNT
    assert all("not tested" in found[name] or "not held" in found[name] for name in ALWAYS | BY_COUNT)
    assert found["test_combines_with_in_batch"] == "passed"


def test_with_log_count_all_is_tested() -> None:
    """A right sampler passes everything but what nobody stated."""
    found = outcomes(Counted)
    assert {name for name, said in found.items() if said != "passed"} == ALWAYS


@pytest.mark.parametrize(
    ("sampler", "how", "caught"),
    [
        (Counted, {"factor": 2.0}, {"test_partition_function"}),
        (Counted, {"share": 0.5}, {"test_distribution", "test_partition_function"}),
        (WrongSize, {}, {"test_size_is_the_sum_of_counts"}),
        (NoSize, {}, {"test_size_is_the_sum_of_counts", "test_combines_with_in_batch"}),
    ],
)
def test_wrong_samplers_are_caught(sampler: type[Even], how: dict[str, float], caught: set[str]) -> None:
    """Weights twice too large, half of the catalogue, a size that is not the sum of the counts, no size at all."""
    assert {name for name, said in outcomes(sampler, **how).items() if said == "failed"} == caught


def test_pytest_shows_the_skips(tmp_path: Path) -> None:
    """Its summary counts them and gives the reasons."""
    source = Path(__file__).read_text().partition("def outcomes")[0]
    (tmp_path / "test_even.py").write_text(
        source + "class TestEven(NegativesContract):\n    make = lambda self, world: Even(world.n_items)\n"
    )
    words = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "test_even.py"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert f" {len(ALWAYS | BY_COUNT)} skipped" in done.stdout.splitlines()[-1]
    assert "no log_count: size was not tested" in done.stdout
