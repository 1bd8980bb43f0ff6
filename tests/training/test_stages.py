"""Training in stages: classifiers start from item vectors, rankings are fused, and a stop changes nothing."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparring.core import files
from sparring.data.interactions import Split
from sparring.evaluation.ranking import evaluate, top_k
from sparring.models.fusion import DEPTH, Fused
from sparring.models.retriever import Retriever
from sparring.models.towers import IdTower
from sparring.recipes.settings import build
from sparring.training.fitting import Fitted, fit
from sparring.training.loop import TrainingProgress
from sparring.training.stages import classifier_run
from sparring.training.trained import load
from support.texts import text_parts, tiny_bert

SETTINGS: dict[str, Any] = {
    "dim": 8,
    "epochs": 3,
    "batch_size": 16,
    "warmup": 2,
    "lr": 0.05,
    "eval_every": 1,
    "seed": 5,
}
OWN: dict[str, Any] = {
    "size": 4,
    "every": 1,
    "grow": "2",
    "clf_epochs": 3,
    "clf_batch_size": 16,
    "clf_warmup": 2,
    "clf_lr": 0.05,
}


class Killed(BaseException):
    """Simulates a kill: nothing may catch it."""


def train(
    recipe: str,
    parts: Split,
    out: Path | None,
    *,
    resume: bool = False,
    progress: TrainingProgress | None = None,
    **more: Any,
) -> Fitted:
    extra = {"auxiliary": 4, "private": 3} if recipe == "dexa" else {}
    run = build(recipe, parts.train, {**SETTINGS, **OWN, **extra, **more})
    return fit(run, parts, out, resume=resume, k=(1, 10), device="cpu", progress=progress)


def figures(folder: Path) -> dict[str, Any]:
    """All test metrics of all stages, and every tensor of a run folder."""
    result = json.loads((folder / "result.json").read_text())
    found: dict[str, Any] = {name: test["metrics"] for name, test in result["stages"].items()}
    for name in ("model", "classifiers/model", "fusion", "checkpoint", "classifiers/checkpoint"):
        found |= {
            f"{name}.{key}": value for key, value in files.read_tensors(folder / f"{name}.safetensors")[0].items()
        }
    return found


def killer(stage: int, moment: tuple[int, int] | str) -> TrainingProgress:
    """Raise in the stage (0: towers, 1: classifiers) after this step of this epoch; save after every second step."""
    at = -1

    def start(epochs: int, steps: int) -> None:
        nonlocal at
        at += 1

    def step(epoch: int, done: int, loss: Callable[[], float]) -> bool:
        if at == stage and (epoch, done) == moment:
            raise Killed
        return done % 2 == 1

    return TrainingProgress(start=start, step=step, epoch=lambda record: True)


class KillAtMessage(logging.Handler):
    """Raise when the library logs a message that starts with this."""

    def __init__(self, start: str) -> None:
        super().__init__()
        self.start = start

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith(self.start):
            raise Killed


@contextmanager
def logged(handler: logging.Handler) -> Iterator[None]:
    """The handler receives all messages of the library meanwhile."""
    log = logging.getLogger("sparring")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)


MOMENTS: list[tuple[int, tuple[int, int] | str]] = [
    (0, (0, 1)),
    (0, (1, 2)),
    (0, (2, 3)),
    (0, "classifiers:"),
    (1, (0, 1)),
    (1, (1, 3)),
    (1, (2, 2)),
    (1, "fusion:"),
]


@pytest.fixture(scope="module")
def whole(parts: Split, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for recipe in ("ngame", "dexa"):
        found[recipe] = tmp_path_factory.mktemp("stages") / recipe
        train(recipe, parts, found[recipe])
    return found


@pytest.mark.parametrize("recipe", ["ngame", "dexa"])
@pytest.mark.parametrize("moment", MOMENTS, ids=str)
def test_killed_in_any_stage_and_resumed(
    parts: Split, whole: dict[str, Path], tmp_path: Path, recipe: str, moment: tuple[int, tuple[int, int] | str]
) -> None:
    """Killed in or between stages, or before the fusion, a resumed run has bitwise the same results."""
    with logged(KillAtMessage(str(moment[1]))), pytest.raises(Killed):
        train(recipe, parts, tmp_path / "run", progress=killer(*moment))
    train(recipe, parts, tmp_path / "run", resume=True)
    first, second = figures(whole[recipe]), figures(tmp_path / "run")
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]) if isinstance(value, torch.Tensor) else value == second[name], name


def test_without_a_folder_the_figures_are_the_same(parts: Split, whole: dict[str, Path]) -> None:
    """In memory and in a folder the three rankings are the same."""
    found = train("ngame", parts, None)
    written = json.loads((whole["ngame"] / "result.json").read_text())["stages"]
    assert set(found.stages) == set(written) == {"knn", "clf", "fusion"}
    for name, test in found.stages.items():
        assert test.metrics == pytest.approx(written[name]["metrics"])


def test_each_row_is_the_ranking_that_it_names(parts: Split, whole: dict[str, Path]) -> None:
    """knn is the run folder's model, clf the one in `classifiers`, fusion both with the tree: loaded and ranked by a
    plain loop, each has the recorded recall."""
    written = json.loads((whole["dexa"] / "result.json").read_text())["stages"]
    assert parts.test is not None
    seen = parts.seen_for("test")
    everyone = torch.arange(parts.train.n_queries)
    fused = load(whole["dexa"]).fused
    assert fused is not None
    both = fused.lists(everyone, 10, seen)
    for name, folder in (("knn", whole["dexa"]), ("clf", whole["dexa"] / "classifiers"), ("fusion", None)):
        if folder is None:
            scores = torch.zeros(len(everyone), parts.train.n_items)
            scores.scatter_(1, both, torch.arange(10, 0, -1.0).expand(both.shape))
        else:
            model = load(folder).model
            scores = model.query_vectors(everyone) @ model.item_vectors().T
        recalls = []
        for query in np.unique(parts.test.queries).tolist():
            mine = scores[query].clone()
            mine[seen.items[seen.start[query] : seen.start[query + 1]].long()] = -np.inf
            right = parts.test.items[parts.test.queries == query]
            recalls.append(np.isin(mine.topk(10).indices.numpy(), right).sum() / len(right))
        assert written[name]["metrics"]["recall@10"] == pytest.approx(np.mean(recalls)), name
    assert len({test["metrics"]["ndcg@10"] for test in written.values()}) == 3


def test_transfer(parts: Split) -> None:
    """Classifiers start at the item vectors plus auxiliary ones; query vectors are the towers' and stay fixed."""
    run = build("dexa", parts.train, {**SETTINGS, **OWN, "auxiliary": 4, "private": 3})
    fit(run, parts, k=(10,), device="cpu")
    second = classifier_run(run, parts)
    queries = run.model.query_vectors(torch.arange(parts.train.n_queries))
    torch.testing.assert_close(second.model.item_vectors(), run.model.item_vectors())
    start = second.model.item_vectors().clone()
    fit(second, parts, k=(10,), device="cpu")
    torch.testing.assert_close(second.model.query_vectors(torch.arange(parts.train.n_queries)), queries)
    assert not torch.allclose(second.model.item_vectors(), start, atol=1e-3)


