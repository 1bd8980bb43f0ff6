"""The rankings of a run in stages: the best on validation is the default of every command, also for new texts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
import torch.nn.functional as F

import sparring
from sparring.cli import main
from sparring.core import files
from sparring.core.errors import UserError
from sparring.core.manifest import add_files
from sparring.data.interactions import Interactions, Split, Vocabulary
from sparring.models.fusion import Fused
from sparring.models.retriever import Retriever
from sparring.models.towers import IdTower
from sparring.training.stages import compare_rankings
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
pytestmark = pytest.mark.usefixtures("private_home")


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
    """sparring.fit trains all stages, and the run folder recommends by the ranking that it recorded."""
    assert run.fused is not None
    result = json.loads((run.folder / "result.json").read_text())
    assert set(result["stages"]) == {"knn", "clf", "fusion"}
    assert run.how() == result["ranking"]
    by_default, asked = (run.recommend([0, 1], 5, ranking=name) for name in (None, result["ranking"]))
    assert by_default.equals(asked)


@pytest.mark.parametrize("best", ["towers", "classifiers", "fused"])
def test_the_default_is_the_best_ranking_on_held_out_queries(best: str) -> None:
    """Of towers, classifiers and both, the one that ranks as relevance does is chosen."""
    random = np.random.default_rng(0)
    vectors = F.normalize(torch.from_numpy(random.normal(size=(140, 4))).float(), dim=1)
    q, v, w = vectors.split([60, 40, 40])
    score = q @ v.T + (q @ w.T if best == "fused" else 0)
    right = score.topk(3).indices.flatten().numpy().astype(np.int32)
    valid = Interactions(
        np.repeat(np.arange(60, dtype=np.int32), 3), right, Vocabulary(np.arange(60)), Vocabulary(np.arange(40))
    )
    models = []
    for items in {"towers": (v, -w), "classifiers": (-w, v), "fused": (v, w)}[best]:
        model = Retriever(IdTower(60, 4), IdTower(40, 4), "cosine")
        with torch.no_grad():
            model.query.weight.copy_(q)
            model.item.weight.copy_(items)
        models.append(model)
    fused = Fused(*models, np.ones(40, dtype=np.float32))
    compared = compare_rankings(fused, valid, None, "ndcg@3", seed=1)
    assert list(compared) == ["towers", "classifiers", "fused"]
    assert max(compared, key=lambda name: compared[name]) == best


def test_known_queries_are_ranked_by_both(run: sparring.Trained, parts: Split) -> None:
    """Lists without taken items equal the formula; other rankings use towers or classifiers alone, and they differ."""
    at = torch.arange(parts.train.n_queries)
    every = [part for part in (parts.train, parts.valid, parts.test) if part is not None]
    taken = [{int(item) for part in every for item in part.items[part.queries == query]} for query in at.tolist()]
    items, scores = by_hand(run, run.model.query_vectors(at), taken, 5)
    asked = parts.train.query_ids.decode(at.numpy()).tolist()
    found = run.recommend(asked, 5, ranking="fused")
    assert lists(found) == [parts.train.item_ids.decode(each).tolist() for each in items]
    np.testing.assert_allclose(found["score"], np.concatenate(scores), atol=1e-5)
    assert run.fused is not None
    unit = F.normalize(run.model.query_vectors(at), dim=1) @ run.fused.clf.item_vectors().T
    towers = run.recommend(asked, 5, ranking="towers")
    near = run.model.query_vectors(at) @ run.model.item_vectors().T
    for query, own in enumerate(taken):
        near[query, list(own)] = -torch.inf
        unit[query, list(own)] = -torch.inf
    alone = run.recommend(asked, 5, ranking="classifiers")
    assert lists(alone) == [parts.train.item_ids.decode(each).tolist() for each in unit.topk(5).indices.numpy()]
    assert lists(towers) == [parts.train.item_ids.decode(each).tolist() for each in near.topk(5).indices.numpy()]
    assert lists(towers) != lists(found)


def test_new_texts_are_ranked_by_both(run: sparring.Trained, parts: Split) -> None:
    """New texts go through the query tower to the classifiers as well."""
    texts = ["warm wool coat", "a small old lamp"]
    items, _ = by_hand(run, run.encode_texts(texts, "query"), [set(), set()], 5)
    found = lists(run.recommend_text(texts, 5, ranking="fused"))
    assert found == [parts.train.item_ids.decode(each).tolist() for each in items]
    assert lists(run.recommend_text(texts, 5, ranking="towers")) != found


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
    assert run.how() == "towers"
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
    """train, the card and evaluate show the figures of the best ranking and the towers; recommend follows --ranking."""
    result = json.loads((trained / "result.json").read_text())
    stages, best = result["stages"], result["ranking"]
    assert best == "classifiers"  # on this data
    chosen = stages["clf"]
    figures = {name: f"recall@10 {test['metrics']['recall@10']:.4f}" for name, test in stages.items()}
    last = trained.with_name("out").read_text().strip().splitlines()[-1]
    assert f"test, {best}: {figures['clf']}" in last
    assert f"towers alone: {figures['knn']}" in last
    card = (trained / "README.md").read_text()
    valid = ", ".join(f"{name} {value:.4f}" for name, value in result["rankings"].items())
    assert f"Ranked by the classifiers alone, chosen on the validation part ({valid})." in card
    assert f"ranking: {best}; ndcg@10 of the validation part: {valid}" in trained.with_name("out").read_text()
    assert f"| recall | {chosen['metrics']['recall@1']:.4f} | {chosen['metrics']['recall@10']:.4f} |" in card
    assert f"(`--ranking towers`): {figures['knn']}" in card

    def evaluated(*more: str) -> dict:
        assert main(["evaluate", str(trained), "--k=1,10", "--json", "--device=cpu", *more]) == 0
        found: dict = json.loads(capsys.readouterr().out)
        return found

    found = evaluated()
    assert found["ranking"] == best
    words = found["baselines"]["tf-idf"]["metrics"]
    assert words == result["baselines"]["tf-idf"]["metrics"]
    assert 0 < words["recall@10"] < 1
    assert "tf-idf (baseline)" in trained.with_name("out").read_text()
    assert evaluated()["metrics"]["recall@10"] == pytest.approx(chosen["metrics"]["recall@10"])
    both, towers = evaluated("--ranking=fused"), evaluated("--ranking=towers")
    assert (both["ranking"], towers["ranking"]) == ("fused", "towers")
    for name in ("recall@10", "ndcg@10", "precision@1"):
        assert both["metrics"][name] == pytest.approx(stages["fusion"]["metrics"][name])
        assert (
            both["rankings"]["towers"]["metrics"][name]
            == towers["metrics"][name]
            == pytest.approx(stages["knn"]["metrics"][name])
        )
    assert main(["evaluate", str(trained), "--k=1,10", "--no-baselines", "--device=cpu", "--ranking=fused"]) == 0
    out = capsys.readouterr().out
    assert "by towers and classifiers fused" in out
    assert [line.split()[0] for line in out.strip().splitlines()[-3:]] == ["towers", "classifiers", "fused"]

    run = sparring.load(trained)
    for ranking in ("fused", "classifiers", "towers"):
        assert main(["recommend", str(trained), "--text", "warm coat", "-k=5", "--json", f"--ranking={ranking}"]) == 0
        found = [json.loads(line)["item"] for line in capsys.readouterr().out.splitlines()]
        assert found == run.recommend_text(["warm coat"], 5, ranking)["item"].to_list()  # type: ignore[arg-type]
        file = trained.with_name(f"{ranking}.parquet")
        assert main(["recommend", str(trained), "--all", "--out", str(file), "-k=5", f"--ranking={ranking}"]) == 0
        capsys.readouterr()
        assert lists(pl.read_parquet(file)) == lists(run.recommend(list(range(60)), 5, ranking=ranking))  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["fused", "classifiers"])
def test_index_recommend_and_export_take_a_ranking(trained: Path, capsys: pytest.CaptureFixture[str], how: str) -> None:
    """Lists through an exact index and lists from exported files are those of the exact ranking."""
    run = sparring.load(trained)
    exact = lists(run.recommend(list(range(60)), 5, ranking=how))  # type: ignore[arg-type]
    assert main(["index", str(trained), "--kind=exact", "--k=5", f"--ranking={how}"]) == 0
    assert f"recall@5 1.0000 of the {'exact fused lists' if how == 'fused' else 'lists by classifiers'}" in (
        capsys.readouterr().out
    )
    meta = json.loads((trained / "index" / "index.json").read_text())
    assert (meta["ranking"], meta["measured"]["recall"]) == (how, 1.0)
    file = trained.with_name("lists.parquet")
    for words in ([], [f"--ranking={how}"]):
        assert main(["recommend", str(trained), "--all", "--index", "--out", str(file), "-k=5", *words]) == 0
        assert lists(pl.read_parquet(file)) == exact
    assert main(["recommend", str(trained), "--all", "--index", "--out", str(file), "--ranking=towers"]) == 2
    assert f"was built for the {how} ranking, not towers" in capsys.readouterr().err
    folder = trained.with_name("exported")
    assert main(["export", str(trained), "--to=parquet", "--out", str(folder), f"--ranking={how}"]) == 0
    assert exported(folder, run, 5, how == "fused") == exact
    assert main(["export", str(trained), "--to=onnx", f"--ranking={how}"]) == 2
    assert "--to onnx writes the towers alone" in capsys.readouterr().err


def test_vectors_with_a_bias_have_no_fused_export(
    parts: Split, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Queries beside an item bias are not of length 1, which the formula of the export needs: one line, no files."""
    folder = tmp_path / "run"
    sparring.fit(
        sparring.build("ngame", parts.train, {**SETTINGS, "item_bias": True}), parts, folder, device="cpu", k=(5,)
    )
    words = ["export", str(folder), "--to=parquet", "--out", str(tmp_path / "out")]
    assert main([*words, "--ranking=fused"]) == 2
    assert "needs score=cosine and item_bias=false" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main([*words, "--ranking=classifiers"]) == 0


