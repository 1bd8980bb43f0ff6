"""DPR, ANCE, NGAME, DEXA and DEXML as recipes: their candidates, corrections and batches, and proof that they learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparring.core.errors import UserError
from sparring.core.types import Step
from sparring.data.batches import query_rows
from sparring.data.interactions import Split
from sparring.data.splits import split
from sparring.data.synthetic_world import make_world
from sparring.evaluation.ranking import evaluate
from sparring.losses import OnlineHard
from sparring.models.clusters.clustered_batches import ClusteredBatches
from sparring.negatives import InBatch, NearestItems, OtherClusters, Popularity, Union
from sparring.negatives import nearest as ance_module
from sparring.recipes import RECIPES
from sparring.recipes.extreme import LABELS, ngame
from sparring.recipes.in_batch import positive_counts
from sparring.recipes.run import Run
from sparring.recipes.settings import build, own_arguments, own_setup, resolve
from sparring.recipes.setup import Setup, parse_setup
from sparring.training.fitting import fit
from sparring.training.loop import TrainingProgress
from sparring.training.step import training_step

NAMES = ("dpr", "ance", "ngame", "dexa", "prime", "dexml")


@pytest.fixture(scope="module")
def tastes() -> Split:
    world = make_world(300, 60, exposure=0.5, relevant=0.3, sharpness=10.0, spread=0.3, seed=2)
    return split(world.interactions, "random", valid=0.1, test=0.2, seed=0)


@pytest.mark.parametrize("name", NAMES)
def test_each_recipe_ranks_far_better_than_it_began(tastes: Split, name: str) -> None:
    """On a world of known tastes, id towers reach at least twice the ndcg@10 of the untrained model."""
    settings: dict[str, Any] = {"dim": 16, "epochs": 40, "batch_size": 50, "warmup": 10, "lr": 0.05}
    if name in ("ngame", "dexa", "prime"):
        settings |= {"clf_epochs": 0, "size": 4}
    run = build(name, tastes.train, settings)
    assert tastes.test is not None
    before = evaluate(run.model, tastes.test, tastes.seen_for("test"), (10,), ("ndcg",)).metrics["ndcg@10"]
    after = fit(run, tastes, k=(10,), device="cpu").test
    assert after is not None
    assert after.metrics["ndcg@10"] > 2 * before


@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_a_query_with_one_of_its_positives(parts: Split, name: str) -> None:
    """Each epoch visits every query with positives once, with one of its items, and the items vary."""
    run = build(name, parts.train, {"dim": 4, "epochs": 6, "batch_size": 7, "warmup": 0, "clf_epochs": 0})
    pairs = set(zip(parts.train.queries.tolist(), parts.train.items.tolist(), strict=True))
    seen: list[list[tuple[int, int]]] = [[]]
    watch(run, lambda step: seen[-1].extend(zip(step.query_ids.tolist(), step.item_ids.tolist(), strict=True)))
    fit(run, Split(parts.train), device="cpu", progress=TrainingProgress(epoch=lambda record: seen.append([])))
    for epoch in seen[:-1]:
        assert sorted(query for query, _ in epoch) == sorted({query for query, _ in pairs})
        assert set(epoch) <= pairs
    assert len({frozenset(epoch) for epoch in seen[:-1]}) == 6


def watch(run: Run, look: Any) -> None:
    """Pass every training step to `look`."""
    negatives = run.terms[0].negatives
    kind = type(negatives)
    negatives.__class__ = type(kind.__name__, (kind,), {"observe": lambda self, step, outcome: look(step)})


def test_batches_follow_the_vectors_of_the_steps(parts: Split) -> None:
    """After each epoch the memory holds, for every training query, its vector from that epoch's step."""
    run = build("ngame", parts.train, {"dim": 4, "epochs": 3, "batch_size": 7, "clf_epochs": 0, "size": 4, "every": 1})
    assert isinstance(run.batches, ClusteredBatches)
    last: dict[int, torch.Tensor] = {}

    def look(step: Step) -> None:
        last.update(zip(step.query_ids.tolist(), step.q.detach().clone(), strict=True))

    def check(record: dict[str, Any]) -> None:
        assert isinstance(run.batches, ClusteredBatches)
        for query, vector in last.items():
            assert torch.equal(run.batches.memory[query], vector)
        assert 0 < record["violators"] <= 10

    watch(run, look)
    fit(run, Split(parts.train), device="cpu", progress=TrainingProgress(epoch=check))
    assert len(last) == len(np.unique(parts.train.queries))


def test_neighbours_share_batches(tastes: Split) -> None:
    """Queries of a clustered batch are closer to one another than queries of a random batch."""

    def closeness(size: int) -> float:
        run = build(
            "ngame",
            tastes.train,
            {"dim": 16, "epochs": 30, "batch_size": 20, "clf_epochs": 0, "size": size, "every": 1, "lr": 0.05},
        )
        fit(run, Split(tastes.train), device="cpu")
        assert run.batches is not None
        rows = query_rows(tastes.train, "uniform")
        found = []
        for batch in run.batches.epoch(29):
            q = run.model.query_vectors(rows.queries[batch])
            found.append(float((q @ q.T).fill_diagonal_(0).mean()))
        return float(np.mean(found))

    assert closeness(8) > closeness(1) + 0.02


