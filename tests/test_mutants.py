"""The tests can fail: each known bug, injected again, is noticed by the tests that claim to guard against it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mutants import MUTANTS, Mutant

_passes: dict[str, bool] = {}


def passes(test: Callable[[], None]) -> bool:
    """Whether a test passes; any error but a failed claim is a failure to run and is raised."""
    torch.manual_seed(0)
    try:
        test()
    except AssertionError:
        return False
    return True


def passes_as_it_is(test: Callable[[], None]) -> bool:
    if test.__name__ not in _passes:
        _passes[test.__name__] = passes(test)
    return _passes[test.__name__]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_mutant_is_noticed(mutant: Mutant) -> None:
    """The tests pass on the source as it is, and at least one fails on the mutant."""
    for test in mutant.tests:
        assert passes_as_it_is(test), f"{test.__name__} fails without the mutant"
    with mutant.injected():
        noticed = [test.__name__ for test in mutant.tests if not passes(test)]
    assert noticed, f"nobody noticed: {mutant.name}"


def test_mutants_are_put_back() -> None:
    """After a mutant has run, the source is as it was."""
    mutant = MUTANTS[0]
    before = mutant.function.__code__
    with mutant.injected():
        assert mutant.function.__code__ is not before
    assert mutant.function.__code__ is before


def test_there_are_enough() -> None:
    """Names are unique, and every module of the samplers and the kernels has a mutant."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 14
    modules = {mutant.function.__module__.removeprefix("sparring.") for mutant in MUTANTS}
    assert {"types", "contrast", "kernels.chunked", "kernels.reference"} <= modules
    assert {f"losses.{name}" for name in ("softmax", "pairwise", "topk", "adaptive")} <= modules
    assert {f"negatives.{name}" for name in ("algebra", "batch", "corpus", "distributions")} <= modules