def test_classifiers_learn_what_the_towers_cannot(parts: Split) -> None:
    """On random query and item vectors, classifiers alone learn to rank the training pairs far better."""
    run = build(
        "ngame", parts.train, {**SETTINGS, **OWN, "dim": 32, "clf_epochs": 60, "clf_lr": 0.05, "epochs": 1, "lr": 1e-9}
    )
    fit(run, parts, k=(10,), device="cpu")
    second = classifier_run(run, Split(parts.train))
    before = evaluate(second.model, parts.train, None, (10,), ("recall",)).metrics["recall@10"]
    fit(second, Split(parts.train), device="cpu")
    after = evaluate(second.model, parts.train, None, (10,), ("recall",)).metrics["recall@10"]
    assert after > before + 0.2


def test_stages_can_be_left_out(parts: Split, tmp_path: Path) -> None:
    """clf_epochs=0 trains only the towers, fusion=false skips fusion; other recipes have stages on request."""
    assert train("ngame", parts, tmp_path / "towers", clf_epochs=0).stages == {}
    assert not (tmp_path / "towers" / "classifiers").exists()
    assert set(train("ngame", parts, None, clf_fusion=False).stages) == {"knn", "clf"}
    plain = {"dim": 4, "epochs": 1}
    assert fit(build("ssl", parts.train, plain), parts, k=(10,), device="cpu").stages == {}
    asked = {**plain, "clf_epochs": 1, "clf_batch_size": 16}
    assert set(fit(build("ssl", parts.train, asked), parts, k=(10,), device="cpu").stages) == {
        "knn",
        "clf",
        "fusion",
    }


