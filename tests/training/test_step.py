"""Every report on a run's batches describes the batches that the run trains on."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparring.core.types import Bag, Step
from sparring.data.interactions import Split
from sparring.experiments.diagnose.item_negatives import negatives_of_item
from sparring.experiments.diagnose.measures import diagnose
from sparring.experiments.diagnose.profile import profile
from sparring.experiments.diagnose.samplers import with_negatives_of
from sparring.models.clusters.clustered_batches import ClusteredBatches
from sparring.negatives import Negatives
from sparring.recipes.run import Run
from sparring.recipes.settings import build
from sparring.training.fitting import fit
from sparring.training.step import TrainingRows, describe_batch, sample_steps

QUICK: dict[str, object] = {"dim": 8, "batch_size": 8}
NGAME: dict[str, object] = {**QUICK, "epochs": 2, "clf_epochs": 0, "size": 4, "start": 1, "every": 1}


class Recorder(Negatives):
    """Negatives that record the ids of every batch."""

    def __init__(self, inner: Negatives) -> None:
        super().__init__()
        self.recorded, self.batches = inner, list[tuple[list[int], list[int]]]()

    def forward(self, step: Step) -> Bag:
        self.batches.append((step.query_ids.tolist(), step.item_ids.tolist()))
        return self.recorded(step)


def recorded(recipe: str, parts: Split, settings: dict[str, object]) -> tuple[Run, Recorder]:
    run = build(recipe, parts.train, settings)
    recorder = Recorder(run.terms[0].negatives)
    return replace(run, terms=(replace(run.terms[0], negatives=recorder),)), recorder


@pytest.mark.parametrize("settings", [{}, {"rows": "pairs"}, {"draw": "propensity"}])
def test_the_profile_is_of_the_first_batches_of_training(parts: Split, settings: dict[str, object]) -> None:
    """For rows=queries and rows=pairs, profile and describe_batch see the queries and items of the first steps."""
    run, recorder = recorded("dpr", parts, {**QUICK, "epochs": 1, **settings})
    fit(run, Split(parts.train), device="cpu")
    trained = recorder.batches[:4]
    recorder.batches.clear()
    profile(run, parts, batches=4)
    assert recorder.batches == trained
    recorder.batches.clear()
    describe_batch(run, parts)
    assert recorder.batches == trained[:1]


def test_one_step_is_run_to_describe_the_batch(parts: Split, tmp_path: Path) -> None:
    """A training with a folder runs one extra step, whose description is in run.json."""
    run, recorder = recorded("dpr", parts, {**QUICK, "epochs": 1})
    fit(run, Split(parts.train), tmp_path / "run", device="cpu")
    assert len(recorder.batches) == 1 + len(TrainingRows(run, parts.train).batches)
    assert recorder.batches[0] == recorder.batches[1]
    meta = json.loads((tmp_path / "run" / "run.json").read_text())
    assert meta["batch"] == describe_batch(run, parts).splitlines()


def test_clustered_batches_are_profiled_as_they_are_trained_on(parts: Split) -> None:
    """For NGAME, steps and profile have the queries of the trainer's batches of that epoch, in order."""
    run, recorder = recorded("ngame", parts, NGAME)
    fit(run, Split(parts.train), device="cpu")
    assert isinstance(run.batches, ClusteredBatches)
    second = [queries for queries, _ in recorder.batches[len(recorder.batches) // 2 :]]
    assert [step.query_ids.tolist() for _, step, _ in sample_steps(run, parts, epoch=1)] == second
    recorder.batches.clear()
    profile(run, parts, batches=3)
    planned = [run.batches.queries[rows].tolist() for rows in islice(run.batches.epoch(0), 3)]
    assert [queries for queries, _ in recorder.batches] == planned
    items = parts.train.positives()
    for queries, positives in recorder.batches:
        for query, item in zip(queries, positives, strict=True):
            assert item in items.items[items.start[query] : items.start[query + 1]]


def clusters_of(run: Run, queries: list[int]) -> Tensor:
    """The cluster of each of these queries."""
    assert isinstance(run.batches, ClusteredBatches)
    return run.batches.cluster[torch.searchsorted(run.batches.queries, torch.tensor(queries))]


def test_a_diagnosed_pair_is_in_the_company_of_its_cluster(parts: Split) -> None:
    """For NGAME every batch of diagnose and of an item's negatives has the complete cluster of its first query."""
    run, recorder = recorded("ngame", parts, NGAME)
    fit(run, Split(parts.train), device="cpu")
    assert isinstance(run.batches, ClusteredBatches)
    sizes = torch.bincount(run.batches.cluster.long())
    assert sizes.max() > 1
    recorder.batches.clear()
    negatives_of_item(run, parts, int(parts.train.items[0]), steps=3)
    assert all(positives[0] == int(parts.train.items[0]) for _, positives in recorder.batches)
    diagnose("own", run, parts, queries=16, draws=2)  # a profile of 4 batches ends it
    for queries, _ in recorder.batches[:-4]:
        cluster = clusters_of(run, queries)
        assert int((cluster == cluster[0]).sum()) == int(sizes[cluster[0]])
        assert len(set(queries)) == len(queries) == 8
    assert len(recorder.batches) == 3 + 2 * 16 + 4


def test_an_opponent_with_batches_of_its_own_has_clusters(parts: Split) -> None:
    """On another run's towers, NGAME's batches are clusters of the queries' current vectors, not random rows."""
    run = build("dpr", parts.train, QUICK)
    rival = with_negatives_of("ngame", run, parts)
    assert isinstance(rival.batches, ClusteredBatches)
    assert len(rival.batches.cluster.unique()) < len(rival.batches.cluster)
    assert torch.equal(rival.batches.memory, run.model.query_vectors(torch.arange(parts.train.n_queries)))


@pytest.mark.parametrize("rows", ["pairs", "queries"])
def test_a_batch_around_pairs_starts_with_them(parts: Split, rows: str) -> None:
    """The other rows are distinct and have one of their own pairs; a small batch has at least the requested pairs."""
    run = build("dpr", parts.train, {**QUICK, "rows": rows})
    training, generator = TrainingRows(run, parts.train), torch.Generator().manual_seed(4)
    pairs = training.sample(5, generator)
    batch = training.around(pairs, 12, generator)
    assert torch.equal(batch[:5], pairs)
    assert len(batch) == len(batch.unique()) == 12
    if rows == "queries":
        assert len(training.ids(batch)[0].unique()) == 12
    assert torch.equal(training.around(pairs, 2, generator), pairs)


@pytest.mark.parametrize("draw", ["uniform", "propensity"])
def test_chances_are_how_often_pairs_are_drawn(parts: Split, draw: str) -> None:
    """Given its query, the probability of a pair is its share of the query's weights; they sum to one."""
    run = build("dpr", parts.train, {**QUICK, "draw": draw})
    drawn = TrainingRows(run, parts.train).by_query
    assert drawn is not None
    queries, chances = parts.train.pairs()[0].long(), drawn.chances()
    total = torch.zeros(parts.train.n_queries, dtype=torch.float64).index_add_(0, queries, chances)
    torch.testing.assert_close(total[queries.unique()], torch.ones(len(queries.unique()), dtype=torch.float64))
    generator, n = torch.Generator().manual_seed(0), 4000
    rows = torch.arange(len(drawn)).repeat(n)
    counts = torch.bincount(drawn.pairs(rows, generator), minlength=len(chances))
    deviation = (counts - n * chances) / (n * chances * (1 - chances)).sqrt().clamp(min=1e-9)
    assert float(deviation[chances < 0.999999].abs().max()) < 5
    assert bool((counts[chances >= 0.999999] == n).all())
