"""Baselines beside a run: popularity, also recent, and the best cheap one that knows the query, on the same part.

A model that a count of interactions beats should not be served, so its figure never stands alone. Baselines are the
recipes of recipes/baselines.py, trained and ranked as `fit` trains and ranks them; for texts there is TF-IDF as well,
which is not trained (evaluation/tfidf.py). They never fail a run: the log says why one is missing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparring.core.errors import first_line
from sparring.data.interactions import Split
from sparring.data.pairs import occurrences
from sparring.data.texts.texts import text_of
from sparring.evaluation.ranking import Evaluation, Pairs
from sparring.evaluation.tfidf import TfIdf
from sparring.models.retriever import Retriever
from sparring.recipes.settings import build
from sparring.training.loop import Trainer, TrainingProgress
from sparring.training.trend import HALF_LIVES

SWEEPS = 4  # of ials: it starts from an SVD
# The personalised baselines and their settings, the usual best first.
PERSONAL: dict[str, dict[str, object]] = {"ease": {}, "ials": {"epochs": SWEEPS, "eval_every": SWEEPS}, "item_knn": {}}
SHARE, SPARE = 0.1, 5.0  # they may take this share of the training time, and so many seconds more
WORDS, WORDS_SPARE = "tf-idf", 30.0  # TF-IDF may take so many seconds more: runs over texts train for minutes
RECENT = "recent popularity"
TIE = 0.99  # a run with this share of a baseline's figure is not called behind
_GPU = 100.0  # times as fast as two CPU threads
log = logging.getLogger(__name__)

Rank = Callable[[Retriever | TfIdf, Tensor | None], Evaluation]  # a model and the items it may list -> its metrics
Columns = tuple[Sequence[str], Sequence[str]]  # that the towers of queries and items read as texts


def baselines(
    split: Split,
    ranked: Pairs,
    rank: Rank,
    device: torch.device,
    *,
    select: str = "ndcg@10",
    seed: int = 0,
    seconds: float = 0.0,
    personal: Collection[str] = tuple(PERSONAL),
    apart: Collection[str] = (),
    texts: Columns | None = None,
) -> dict[str, Evaluation]:
    """The metrics of popularity, of TF-IDF for `texts`, and of one personalised baseline, on the pairs `ranked`.

    All are solved on the training part. The personalised one is the best by `select` on the validation part, among
    those of `personal` that fit into SHARE of the training's `seconds` and SPARE seconds more; sizes decide that in
    advance. Without a validation part it is the first that fits. Recipes in `apart` are left out. Where the validation
    part is later than the training part, recent popularity stands beside popularity; validation chooses its half-life.

        baselines(split, split.test, lambda model, listed: evaluate(model, split.test, seen, among=listed), device)
    """
    found: dict[str, Evaluation] = {}
    if "popularity" not in apart:
        with _noted("popularity"):
            model, listed, _ = _solved("popularity", Split(split.train), device, select, seed)  # nothing to choose
            found["popularity"] = rank(model, listed)
        if split.timed:
            with _noted(RECENT):
                tried = [_solved("popularity", split, device, select, seed, half_life=share) for share in HALF_LIVES]
                found[RECENT] = rank(*max(tried, key=lambda each: each[2])[:2])
    if texts is not None:
        expected = 2e-8 * len(np.unique(ranked.queries)) * split.train.n_items
        if expected > SHARE * seconds + WORDS_SPARE:
            log.info("no baseline %s: it would take about %.0f s", WORDS, expected)
        else:
            with _noted(WORDS):
                found[WORDS] = rank(_tf_idf(split, texts), None)
    wanted = [name for name in PERSONAL if name in personal and name not in apart]
    if not occurrences(split.train.queries, split.train.n_queries)[ranked.queries].any():
        log.info("no personalised baseline: no query that is ranked has a training pair")
        return found
    began, room = time.monotonic(), SHARE * seconds + SPARE
    best: tuple[str, Retriever, Tensor | None, float] | None = None
    late = []
    for name in wanted:
        if best is not None and split.valid is None:
            break
        if time.monotonic() - began + expected_seconds(name, split, ranked, device) > room:
            late.append(name)
            continue
        with _noted(name):
            solved = name, *_solved(name, split, device, select, seed)
            best = solved if best is None or solved[3] > best[3] else best
    if best is not None:
        with _noted(best[0]):
            found[best[0]] = rank(*best[1:3])
    elif late:
        log.info("no personalised baseline: %s would take more than %.0f s", ", ".join(late), room)
    return found


def expected_seconds(name: str, split: Split, ranked: Pairs, device: torch.device) -> float:
    """The time that a personalised baseline takes to solve, validate and rank, from sizes; right within a factor of 2.

    The constants are those of two CPU threads: EASE inverts a matrix of N^3, item kNN sorts N^2 similarities, ials
    solves a system per row, and all rank Q queries.
    """
    train, n = split.train, split.train.n_items
    pairs, together = len(train), float((occurrences(train.queries, train.n_queries).astype(np.float64) ** 2).sum())
    lists = len(np.unique(ranked.queries)) + (0 if split.valid is None else len(np.unique(split.valid.queries)))
    seconds = {
        "ease": 3e-11 * n**3 + 1.5e-8 * together + lists * n * (1.2e-8 + 5e-10 * pairs / max(train.n_queries, 1)),
        "ials": SWEEPS * (1e-6 * pairs + 1e-5 * (train.n_queries + n)) + 4e-9 * lists * n,
        "item_knn": 6e-8 * n**2 + 2e-8 * together + 1.2e-8 * lists * n,
    }[name]
    return seconds / _GPU if device.type == "cuda" else seconds * 2 / torch.get_num_threads()


def behind(metric: str, own: float, others: Mapping[str, float]) -> list[str]:
    """A line for each baseline that does better than a run, by more than a hundredth."""
    advice = {
        "popularity": "a list of the most popular items would serve better than this run",
        RECENT: "a list of what is taken most lately would serve better than this run",
        WORDS: "the words that texts share, without training, would serve better than this run",
    }
    return [
        f"{metric} is behind {name} ({own:.4f} against {other:.4f}): "
        + advice.get(name, f"`--recipe {name}` takes seconds and does better")
        for name, other in others.items()
        if own < TIE * other
    ]


def headline(metrics: Mapping[str, float]) -> str:
    """The metric that a run and its baselines are compared by: NDCG at the middle cutoff, or the first there is."""
    cutoffs = sorted({int(name.split("@")[1]) for name in metrics})
    names = [name for name in metrics if name.endswith(f"@{cutoffs[len(cutoffs) // 2]}")]
    return next((name for name in names if name.startswith("ndcg")), names[0])


def text_columns(setup: Mapping[str, Any]) -> Columns | None:
    """The columns that a run reads as texts, from its settings by flat name; None unless both towers read texts."""
    if (setup.get("query_tower"), setup.get("item_tower")) != ("text", "text"):
        return None
    return tuple(setup.get("query_text") or ()), tuple(setup.get("item_text") or ())


def _tf_idf(split: Split, columns: Columns) -> TfIdf:
    queries, items = text_of(split.train, "query", columns[0]), text_of(split.train, "item", columns[1])
    return TfIdf(items, queries, queries.gather(np.unique(split.train.queries)))


def _solved(
    name: str, split: Split, device: torch.device, select: str, seed: int, **arguments: object
) -> tuple[Retriever, Tensor | None, float]:
    """A baseline's model, the items that it may list, and its validation metric; -inf without a validation part."""
    run = build(name, split.train, {**PERSONAL.get(name, {}), "select": select, "seed": seed, **arguments})
    trainer = Trainer(run, Split(split.train, split.valid), device, None, TrainingProgress())
    if device.type == "cuda":
        torch.set_float32_matmul_precision("highest")
    with trainer.checkpoints:
        trainer.train()
    trainer.checkpoints.load_best(trainer.state.best_epoch)
    return run.model, trainer.listed, trainer.state.best


@contextmanager
def _noted(name: str) -> Iterator[None]:
    """Log an error instead of raising it: a baseline is no reason to lose a run."""
    try:
        yield
    except Exception as error:
        log.warning("no baseline %s: %s", name, first_line(error))
