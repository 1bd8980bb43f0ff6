"""Eligibility: neither items that a query is known to have taken nor items that were never trained."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from sparring.cli import main
from sparring.core.errors import UserError
from sparring.data.interactions import Interactions, Split, Vocabulary
from sparring.evaluation.ranking import evaluate
from sparring.recipes.settings import build
from sparring.serving.export.lists import write_lists
from sparring.serving.index import Index
from sparring.training.eligibility import Eligibility
from sparring.training.fitting import fit
from sparring.training.trained import Trained, load
from support.settings import quick

QUICK = quick(dim=6, epochs=2, batch_size=32)
NEW_QUERIES, NEW_ITEMS = {17, 18, 19}, {3, 11, 14}  # nobody trains on them


@pytest.fixture(scope="module")
def shop() -> Split:
    """20 customers (cust-00 ...) and 15 things (100 ...); some of each occur in the test part only."""
    rng = np.random.default_rng(0)
    pairs = [(q, i) for q in range(20) for i in sorted(rng.permutation(15)[:7].tolist())]
    pairs += [(q, i) for q in (0, 1) for i in sorted(NEW_ITEMS) if (q, i) not in pairs]
    late = np.array([q in NEW_QUERIES or i in NEW_ITEMS or (q + i) % 5 == 0 for q, i in pairs])
    q, i = (np.array(column, np.int32) for column in zip(*pairs, strict=True))
    ids = Vocabulary([f"cust-{n:02}" for n in range(20)]), Vocabulary([100 + n for n in range(15)])
    table = pl.DataFrame({"title": [f"thing {n}" for n in range(15)], "kind": [f"k{n % 3}" for n in range(15)]})
    return Split(
        *(Interactions(q[part], i[part], *ids, item_table=table) for part in (~late, late & (q == 2), late & (q != 2)))
    )


@pytest.fixture(scope="module")
def folder(shop: Split, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "shop"
    fit(build("bpr", shop.train, QUICK), shop, out, k=(5,), device="cpu")
    return out


def known(shop: Split) -> list[set[int]]:
    """All items of each customer, by brute force."""
    found: list[set[int]] = [set() for _ in range(20)]
    for part in (shop.train, shop.valid, shop.test):
        assert part is not None
        for query, item in zip(part.queries.tolist(), part.items.tolist(), strict=True):
            found[query].add(item)
    return found


def expected(trained: Trained, shop: Split, query: int, k: int, taken: set[int]) -> list[int]:
    scores = (trained.model.query_vectors(_tensor(query)) @ trained.model.item_vectors().T)[0].tolist()
    trained_items = set(shop.train.items.tolist())
    return [100 + item for item in sorted(trained_items - taken, key=lambda item: (-scores[item], item))][:k]


def _tensor(query: int):  # type: ignore[no-untyped-def]
    import torch

    return torch.tensor([query])


@pytest.mark.parametrize("way", ["recommend", "all", "index"])
@pytest.mark.parametrize("with_seen", [False, True])
def test_lists_hold_nothing_known_and_nothing_untrained(
    folder: Path, shop: Split, tmp_path: Path, way: str, with_seen: bool
) -> None:
    """Single lists, all lists and an index give the brute-force order of trained items without known ones."""
    trained, names = load(folder), [f"cust-{n:02}" for n in range(20)]
    if way == "recommend":
        table = trained.recommend(names, k=15, with_seen=with_seen)
    else:
        index = Index(trained.item_vectors().numpy(), np.arange(15)) if way == "index" else None
        write_lists(trained, tmp_path / "lists.parquet", 15, with_seen, index)
        table = pl.read_parquet(tmp_path / "lists.parquet")
    for query, taken in enumerate(known(shop)):
        listed = table.filter(pl.col("query") == names[query]).sort("rank")["item"].to_list()
        assert listed == expected(trained, shop, query, 15, set() if with_seen else taken)


def test_evaluation_ranks_the_items_of_lists(folder: Path, shop: Split) -> None:
    """The test part is ranked among trained items, and only items taken before it are excluded."""
    trained = load(folder)
    assert shop.test is not None
    before, shares = known(dataclasses.replace(shop, test=shop.train)), []
    for query in sorted(set(shop.test.queries.tolist())):
        wanted = {100 + item for item in shop.test.items[shop.test.queries == query].tolist()}
        best = expected(trained, shop, query, 5, before[query])
        shares.append(len(wanted & set(best)) / len(wanted))
    result = json.loads((folder / "result.json").read_text())["test"]
    assert result["metrics"]["recall@5"] == pytest.approx(sum(shares) / len(shares))
    assert result["strata"]["cold"]["recall@5"] == 0  # a table has no vector for them
    assert "cold among cold" not in result["strata"]
    among = trained.eligibility.listed(15)
    again = evaluate(trained.model, shop.test, shop.seen_for("test"), (5,), ("recall",), among=among)
    assert again.metrics["recall@5"] == result["metrics"]["recall@5"]
    seen = [set(trained.seen.items[trained.seen.start[q] : trained.seen.start[q + 1]].tolist()) for q in range(20)]
    assert seen[2] == known(shop)[2]
    assert not seen[17]


def test_what_was_never_trained_is_counted(folder: Path, shop: Split) -> None:
    """run.json, result.json and the card count queries and items without a training pair, also among the test pairs."""
    assert shop.test is not None
    fresh = sorted(set(range(20)) - set(shop.train.queries.tolist()))
    counts = {"queries": len(fresh), "items": 3, "tested": len(set(fresh) & set(shop.test.queries.tolist()))}
    assert set(fresh) == NEW_QUERIES
    for name in ("run.json", "result.json"):
        assert json.loads((folder / name).read_text())["untrained"] == counts
    card = (folder / "README.md").read_text()
    assert f"{len(fresh)} queries and 3 items have no training pair" in card
    assert f"{counts['tested']} test queries" in card


def test_a_query_without_a_training_pair_is_told(
    folder: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A warning names an untrained query; a trained one has only the note on the number of excluded items."""
    load(folder).recommend(["cust-01", "cust-18"], k=3)
    (record,) = caplog.records
    assert (record.levelname, record.name.split(".")[0]) == ("WARNING", "sparring")
    assert "'cust-18'" in record.getMessage()
    assert "'cust-01'" not in record.getMessage()
    assert main(["recommend", str(folder), "--query", "cust-18", "-k", "3"]) == 0
    assert "sparring: warning: no training" in capfd.readouterr().err
    assert main(["recommend", str(folder), "--query", "cust-01", "-k", "3"]) == 0
    assert capfd.readouterr().err.startswith("sparring: note: 3 items have no training pair")


