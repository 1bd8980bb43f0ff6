"""The table of NGAME and DEXA: every figure recomputed from the run folders, beside the published ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import scipy.sparse

from sparring.cli import main
from sparring.data.formats.xc import read_xc
from sparring.data.interactions import Interactions, Vocabulary
from sparring.evaluation.ranking import evaluate_lists
from sparring.experiments.papers import PaperDataset
from sparring.experiments.papers.ngame import ABSENT, PRINTED, RANDOM, methods, rare_and_frequent
from support.papers import result_json, run_here, table
from support.texts import WORDS

NAMES = [RANDOM, "random in-batch, softmax", "corrected in-batch, softmax", "ANCE", "NGAME", "DEXA"]
RANKINGS = {"encoder": "knn", "classifiers": "clf", "fused": "fusion"}
N_LABELS = 24


def write_xc(folder: Path, seed: int = 0) -> Path:
    """90 training and 40 test texts; each text joins the words of its two labels, half of which are rare."""
    draw = np.random.default_rng(seed)
    often = np.repeat([8.0, 1.0], N_LABELS // 2)
    folder.mkdir(parents=True)
    labels = [" ".join(draw.choice(WORDS, 2, replace=False)) for _ in range(N_LABELS)]
    (folder / "Y.txt").write_text("\n".join(labels) + "\n")
    for name, n in (("trn", 90), ("tst", 40)):
        chosen = [draw.choice(N_LABELS, 2, replace=False, p=often / often.sum()) for _ in range(n)]
        texts = [" ".join(labels[label] for label in some) for some in chosen]
        (folder / f"{name}_X.txt").write_text("\n".join(texts) + "\n")
        rows = np.repeat(np.arange(n), 2)
        matrix = scipy.sparse.csr_matrix((np.ones(2 * n), (rows, np.concatenate(chosen))), shape=(n, N_LABELS))
        scipy.sparse.save_npz(folder / f"Y.{name}.npz", matrix)
    return folder


def words(data: Path, out: Path, *more: str) -> list[str]:
    quick = [f"--set={each}" for each in ("dim=8", "clf_epochs=2", "clf_batch_size=32", "private=2")]
    shared = ["--encoder", "bag", "--epochs", "4", "--batch-size", "32", "--device", "cpu"]
    return ["reproduce", "ngame-dexa", "--data", str(data), *shared, *quick, "--out", str(out), *more]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds on a set with the name of a published one."""
    folder = tmp_path_factory.mktemp("ngame")
    data = write_xc(folder / "LF-AmazonTitles-131K")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARRING_HOME", str(folder / "home"))
        run_here(patch)
        assert main(words(data, folder / "out", "--seeds", "2")) == 0
    return folder / "out"


def slug(method: str) -> str:
    return "-".join(method.lower().replace(",", "").split())


def results(out: Path, method: str) -> list[dict[str, Any]]:
    folder = out / "LF-AmazonTitles-131K" / slug(method)
    return [result_json(folder / seed) for seed in ("10", "20")]


def test_every_ranking_of_every_method_is_there(done: Path) -> None:
    """Six methods with three rankings each and two references; figures are means over seeds of the runs, in percent."""
    rows = [row for row in table(done) if row["data"] == "LF-AmazonTitles-131K"]
    assert [(row["ranking"], row["method"]) for row in rows[:2]] == [
        ("reference", "BM25"),
        ("reference", "encoder, untrained"),
    ]
    assert [(row["ranking"], row["method"]) for row in rows[2:]] == [
        (ranking, name) for ranking in RANKINGS for name in NAMES
    ]
    keys = {
        "p_at_1": "precision_xc@1",
        "p_at_5": "precision_xc@5",
        "ndcg_at_5": "ndcg_xc@5",
        "psp_at_1": "psp@1",
        "psp_at_5": "psp@5",
    }
    for row in rows[2:]:
        found = [result["stages"][RANKINGS[row["ranking"]]]["metrics"] for result in results(done, row["method"])]
        for field, key in keys.items():
            assert row[field] == pytest.approx(100 * np.mean([each[key] for each in found]))
        assert row["p_at_1_std"] == pytest.approx(100 * np.std([each["precision_xc@1"] for each in found], ddof=1))
        assert row["r_at_100"] is None  # there are 24 labels
        assert row["seeds"] == 2
    assert rows[0]["p_at_1"] > 50  # the words of a text are the words of its labels