@pytest.mark.parametrize("encoder", ["bag", "bert"])
def test_text_towers_go_through_all_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoder: str) -> None:
    """Text towers with auxiliary vectors, killed in each stage and resumed, equal an uninterrupted run."""
    monkeypatch.setenv("SPARRING_HOME", str(tmp_path / "home"))
    if encoder == "bert":
        pytest.importorskip("transformers")
    name = "bag" if encoder == "bag" else str(tiny_bert(tmp_path / "bert"))
    texts = text_parts()
    settings = {
        **OWN,
        "encoder": name,
        "dim": 8,
        "epochs": 2,
        "batch_size": 16,
        "auxiliary": 4,
        "private": 3,
        "warmup": 2,
    }
    run = build("dexa", texts.train, settings)
    fit(run, texts, tmp_path / "whole", k=(1, 10), device="cpu")
    for stage, moment in ((0, (1, 1)), (1, (1, 1))):
        again = build("dexa", texts.train, settings)
        with pytest.raises(Killed):
            fit(
                again,
                texts,
                tmp_path / "run",
                resume=stage > 0,
                k=(1, 10),
                device="cpu",
                progress=killer(stage, moment),
            )
    fit(build("dexa", texts.train, settings), texts, tmp_path / "run", resume=True, k=(1, 10), device="cpu")
    first, second = figures(tmp_path / "whole"), figures(tmp_path / "run")
    assert first.keys() == second.keys()
    for key, value in first.items():
        assert torch.equal(value, second[key]) if isinstance(value, torch.Tensor) else value == second[key], key
    everyone = torch.arange(texts.train.n_queries)
    torch.testing.assert_close(load(tmp_path / "run").model.item_vectors(), run.model.item_vectors())
    fused = load(tmp_path / "run").fused
    assert fused is not None
    assert fused.lists(everyone, 5, None).shape == (len(everyone), 5)


@pytest.fixture(scope="module")
def pair(parts: Split) -> tuple[Retriever, Retriever]:
    """Two retrievers over the same queries, like a run and its classifiers."""
    generator = torch.Generator().manual_seed(0)
    made = [Retriever(IdTower(parts.train.n_queries, 6), IdTower(parts.train.n_items, 6)) for _ in range(2)]
    with torch.no_grad():
        for model in made:
            model.item.weight.copy_(torch.randn(parts.train.n_items, 6, generator=generator))  # type: ignore[operator]
            model.query.weight.copy_(torch.randn(parts.train.n_queries, 6, generator=torch.Generator().manual_seed(9)))  # type: ignore[operator]
    return made[0], made[1]


