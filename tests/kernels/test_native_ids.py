"""Ids in a list of candidates, native and torch's, against loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparring.kernels.native import ids as native
from sparring.kernels.native import library

IDS = st.lists(st.integers(-1, 6) | st.sampled_from([1 << 40, (1 << 63) - 1]), max_size=12)


@pytest.fixture(params=["native", "torch"], autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both forms; the native one must be there."""
    monkeypatch.setattr(library, "active", request.param == "native")
    if request.param == "native" and library.library() is None:
        pytest.skip("needs a C++ compiler")
    return str(request.param)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(IDS, IDS, st.data())
def test_places_of_ids(ids: list[int], wanted: list[int], data: st.DataObject) -> None:
    """Every place of every wanted id, in order, with its row: of few ids, of none, and of the largest."""
    tensors = torch.tensor(ids, dtype=torch.long), torch.tensor(wanted, dtype=torch.long)
    rows = sorted(data.draw(st.lists(st.integers(0, 9), min_size=len(wanted), max_size=len(wanted))))
    for given_rows in (None, rows):
        labels = range(len(wanted)) if given_rows is None else given_rows
        want = [(r, j) for r, w in zip(labels, wanted, strict=True) for j, each in enumerate(ids) if each == w]
        got = native.pairs(*tensors, None if given_rows is None else torch.tensor(given_rows, dtype=torch.long))
        assert list(zip(*(column.tolist() for column in got), strict=True)) == want
    assert native.distinct(tensors[0]) == len(set(ids))


@pytest.mark.parametrize("n", [0, 1, 31, 33, 500])
def test_ids_of_rows(n: int) -> None:
    """The id of every row, also where rows repeat or their memory is strided; no memory outside is read."""
    column = torch.arange(1000, dtype=torch.int32) * 7
    rows = torch.randint(1000, (2 * n,), generator=torch.Generator().manual_seed(0))[::2]
    got = native.taken(column, rows)
    assert got.dtype == torch.int64
    assert got.tolist() == [7 * row for row in rows.tolist()]
    for wrong in (-1, 1000):
        with pytest.raises(IndexError):
            native.taken(column, torch.tensor([wrong]))


def test_long_lists() -> None:
    """Thousands of ids that collide in the low bits, as in a large catalogue, in strided memory too."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(1500, (6000,), generator=g) << 32
    wanted = torch.randint(3000, (2000,), generator=g) << 32
    want = (wanted.unsqueeze(1) == ids[::2]).nonzero()
    assert torch.equal(torch.stack(native.pairs(ids[::2], wanted), 1), want)
    assert native.distinct(ids[::2]) == len(set(ids[::2].tolist()))