def test_what_is_contrasted(parts: Split) -> None:
    """All recipes mask known positives; ANCE adds nearest items, NGAME and DEXA the hinge, DEXA auxiliary vectors."""
    runs = {name: build(name, parts.train) for name in NAMES}
    for name, run in runs.items():
        negatives = run.terms[0].negatives
        sources = list(negatives.sources) if isinstance(negatives, Union) else [negatives]
        assert all(source.exclude == "known" for source in sources), name
    ance = runs["ance"].terms[0].negatives
    assert isinstance(ance, Union)
    assert [type(source) for source in ance.sources] == [InBatch, NearestItems]
    assert isinstance(runs["ngame"].terms[0].loss, OnlineHard)
    assert isinstance(runs["dexa"].terms[0].loss, OnlineHard)
    assert isinstance(build("dpr", parts.train, {"loss": "hinge"}).terms[0].loss, OnlineHard)
    assert runs["dexa"].setup.model.auxiliary
    assert not runs["ngame"].setup.model.auxiliary
    assert build("ngame", parts.train, {"dynamic": True}).terms[0].loss.least == 0.1  # type: ignore[union-attr]


def test_an_encoder_keeps_what_makes_the_recipe(parts: Split) -> None:
    """encoder=bag switches to text towers; rows, temperature and auxiliary vectors stay the recipe's."""
    from sparring.recipes import RECIPES

    setup, _ = resolve(RECIPES["dexa"], {"encoder": "bag"})
    assert (setup.model.query_tower, setup.model.item_tower, setup.text.encoder) == ("text", "text", "bag")
    assert (setup.batches.rows, setup.temperature.tau, setup.model.auxiliary, setup.model.private) == (
        "queries",
        0.1,
        4,
        1000,
    )
    assert parse_setup({"batches": {"rows": "queries"}, "model": {"auxiliary": 4}}).batches.rows == "queries"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"size": 0}, "size"),
        ({"k": 0}, "k >= 1"),
        ({"margin": 0}, "margin"),
        ({"start": 0}, "start"),
        ({"auxiliary": -1}, "auxiliary"),
        ({"rows": "x"}, "rows"),
        ({"rows": "pairs", "draw": "propensity"}, "set rows=queries"),
    ],
)
def test_nonsense_is_refused(parts: Split, settings: dict[str, Any], words: str) -> None:
    """A one-line error names the setting."""
    with pytest.raises(UserError, match=words):
        build("ngame", parts.train, settings)


def test_dexa_is_ngame_with_auxiliary_vectors() -> None:
    """DEXA has NGAME's arguments and defaults, but its own Setup, name and description."""
    own = {recipe: own_arguments(RECIPES[recipe]) for recipe in ("ngame", "dexa")}
    assert own["ngame"] == own["dexa"]
    assert own_setup(RECIPES["dexa"]).replaced(auxiliary=0, private=0) == own_setup(RECIPES["ngame"])
    assert RECIPES["dexa"].__name__ == "dexa"
    assert "DEXA" in str(RECIPES["dexa"].__doc__)


@pytest.mark.parametrize("name", ["dexa", "prime"])
def test_a_variant_passes_every_argument_on(parts: Split, name: str) -> None:
    """DEXA and PRIME take NGAME's arguments and pass each to the loss or the batches; their defaults are their own."""
    assert own_arguments(RECIPES[name]).keys() == own_arguments(ngame).keys()
    given: dict[str, Any] = {"size": 4, "start": 2, "every": 3, "grow": (7,), "k": 3, "margin": 0.2, "dynamic": True}
    given |= {"reduction": "mean", "constant_weights": True, "both_ways": True}
    assert given.keys() == own_arguments(ngame).keys()
    setup = own_setup(RECIPES[name]).replaced(dim=4)
    for values in (given, {key: default for key, (_, default) in own_arguments(RECIPES[name]).items()}):
        run, same = RECIPES[name](parts.train, setup, **values), ngame(parts.train, setup, **values)
        assert vars(run.terms[0].loss).keys() == vars(same.terms[0].loss).keys()
        for key in ("k", "margin", "reduction", "least", "constant_weights", "both_ways"):
            assert getattr(run.terms[0].loss, key) == getattr(same.terms[0].loss, key), key
        for key in ("size", "start", "every", "grow", "batch_size", "seed"):
            assert getattr(run.batches, key) == getattr(same.batches, key), key
    assert (own_arguments(RECIPES["prime"])["size"][1], own_arguments(RECIPES["dexa"])["size"][1]) == (16, 8)