def test_all_lists_say_what_they_are(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`recommend --all` counts the lists of queries without a training pair, and the items left out."""
    assert main(["recommend", str(folder), "--all", "-k", "3", "--out", str(tmp_path / "lists.csv")]) == 0
    said = capfd.readouterr().err
    assert "note: 3 items have no training pair" in said
    assert "note: 3 queries have no training pair" in said


def test_long_lists_are_told_of_in_a_log(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Without a terminal, occasional log lines replace the progress bar."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sparring.cli.recommend.LOG_SECONDS", 0.0)
        patch.setattr("sparring.serving.export.lists.max", lambda *_: 8, raising=False)  # queries per block
        assert main(["recommend", str(folder), "--all", "-k", "3", "--out", str(tmp_path / "lists.csv")]) == 0
    assert "sparring: note: 8 of 20 queries ranked after 0 s\n" in capfd.readouterr().err


def test_features_place_items_without_pairs(shop: Split, tmp_path: Path) -> None:
    """If the item tower reads columns, items without interactions are recommended too."""
    fit(build("bpr", shop.train, {**QUICK, "item_features": "kind"}), shop, tmp_path / "run", k=(5,), device="cpu")
    assert set(load(tmp_path / "run").recommend(["cust-05"], k=15, with_seen=True)["item"].to_list()) == {
        100 + n for n in range(15)
    }


def test_lists_tell_their_own_errors(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error during ranking is reported as such, not as an unwritable file."""
    trained = load(folder)
    monkeypatch.setattr(trained.model, "query_vectors", lambda at: trained.model.item_vectors()[at % 15] * float("nan"))
    with pytest.raises(UserError, match="NaN"):
        write_lists(trained, tmp_path / "lists.parquet", 3)
    assert not list(tmp_path.iterdir())


def test_a_history_leaves_out_what_was_never_trained(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An untrained item carries no information, so it is named and ignored."""
    trained = load(folder)
    mixed = trained.recommend_history([101, 103], k=3, with_seen=True)
    assert "103" in caplog.records[-1].getMessage()
    assert mixed.equals(trained.recommend_history([101], k=3, with_seen=True))


def test_no_test_part_is_nothing_to_leave_out(shop: Split, tmp_path: Path) -> None:
    """A run on all data, without validation or test, keeps and lists the same way."""
    whole = Split(dataclasses.replace(shop.train))
    fit(build("bpr", whole.train, QUICK), whole, tmp_path / "run", device="cpu")
    assert json.loads((tmp_path / "run" / "result.json").read_text())["untrained"] == {"queries": 3, "items": 3}
    assert len(load(tmp_path / "run").recommend(["cust-05"], k=15)) == 12 - len(
        set(whole.train.items[whole.train.queries == 5].tolist())
    )


def test_weights_of_nothing_are_refused(shop: Split, tmp_path: Path) -> None:
    """All-zero weights raise before the folder is created; one positive weight is enough."""
    weight = np.zeros(len(shop.train), np.float32)
    with pytest.raises(UserError, match="weights of the training pairs are all 0"):
        fit(
            build("bpr", shop.train, QUICK),
            Split(dataclasses.replace(shop.train, weight=weight)),
            tmp_path / "run",
            device="cpu",
        )
    assert not (tmp_path / "run").exists()
    weight[3] = 1.0
    fit(
        build("bpr", shop.train, QUICK),
        Split(dataclasses.replace(shop.train, weight=weight)),
        tmp_path / "run",
        device="cpu",
    )


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"start": torch.tensor([0, 2, 1, 3])}, "overlap"),
        ({"start": torch.tensor([1, 1, 2, 3])}, "overlap"),
        ({"start": torch.tensor([0, 1, 3])}, "3 queries"),
        ({"start": torch.tensor([0.0, 1.0, 2.0, 3.0])}, "3 queries"),
        ({"items": torch.tensor([0, 4], dtype=torch.int32)}, "3 queries"),
        ({"items": torch.tensor([0, 4, 5], dtype=torch.int32)}, "outside"),
        ({"items": torch.tensor([-1, 0, 1], dtype=torch.int32)}, "outside"),
        ({"untrained_items": torch.tensor([5], dtype=torch.int32)}, "outside"),
    ],
)
def test_lists_that_do_not_fit_the_ids_are_refused(changes: dict[str, torch.Tensor], word: str) -> None:
    """Offsets that overlap or are too few, and ids beyond the catalogue, are errors before anything is indexed."""
    good = {"start": torch.tensor([0, 1, 2, 3]), "items": torch.tensor([0, 4, 2], dtype=torch.int32)}
    assert Eligibility.read(good, 3, 5).seen.items.tolist() == [0, 4, 2]
    with pytest.raises(ValueError, match=word):
        Eligibility.read({**good, **changes}, 3, 5)