def test_the_page_and_its_figure(done: Path) -> None:
    """The page has the table, the claims and a figure, which is also a file."""
    page = (done / "report.html").read_text()
    for words in ("random in-batch", "DEXA over NGAME", "Rare and frequent labels", ABSENT, "<svg"):
        assert words in page
    assert (done / "figures" / "LF-AmazonTitles-131K-ngame-dexa.svg").stat().st_size > 1000


def test_gains_equal_the_values_by_query(done: Path) -> None:
    """Gains on P@1 and all claims equal those of the values by query, for each ranking."""
    files = {"encoder": "per_query", "classifiers": "classifiers/per_query", "fused": "fusion_per_query"}

    def mean(method: str, ranking: str, key: str) -> float:
        folder = done / "LF-AmazonTitles-131K" / slug(method)
        return float(
            np.mean([pl.read_parquet(folder / seed / f"{files[ranking]}.parquet")[key].mean() for seed in ("10", "20")])
        )

    for row in table(done)[2 : 2 + 18]:
        if row["method"] != RANDOM:
            base = mean(RANDOM, row["ranking"], "precision_xc@1")
            assert row["over"] == pytest.approx(
                mean(row["method"], row["ranking"], "precision_xc@1") / base - 1, abs=1e-6
            )
            assert row["p_holm"] >= row["p"]
    claims = table(done, "claims")
    assert len(claims) == 3 * 5 * 3
    for row in claims:
        better, base = row["claim"].split(" over ")
        key = (
            row["metric"].lower().replace("p@", "precision_xc@", 1)
            if row["metric"].startswith("P@")
            else row["metric"].lower()
        )
        key = key.replace("ndcg@", "ndcg_xc@")
        expected = mean(better, row["ranking"], key) / mean(base, row["ranking"], key) - 1
        assert row["over"] == pytest.approx(expected, abs=1e-5), row


def test_costs_equal_those_of_the_runs(done: Path) -> None:
    """time is a ratio to random batches; mining is a share of the rest of training; only encoders have them."""
    base = sum(result["train_seconds"] for result in results(done, RANDOM))
    for row in table(done)[2 : 2 + 18]:
        if row["ranking"] != "encoder":
            assert row["time"] is row["mining"] is None
            continue
        total = sum(result["train_seconds"] for result in results(done, row["method"]))
        assert row["time"] == pytest.approx(total / base)
        mined = 0.0
        for seed in ("10", "20"):
            lines = (
                (done / "LF-AmazonTitles-131K" / slug(row["method"]) / seed / "metrics.jsonl").read_text().splitlines()
            )
            mined += sum(
                json.loads(line).get(name, 0.0) for line in lines for name in ("cluster_seconds", "list_seconds")
            )
        assert row["mining"] == pytest.approx(mined / (total - mined))
        assert (row["mining"] > 0) == (row["method"] in ("ANCE", "NGAME", "DEXA"))


def test_rare_and_frequent_labels(done: Path) -> None:
    """The bins of a method add up to its P@5 and cover all labels and test pairs."""
    rows = table(done, "bins")
    for ranking, stage in RANKINGS.items():
        some = [row for row in rows if (row["ranking"], row["method"]) == (ranking, "DEXA")]
        expected = 100 * np.mean(
            [result["stages"][stage]["metrics"]["precision_xc@5"] for result in results(done, "DEXA")]
        )
        assert sum(row["added"] for row in some) == pytest.approx(expected)
        assert sum(row["items"] for row in some) == N_LABELS
        assert sum(row["pairs"] for row in some) == 80


