"""Auxiliary vectors of item clusters: their sum with the tower, their sharing, and towers of every kind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sparring import build, fit, load
from sparring.core.types import Corpus, Positives
from sparring.data.interactions import Ids, Split
from sparring.models.clusters.clustered_batches import ClusteredBatches
from sparring.models.item_corrections import Augmented, Centroids, shared_vectors
from sparring.models.text import text_tower
from sparring.models.towers import IdTower
from sparring.recipes.run import build_towers
from sparring.recipes.setup import Setup
from sparring.training.loop import TrainingProgress
from sparring.training.optimizers import optimizers
from support.texts import text_parts


def table(n: int, d: int = 4, seed: int = 0) -> IdTower:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return IdTower(n, d)


@pytest.mark.parametrize("init", ["xavier", "zeros"])
def test_the_clusters_vector_is_added_before_scaling(init: str) -> None:
    """w_l = E(l) + a_c(l) for ids of any shape; "zeros" starts equal to the tower alone."""
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
    """The `private` most frequent items (ties by id) have their own vector; the others share equal clusters."""
    counts = torch.tensor([5, 1, 9, 1, 1, 7, 1, 1, 1, 1, 5])
    item = Augmented(table(11), 2 + 4)
    item.assign(counts, 2, torch.Generator().manual_seed(0))
    assert (int(item.cluster[2]), int(item.cluster[5])) == (0, 1)
    rest = [int(item.cluster[j]) for j in range(11) if j not in (2, 5)]
    sizes = [rest.count(c) for c in range(2, 6)]
    assert sum(sizes) == 9
    assert max(sizes) - min(sizes) <= 1


def test_alike_items_share() -> None:
    """Items of two distant groups never share a vector."""
    item = Augmented(table(32), 4)
    with torch.no_grad():
        item.tower.weight.mul_(0.05)  # type: ignore[operator]
        item.tower.weight[:16, 0] += 1.0  # type: ignore[index]
        item.tower.weight[16:, 0] -= 1.0  # type: ignore[index]
    item.assign(torch.ones(32), 0, torch.Generator().manual_seed(0))
    assert set(item.cluster[:16].tolist()).isdisjoint(item.cluster[16:].tolist())


def test_how_many_vectors() -> None:
    """A power of two near (N - private) / items, plus the private ones, which are at most half the items."""
    assert shared_vectors(20_560, 5, 0) == (4096, 0)
    assert shared_vectors(131_073, 2, 1000) == (65_536, 1000)
    assert shared_vectors(10, 4, 1000) == (1, 5)


@pytest.mark.parametrize(
    "settings",
    [{}, {"item_features": ("category",)}, {"item_bias": True}, {"query_tower": "history"}, {"init": "spectral"}],
)
def test_every_tower_trains_with_them_and_is_loaded_again(
    parts: Split, tmp_path: Path, settings: dict[str, object]
) -> None:
    """Training moves the vectors, and a run folder gives back the same item vectors, clusters and all."""
    run = build(
        "ssl",
        parts.train,
        {"dim": 8, "epochs": 2, "batch_size": 64, "optimizer": "row-adam", "auxiliary": 4, "private": 3, **settings},
    )
    item = run.model.item
    assert isinstance(item, Augmented)
    assert item.auxiliary.n == sum(shared_vectors(parts.train.n_items, 4, 3))
    before = item.auxiliary.weight.detach().clone()
    fit(run, parts, tmp_path / "run", k=(5,), device="cpu")
    assert not torch.equal(before, item.auxiliary.weight)
    torch.testing.assert_close(load(tmp_path / "run").model.item_vectors(), run.model.item_vectors())


def test_they_never_decay(parts: Split) -> None:
    """Weight decay applies to the tower's vectors and not to the auxiliary ones."""
    model = build_towers(Setup.of(dim=4, auxiliary=4), Ids(parts.train.query_ids, parts.train.item_ids))
    assert isinstance(model.item, Augmented)
    groups = [
        group for optimizer in optimizers(model, "row-adam", 0.1, weight_decay=0.5) for group in optimizer.param_groups
    ]
    decays = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    assert decays[id(model.item.tower.weight)] == 0.5
    assert decays[id(model.item.auxiliary.weight)] == 0.0


def test_nonsense_is_refused() -> None:
    """More vectors than items, or none, raise errors."""
    for vectors in (0, 11):
        with pytest.raises(ValueError, match="between 1 and"):
            Augmented(table(10), vectors)


def by_hand(positives: Positives, vectors: torch.Tensor, item: int, shrink: float) -> torch.Tensor:
    """The mean of the vectors of an item's queries, as if `shrink` additional ones were 0."""
    start = positives.start.tolist()
    mine = [q for q in range(len(start) - 1) if item in positives.items[start[q] : start[q + 1]].tolist()]
    return sum((vectors[q] for q in mine), torch.zeros(vectors.shape[1])) / max(len(mine) + shrink, 1)


