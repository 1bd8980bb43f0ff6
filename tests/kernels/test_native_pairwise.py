"""The native step of a pairwise loss: against loops over named negatives, and against the general step."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sparring.data.interactions import Interactions, Split
from sparring.data.splits import split
from sparring.data.synthetic_world import make_world
from sparring.kernels.native import library, pairwise
from sparring.kernels.native.pairwise import Penalty
from sparring.losses import bpr, gbce, hinge
from sparring.losses.pairwise import penalty_of
from sparring.negatives import Hardest, Sampled, Uniform
from sparring.recipes.run import Run, Term, compose
from sparring.recipes.settings import build
from sparring.recipes.setup import Setup
from sparring.training.loop import Trainer, TrainingProgress
from sparring.training.pairwise_step import Threads
from sparring.training.row_optimizers import RowAdagrad, RowAdam, RowOptimizer

N_QUERIES, N_ITEMS = 6, 20


@pytest.fixture(autouse=True)
def _native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "active", True)
    if library.library() is None:
        pytest.skip("needs a C++ compiler")


def a_rule(kind: str, tables: list[Tensor]) -> RowOptimizer:
    params = [torch.nn.Parameter(t) for t in tables]
    if kind == "adagrad":
        return RowAdagrad(params, lr=0.1, weight_decay=0.03)
    return RowAdam(params, lr=0.1, weight_decay=0.03, bias="row" if kind == "adam" else "step")


def native_step(
    rule: RowOptimizer, q: Tensor, positive: Tensor, *given: Any, slots: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """A step whose pairs stand in another order in the data, between others."""
    (group,) = rule.param_groups
    tables = group["params"]
    rules = rule.native_rule(tables[0], group), rule.native_rule(tables[1], group)
    slots = slots or (pairwise.slots(tables[0]), pairwise.slots(tables[1]))
    pairs = torch.randperm(2 * len(q), generator=torch.Generator().manual_seed(7))[: len(q)]
    columns = [torch.full((2 * len(q),), -1, dtype=torch.int32).scatter_(0, pairs, ids.int()) for ids in (q, positive)]
    return pairwise.pairwise(rules, slots, (columns[0], columns[1]), pairs, *given)


def updated(kind: str, table: Tensor, gradients: list[Tensor], touched: list[set[int]]) -> Tensor:
    """A table after some steps of a rule, row by row in float64, as the docstrings of the rules have it."""
    table = table.double().clone()
    mean, square, total = torch.zeros_like(table), torch.zeros_like(table), torch.zeros(len(table)).double()
    count = [0] * len(table)
    for step, (g, rows) in enumerate(zip(gradients, touched, strict=True)):
        for r in rows:
            count[r] += 1
            kept = (1 - 0.1 * 0.03) * table[r]
            if kind == "adagrad":
                total[r] += (g[r] ** 2).mean()
                table[r] = kept - 0.1 * g[r] / (total[r].sqrt() + 1e-8)
                continue
            t = count[r] if kind == "adam" else step + 1
            mean[r] = 0.9 * mean[r] + 0.1 * g[r]
            square[r] = 0.999 * square[r] + 0.001 * g[r] ** 2
            table[r] = kept - 0.1 * (mean[r] / (1 - 0.9**t)) / ((square[r] / (1 - 0.999**t)).sqrt() + 1e-8)
    return table


def looped(
    u: Tensor, e: Tensor, q: Tensor, positive: Tensor, met: list[list[int]], penalty: Penalty, tau: float
) -> list[Tensor]:
    """The loss of each query against the items it meets, by the formulas of the losses' docstrings."""
    losses = []
    for i in range(len(q)):
        own, scores = (u[q[i]] @ e[positive[i]]) / tau, [(u[q[i]] @ e[j]) / tau for j in met[i]]
        if penalty.kind == "gbce":
            alpha = min(1.0, len(scores) / (penalty.n_items - 1))
            beta = 1 - penalty.parameter * (1 - alpha)
            shifted = [s + penalty.offset for s in scores]
            parts = [beta * torch.log1p((-own - penalty.offset).exp()), *(torch.log1p(s.exp()) for s in shifted)]
            losses.append(torch.stack(parts).sum() / (1 + len(scores)))
        elif not scores:
            losses.append(0 * own)
        else:
            logistic = penalty.kind == "logistic"
            apart = [s - own for s in scores]
            parts = [torch.log1p(x.exp()) if logistic else (penalty.parameter + x).clamp(min=0) for x in apart]
            losses.append(torch.stack(parts).mean())
    return losses


