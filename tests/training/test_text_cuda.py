"""Text retrievers on a GPU equal those on a CPU within rounding, through all stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sparring import build, load
from sparring.models.clusters.balanced import balanced_2means
from sparring.models.tree import grow
from sparring.training import fitting as train
from sparring.training import loop
from sparring.training.cuda_graph import CudaGraphStep
from sparring.training.fitting import fit
from sparring.training.step import training_step
from support.texts import text_parts, tiny_bert

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def encoder(kind: str, folder: Path, dropout: float = 0.0) -> str:
    if kind == "bag":
        return kind
    pytest.importorskip("transformers")
    return str(tiny_bert(folder / "bert", dropout))


@pytest.mark.parametrize("kind", ["bag", "bert"])
@pytest.mark.parametrize("chunk", [None, 5])
def test_a_step_is_that_of_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, chunk: int | None) -> None:
    """One float32 step has the losses and gradients of a CPU, encoded at once or by the gradient cache."""
    monkeypatch.setenv("SPARRING_HOME", str(tmp_path / "home"))
    train, found = text_parts().train, []
    settings = {
        "encoder": encoder(kind, tmp_path),
        "dim": 8,
        "precision": "float32",
        "chunk": chunk,
        "auxiliary": 4,
        "private": 2,
    }
    for device in ("cpu", "cuda"):
        run = build("ngame", train, settings)
        run.modules().to(device)
        queries, items = (column[:20].long().to(device) for column in train.pairs())
        known = train.positives()
        positives = known.to(device)
        losses = training_step(run, queries, items, torch.Generator(device), positives)[0]
        losses.mean().backward()
        grads = [p.grad.to_dense().cpu() for p in run.model.parameters() if p.grad is not None]
        found.append((losses.detach().cpu(), grads))
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-4, rtol=1e-3)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-2)


@pytest.mark.parametrize("kind", ["bag", "bert"])
@pytest.mark.parametrize("recipe", ["ance", "dexa", "prime"])
def test_all_stages_train_and_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, recipe: str) -> None:
    """bf16, gradient cache, clusters or lists, sharded classifiers and fusion give finite metrics and a folder that a
    CPU reads."""
    monkeypatch.setenv("SPARRING_HOME", str(tmp_path / "home"))
    parts = text_parts()
    settings: dict[str, Any] = {
        "encoder": encoder(kind, tmp_path, 0.1),
        "dim": 8,
        "epochs": 4,
        "batch_size": 16,
        "warmup": 2,
        "chunk": 7,
    }
    settings |= {"precision": "bf16", "clf_epochs": 2, "clf_batch_size": 16, "clf_shards": 2, "every": 1}
    settings |= {"delay": 1} if recipe == "ance" else {"size": 4}
    fitted = fit(build(recipe, parts.train, settings), parts, tmp_path / "run", k=(5,), device="cuda")
    assert set(fitted.stages) == {"knn", "clf", "fusion"}
    for test in fitted.stages.values():
        assert 0 <= test.metrics["recall@5"] <= 1
    assert bool(torch.isfinite(load(tmp_path / "run").model.item_vectors()).all())


def test_trees_and_clusters() -> None:
    """The tree equals the CPU's; clusters have equal sizes, hold every point, and group similar points."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(5000, 3, generator=draw)
    y = x[:, 0] * x[:, 1] + torch.randn(5000, generator=draw) > 0
    one, other = grow(x, y, 5), grow(x.cuda(), y.cuda(), 5)
    assert torch.equal(one.feature, other.feature.cpu())
    torch.testing.assert_close(one.chance, other.chance.cpu())
    centres = torch.randn(16, 24, generator=draw)
    points = centres.repeat_interleave(64, 0) + 0.01 * torch.randn(1024, 24, generator=draw)
    labels = balanced_2means(points.cuda(), 128, torch.Generator().manual_seed(0)).cpu()
    assert torch.bincount(labels).tolist() == [8] * 128
    pure = sum(len(torch.unique(torch.arange(1024)[labels == label] // 64)) == 1 for label in range(128))
    assert pure > 64


@pytest.mark.parametrize("recipe", ["dpr", "ngame", "dexa", "ance"])
def test_steps_of_a_transformer_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    """Steps are captured as a graph while clusters and lists are rebuilt; without dropout losses equal eager ones."""
    monkeypatch.setenv("SPARRING_HOME", str(tmp_path / "home"))
    kept: list[CudaGraphStep] = []

    class Kept(CudaGraphStep):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            kept.append(self)

    class Plain(Kept):
        def __call__(self, rows: torch.Tensor) -> None:
            self.work(rows)

    parts, found = text_parts(), []
    settings: dict[str, Any] = {
        "encoder": encoder("bert", tmp_path),
        "epochs": 4,
        "batch_size": 12,
        "warmup": 2,
        "lr": 1e-3,
        "clf_epochs": 0,
    }
    settings |= {} if recipe == "dpr" else {"every": 1}
    for kind in (Kept, Plain):
        monkeypatch.setattr(loop, "CudaGraphStep", kind)
        run = build(recipe, parts.train, settings)
        found.append([record["loss"] for record in train.fit(run, parts, k=(5,), device="cuda").history])
    assert kept[0].why is None
    assert kept[0].graph is not None
    assert found[0] == pytest.approx(found[1], rel=0.02)