def test_rare_labels_apart() -> None:
    """Rare labels train on at most four texts: shares of their test pairs, and their part of P@1, as by counting."""
    draw = np.random.default_rng(1)
    counts = np.repeat([40, 20, 8, 4, 2], [1, 2, 5, 10, 20])  # 40 pairs each, so no bin has two of these counts
    n_items, n_texts = len(counts), 30
    labels = [set(draw.choice(n_items, 3, replace=False).tolist()) for _ in range(n_texts)]
    lists = np.stack([draw.permutation(n_items)[:20] for _ in range(n_texts)])
    pairs = [(text, label) for text in range(n_texts) for label in sorted(labels[text])]
    test = Interactions(
        *np.array(pairs, dtype=np.int32).T, Vocabulary(np.arange(n_texts)), Vocabulary(np.arange(n_items))
    )
    found = evaluate_lists(lists, test, n_items, (1, 5, 20), ("precision_xc",), counts=counts)
    groups = rare_and_frequent(found.bins)
    for name, inside in (("rare", counts <= 4), ("frequent", counts > 4)):
        own = [(text, label) for text, label in pairs if inside[label]]
        first = sum(lists[text][0] == label for text, label in own)
        listed = sum(label in lists[text] for text, label in own)
        assert groups[name] == pytest.approx(
            {
                "items": inside.sum(),
                "pairs": len(own),
                "k": 20,
                "found": listed / len(own),
                "first": first / len(own),
                "added": first / n_texts,
            }
        )
        assert first > 0


def test_rare_labels_of_every_method(done: Path) -> None:
    """Every reference, ranking and method has both groups: means over seeds, and parts that add up to P@1."""
    quality = [row for row in table(done) if row["data"] == "LF-AmazonTitles-131K"]
    rows = table(done, "rare")
    for row in quality:
        own = [each for each in rows if (each["ranking"], each["method"]) == (row["ranking"], row["method"])]
        assert [each["labels"] for each in own] == ["rare", "frequent"]
        assert sum(each["added"] for each in own) == pytest.approx(row["p_at_1"])
        assert sum(each["items"] for each in own) == N_LABELS
        assert sum(each["pairs"] for each in own) == 80
        if row["seeds"]:
            stage = [result["stages"][RANKINGS[row["ranking"]]]["bins"] for result in results(done, row["method"])]
            rare = [[each for each in bins if each["most"] <= 4] for bins in stage]
            expected = [sum(b["recall@5"] * b["pairs"] for b in bins) / sum(b["pairs"] for b in bins) for bins in rare]
            assert own[0]["found"] == pytest.approx(100 * np.mean(expected))


