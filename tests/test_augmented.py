"""Auxiliary vectors of item clusters: what is added, who shares, and that towers of every kind take them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sparring import build, fit, load
from sparring.augmented import Augmented, shared_vectors
from sparring.composition import Setup, retriever
from sparring.data.interactions import Ids, Split
from sparring.optim import optimizers
from sparring.towers import IdTower


def table(n: int, d: int = 4, seed: int = 0) -> IdTower:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return IdTower(n, d)


@pytest.mark.parametrize("init", ["xavier", "zeros"])
def test_the_clusters_vector_is_added_before_scaling(init: str) -> None:
    """w_l = E(l) + a_c(l), for ids of any shape; "zeros" starts as the tower alone."""
    item = Augmented(table(10), 3, init)  # type: ignore[arg-type]
    ids = torch.tensor([[3, 9], [0, 3]])
    found = item(ids)
    for row in range(2):
        for column in range(2):
            at = int(ids[row, column])
            expected = item.tower.weight[at] + item.auxiliary.weight[int(item.cluster[at])]  # type: ignore[index]
            torch.testing.assert_close(found[row, column], expected)
    assert torch.equal(found, item.tower(ids)) == (init == "zeros")


def test_frequent_items_have_vectors_of_their_own_and_the_others_share_equally() -> None:
    """The `private` most frequent items (of equals the first) one each; the others in clusters whose sizes differ by at most 1."""
    counts = torch.tensor([5, 1, 9, 1, 1, 7, 1, 1, 1, 1, 5])
    item = Augmented(table(11), 2 + 4)
    item.assign(counts, 2, torch.Generator().manual_seed(0))
    assert (int(item.cluster[2]), int(item.cluster[5])) == (0, 1)
    rest = [int(item.cluster[j]) for j in range(11) if j not in (2, 5)]
    sizes = [rest.count(c) for c in range(2, 6)]
    assert sum(sizes) == 9
    assert max(sizes) - min(sizes) <= 1


def test_alike_items_share() -> None:
    """Items in two far apart groups: no vector serves both."""
    item = Augmented(table(32), 4)
    with torch.no_grad():
        item.tower.weight.mul_(0.05)  # type: ignore[operator]
        item.tower.weight[:16, 0] += 1.0  # type: ignore[index]
        item.tower.weight[16:, 0] -= 1.0  # type: ignore[index]
    item.assign(torch.ones(32), 0, torch.Generator().manual_seed(0))
    assert set(item.cluster[:16].tolist()).isdisjoint(item.cluster[16:].tolist())


def test_how_many_vectors() -> None:
    """A power of two near (N - private) / items, and the private ones; never more private than half the items."""
    assert shared_vectors(20_560, 5, 0) == (4096, 0)
    assert shared_vectors(131_073, 2, 1000) == (65_536, 1000)
    assert shared_vectors(10, 4, 1000) == (1, 5)


@pytest.mark.parametrize(
    "settings", [{}, {"item_features": ("category",)}, {"item_bias": True}, {"query_tower": "history"}, {"init": "spectral"}]
)
def test_every_tower_trains_with_them_and_is_loaded_again(parts: Split, tmp_path: Path, settings: dict[str, object]) -> None:
    """Training moves the vectors, and a run folder gives back the same item vectors, clusters and all."""
    run = build(
        "ssl", parts.train, {"dim": 8, "epochs": 2, "batch_size": 64, "optimizer": "row-adam", "auxiliary": 4, "private": 3, **settings}
    )
    item = run.model.item
    assert isinstance(item, Augmented)
    assert item.auxiliary.n == sum(shared_vectors(parts.train.n_items, 4, 3))
    before = item.auxiliary.weight.detach().clone()
    fit(run, parts, tmp_path / "run", k=(5,), device="cpu")
    assert not torch.equal(before, item.auxiliary.weight)
    torch.testing.assert_close(load(tmp_path / "run").model.item_vectors(), run.model.item_vectors())


def test_they_never_decay(parts: Split) -> None:
    """Weight decay reaches the tower's vectors and not these."""
    model = retriever(Setup(dim=4, auxiliary=4), Ids(parts.train.query_ids, parts.train.item_ids))
    assert isinstance(model.item, Augmented)
    groups = [group for optimizer in optimizers(model, "row-adam", 0.1, weight_decay=0.5) for group in optimizer.param_groups]
    decays = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    assert decays[id(model.item.tower.weight)] == 0.5
    assert decays[id(model.item.auxiliary.weight)] == 0.0


def test_nonsense_is_refused() -> None:
    """More vectors than items, or none."""
    for vectors in (0, 11):
        with pytest.raises(ValueError, match="between 1 and"):
            Augmented(table(10), vectors)