@pytest.mark.parametrize("draw", ["uniform", "propensity"])
def test_the_correction_is_by_how_often_rows_offer_an_item(parts: Split, draw: Any) -> None:
    """Over many epochs, rows contain each item as often as `positive_counts` predicts, within 5 standard errors."""
    expected = positive_counts(parts.train, LABELS.replaced(draw=draw)).double()
    rows, generator = query_rows(parts.train, draw), torch.Generator().manual_seed(0)
    found, epochs = torch.zeros(parts.train.n_items, dtype=torch.float64), 3000
    for _ in range(epochs):
        pairs = rows.pairs(torch.arange(len(rows)), generator)
        found += torch.bincount(torch.from_numpy(parts.train.items)[pairs].long(), minlength=parts.train.n_items)
    assert float(expected.sum()) == pytest.approx(len(rows))
    assert bool(((found / epochs - expected).abs() <= 5 * (expected / epochs).sqrt() + 1e-9).all())


BY_POPULARITY = {
    "dpr": {"corrected": True},
    "esans": {"correction": "counts", "m_o": 2},
    "amns": {"correction": "count"},
}
BY_POPULARITY |= {
    name: {} for name in ("quick", "ssl_pop", "mns", "debiased_mns", "bir", "xir", "cbns", "shown", "bmns")
}


@pytest.mark.parametrize("draw", ["uniform", "propensity"])
@pytest.mark.parametrize("name", BY_POPULARITY)
def test_every_correction_is_by_what_batches_offer(name: str, draw: str, parts: Split) -> None:
    """With rows=queries a recipe corrects by the frequency of each item in its batches, within 5 standard errors of a
    count over many epochs; the frequency among pairs differs."""
    run = build(name, parts.train, BY_POPULARITY[name], setup=Setup.of(rows="queries", draw=draw, dim=4))
    rows = query_rows(parts.train, draw)
    generator, held, epochs = torch.Generator().manual_seed(2), torch.zeros(parts.train.n_items).double(), 3000
    every = torch.arange(len(rows)).repeat(epochs)
    held.index_add_(0, parts.train.pairs()[1][rows.pairs(every, generator)].long(), torch.ones(len(every)).double())
    share, error = held / len(every), (held.clamp(min=1) / len(every) ** 2).sqrt()
    pairs = torch.from_numpy(parts.train.counts()).double() / len(parts.train)
    assert float(((pairs - share).abs() / error).max()) > 15
    modules = list(run.modules().modules())
    used = [module.log_p.exp() for module in modules if isinstance(module, Popularity)]
    used += [module.popularity for module in modules if isinstance(module, OtherClusters)]
    assert used
    for one in used:
        assert float(((one.double() - share).abs() / error).max()) < 5


def test_the_corrected_softmax_subtracts_it(parts: Split) -> None:
    """A candidate's log_w is -log((B - 1) q_j); the hinge has no weights and rejects the correction."""
    run = build("dpr", parts.train, {"corrected": True, "dim": 4})
    queries, items = (column[:9].long() for column in parts.train.pairs())
    bag = training_step(run, queries, items, torch.Generator(), parts.train.positives())[2].bags[0]
    q = positive_counts(parts.train, run.setup).double()
    expected = -(8 * q / q.sum()).log()[items]
    torch.testing.assert_close(bag.blocks[0].log_w.expand(9, 9)[0].double(), expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(UserError, match="loss=softmax"):
        build("dpr", parts.train, {"corrected": True, "loss": "hinge"})


@pytest.mark.parametrize("stopped", [None, (1, 2), (2, 1), (3, 1)])
def test_lists_in_the_background_change_nothing(
    parts: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: Any
) -> None:
    """With a delay, building lists in the background gives the weights of building them inline, even if a run is
    interrupted while a list is being built and then resumed."""
    settings = {
        "dim": 4,
        "epochs": 5,
        "batch_size": 16,
        "warmup": 2,
        "lr": 0.05,
        "every": 2,
        "delay": 1,
        "k": 6,
        "seed": 3,
    }

    def weights(folder: Path, background: bool, stop: Any = None) -> dict[str, torch.Tensor]:
        monkeypatch.setattr(ance_module, "spare_device", lambda device: device if background else None)

        def step(epoch: int, done: int, loss: Any) -> None:
            if (epoch, done) == stop:
                raise KeyboardInterrupt

        for at in (stop, None) if stop else (None,):
            run = build("ance", parts.train, settings)
            try:
                fit(
                    run,
                    Split(parts.train),
                    folder,
                    resume=True,
                    device="cpu",
                    progress=TrainingProgress(step=step) if at else None,
                    save_seconds=-1.0,
                )
            except KeyboardInterrupt:
                continue
        return {name: tensor.clone() for name, tensor in run.model.state_dict().items()}

    inline, beside = weights(tmp_path / "a", False), weights(tmp_path / "b", True, stopped)
    for name, tensor in inline.items():
        assert torch.equal(tensor, beside[name]), name
