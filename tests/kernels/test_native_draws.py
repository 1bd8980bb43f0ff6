"""Uniform integers, native and torch's, against torch.randint; orders against Python's sort."""

from __future__ import annotations

import pytest
import torch

from sparring.kernels.native import draws, library


@pytest.fixture(params=["native", "torch"], autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both forms; the native one must be there."""
    monkeypatch.setattr(library, "active", request.param == "native")
    if request.param == "native" and library.library() is None:
        pytest.skip("needs a C++ compiler")
    return str(request.param)


@pytest.mark.parametrize("high", [1, 2, 3, 40_981, 65_536, (1 << 28) - 1, 1 << 28, 1 << 40])
def test_numbers_and_generator_are_those_of_torch(high: int) -> None:
    """The same numbers in the same order, from any state; draws of other kinds afterwards agree too."""
    ours, theirs = (torch.Generator().manual_seed(7) for _ in range(2))
    for shape in ((3,), (1024,), (2048, 2), (623, 2), (1, 1249), (5000,)):
        want = torch.randint(high, shape, generator=theirs)
        assert torch.equal(draws.randint(high, shape, ours), want)
        assert torch.equal(torch.randn(5, generator=ours), torch.randn(5, generator=theirs))
    assert torch.equal(ours.get_state(), theirs.get_state())


def test_this_version_of_torch_is_known(form: str) -> None:
    """The kernel agrees with the installed PyTorch, so that it is used."""
    if form == "native":
        assert draws._same()


def test_orders_are_those_of_the_numbers_of_torch() -> None:
    """Ascending, the first of equal numbers first; among 20,000 numbers of 24 bits some are equal."""
    for n in (0, 1, 2, 3000, 20_000):
        ours, theirs = (torch.Generator().manual_seed(n) for _ in range(2))
        drawn = torch.rand(n, generator=theirs).tolist()
        assert draws.order(n, ours).tolist() == sorted(range(n), key=lambda i: (drawn[i], i))
        assert torch.equal(ours.get_state(), theirs.get_state())
    assert len(set(drawn)) < n
