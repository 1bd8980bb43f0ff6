"""The fused ranking of a run in stages is the default of every command that ranks, for known queries and new texts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

import sparring
from sparring.cli import main
from sparring.core.errors import UserError
from sparring.data.interactions import Split
from support.texts import text_parts

SETTINGS = {
    "encoder": "bag",
    "dim": 8,
    "epochs": 2,
    "batch_size": 16,
    "clf_epochs": 4,
    "clf_batch_size": 16,
    "clf_lr": 0.05,
    "size": 4,
}
pytestmark = pytest.mark.usefixtures("quick_texts")


@pytest.fixture(scope="module")
def parts() -> Split:
    return text_parts()


@pytest.fixture
def run(parts: Split, tmp_path: Path) -> sparring.Trained:
    sparring.fit(sparring.build("ngame", parts.train, SETTINGS), parts, tmp_path / "run", k=(1, 10), device="cpu")
    return sparring.load(tmp_path / "run")


def lists(table: pl.DataFrame) -> list[list[int]]:
    return [group["item"].to_list() for group in table.partition_by("query", maintain_order=True)]


def by_hand(
    run: sparring.Trained, q: torch.Tensor, taken: list[set[int]], k: int
) -> tuple[list[list[int]], list[list[float]]]:
    """clf + knn + the tree's probability, over the 40 items, one query and one item at a time."""
    assert run.fused is not None
    clf, knn = run.fused.clf.item_vectors().double(), run.model.item_vectors().double()
    found, scores = [], []
    for vector, own in zip(q.double(), taken, strict=True):
        scored = {}
        for item in set(range(len(knn))) - own:
            unit = vector / vector.norm().clamp(min=1e-9)
            x = torch.stack([clf[item] @ unit, knn[item] @ vector, run.fused.propensity[item].double()]).float()
            scored[item] = float(x[0] + x[1] + run.fused.probability(x))
        best = sorted(scored, key=lambda item: -scored[item])[:k]
        found.append(best)
        scores.append([scored[item] for item in best])
    return found, scores


def test_fit_trains_all_stages(run: sparring.Trained) -> None:
    """sparring.fit trains all stages, and the run folder recommends by towers and classifiers."""
    assert run.fused is not None
    assert run.how() == "fused"
    assert set(json.loads((run.folder / "result.json").read_text())["stages"]) == {"knn", "clf", "fusion"}


def test_known_queries_are_ranked_by_both(run: sparring.Trained, parts: Split) -> None:
    """Lists without taken items equal the formula; ranking="encoder" uses the towers alone, and the two differ."""
    at = torch.arange(parts.train.n_queries)
    every = [part for part in (parts.train, parts.valid, parts.test) if part is not None]
    taken = [{int(item) for part in every for item in part.items[part.queries == query]} for query in at.tolist()]
    items, scores = by_hand(run, run.model.query_vectors(at), taken, 5)
    asked = parts.train.query_ids.decode(at.numpy()).tolist()
    found = run.recommend(asked, 5)
    assert lists(found) == [parts.train.item_ids.decode(each).tolist() for each in items]
    np.testing.assert_allclose(found["score"], np.concatenate(scores), atol=1e-5)
    towers = run.recommend(asked, 5, ranking="encoder")
    near = run.model.query_vectors(at) @ run.model.item_vectors().T
    for query, own in enumerate(taken):
        near[query, list(own)] = -torch.inf
    assert lists(towers) == [parts.train.item_ids.decode(each).tolist() for each in near.topk(5).indices.numpy()]
    assert lists(towers) != lists(found)


def test_new_texts_are_ranked_by_both(run: sparring.Trained, parts: Split) -> None:
    """New texts go through the query tower to the classifiers as well."""
    texts = ["warm wool coat", "a small old lamp"]
    items, _ = by_hand(run, run.encode_texts(texts, "query"), [set(), set()], 5)
    assert lists(run.recommend_text(texts, 5)) == [parts.train.item_ids.decode(each).tolist() for each in items]
    assert lists(run.recommend_text(texts, 5, ranking="encoder")) != lists(run.recommend_text(texts, 5))


def test_a_run_without_classifiers_has_no_fused_ranking(parts: Split, tmp_path: Path) -> None:
    """The default ranking is the towers'; a fused one and an unknown name raise errors."""
    sparring.fit(
        sparring.build("ngame", parts.train, {**SETTINGS, "clf_epochs": 0}),
        parts,
        tmp_path / "run",
        k=(10,),
        device="cpu",
    )
    run = sparring.load(tmp_path / "run")
    assert run.how() == "encoder"
    with pytest.raises(UserError, match="no fused ranking"):
        run.recommend([0], ranking="fused")
    with pytest.raises(UserError, match="ranking is 'knn'; it must be"):
        run.recommend([0], ranking="knn")  # type: ignore[arg-type]


