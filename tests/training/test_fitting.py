"""Training learns the signal in the data, keeps the best epoch, and follows its settings in every step."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor, nn

from sparring.core.devices import pick_device
from sparring.core.errors import UserError
from sparring.core.types import Corpus
from sparring.data.interactions import Interactions, Split, Vocabulary
from sparring.data.splits import split
from sparring.data.synthetic_world import make_world
from sparring.evaluation.ranking import Evaluation, evaluate
from sparring.negatives import InBatch
from sparring.recipes.run import Run, Term, compose
from sparring.recipes.settings import build
from sparring.recipes.setup import Setup
from sparring.training import loop as training
from sparring.training.fitting import fit
from sparring.training.loop import TrainingProgress
from sparring.training.trained import load
from support.settings import quick

QUICK = quick(epochs=3, patience=None)
USERS, ITEMS = 40, 20


def interactions(
    pairs: list[tuple[int, int]], n_queries: int = USERS, n_items: int = ITEMS, **columns: Any
) -> Interactions:
    queries, items = (np.array(column, dtype=np.int32) for column in zip(*sorted(pairs), strict=True))
    return Interactions(queries, items, Vocabulary(np.arange(n_queries)), Vocabulary(np.arange(n_items)), **columns)


@pytest.fixture(scope="module")
def checkerboard() -> Split:
    """Even users take even items and odd users odd ones, all but one each, which is the only right answer.

    User u holds out its (u // 2 mod 10)-th item for the test and the next one for validation. Titles tell the
    parity."""
    table = pl.DataFrame(
        {"title": [f"{'odd' if i % 2 else 'even'} {i}" for i in range(ITEMS)], "parity": ["even", "odd"] * (ITEMS // 2)}
    )
    train, valid, test = [], [], []
    for user in range(USERS):
        own = [item for item in range(ITEMS) if item % 2 == user % 2]
        held = user // 2 % len(own)
        test.append((user, own[held]))
        valid.append((user, own[(held + 1) % len(own)]))
        train += [(user, item) for at, item in enumerate(own) if at not in (held, (held + 1) % len(own))]
    return Split(*(interactions(pairs, item_table=table) for pairs in (train, valid, test)))


def recall_at_1(scores: Callable[[int], Tensor], parts: Split) -> float:
    """Share of users whose best unseen item is their test item."""
    assert parts.valid is not None
    assert parts.test is not None
    hits = 0
    for user, item in zip(parts.test.queries.tolist(), parts.test.items.tolist(), strict=True):
        mine = scores(user).clone()
        for seen in (parts.train, parts.valid):
            mine[torch.from_numpy(seen.items[seen.queries == user]).long()] = -math.inf
        hits += int(mine.argmax()) == item
    return hits / len(parts.test)


@pytest.mark.parametrize("name", ["default", "quick", "ssl_pop", "bir", "xir", "full_softmax", "bpr"])
def test_a_checkerboard_is_learnt(checkerboard: Split, name: str) -> None:
    """Every user's best unseen item is the right one (by chance one in eleven), and the loss falls."""
    settings = {"dim": 8, "epochs": 30, "batch_size": 64, "patience": None, "lr": 0.05, "init_std": 0.1}
    if name == "bpr":
        settings["n"] = 4
    run = build(name, checkerboard.train, settings)
    found = fit(run, checkerboard, k=(1,), device="cpu")
    losses = [record["loss"] for record in found.history]
    # small drops: the draws of BIR and XIR grow harder with the model, quick starts near the end, default's loss
    # includes log n
    assert np.mean(losses[-3:]) < (1.0 if name in ("bir", "xir", "quick", "default") else 0.8) * losses[0]
    assert found.test is not None
    vectors = run.model.item_vectors()
    own = recall_at_1(lambda user: (run.model.query_vectors(torch.tensor([user])) @ vectors.T)[0], checkerboard)
    assert own == pytest.approx(found.test.metrics["recall@1"])
    assert own == 1.0
    popular = torch.bincount(torch.from_numpy(checkerboard.train.items).long(), minlength=ITEMS).float()
    generator = torch.Generator().manual_seed(0)
    assert recall_at_1(lambda user: popular, checkerboard) < 0.4
    assert recall_at_1(lambda user: torch.rand(ITEMS, generator=generator), checkerboard) < 0.4


def test_a_world_of_known_tastes_is_learnt() -> None:
    """Trained on observed pairs, the ranking agrees with true relevance far better than popularity or chance do."""
    world = make_world(200, 80, exposure=0.5, relevant=0.3, sharpness=10.0, spread=0.3, seed=2)
    parts = split(world.interactions, "random", valid=0.1, test=0.1, seed=0)
    run = build("tables", parts.train, {"dim": 16, "epochs": 20, "batch_size": 256, "n": 64, "lr": 0.02})
    fit(run, parts, k=(10,), device="cpu")
    truth = world.relevance(torch.arange(200))
    seen = torch.zeros(200, 80, dtype=torch.bool)
    seen[torch.from_numpy(world.interactions.queries).long(), torch.from_numpy(world.interactions.items).long()] = True

    def worth(scores: Tensor) -> float:
        """Mean true relevance of the 5 best unseen items."""
        best = scores.masked_fill(seen, -math.inf).topk(5, 1).indices
        return float(truth.gather(1, best).mean())

    learnt = worth(run.model.query_vectors(torch.arange(200)) @ run.model.item_vectors().T)
    popular = worth(torch.bincount(torch.from_numpy(parts.train.items).long(), minlength=80).float().expand(200, -1))
    chance = worth(torch.rand(200, 80, generator=torch.Generator().manual_seed(0)))
    best = worth(truth)
    assert learnt > 2 * max(popular, chance)
    assert learnt > 0.6 * best


def scripted(monkeypatch: pytest.MonkeyPatch, scores: list[float]) -> list[Interactions]:
    """Make validations report these values of ndcg@10 in turn; return the part that each one ranked."""
    asked: list[Interactions] = []

    def report(model: Any, test: Interactions, seen: Any, k: Any, metrics: Any, **more: Any) -> Evaluation:
        if "counts" in more:  # the final test
            return evaluate(model, test, seen, k, metrics, **more)
        asked.append(test)
        score = scores[len(asked) - 1]
        return Evaluation({"ndcg@10": score, "recall@10": 0.0}, {}, np.arange(1), {}, 0.0)

    monkeypatch.setattr(training, "evaluate", report)
    return asked


def snapshots(run: Run) -> tuple[list[Tensor], TrainingProgress]:
    """The item vectors after every epoch."""
    kept: list[Tensor] = []
    return kept, TrainingProgress(epoch=lambda record: kept.append(run.model.item_vectors().clone()))


@pytest.mark.parametrize("in_folder", [False, True])
@pytest.mark.parametrize(
    ("scores", "settings", "epochs", "best"),
    [
        ([0.1, 0.3, 0.2, 0.25, 0.3, 0.9], {"patience": 3}, 5, 2),  # equal is not better
        ([0.1, 0.3, 0.2, 0.4, 0.1, 0.2], {"patience": 2}, 6, 4),  # a better one restarts the count
        ([0.3, 0.2, 0.1, 0.1, 0.1, 0.1], {"patience": None}, 6, 1),
        ([0.5, 0.1, 0.2], {"patience": 1, "eval_every": 2}, 4, 2),  # patience counts validations, not epochs
        ([0.1, 0.2], {"patience": None, "eval_every": 4}, 6, 6),  # the last epoch is always validated
        ([0.0] * 6, {"patience": None}, 6, 1),
    ],
)
def test_the_best_epoch_is_kept_and_patience_ends_training(
    parts: Split,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    in_folder: bool,
    scores: list[float],
    settings: dict[str, Any],
    epochs: int,
    best: int,
) -> None:
    """Training ends `patience` validations after the best, and the model is bitwise that of the best epoch."""
    scripted(monkeypatch, scores)
    run = build("tables", parts.train, {**QUICK, "n": 16, "epochs": 6, **settings})
    vectors, progress = snapshots(run)
    found = fit(run, parts, tmp_path / "run" if in_folder else None, k=(10,), device="cpu", progress=progress)
    assert len(found.history) == epochs
    assert found.best_epoch == best
    assert torch.equal(run.model.item_vectors(), vectors[best - 1])
    if in_folder:
        assert torch.equal(load(tmp_path / "run").model.item_vectors(), vectors[best - 1])


def test_without_validation_the_last_epoch_is_kept(parts: Split, tmp_path: Path) -> None:
    """Without a validation part all epochs run, for any patience, and the last one is the model."""
    for out in (None, tmp_path / "run"):
        run = build("tables", parts.train, {**QUICK, "n": 16, "patience": 1})
        vectors, progress = snapshots(run)
        found = fit(run, Split(parts.train, None, parts.test), out, k=(10,), device="cpu", progress=progress)
        assert (len(found.history), found.best_epoch) == (3, 3)
        assert torch.equal(run.model.item_vectors(), vectors[-1])
        assert "ndcg@10" not in found.history[0]


def test_training_without_any_held_out_part(parts: Split) -> None:
    """Training without held-out parts gives no test metrics and no error."""
    found = fit(build("tables", parts.train, {**QUICK, "n": 16}), Split(parts.train), device="cpu")
    assert found.test is None
    assert len(found.history) == 3


def test_validation_uses_the_same_sample_of_queries_each_time(parts: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    """valid_queries limits validation to the same queries in every epoch, with all their rows."""
    asked = scripted(monkeypatch, [0.1, 0.2, 0.3])
    assert parts.valid is not None
    fit(build("tables", parts.train, {**QUICK, "n": 16, "valid_queries": 5}), parts, k=(10,), device="cpu")
    assert len(asked) == 3
    chosen = set(asked[0].queries.tolist())
    assert len(chosen) == 5
    for part in asked:
        assert set(part.queries.tolist()) == chosen
        assert len(part) == int(np.isin(parts.valid.queries, list(chosen)).sum())


def test_the_recorded_loss_is_the_mean_over_every_row_once(parts: Split) -> None:
    """At a vanishing learning rate the epoch's loss is the mean full-softmax loss over all rows, the short last batch
    in proportion."""
    run = build("full_softmax", parts.train, {**QUICK, "epochs": 2, "lr": 1e-30, "weight_decay": 0.0})
    assert len(parts.train) % 64
    users, items = (tower.weight.detach().double().clone() for tower in (run.model.query, run.model.item))  # type: ignore[union-attr]
    queries, taken = (torch.from_numpy(column).long() for column in (parts.train.queries, parts.train.items))
    expected = -torch.log_softmax(users[queries] @ items.T, 1)[torch.arange(len(taken)), taken].mean()
    found = fit(run, Split(parts.train), device="cpu")
    assert [record["loss"] for record in found.history] == pytest.approx([float(expected)] * 2, rel=1e-5)


def gradient_descent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train with plain gradient descent at rate 1, so that one step of one epoch shows the gradient."""

    def descent(model: nn.Module, *_: object) -> list[torch.optim.Optimizer]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer.param_groups[0]["initial_lr"] = 1.0
        return [optimizer]

    monkeypatch.setattr(training, "optimizers", descent)


def one_step(data: Interactions, **settings: Any) -> list[Tensor]:
    """The change of the tables in one step on all rows, which is minus the gradient."""
    run = build("full_softmax", data, {"dim": 4, "epochs": 1, "batch_size": 1000, **settings})
    before = [parameter.detach().clone() for parameter in run.model.parameters()]
    fit(run, Split(data), device="cpu")
    return [after.detach() - old for after, old in zip(run.model.parameters(), before, strict=True)]


def test_a_weight_of_two_is_the_row_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights (1, 2, 1, 3) give the gradient of rows repeated as often, and the unit of the weights does not matter."""
    gradient_descent(monkeypatch)
    pairs, weight = [(0, 1), (0, 2), (1, 0), (2, 3)], np.array([1, 2, 1, 3], dtype=np.float32)
    twice = [pair for pair, times in zip(pairs, [1, 2, 1, 3], strict=True) for _ in range(times)]
    weighted = one_step(interactions(pairs, 3, 4, weight=weight))
    repeated = one_step(interactions(twice, 3, 4))
    scaled = one_step(interactions(pairs, 3, 4, weight=10 * weight))
    plain = one_step(interactions(pairs, 3, 4))
    for a, b, c, d in zip(weighted, repeated, scaled, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(a, c, rtol=1e-5, atol=1e-7)
        assert not torch.allclose(a, d, rtol=1e-2)


def test_clip_bounds_the_joint_norm_of_the_gradient(monkeypatch: pytest.MonkeyPatch, parts: Split) -> None:
    """A gradient above `clip` is scaled to that joint norm over all tables in its direction; one below is unchanged."""
    gradient_descent(monkeypatch)
    free = torch.cat([change.flatten() for change in one_step(parts.train)])
    norm = float(free.norm())
    clipped = torch.cat([change.flatten() for change in one_step(parts.train, clip=norm / 10)])
    assert float(clipped.norm()) == pytest.approx(norm / 10, rel=1e-3)
    torch.testing.assert_close(clipped * 10, free, rtol=1e-3, atol=1e-5)
    loose = torch.cat([change.flatten() for change in one_step(parts.train, clip=norm * 10)])
    torch.testing.assert_close(loose, free, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("optimizer", ["row-adam", "row-adagrad", "adam"])
def test_clip_works_with_every_optimiser(parts: Split, optimizer: str) -> None:
    """Sparse and dense gradients train under clip and reach other values than without it."""
    losses = []
    for clip in (None, 0.05):
        run = build("tables", parts.train, {**QUICK, "n": 16, "optimizer": optimizer, "clip": clip, "init_std": 1.0})
        losses.append(fit(run, parts, k=(10,), device="cpu").history[-1]["loss"])
        assert np.isfinite(losses[-1])
    # Adam's step hardly depends on the length of the gradient, so the difference may be small
    assert losses[0] != losses[1]


def test_a_learned_temperature_moves_and_stays_within_bounds(checkerboard: Split) -> None:
    """With learn_tau the temperature of an easy task falls, is recorded per epoch, and stays in [0.02, 1]."""
    settings = {"dim": 8, "batch_size": 64, "patience": None, "n": 16, "learn_tau": True, "tau": 0.5}
    run = build("uns", checkerboard.train, {**settings, "epochs": 8, "lr": 0.02})
    taus = [record["tau"] for record in fit(run, checkerboard, k=(1,), device="cpu").history]
    assert len(set(taus)) == 8
    assert taus[-1] < 0.45
    wild = build("uns", checkerboard.train, {**settings, "epochs": 6, "lr": 1.0})
    assert all(
        0.02 - 1e-6 <= record["tau"] <= 1 + 1e-6 for record in fit(wild, checkerboard, k=(1,), device="cpu").history
    )
    fixed = build("uns", checkerboard.train, {**settings, "learn_tau": False, "epochs": 2})
    assert {record["tau"] for record in fit(fixed, checkerboard, k=(1,), device="cpu").history} == {0.5}


@pytest.mark.parametrize(("warmup", "taken"), [(1000, 1), (6, 6), (7, 1), (0, 0)])
def test_a_warmup_that_does_not_fit_is_shortened_and_said(
    parts: Split, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, warmup: int, taken: int
) -> None:
    """A warm-up of more than half of all steps is cut to a tenth and logged; a shorter one is unchanged."""
    made: list[torch.optim.Optimizer] = []
    rates: list[float] = []
    caplog.set_level(logging.INFO, "sparring")
    real = training.optimizers
    monkeypatch.setattr(training, "optimizers", lambda *args: made.extend(real(*args)) or made)
    settings = {**QUICK, "epochs": 6, "batch_size": -(-len(parts.train) // 2), "schedule": "linear", "warmup": warmup}
    run = build("ssl", parts.train, settings)
    progress = TrainingProgress(
        step=lambda epoch, step, loss: rates.append(made[0].param_groups[0]["lr"] / run.setup.training.lr)
    )
    fit(run, Split(parts.train), device="cpu", progress=progress)
    expected = [min(1.0, (t + 1) / max(taken, 1)) * min(1.0, (12 - t) / (12 - taken)) for t in range(12)]
    assert rates == pytest.approx(expected, rel=1e-12)
    reported = [message for message in caplog.messages if f"warmup={warmup}" in message]
    assert len(reported) == (warmup > 6)
    assert all(f"{taken} steps" in message for message in reported)


def test_learning_rate_follows_decay_and_warmup(parts: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    """At global step t of epoch e the rate is lr * lr_decay^(e // lr_decay_every) * min(1, (t + 1) / warmup)."""
    made: list[torch.optim.Optimizer] = []
    rates: list[float] = []
    real = training.optimizers
    monkeypatch.setattr(training, "optimizers", lambda *args: made.extend(real(*args)) or made)
    steps = -(-len(parts.train) // 64)
    run = build("ssl", parts.train, {**QUICK, "epochs": 5, "lr_decay": 0.5, "lr_decay_every": 2, "warmup": 8})
    progress = TrainingProgress(step=lambda epoch, step, loss: rates.append(made[0].param_groups[0]["lr"]))
    fit(run, Split(parts.train), device="cpu", progress=progress)
    expected = [run.setup.training.lr * 0.5 ** (t // steps // 2) * min(1.0, (t + 1) / 8) for t in range(5 * steps)]
    assert rates == pytest.approx(expected, rel=1e-12)


def test_learning_rate_follows_a_cosine(parts: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    """schedule=cosine: after a linear warm-up, (1 + cos(pi * share of the remaining steps)) / 2 of lr at every step."""
    made: list[torch.optim.Optimizer] = []
    rates: list[float] = []
    real = training.optimizers
    monkeypatch.setattr(training, "optimizers", lambda *args: made.extend(real(*args)) or made)
    total, warmup = 3 * -(-len(parts.train) // 64), 4
    run = build("ssl", parts.train, {**QUICK, "epochs": 3, "schedule": "cosine", "warmup": warmup})
    progress = TrainingProgress(
        step=lambda epoch, step, loss: rates.append(made[0].param_groups[0]["lr"] / run.setup.training.lr)
    )
    fit(run, Split(parts.train), device="cpu", progress=progress)
    expected = [
        min(1.0, (t + 1) / warmup) * (1 + math.cos(math.pi * min(1.0, max(0.0, (t - warmup) / (total - warmup))))) / 2
        for t in range(total)
    ]
    assert rates == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("pooling", ["mean", "attention"])
def test_a_history_tower_trains_and_serves_new_users(checkerboard: Split, tmp_path: Path, pooling: str) -> None:
    """Known users get their right answer, and a new user with three odd items gets the other odd ones first."""
    settings = {
        "query_tower": "history",
        "pooling": pooling,
        "dim": 8,
        "epochs": 30,
        "batch_size": 64,
        "lr": 0.05,
        "n": 16,
    }
    settings["patience"] = None
    run = build("tables", checkerboard.train, settings)
    found = fit(run, checkerboard, tmp_path / "run", k=(1,), device="cpu")
    assert found.test is not None
    assert found.test.metrics["recall@1"] > 0.9
    for parity, history in (("odd", [1, 7, 13]), ("even", [0, 4, 12])):
        titles = load(tmp_path / "run").recommend_history(history, k=7)["title"].to_list()
        assert all(title.startswith(parity) for title in titles)


def test_a_feature_tower_trains_and_serves(checkerboard: Split, tmp_path: Path) -> None:
    """Ids and a category through two layers find the right answers, and the saved run ranks like the trained one."""
    settings = {
        "item_features": "parity",
        "hidden": (16, 8),
        "dim": 8,
        "epochs": 30,
        "batch_size": 64,
        "lr": 0.02,
        "n": 16,
        "patience": None,
    }
    run = build("tables", checkerboard.train, settings)
    found = fit(run, checkerboard, tmp_path / "run", k=(1,), device="cpu")
    assert found.test is not None
    assert found.test.metrics["recall@1"] > 0.9
    trained = load(tmp_path / "run")
    assert torch.equal(trained.model.item_vectors(), run.model.item_vectors())
    assert trained.recommend([0], k=1, with_seen=True)["title"][0].startswith("even")


def test_shown_and_not_taken_items_score_lower() -> None:
    """Items shown but not taken score below equal unseen ones; without explicit negatives they do not."""
    random = np.random.default_rng(0)
    taken, passed, unseen = [], [], []
    for user in range(60):
        own = random.permutation([item for item in range(40) if item % 2 == user % 2])
        taken += [(user, int(item)) for item in own[:8]]
        passed += [(user, int(item)) for item in own[8:14]]
        unseen += [(user, int(item)) for item in own[14:]]
    shown = tuple(np.array(column, dtype=np.int32) for column in zip(*sorted(passed), strict=True))
    data = interactions(taken, 60, 40, shown=shown)
    gaps = {}
    for name in ("shown", "ssl_pop"):
        setup = Setup.of(dim=32, epochs=25, batch_size=64, patience=None, lr=0.02)
        own_arguments = {"n": 60} if name == "shown" else {"correction": "count"}
        run = build(name, data, own_arguments, setup)
        fit(run, Split(data), device="cpu")
        scores = run.model.query_vectors(torch.arange(60)) @ run.model.item_vectors().T
        mean = [float(scores[tuple(torch.tensor(pairs).T)].mean()) for pairs in (passed, unseen)]
        gaps[name] = mean[1] - mean[0]
    assert gaps["shown"] > 0.08
    assert abs(gaps["ssl_pop"]) < 0.02


@pytest.mark.parametrize("mid_epoch", [False, True])
def test_a_loss_that_is_not_a_number_ends_training(parts: Split, tmp_path: Path, mid_epoch: bool) -> None:
    """Divergence raises one line with the epoch and the learning rate, and never replaces a checkpoint."""
    run = build("ssl", parts.train, {**QUICK, "lr": 1e30})
    with pytest.raises(UserError) as error:
        fit(run, parts, tmp_path / "run", k=(10,), device="cpu", save_seconds=-1.0 if mid_epoch else None)
    assert "loss is" in str(error.value)
    assert "epoch 1" in str(error.value)
    assert "1e+30" in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    if (tmp_path / "run" / "checkpoint.safetensors").exists():  # after the first step, whose loss was still finite
        assert mid_epoch
    else:
        assert not mid_epoch


@pytest.mark.parametrize("name", ["default", "xir", "bir", "uns", "g_tower", "cbns", "shown"])
@pytest.mark.parametrize("optimizer", ["row-adam", "adam"])
def test_two_identical_runs_are_bitwise_identical(parts: Split, name: str, optimizer: str) -> None:
    """A seed fixes model and history bit for bit, for any state of the global generator; another seed differs."""
    settings: dict[str, Any] = {**QUICK, "epochs": 2, "optimizer": optimizer}
    if name in ("xir", "bir"):
        settings["draw"] = "multinomial"
    if name == "cbns":
        settings |= {"opens": 2, "size": 100}
    found: list[tuple[dict[str, Tensor], list[dict[str, Any]]]] = []
    for seed in (7, 7, 8):
        torch.manual_seed(len(found))
        run = build(name, parts.train, {**settings, "seed": seed})
        history = fit(run, parts, k=(10,), device="cpu").history
        found.append(
            (
                run.modules().state_dict(),
                [{k: v for k, v in record.items() if "seconds" not in k} for record in history],
            )
        )
    assert found[0][0].keys() == found[1][0].keys()
    assert all(torch.equal(tensor, found[1][0][key]) for key, tensor in found[0][0].items())
    assert found[0][1] == found[1][1]
    assert found[0][1] != found[2][1]


def test_a_folder_does_not_change_the_training(parts: Split, tmp_path: Path) -> None:
    """The model is bitwise the same with and without `out`, and with checkpoints at every step or none."""
    models = []
    for out in (None, tmp_path / "run"):
        run = build("xir", parts.train, {**QUICK, "cache_size": 64, "draw": "multinomial"})
        fit(run, parts, out, k=(10,), device="cpu", save_seconds=-1.0)
        models.append(run.model.state_dict())
    assert all(torch.equal(tensor, models[1][key]) for key, tensor in models[0].items())


def test_what_the_ranking_could_not_do_is_told_before_training(parts: Split) -> None:
    """An invalid cutoff or metric, of the test or the selection, raises before the first step."""
    steps: list[int] = []
    progress = TrainingProgress(step=lambda epoch, step, loss: steps.append(step))
    good = build("tables", parts.train, {**QUICK, "n": 16})

    def refused(words: str, run: Run = good, **arguments: Any) -> None:
        with pytest.raises(UserError, match=words):
            fit(run, parts, device="cpu", progress=progress, **{"k": (10,), **arguments})

    refused("41.* 40 items", k=(10, 41))
    refused("1 and the 40", k=(0,))
    refused("'recal'", metrics=("recal",))
    for select, words in (
        ("ndcg@41", "ndcg@41.* 40 items"),
        ("ndgc@10", "'ndgc'"),
        ("ndcg", "ndcg@10"),
        ("ndcg@0", "ndcg@0"),
    ):
        refused(words, build("tables", parts.train, {**QUICK, "select": select}))
    assert not steps


def test_selection_by_another_metric(parts: Split) -> None:
    """select takes any metric, cutoff and dialect; the best epoch is the one with its highest value."""
    for select in ("recall@5", "mrr@3", "ndcg_xir_release@10", "coverage@10"):
        found = fit(build("tables", parts.train, {**QUICK, "n": 16, "select": select}), parts, k=(10,), device="cpu")
        values = [record[select] for record in found.history]
        assert found.best_epoch == 1 + values.index(max(values))


def test_progress_hears_of_every_step_and_epoch(parts: Split) -> None:
    """start is called once with the numbers of epochs and steps, step with the running mean loss, epoch with each
    record."""
    heard: list[tuple[Any, ...]] = []
    progress = TrainingProgress(
        start=lambda epochs, steps: heard.append(("start", epochs, steps)),
        step=lambda epoch, step, loss: heard.append(("step", epoch, step)),
        epoch=lambda record: heard.append(("epoch", record["epoch"])),
    )
    fit(build("ssl", parts.train, {**QUICK, "epochs": 2}), Split(parts.train), device="cpu", progress=progress)
    steps = -(-len(parts.train) // 64)
    expected: list[tuple[Any, ...]] = [("start", 2, steps)]
    for epoch in range(2):
        expected += [*(("step", epoch, step + 1) for step in range(steps)), ("epoch", epoch + 1)]
    assert heard == expected


def test_half_precision_trains(checkerboard: Split) -> None:
    """precision="bf16" encodes in bfloat16 where it is faster and still learns the checkerboard."""
    settings = {"dim": 8, "epochs": 30, "batch_size": 64, "patience": None, "lr": 0.05, "n": 16, "precision": "bf16"}
    found = fit(build("tables", checkerboard.train, settings), checkerboard, k=(1,), device="cpu")
    assert found.test is not None
    assert found.test.metrics["recall@1"] > 0.9


def test_own_negatives_and_terms_compose(parts: Split) -> None:
    """A custom run takes any terms over any Setup; a step's loss is the weighted sum of the terms' losses."""
    from sparring.negatives import AllItems

    setup = Setup.of(dim=8, epochs=1, batch_size=1000, lr=1e-30, patience=None)
    one = fit(compose(parts.train, setup, Term(1.0, AllItems(40))), Split(parts.train), device="cpu").history[0]["loss"]
    both = compose(parts.train, setup, Term(0.25, AllItems(40)), Term(0.5, AllItems(40)))
    assert both.recipe == "custom"
    assert fit(both, Split(parts.train), device="cpu").history[0]["loss"] == pytest.approx(0.75 * one, rel=1e-6)


def test_an_observer_anywhere_in_the_run_is_told(parts: Split) -> None:
    """Every module of a run that defines observe(step, outcome) is called after each step with the step's rows."""

    class Watch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = 0

        def forward(self, query_ids: Tensor) -> Tensor:
            return torch.tensor(0.1)

        def observe(self, step: Any, outcome: Any) -> None:
            assert outcome.loss.shape == step.query_ids.shape
            assert not outcome.loss.requires_grad
            self.rows += len(step.query_ids)

    watch = Watch()
    run = dataclasses.replace(build("ssl", parts.train, {**QUICK, "epochs": 2}), temperature=watch)
    fit(run, Split(parts.train), device="cpu")
    assert watch.rows == 2 * len(parts.train)


def test_devices_are_checked() -> None:
    """An unknown device, or a GPU on a machine without one, is a one-line error."""
    with pytest.raises(UserError, match="'tpu9'"):
        pick_device("tpu9")
    assert pick_device("cpu").type == "cpu"
    if not torch.cuda.is_available():
        assert pick_device("auto").type == "cpu"
        with pytest.raises(UserError, match="no GPU"):
            pick_device("cuda")


class _Refreshed(InBatch):
    """Records, in buffers, its refreshed epochs and the sum of the item vectors it saw."""

    def __init__(self, epochs: int) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(epochs))
        self.register_buffer("sums", torch.zeros(epochs))

    def refresh(self, corpus: Corpus) -> None:
        self.calls[corpus.epoch] += 1
        self.sums[corpus.epoch] = corpus.items.sum()


def test_refresh_comes_once_before_each_epoch_with_the_vectors_of_that_moment(parts: Split) -> None:
    """One refresh precedes each epoch; the first sees the initial vectors, later ones the trained vectors."""
    negatives = _Refreshed(3)
    run = compose(parts.train, Setup.of(dim=4, batch_size=64, epochs=3, patience=None), Term(1.0, negatives))
    first = float(run.model.item_vectors().sum())
    fit(run, Split(parts.train), device="cpu")
    assert negatives.calls.tolist() == [1, 1, 1]
    assert negatives.sums[0] == pytest.approx(first)
    assert len({round(float(s), 4) for s in negatives.sums}) == 3


@pytest.mark.parametrize("optimizer", ["row-adam", "adam"])
def test_gradients_left_over_are_not_added_to_a_step(
    parts: Split, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    """Gradients of a failed step do not reach the model: later losses are unchanged."""

    def losses(left_over: bool) -> list[float]:
        run = build(
            "uns",
            parts.train,
            {"dim": 4, "n": 16, "batch_size": 32, "epochs": 2, "item_bias": True, "optimizer": optimizer},
        )
        tables = [run.model.query.weight, run.model.item.weight, run.model.item_bias.weight]  # type: ignore[union-attr]

        def leave(epoch: int, step: int, loss: Callable[[], float]) -> None:
            for table in tables if left_over else []:
                rows = torch.zeros(1, 1, dtype=torch.long)
                sparse = torch.sparse_coo_tensor(
                    rows, torch.full((1, table.shape[1]), 1e3), table.shape, check_invariants=False
                )
                table.grad = sparse if optimizer != "adam" else torch.full_like(table, 1e3)

        return [
            record["loss"]
            for record in fit(run, Split(parts.train), device="cpu", progress=TrainingProgress(step=leave)).history
        ]

    assert losses(True) == losses(False)


@pytest.mark.parametrize("name", ["uns", "ease", "popularity"])
def test_a_fitted_run_recommends_what_its_folder_does(parts: Split, name: str, tmp_path: Path) -> None:
    """With a folder or without, lists equal those of the loaded run; unknown queries are refused by name."""
    given = quick() if name == "uns" else {}
    fitted = [fit(build(name, parts.train, given), parts, out, k=(10,), device="cpu") for out in (None, tmp_path / "a")]
    queries = parts.train.query_ids.ids[:7].to_list()
    for options in ({"k": 5}, {"k": 40, "with_seen": True}):
        expected = load(tmp_path / "a").recommend(queries, **options)
        for each in fitted:
            assert each.recommend(queries, **options).equals(expected)
    with pytest.raises(UserError, match="'nobody'"):
        fitted[0].recommend(["nobody"])


def test_a_warm_start_without_a_folder_lists_what_it_inherited(parts: Split, tmp_path: Path) -> None:
    """An item without a training pair is listed if an earlier run trained it, with a folder or without."""
    fit(build("uns", parts.train, quick()), parts, tmp_path / "old", k=(10,), device="cpu")
    gone = int(parts.train.counts().argmax())
    later = Split(parts.train.subset(parts.train.items != gone), None, parts.test)

    def listed(out: Path | None, warm: Path | None) -> set[object]:
        fitted = fit(build("uns", later.train, quick()), later, out, k=(10,), device="cpu", warm=warm)
        query = parts.train.query_ids.ids[:1].to_list()
        return set(fitted.recommend(query, k=40, with_seen=True)["item"].to_list())

    item = parts.train.item_ids.decode([gone])[0]
    assert item not in listed(None, None)
    assert item in listed(None, tmp_path / "old")
    assert item in listed(tmp_path / "new", tmp_path / "old")


def test_progress_is_shown_where_someone_looks(
    parts: Split, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line per epoch on stderr if that is a terminal or if asked for; otherwise nothing, on stdout least of all."""

    def lines(progress: bool | None) -> int:
        capsys.readouterr()
        fit(build("uns", parts.train, quick(epochs=2)), parts, k=(10,), device="cpu", progress=progress)
        shown = capsys.readouterr()
        assert shown.out == ""
        return shown.err.count("loss ")

    assert [lines(progress) for progress in (None, False, True)] == [0, 0, 2]
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert [lines(progress) >= 2 for progress in (None, False)] == [True, False]