@pytest.mark.parametrize(("beta", "near"), [(0.0, None), (1.0, None), (0.3, None), (1.0, 0.0)])
def test_the_fused_score_is_its_formula(
    parts: Split, pair: tuple[Retriever, Retriever], beta: float, near: float | None
) -> None:
    """Lists are by clf + beta (knn + p) of the best by clf + beta knn, in earlier versions by clf alone; p equals
    scikit-learn's tree on the pairs learned from, and a walk down the nodes on other pairs."""
    pytest.importorskip("sklearn")
    from sklearn.tree import DecisionTreeClassifier

    assert parts.valid is not None
    weights = np.linspace(1, 5, parts.train.n_items).astype(np.float32)
    seen, everyone = parts.seen_for("valid"), torch.arange(parts.train.n_queries)
    fused = Fused(*pair, weights, beta, 12, near)
    fused.learn(parts.valid, seen)
    knn, clf = (model.query_vectors(everyone) @ model.item_vectors().T for model in pair)

    def shortlist(query: int) -> list[int]:
        known = set(seen.items[seen.start[query] : seen.start[query + 1]].tolist())
        by = clf[query] + (beta if near is None else near) * knn[query]
        return sorted((j for j in range(parts.train.n_items) if j not in known), key=lambda j: -float(by[j]))[:12]

    def features(query: int, items: list[int]) -> np.ndarray:
        return np.array([[clf[query, j], knn[query, j], weights[j]] for j in items], dtype=np.float32)

    right = {(int(q), int(j)) for q, j in zip(parts.valid.queries, parts.valid.items, strict=True)}
    asked = np.unique(parts.valid.queries).tolist()
    rows = np.concatenate([features(q, shortlist(q)) for q in asked])
    target = np.array([(q, j) in right for q in asked for j in shortlist(q)])
    tree = DecisionTreeClassifier(max_depth=7, random_state=0).fit(rows, target)
    np.testing.assert_allclose(
        fused.probability(torch.from_numpy(rows)).numpy(), tree.predict_proba(rows)[:, 1], atol=1e-6
    )

    def chance(row: np.ndarray) -> float:
        node = 0
        for _ in range(DEPTH):
            node = int(
                fused.below[node]
                if row[int(fused.feature[node])] <= float(fused.threshold[node])
                else fused.above[node]
            )
        return float(fused.chance[node])

    found = fused.lists(everyone, 5, seen)
    for query in range(parts.train.n_queries):
        items = shortlist(query)
        x = features(query, items)
        score = x[:, 0] + beta * (x[:, 1] + np.array([chance(row) for row in x]))
        ours = [score[items.index(j)] for j in found[query].tolist()]
        np.testing.assert_allclose(ours, np.sort(score)[::-1][:5], atol=1e-5)


def test_lists_longer_than_the_shortlist_and_than_the_catalogue_leaves(
    parts: Split, pair: tuple[Retriever, Retriever]
) -> None:
    """k above the shortlist still gives k items; with fewer unseen items the rest is -1; no item is repeated or
    seen."""
    seen, n = parts.seen_for("test"), parts.train.n_items
    found = Fused(*pair, np.ones(n, dtype=np.float32), shortlist=3).lists(torch.arange(parts.train.n_queries), n, seen)
    plain = top_k(
        pair[1].query_vectors(torch.arange(parts.train.n_queries)),
        pair[1].item_vectors(),
        n,
        seen,
        torch.arange(len(found)),
    )[1]
    assert torch.equal(found.sort(1).values, plain.sort(1).values)
    assert int((found < 0).sum()) == int((plain < 0).sum()) > 0


def test_a_tree_without_any_right_pair_is_zero(parts: Split, pair: tuple[Retriever, Retriever]) -> None:
    """If no held-out pair is found, the tree is zero and the score is clf + knn."""
    assert parts.valid is not None
    fused = Fused(*pair, np.ones(parts.train.n_items, dtype=np.float32), shortlist=1)
    worst = (
        top_k(-pair[1].query_vectors(torch.arange(parts.train.n_queries)), pair[1].item_vectors(), 1)[1].numpy().ravel()
    )
    fused.learn(replace(parts.valid, items=worst[parts.valid.queries].astype(np.int32)), None)
    assert float(fused.probability(torch.randn(100, 3)).max()) == 0.0
    assert len(fused.chance) == 2 ** (DEPTH + 1) - 1