@pytest.fixture
def trained(parts: Split, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A staged run trained by the command line; its output is in the file `out`."""
    data = parts.train
    assert data.query_table is not None
    assert data.item_table is not None
    pairs = pl.DataFrame({"query_id": data.queries, "item_id": data.items})
    pairs.write_parquet(tmp_path / "pairs.parquet")
    pl.DataFrame({"query_id": range(60), "text": data.query_table["text"]}).write_parquet(tmp_path / "queries.parquet")
    pl.DataFrame({"item_id": range(40), "text": data.item_table["text"]}).write_parquet(tmp_path / "items.parquet")
    words = ["train", "--data", str(tmp_path / "pairs.parquet"), "--recipe", "ngame", "--k=1,10", "--device=cpu"]
    words += ["--out", str(tmp_path / "run"), *(f"--set={name}={value}" for name, value in SETTINGS.items())]
    words += [f"--{name}={tmp_path / name}.parquet" for name in ("queries", "items")]
    assert main(words) == 0
    (tmp_path / "out").write_text(capsys.readouterr().out)
    return tmp_path / "run"


def test_every_command_ranks_by_both_and_can_be_asked_for_the_towers(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """train, the card and evaluate show fused and tower figures, and recommend follows --ranking."""
    stages = json.loads((trained / "result.json").read_text())["stages"]
    figures = {name: f"recall@10 {test['metrics']['recall@10']:.4f}" for name, test in stages.items()}
    last = trained.with_name("out").read_text().strip().splitlines()[-1]
    assert f"test, fused: {figures['fusion']}" in last
    assert f"towers alone: {figures['knn']}" in last
    card = (trained / "README.md").read_text()
    assert "Ranked by towers and classifiers fused." in card
    assert (
        f"| recall | {stages['fusion']['metrics']['recall@1']:.4f} | {stages['fusion']['metrics']['recall@10']:.4f} |"
        in card
    )
    assert f'`ranking="encoder"`: {figures["knn"]}' in card

    def evaluated(*more: str) -> dict:
        assert main(["evaluate", str(trained), "--k=1,10", "--json", "--device=cpu", *more]) == 0
        found: dict = json.loads(capsys.readouterr().out)
        return found

    both, towers = evaluated(), evaluated("--ranking=encoder")
    assert (both["ranking"], towers["ranking"]) == ("fused", "encoder")
    for name in ("recall@10", "ndcg@10", "precision@1"):
        assert both["metrics"][name] == pytest.approx(stages["fusion"]["metrics"][name])
        assert (
            both["encoder"]["metrics"][name] == towers["metrics"][name] == pytest.approx(stages["knn"]["metrics"][name])
        )
    assert main(["evaluate", str(trained), "--k=1,10", "--device=cpu"]) == 0
    out = capsys.readouterr().out
    assert "by towers and classifiers fused" in out
    assert [line.split()[0] for line in out.strip().splitlines()[-2:]] == ["encoder", "fused"]

    run = sparring.load(trained)
    for ranking in ("fused", "encoder"):
        assert main(["recommend", str(trained), "--text", "warm coat", "-k=5", "--json", f"--ranking={ranking}"]) == 0
        found = [json.loads(line)["item"] for line in capsys.readouterr().out.splitlines()]
        assert found == run.recommend_text(["warm coat"], 5, ranking)["item"].to_list()  # type: ignore[arg-type]
        file = trained.with_name(f"{ranking}.parquet")
        assert main(["recommend", str(trained), "--all", "--out", str(file), "-k=5", f"--ranking={ranking}"]) == 0
        capsys.readouterr()
        assert lists(pl.read_parquet(file)) == lists(run.recommend(list(range(60)), 5, ranking=ranking))  # type: ignore[arg-type]
    assert main(["recommend", str(trained), "--all", "--index", "--out", str(file), "--ranking=fused"]) == 2
    assert "--index" in capsys.readouterr().err


def test_what_has_the_towers_alone_says_so(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Index and export of a fused run each print one line that they use the towers alone."""
    for words in (["index", str(trained), "--kind=exact", "--k=5"], ["export", str(trained), "--to=parquet"]):
        assert main(words) == 0
        assert "only the towers" in capsys.readouterr().err