def exported(folder: Path, run: sparring.Trained, k: int, fused: bool) -> list[list[int]]:
    """Lists from the files of an export alone, and the pairs that queries have taken."""
    items, queries = (pl.read_parquet(folder / f"{name}.parquet") for name in ("items", "queries"))
    scores = queries["vector"].to_numpy() @ items["vector"].to_numpy().T
    taken, found, ids = run.eligibility.taken(torch.arange(60)), [], items["id"].to_list()
    if fused:
        both, fusion = pl.read_parquet(folder / "scores.parquet"), json.loads((folder / "fusion.json").read_text())
        assert both["id"].to_list() == ids
    for row, q in enumerate(queries["vector"].to_numpy()):
        own = taken.items[taken.start[row] : taken.start[row + 1]].tolist()
        left = sorted(set(range(40)) - set(own), key=lambda item: -scores[row, item])
        if fused:
            tree, score = fusion["tree"], {}
            for item in left[: fusion["shortlist"]]:
                x = [float(np.float32(q @ both[name][item].to_numpy())) for name in ("classifier", "tower")]
                x.append(both["propensity"][item])
                node = 0
                for _ in range(7):
                    way = "below" if x[tree["feature"][node]] <= tree["threshold"][node] else "above"
                    node = tree[way][node]
                score[item] = x[0] + fusion["beta"] * (x[1] + tree["chance"][node])
            left = sorted(score, key=lambda item: -score[item])
        found.append([ids[item] for item in left[:k]])
    return found