def test_methods_alone(done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--methods trains those alone, by folder or name; the tables name all others as not run, and keep earlier runs."""
    monkeypatch.setenv("SPARRING_HOME", str(done.parent / "home"))
    ran = run_here(monkeypatch)
    data, out = done.parent / "LF-AmazonTitles-131K", tmp_path / "out"
    more = ["--seeds", "1", "--set=clf_fusion=false"]
    assert main(words(data, out, *more, "--methods", "corrected-in-batch-softmax,ANCE")) == 0
    assert ran == [f"{data.name} {name} seed 10" for name in ("corrected in-batch, softmax", "ANCE")]
    ran.clear()
    assert main(words(data, out, *more, "--methods", "random-in-batch")) == 0
    assert ran == [f"{data.name} {RANDOM} seed 10"]
    there = {
        row["method"]: row["seeds"] for row in table(out) if row["ranking"] == "encoder" and row["data"] == data.name
    }
    assert there == {RANDOM: 1, NAMES[1]: 0, NAMES[2]: 1, "ANCE": 1, "NGAME": 0, "DEXA": 0}


def test_published_figures(done: Path) -> None:
    """Published figures are beside ours on the set of that name, and alone with a reason on the others."""
    rows = table(done)
    fused = next(row for row in rows if (row["ranking"], row["method"]) == ("fused", "NGAME"))
    assert (fused["published_p_at_1"], fused["published_psp_at_5"]) == (46.01, 49.43)
    absent = [row for row in rows if row["data"] != "LF-AmazonTitles-131K"]
    assert {row["verdict"] for row in absent} == {ABSENT}
    printed = {
        (ranking, data, method)
        for ranking, cells in PRINTED.items()
        for data, _, method in cells
        if data != "LF-AmazonTitles-131K"
    }
    assert {(row["ranking"], row["data"], row["method"]) for row in absent} == printed
    page = PRINTED["encoder"]
    assert [page["LF-Wikipedia-500K", "P@1", name].value for name in ("DEXA", "NGAME", "ANCE", RANDOM)] == [
        79.99,
        77.92,
        63.33,
        62.63,
    ]
    assert page["LF-AmazonTitles-131K", "PSP@5", "NGAME by LEVER"].value == 48.81


def test_a_second_command_trains_what_is_missing(
    done: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second call trains nothing; an unfinished run is finished with the same figures."""
    monkeypatch.setenv("SPARRING_HOME", str(done.parent / "home"))
    ran = run_here(monkeypatch)
    data = done.parent / "LF-AmazonTitles-131K"
    before = table(done)
    assert main(words(data, done, "--seeds", "2")) == 0
    assert ran == []
    (done / "LF-AmazonTitles-131K" / "dexa" / "20" / "measured.json").unlink()
    assert main(words(data, done, "--seeds", "2")) == 0
    assert ran == ["LF-AmazonTitles-131K DEXA seed 20"]
    for old, new in zip(before, table(done), strict=True):
        assert (old["p_at_1"], old["psp_at_5"]) == (new["p_at_1"], new["psp_at_5"])
    said = capsys.readouterr().out
    assert "DEXA over NGAME" in said
    assert "the slides say +2.5% to +5.5%" in said


def test_methods_share_all_but_their_negatives(tmp_path: Path) -> None:
    """All methods share encoder and optimiser; NGAME's clusters and ANCE's lists are rebuilt equally often."""
    given = PaperDataset("x", read_xc(write_xc(tmp_path / "x")))
    made = {method.name: method.settings for method in methods(given, {"encoder": "minilm", "epochs": 30})}
    for name in ("encoder", "lr", "weight_decay", "precision", "dim"):
        assert len({str(own[name]) for own in made.values()}) == 1
    assert made["NGAME"]["every"] == made["ANCE"]["every"] == made["DEXA"]["every"] == 5
    assert made["NGAME"]["start"] == made["ANCE"]["start"] == 6
    assert made["NGAME"]["lr"] == 2e-4


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--set", "encoder=bag"], "encoder is set twice"),
        (["--set", "batch_size=8"], "batch_size is set twice"),
        (["--set", "sizes=8"], "'sizes'"),
        (["--tune", "3"], "keeps the settings of its paper"),
        (["--methods", "ngam"], "'ngam'"),
        (["--methods", "ngame", "--tune", "3"], "--tune"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], said: str) -> None:
    """Exit code 2 and one line with the bad setting; nothing is trained."""
    data = write_xc(tmp_path / "x")
    assert main(words(data, tmp_path / "out", *more)) == 2
    error = capsys.readouterr().err.strip()
    assert said in error
    assert "\n" not in error


def test_data_without_texts_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Data without texts is a one-line error that names the data set, alone or beside other data; no folder is made."""
    pl.DataFrame({"user_id": range(30), "item_id": [at % 7 for at in range(30)]}).write_parquet(
        tmp_path / "ids.parquet"
    )
    for more in ([], ["--data", str(write_xc(tmp_path / "x"))]):
        assert main(words(tmp_path / "ids.parquet", tmp_path / "out", *more)) == 2
        error = capsys.readouterr().err.strip()
        assert error.startswith("sparring: error: ids:") or "ids: " in error
        assert "--queries" in error
        assert "\n" not in error
        assert not (tmp_path / "out").exists()