@pytest.mark.parametrize("shrink", [0.0, 1.0])
def test_centroids_are_means_of_the_queries_of_an_item(parts: Split, shrink: float) -> None:
    """Centroids equal a loop over all pairs; 0 without queries; none before the first epoch; no item is encoded."""
    positives, n = parts.train.positives(), parts.train.n_items
    vectors = torch.randn(parts.train.n_queries, 4, generator=torch.Generator().manual_seed(0))
    tower = Centroids(table(n), shrink)

    def never() -> torch.Tensor:
        raise AssertionError("encoded")

    for epoch in (0, 1):
        tower.refresh(Corpus(epoch, never, lambda ids: vectors[ids], positives, torch.Generator()))
        for item in range(n):
            expected = by_hand(positives, vectors, item, shrink) if epoch else torch.zeros(4)
            torch.testing.assert_close(tower.centroid[item], expected)


def test_a_centroid_counts_through_the_learned_matrix(parts: Split) -> None:
    """w_l = E(l) + G m_l; G starts at 0 with a gradient, so vectors start as the tower's; centroids are constants."""
    tower = Centroids(table(10))
    tower.centroid.copy_(torch.randn(10, 4))
    ids = torch.tensor([[3, 9], [0, 3]])
    assert torch.equal(tower(ids), tower.tower(ids))
    tower(ids).sum().backward()
    assert tower.mix.weight.grad is not None
    assert float(tower.mix.weight.grad.abs().sum()) > 0
    with torch.no_grad():
        tower.mix.weight.normal_()
    torch.testing.assert_close(tower(ids)[1, 0], tower.tower(ids)[1, 0] + tower.mix.weight @ tower.centroid[0])


def test_prime_takes_the_vectors_that_batches_keep(parts: Split, tmp_path: Path) -> None:
    """After training the centroids are means of the memory before the last epoch; they are saved, and G has moved."""
    run = build(
        "prime",
        parts.train,
        {"dim": 4, "epochs": 3, "batch_size": 16, "clf_epochs": 0, "size": 4, "lr": 0.05, "warmup": 2},
    )
    assert isinstance(run.model.item, Augmented)
    tower, batches = run.model.item.tower, run.batches
    assert isinstance(tower, Centroids)
    assert isinstance(batches, ClusteredBatches)
    kept: list[torch.Tensor] = []
    fit(
        run,
        Split(parts.train),
        tmp_path,
        device="cpu",
        progress=TrainingProgress(epoch=lambda record: kept.append(batches.memory.clone())),
    )
    for item in range(parts.train.n_items):
        torch.testing.assert_close(tower.centroid[item], by_hand(parts.train.positives(), kept[1], item, 1.0))
    assert float(tower.mix.weight.detach().abs().sum()) > 0
    torch.testing.assert_close(load(tmp_path).model.item_vectors(), run.model.item_vectors())


def test_centroids_without_kept_vectors(parts: Split) -> None:
    """With random batches the queries are encoded, so every recipe supports centroids=true."""
    run = build("dpr", parts.train, {"dim": 4, "epochs": 2, "batch_size": 16, "centroids": True})
    fit(run, Split(parts.train), device="cpu")
    assert isinstance(run.model.item, Centroids)
    assert float(run.model.item.centroid.abs().sum()) > 0


def test_a_negative_shrink_is_refused() -> None:
    """A negative shrink is a one-line error."""
    with pytest.raises(ValueError, match="shrink"):
        Centroids(table(3), -1)


def test_prime_with_texts_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text tower under centroids and auxiliary vectors is saved with its encoder and loaded."""
    monkeypatch.setenv("SPARRING_HOME", str(tmp_path / "home"))
    parts = text_parts()
    settings = {"encoder": "bag", "dim": 8, "epochs": 2, "batch_size": 16, "clf_epochs": 0, "size": 4, "warmup": 2}
    run = build("prime", parts.train, settings)
    assert text_tower(run.model.item) is not None
    fit(run, parts, tmp_path / "run", k=(5,), device="cpu")
    found = load(tmp_path / "run")
    torch.testing.assert_close(found.model.item_vectors(), run.model.item_vectors())
    assert len(found.recommend_text(["red shoe"], 3)) == 3


def test_clusters_are_made_once_before_the_first_epoch(parts: Split) -> None:
    """Clusters come from the tower's vectors and the training counts before the first epoch, and never change."""
    settings = {
        "dim": 8,
        "epochs": 3,
        "batch_size": 16,
        "auxiliary": 4,
        "private": 3,
        "clf_epochs": 0,
        "size": 4,
        "seed": 7,
        "lr": 0.05,
    }
    first, second = (build("dexa", parts.train, settings) for _ in range(2))
    assert isinstance(first.model.item, Augmented)
    assert isinstance(second.model.item, Augmented)
    private = shared_vectors(parts.train.n_items, 4, 3)[1]
    first.model.item.assign(torch.from_numpy(parts.train.counts()), private, torch.Generator().manual_seed(7))
    seen: list[list[int]] = []
    item = second.model.item
    fit(
        second,
        Split(parts.train),
        device="cpu",
        progress=TrainingProgress(epoch=lambda record: seen.append(item.cluster.tolist())),
    )
    assert seen == [first.model.item.cluster.tolist()] * 3
    most = int(parts.train.counts().argmax())
    assert seen[0].count(seen[0][most]) == 1