@pytest.mark.parametrize("command", ["evaluate", "recommend", "index", "serve", "export"])
def test_a_ranking_that_a_run_lacks_is_one_line(
    command: str, parts: Split, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    run = sparring.build("ngame", parts.train, {**SETTINGS, "epochs": 1, "clf_epochs": 0})
    sparring.fit(run, Split(parts.train), folder, device="cpu")
    more = {"recommend": ["--query=0"], "export": ["--to=parquet"]}
    assert main([command, str(folder), "--ranking=fused", *more.get(command, [])]) == 2
    assert "has no fused ranking: train it with clf_epochs=N" in capsys.readouterr().err


def test_training_records_the_ranking_that_is_asked_for(parts: Split, tmp_path: Path) -> None:
    """clf_ranking overrides the comparison, whose figures are kept; without classifiers it is refused."""
    run = sparring.build("ngame", parts.train, {**SETTINGS, "clf_ranking": "fused"})
    fitted = sparring.fit(run, parts, tmp_path / "run", k=(10,), device="cpu")
    assert sparring.load(tmp_path / "run").how() == fitted.ranking == "fused"
    assert list(fitted.rankings) == ["towers", "classifiers", "fused"]
    with pytest.raises(UserError, match="a fused ranking needs classifiers"):
        sparring.build("ngame", parts.train, {**SETTINGS, "clf_epochs": 0, "clf_ranking": "fused"})


@pytest.mark.parametrize("recorded", [None, "encoder"])
def test_folders_of_earlier_versions(run: sparring.Trained, recorded: str | None) -> None:
    """Their classifiers list alone, as they did; encoder is towers, and without a record the towers rank."""
    tensors, settings = files.read_tensors(run.folder / "fusion.safetensors")
    old = {"beta": settings["beta"], "shortlist": 7} | ({} if recorded is None else {"ranking": recorded})
    files.write_tensors(run.folder / "fusion.safetensors", tensors, old)
    add_files(run.folder, "fusion.safetensors")
    again = sparring.load(run.folder)
    assert again.how() == "towers"
    assert again.fused is not None
    q = again.model.query_vectors(torch.arange(60))
    listed = (q @ again.fused.clf.item_vectors().T).topk(7).indices
    found = again.fused.lists(torch.arange(60), 7, None)
    assert found.sort(1).values.tolist() == listed.sort(1).values.tolist()
