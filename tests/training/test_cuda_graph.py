"""A captured step equals the eager step: same draws, same numbers; a step that cannot be captured runs eagerly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sparring.data.interactions import Split
from sparring.data.synthetic_world import make_world
from sparring.recipes import RECIPES
from sparring.recipes.settings import build, is_solved
from sparring.training import loop as training
from sparring.training.cuda_graph import EAGER_STEPS, CudaGraphStep
from support.settings import quick

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
QUICK = quick(epochs=3, batch_size=16, patience=None)  # a row may be one of the 60 queries
NEEDS_MORE = {"shown"}  # need columns or files that the small world lacks


def history(
    name: str, parts: Split, recorded: bool, **more: object
) -> tuple[list[dict[str, float]], torch.Tensor, CudaGraphStep | None]:
    run = build(name, parts.train, QUICK | more)
    trainer = training.Trainer(run, parts, torch.device("cuda"), None, training.TrainingProgress())
    step = trainer.step if isinstance(trainer.step, CudaGraphStep) else None
    if not recorded:
        trainer.step = trainer.work
    trainer.train()
    return trainer.state.history, run.model.item_vectors(), step


@pytest.mark.parametrize("name", [name for name in sorted(RECIPES.keys() - NEEDS_MORE) if not is_solved(RECIPES[name])])
def test_a_recorded_training_equals_a_plain_one(name: str, parts: Split) -> None:
    """Three epochs of every recipe, captured and eager: the same losses and item vectors, up to the order of sums."""
    ours, vectors, step = history(name, parts, recorded=True)
    plain, expected, _ = history(name, parts, recorded=False)
    assert step is not None
    assert step.graph is not None or step.why is not None
    assert [record["loss"] for record in ours] == pytest.approx([record["loss"] for record in plain], rel=2e-3)
    assert torch.nn.functional.cosine_similarity(vectors.flatten(), expected.flatten(), dim=0) > 0.99


@pytest.mark.parametrize(
    "name", ["default", "ssl_pop", "bir", "bir drawn", "xir", "mns", "fairneg", "ada_tau", "slatk", "mixgcf"]
)
def test_the_common_recipes_are_recorded(name: str) -> None:
    """None of these recipes waits for the device inside a step."""
    world = make_world(300, 3000, exposure=0.02, seed=0)
    recipe, drawn = name.split()[0], {"draw": "rounded"} if "drawn" in name else {}
    step = history(recipe, Split(world.interactions), recorded=True, **drawn)[2]
    assert step is not None
    assert step.why is None, step.why


HISTORIES: list[dict[str, object]] = [
    {"pooling": "mean"},
    {"pooling": "sum", "history_table": "own"},
    {"pooling": "attention"},
    {"pooling": "attention", "history_table": "own", "optimizer": "adam"},
    {"pooling": "mean", "optimizer": "row-adagrad"},
]


@pytest.mark.parametrize("settings", HISTORIES, ids=lambda settings: " ".join(map(str, settings.values())))
def test_histories_of_pairs_are_recorded_and_repeat_bitwise(settings: dict[str, object], parts: Split) -> None:
    """A step that pools histories is captured and equals the eager one; two recorded trainings have the same bits."""
    more = {"model": "history", "rows": "pairs", "history": 6, **settings}
    ours, vectors, step = history("tables", parts, recorded=True, **more)
    again, repeated, _ = history("tables", parts, recorded=True, **more)
    plain, expected, _ = history("tables", parts, recorded=False, **more)
    assert step is not None
    assert step.why is None, step.why
    assert step.graph is not None
    assert torch.equal(vectors, repeated)
    assert [record["loss"] for record in ours] == [record["loss"] for record in again]
    assert [record["loss"] for record in ours] == pytest.approx([record["loss"] for record in plain], rel=2e-3)
    assert torch.nn.functional.cosine_similarity(vectors.flatten(), expected.flatten(), dim=0) > 0.99


DESCRIBED: list[tuple[str, dict[str, object]]] = [
    ("uns", {"n": 4, "per_query": True, "correction": "none"}),
    ("uns", {"n": 4, "per_query": True, "correction": "none", "pooling": "attention", "precision": "bf16"}),
    ("debiased_mns", {"n": 4, "per_query": True}),
    ("esans", {"codes": "random", "k_primary": 4, "k_secondary": 2, "shared": False}),
    ("esans", {"codes": "random", "k_primary": 4, "k_secondary": 2, "shared": False, "hard_shared": True}),
]


@pytest.mark.parametrize(("name", "settings"), DESCRIBED, ids=str)
def test_histories_of_described_items_are_recorded(
    name: str, settings: dict[str, object], parts: Split, tmp_path: Path
) -> None:
    """A step whose items have columns and vectors, through a perceptron, is captured and trains like the eager one."""
    np.save(tmp_path / "vectors.npy", np.random.default_rng(0).normal(size=(parts.train.n_items, 5)))
    more: dict[str, object] = {"query_tower": "history", "history": 6, "hidden": (16, 8), "schedule": "linear"}
    more |= {"item_features": ("category",), "item_vectors": str(tmp_path / "vectors.npy"), **settings}
    ours, vectors, step = history(name, parts, recorded=True, **more)
    plain, expected, _ = history(name, parts, recorded=False, **more)
    assert step is not None
    assert step.why is None, step.why
    assert step.graph is not None
    assert [record["loss"] for record in ours] == pytest.approx([record["loss"] for record in plain], rel=2e-3)
    assert torch.nn.functional.cosine_similarity(vectors.flatten(), expected.flatten(), dim=0) > 0.99


@pytest.mark.parametrize("name", ["uns", "midx", "sce"])
def test_an_item_bias_is_recorded_where_a_batch_looks_up_more_items_than_there_are(name: str, parts: Split) -> None:
    """The gradient of a table of width 1 needs no sort, so the step is captured and trains like an eager one."""
    ours, _, step = history(name, parts, recorded=True, item_bias=True, n=512 if name == "uns" else 16)
    plain = history(name, parts, recorded=False, item_bias=True, n=512 if name == "uns" else 16)[0]
    assert step is not None
    assert step.why is None, step.why
    assert [record["loss"] for record in ours] == pytest.approx([record["loss"] for record in plain], rel=2e-3)


def test_work_that_waits_runs_as_it_is() -> None:
    """A step with value-dependent shapes is detected, its location reported, and all its work still done."""
    total = torch.zeros((), device="cuda")

    def work(rows: torch.Tensor) -> None:
        total.add_(rows[rows > 2].sum())

    step = CudaGraphStep(work, torch.Generator("cuda"))
    for _ in range(EAGER_STEPS + 4):
        step(torch.arange(6, device="cuda"))
    assert step.graph is None
    assert step.why is not None
    assert "waits" in step.why
    assert float(total) == (EAGER_STEPS + 4) * 12


def test_other_numbers_of_rows_run_as_they_are() -> None:
    """The short last batch of an epoch trains eagerly and does not disturb the graph."""
    total = torch.zeros((), device="cuda")

    def work(rows: torch.Tensor) -> None:
        total.add_(rows.sum())

    step = CudaGraphStep(work, torch.Generator("cuda"))
    for _ in range(EAGER_STEPS + 2):
        step(torch.arange(6, device="cuda"))
        step(torch.arange(3, device="cuda"))
    assert step.graph is not None
    assert float(total) == (EAGER_STEPS + 2) * (15 + 3)