@pytest.mark.parametrize(
    "penalty",
    [
        Penalty("logistic"),
        Penalty("hinge", 0.3),
        Penalty("gbce", 0.75, N_ITEMS),
        Penalty("gbce", 0.75, N_ITEMS, -1.5),
    ],
)
@pytest.mark.parametrize(("n", "kept"), [(1, None), (3, None), (5, 2)])
@pytest.mark.parametrize("exclude", ["none", "positive", "known"])
@pytest.mark.parametrize(("kind", "d"), [("adagrad", 64), ("adagrad", 5), ("adam", 37), ("adam of steps", 64)])
def test_steps_equal_loops(
    penalty: Penalty, n: int, kept: int | None, exclude: pairwise.Excluded, kind: str, d: int
) -> None:
    """Three steps: losses of named negatives, and tables as the rule's formula leaves them, rows that repeat included.

    A query all of whose negatives are excluded has no loss; an excluded negative that it meets has a gradient of 0.
    """
    g = torch.Generator().manual_seed(2)
    tables = [torch.randn(rows, d, generator=g) / d**0.5 for rows in (N_QUERIES, N_ITEMS)]
    u, e = tables[0].double(), tables[1].double()
    lists = [[1, 2], [], [0, 3, 5, 11, 12], [], list(range(8)), [7]]
    start = torch.tensor([0, *np.cumsum([len(each) for each in lists])])
    known = pairwise.marked(start, torch.tensor([j for each in lists for j in each], dtype=torch.int32))
    rule, tau = a_rule(kind, [t.clone() for t in tables]), 0.5
    history: list[tuple[Tensor, Tensor]] = []
    rows: list[tuple[set[int], set[int]]] = []
    for _ in range(3):
        q, positive = torch.tensor([0, 5, 2, 2, 4, 0, 2]), torch.tensor([1, 7, 0, 3, 1, 2, 19])
        negative, scale = torch.randint(N_ITEMS, (7, n), generator=g), torch.rand(7, generator=g)
        negative[0], negative[6, 0] = 1, 4
        losses = native_step(rule, q, positive, negative, scale, tau, penalty, kept, exclude, known)
        u.requires_grad_()
        e.requires_grad_()
        met, counted = [], []
        for i in range(7):
            out = {"none": [], "positive": [int(positive[i])], "known": lists[int(q[i])]}[exclude]
            drawn = negative[i].tolist()
            if kept is not None:
                score = {j: -math.inf if j in out else (u[q[i]] @ e[j]).item() for j in drawn}
                drawn = sorted(drawn, key=lambda j: -score[j])[:kept]
            met.append(drawn)
            counted.append([j for j in drawn if j not in out])
        want = looped(u, e, q, positive, counted, penalty, tau)
        assert torch.allclose(losses.double(), torch.stack(want).detach(), rtol=1e-4, atol=1e-5)
        torch.stack([scale[i] * want[i] for i in range(7)]).sum().backward()
        history.append((u.grad, e.grad))  # type: ignore[arg-type]
        rows.append((set(q.tolist()), {*positive.tolist(), *(j for each in met for j in each)}))
        u, e = (
            updated(kind, tables[side], [each[side] for each in history], [each[side] for each in rows])
            for side in (0, 1)
        )
    for mine, theirs in zip(rule.param_groups[0]["params"], (u, e), strict=True):
        assert torch.allclose(mine.double(), theirs, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("kind", ["adagrad", "adam"])
@pytest.mark.parametrize("kept", [None, 1])
def test_threads_change_no_bit(kind: str, kept: int | None) -> None:
    """Losses and both tables are the same bits on one, two and three threads."""
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            g = torch.Generator().manual_seed(5)
            rule = a_rule(kind, [torch.randn(rows, 64, generator=g) for rows in (300, 200)])
            losses = []
            for _ in range(3):
                q, positive = (torch.randint(rows, (1500,), generator=g) for rows in (300, 200))
                negative = torch.randint(200, (1500, 2), generator=g)
                scale = torch.rand(1500, generator=g)
                losses.append(
                    native_step(rule, q, positive, negative, scale, 1.0, Penalty("logistic"), kept, "positive")
                )
            found.append([*losses, *rule.param_groups[0]["params"]])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("quicker", [1, 2])
def test_threads_are_those_with_the_quicker_steps(quicker: int) -> None:
    """One thread and all take turns of eight steps, twice; the quicker ones stay, whatever two slow steps say.

    After 2,048 steps, or with other threads, a trial begins anew.
    """
    before, threads = torch.get_num_threads(), Threads()

    def steps(n: int, best: int) -> list[int]:
        took = []
        for i in range(n):
            took.append(threads.next())
            threads.took(took[-1], 9.0 if i in (0, 1, 8, 9) else 1.0 if took[-1] == best else 2.0)
        return took

    turns = [*[1] * 8, *[2] * 8] * 2
    try:
        torch.set_num_threads(2)
        assert steps(2048, quicker) == [*turns, *[quicker] * 2016]
        assert steps(40, 3 - quicker) == [*turns, *[3 - quicker] * 8]
        torch.set_num_threads(1)
        assert steps(40, 1) == [1] * 40
        torch.set_num_threads(2)
        assert steps(40, quicker) == [*turns, *[quicker] * 8]
    finally:
        torch.set_num_threads(before)


def test_known_items_are_excluded_and_no_others() -> None:
    """Of 20,000 negatives, many of them known, exactly those in the query's list count nothing."""
    rng = np.random.default_rng(0)
    lists = [np.sort(rng.choice(5000, size, replace=False)) for size in (0, 1, 2, 40, 700, 5000)]
    start = torch.tensor([0, *np.cumsum([len(each) for each in lists])])
    known = pairwise.marked(start, torch.from_numpy(np.concatenate(lists)).int())
    q = rng.integers(6, size=20_000)
    near = [lists[i][rng.integers(len(lists[i]))] if len(lists[i]) and rng.random() < 0.5 else -1 for i in q]
    negative = np.where(np.array(near) >= 0, near, rng.integers(5000, size=len(q)))
    rule = a_rule("adagrad", [torch.zeros(6, 3), torch.zeros(5000, 3)])
    ids = torch.from_numpy(q), torch.zeros(len(q)), torch.from_numpy(negative).unsqueeze(1)
    losses = native_step(rule, *ids, torch.ones(len(q)), 1.0, Penalty("logistic"), None, "known", known)
    sets = [set(each.tolist()) for each in lists]
    want = np.array([0.0 if j in sets[i] else math.log(2) for i, j in zip(q, negative.tolist(), strict=True)])
    assert np.allclose(losses.numpy(), want, atol=1e-6)
    assert 0.2 < (want == 0).mean() < 0.9


@pytest.mark.parametrize("penalty", [Penalty("logistic"), Penalty("hinge", 0.3), Penalty("gbce", 0.75, 3)])
@pytest.mark.parametrize("kept", [None, 1])
def test_a_table_that_has_diverged(penalty: Penalty, kept: int | None) -> None:
    """A row that is no number has a loss that is none, by which training notices."""
    rule = a_rule("adagrad", [torch.full((1, 5), math.nan), torch.ones(3, 5)])
    ids = torch.zeros(2), torch.zeros(2), torch.tensor([[1, 2], [2, 1]])
    assert bool(native_step(rule, *ids, torch.ones(2), 1.0, penalty, kept).isnan().all())


@pytest.mark.parametrize(
    ("where", "wrong"),
    [
        *(("queries", -1), ("queries", 3), ("items", -1), ("items", 3)),
        *(("negatives", -1), ("negatives", 3), ("negatives", 1 << 32)),
        *(("pairs", -1), ("pairs", 20), ("pairs", 1 << 32)),
    ],
)
def test_an_id_outside_its_table(where: str, wrong: int) -> None:
    """An id that names no row is refused, and nothing is read, changed or left behind."""
    ids = {name: torch.zeros(20, dtype=torch.int32) for name in ("queries", "items")}
    ids |= {"negatives": torch.zeros(20, 1, dtype=torch.int64), "pairs": torch.arange(20)}
    ids[where].view(-1)[15] = wrong
    rule = a_rule("adagrad", [torch.ones(3, 64), torch.ones(3, 64)])
    (group,) = rule.param_groups
    one, other = group["params"]
    slots, rules = (
        (pairwise.slots(one), pairwise.slots(other)),
        (rule.native_rule(one, group), rule.native_rule(other, group)),
    )
    with pytest.raises(IndexError):
        pairwise.pairwise(
            rules,
            slots,
            (ids["queries"], ids["items"]),
            ids["pairs"],
            ids["negatives"],
            torch.ones(20),
            1.0,
            Penalty("logistic"),
        )
    assert all(bool((each == 0).all()) for each in slots)
    assert all(torch.equal(table, torch.ones(3, 64)) for table in (one, other))


def world() -> Split:
    data = make_world(80, 50, exposure=0.5, relevant=0.3, seed=3).interactions
    return split(data, "random", valid=0.1, test=0.1)


def with_weights(train: Interactions) -> Interactions:
    weight = np.random.default_rng(1).uniform(0.2, 3.0, len(train)).astype(np.float32)
    return replace(train, weight=weight)


def composed(train: Interactions, loss: str) -> Run:
    setup = Setup.of(dim=7, batch_size=64, epochs=2, score="dot", tau=0.7, optimizer="row-adagrad", lr=0.05)
    pool = Sampled(Uniform(train.n_items), 6, True, "none", "known")
    if loss == "hinge":
        return compose(train, setup, Term(0.5, pool, hinge(0.4)))
    return compose(train, setup, Term(2.0, Hardest(pool, 2), gbce(train.n_items, 0.6)))


RUNS: dict[str, dict[str, object]] = {
    "bpr": {},
    "bpr n": {"exclude": "positive", "n": 3, "optimizer": "row-adam", "weight_decay": 0.01},
    "bpr tau": {"tau": 0.5, "warmup": 5, "schedule": "cosine", "dim": 64},
    "bpr weights": {},
    "dns": {"n": 8},
    "dns k": {"n": 8, "k": 3, "exclude": "none", "optimizer": "row-adagrad"},
    "gbce": {"n": 5, "per_query": True, "optimizer": "row-adam", "lr": 0.02},
    "gbce published": {"n": 5, "per_query": True, "optimizer": "row-adam", "lr": 0.02, "offset": False},
}


def runs(case: str, parts: Split) -> Iterator[tuple[Trainer, bool]]:
    """A trainer with the native step, and one with the general one."""
    for direct in (True, False):
        if case in ("hinge", "hardest gbce"):
            run = composed(parts.train, case)
        else:
            settings = {"dim": 7, "batch_size": 64, "epochs": 2, **RUNS[case]}
            run = build(case.split()[0], parts.train, settings)
        trainer = Trainer(run, parts, torch.device("cpu"), None, TrainingProgress())
        assert trainer.direct is not None
        trainer.direct = trainer.direct if direct else None
        yield trainer, direct


@pytest.mark.parametrize("case", [*RUNS, "hinge", "hardest gbce"])
def test_the_native_step_trains_as_the_general_one(case: str) -> None:
    """The same draws, losses and tables as the general step after two epochs."""
    parts = world()
    if case == "bpr weights":
        parts = replace(parts, train=with_weights(parts.train))
    found = []
    for trainer, _ in runs(case, parts):
        losses = []
        for _ in range(2):
            losses.append(trainer.epoch())
            trainer.state.epoch, trainer.state.step, trainer.state.rows = trainer.state.epoch + 1, 0, 0
        tables = [p.detach().clone() for p in trainer.run.model.parameters()]
        found.append((losses, tables, trainer.generator.get_state()))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    assert torch.equal(found[0][2], found[1][2])
    for mine, theirs in zip(found[0][1], found[1][1], strict=True):
        assert float((mine - theirs).norm()) <= 2e-4 * float(theirs.norm())


@pytest.mark.parametrize("settings", [{"score": "cosine"}, {"clip": 1.0}, {"optimizer": "adam"}, {"dropout": 0.1}])
def test_runs_without_a_native_step(settings: dict[str, object]) -> None:
    """Cosines, clipping, a dense rule and dropout go through the general step."""
    run = build("bpr", world().train, {"dim": 4, "epochs": 1, **settings})
    assert Trainer(run, world(), torch.device("cpu"), None, TrainingProgress()).direct is None


def test_without_native_kernels_there_is_no_native_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels are off, the general step trains."""
    monkeypatch.setattr(library, "active", False)
    run = build("bpr", world().train, {"dim": 4, "epochs": 1})
    assert Trainer(run, world(), torch.device("cpu"), None, TrainingProgress()).direct is None


def test_losses_of_the_native_step() -> None:
    """It knows our pairwise losses, and takes no other for one of them, not even one that wraps it."""

    @functools.wraps(bpr)
    def wrapped(*given: Any) -> Tensor:
        return 2 * bpr(*given)

    doubled = functools.wraps(made := hinge(0.2))(lambda step, bag: 2 * made(step, bag))
    assert penalty_of(bpr) == Penalty("logistic")
    assert penalty_of(made) == Penalty("hinge", 0.2)
    assert penalty_of(gbce(30, 0.5)) == Penalty("gbce", 0.5, 30)
    assert penalty_of(gbce(30, 1.0, 2)) == Penalty("gbce", 1.0, 30, pytest.approx(math.log(1 / 29)))
    assert penalty_of(wrapped) is None
    assert penalty_of(doubled) is None
    assert penalty_of(torch.nn.Identity()) is None
