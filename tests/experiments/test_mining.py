"""Mining: candidates, filters and layouts against brute force and sentence-transformers, resumption, and bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor

from sparring.cli.main import main
from sparring.core.errors import UserError
from sparring.core.locks import writing
from sparring.data.interactions import Interactions
from sparring.data.table import from_frame
from sparring.data.texts.texts import text_of
from sparring.data.texts.tokenizers import WordTokenizer
from sparring.evaluation.bm25 import bm25
from sparring.experiments import mining as module
from sparring.experiments.mining import Mined, Mining, mine
from sparring.experiments.report.mining_page import write_page
from sparring.models.encoders import save_encoder
from sparring.models.scorers import text_vectors
from sparring.models.text import BagEncoder
from support.texts import WORDS, tiny_bert

N_QUERIES, N_ITEMS = 30, 50


@pytest.fixture(scope="module")
def data() -> Interactions:
    """30 queries with one to three positives among 50 items of distinct texts."""
    draw = np.random.default_rng(0)
    items = [" ".join(draw.choice(WORDS, 4)) + f" {WORDS[i % 16]} {WORDS[i // 16]}" for i in range(N_ITEMS)]
    queries = [f"{' '.join(draw.choice(WORDS, 3))} {WORDS[i % 16]} {WORDS[i // 16]}" for i in range(N_QUERIES)]
    assert len(set(items)) == N_ITEMS
    assert len(set(queries)) == N_QUERIES
    pairs = sorted({(q, int(i)) for q in range(N_QUERIES) for i in draw.choice(N_ITEMS, 1 + q % 3, replace=False)})
    frame = pl.DataFrame(pairs, schema=["query", "item"], orient="row")
    return from_frame(
        frame,
        query="query",
        item="item",
        items=pl.DataFrame({"item": range(N_ITEMS), "text": items}),
        queries=pl.DataFrame({"query": range(N_QUERIES), "text": queries}),
        catalogue=True,
    )


@pytest.fixture(scope="module")
def bag(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a small bag of hashed words."""
    folder = tmp_path_factory.mktemp("bag")
    vectors = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
    save_encoder(BagEncoder(WordTokenizer(512), vectors), folder)
    return str(folder)


def scores_of(data: Interactions, bag: str) -> Tensor:
    """(Q, N) cosines of an encoder."""
    encode = text_vectors(bag)
    return encode(text_of(data, "query").to_list(), "query") @ encode(text_of(data, "item").to_list(), "item").T


def read(mined: Mined) -> pl.DataFrame:
    scan = pl.read_parquet if mined.files[0].suffix == ".parquet" else pl.read_ndjson
    return pl.concat([scan(file) for file in mined.files])


def by_hand(data: Interactions, scores: Tensor, first: int, last: int, keeps: Callable[[float, float], bool]) -> Any:
    """{(query, positive): the candidates of these ranks that stay, in order}, without known positives."""
    known = {(q, i) for q, i in zip(data.queries.tolist(), data.items.tolist(), strict=True)}
    found = {}
    for q, p in sorted(known):
        others = [i for i in range(N_ITEMS) if (q, i) not in known]
        ranked = sorted(others, key=lambda i: (-float(scores[q, i]), i))[first:last]
        found[q, p] = [i for i in ranked if keeps(float(scores[q, i]), float(scores[q, p]))]
    return found


@pytest.mark.parametrize(
    ("bounds", "keeps"),
    [
        ({}, lambda s, p: True),
        ({"relative": 0.9}, lambda s, p: s < p - 0.1 * abs(p)),
        ({"margin": 0.05, "most": 0.4}, lambda s, p: s < p - 0.05 and s < 0.4),
    ],
)
def test_negatives_equal_a_sort_of_all_items(
    data: Interactions, bag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bounds: dict[str, float], keeps: Any
) -> None:
    """With items in parts of seven and queries in blocks of four, each pair has the first n of its range that stay."""
    monkeypatch.setattr(module, "_TEXTS", 7)
    want = by_hand(data, scores_of(data, bag), 2, 25, keeps)
    mined = mine(data, tmp_path / "out", Mining((bag,), first=2, last=25, n=4, block=4, scores=True, **bounds))  # type: ignore[arg-type]
    rows = read(mined)
    texts = {role: text_of(data, role).to_list() for role in ("query", "item")}  # type: ignore[arg-type]
    named = [(texts["query"][q], texts["item"][p], texts["item"][i]) for (q, p), left in want.items() for i in left[:4]]
    assert list(zip(rows["anchor"], rows["positive"], rows["negative"], strict=True)) == named
    scores = scores_of(data, bag)
    expected = [[float(scores[q, p]), float(scores[q, i])] for (q, p), left in want.items() for i in left[:4]]
    np.testing.assert_allclose(np.array(rows["scores"].to_list()).reshape(-1, 2), np.array(expected), atol=1e-5)
    assert (mined.pairs, mined.offered) == (len(data), 23 * len(data))
    assert mined.left == sum(len(left) for left in want.values())
    assert mined.short == sum(len(left) < 4 for left in want.values())
    assert not (tmp_path / "out" / "work").exists()


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("layout", ["triplet", "n-tuple", "labeled-pair", "labeled-list"])
def test_layouts_are_those_of_sentence_transformers(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, data: Interactions, layout: str, scored: bool
) -> None:
    """For each layout, columns and rows equal those that mine_hard_negatives writes with the same model."""
    library = pytest.importorskip("sentence_transformers")
    datasets = pytest.importorskip("datasets")
    from sentence_transformers.util import mine_hard_negatives

    keep = np.unique(data.queries, return_index=True)[1]  # one positive for each query
    one = data.subset(keep)
    folder = tmp_path_factory.getbasetemp() / "st-model"
    if not folder.exists():
        library.SentenceTransformer(str(tiny_bert(tmp_path / "bert", 0.0)), device="cpu").save(str(folder))
    texts = {role: text_of(one, role).to_list() for role in ("query", "item")}  # type: ignore[arg-type]
    pairs = {
        "anchor": [texts["query"][q] for q in one.queries],
        "positive": [texts["item"][i] for i in one.items],
    }
    theirs = mine_hard_negatives(
        datasets.Dataset.from_dict(pairs),
        library.SentenceTransformer(str(folder), device="cpu"),
        corpus=texts["item"],
        range_min=0,
        range_max=20,
        num_negatives=3,
        relative_margin=0.01,
        output_format=layout,
        output_scores=scored,
        verbose=False,
    ).to_dict()
    wanted = Mining((str(folder),), last=20, n=3, relative=0.99, layout=layout, scores=scored)  # type: ignore[arg-type]
    ours = read(mine(one, tmp_path / "out", wanted)).to_dict(as_series=False)
    assert list(ours) == list(theirs)
    number = next((name for name in ours if name.startswith("score")), None)
    rows, others = ([tuple(map(str, row)) for row in _texts(table, number)] for table in (ours, theirs))
    assert rows
    assert sorted(rows) == sorted(others)
    if number is not None:
        paired = dict(zip(others, theirs[number], strict=True))
        for text, value in zip(rows, ours[number], strict=True):
            np.testing.assert_allclose(value, paired[text], atol=1e-4)


def _texts(table: dict[str, list[Any]], number: str | None) -> list[tuple[Any, ...]]:
    return list(zip(*(table[name] for name in table if name != number), strict=True))


def test_a_stopped_mining_continues_with_the_same_bytes(data: Interactions, bag: str, tmp_path: Path) -> None:
    """Stopped while it encodes, then after two blocks, it ends with the files of an uninterrupted mining."""
    wanted = Mining((bag, "bm25"), last=20, n=2, relative=0.9, pick="random", form="jsonl", block=5)
    whole = mine(data, tmp_path / "whole", wanted)
    write_page(whole, wanted, "sparring mine", tmp_path / "whole" / "report.html")

    def stop_at(phase: str, done: int) -> Callable[[str, int, int | None], None]:
        def progress(name: str, count: int, total: int | None) -> None:
            if name == phase and count >= done:
                raise KeyboardInterrupt

        return progress

    for phase, done in (("encoding items", 1), ("mining", 10), ("mining", 20)):
        with pytest.raises(KeyboardInterrupt):
            mine(data, tmp_path / "part", wanted, progress=stop_at(phase, done))
    again = mine(data, tmp_path / "part", wanted)
    write_page(again, wanted, "sparring mine", tmp_path / "part" / "report.html")
    files = {path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("*") if path.is_file()}
    assert files == {path.relative_to(tmp_path / "part") for path in (tmp_path / "part").rglob("*") if path.is_file()}
    for file in files:
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "part" / file).read_bytes(), file
    with writing(tmp_path / "part"), pytest.raises(UserError, match="writes to"):
        mine(data, tmp_path / "part", wanted)
    with pytest.raises(UserError, match="n=2"):
        mine(data, tmp_path / "part", replace(wanted, n=3))
    assert mine(data, tmp_path / "part", replace(wanted, n=3), overwrite=True).pairs == len(data)


def test_several_sources_are_joined_by_their_ranks(data: Interactions, bag: str, tmp_path: Path) -> None:
    """Candidates of bag and BM25 are ordered by the sum of 1 / (61 + rank) over both lists."""
    scores = scores_of(data, bag)
    lexical, _ = bm25(text_of(data, "item"), text_of(data, "query"), 15, data.positives())
    plan = Mining((bag, "bm25"), last=15, n=15, layout="table")
    rows = read(mine(data, tmp_path / "out", plan))
    known = by_hand(data, scores, 0, 15, lambda s, p: True)
    for q, p in known:
        lists = [known[q, p], [i for i in lexical[q].tolist() if i >= 0]]
        total: dict[int, float] = {}
        for listed in lists:
            for rank, item in enumerate(listed):
                total[item] = total.get(item, 0.0) + float(np.float32(1 / (61 + rank)))
        want = sorted(total, key=lambda i: (-np.float32(total[i]), i))[:15]
        found = rows.filter((pl.col("query") == q) & (pl.col("label") == 0))
        assert set(found["item"].to_list()) == set(want)
        for item, value in zip(found["item"], found["score"], strict=True):
            assert value == pytest.approx(float(scores[q, item]), abs=1e-5)  # the first source judges


def test_bm25_alone_and_as_guide(data: Interactions, bag: str, tmp_path: Path) -> None:
    """BM25's lists are those of evaluation.bm25; as a guide it gives each pair the score of its words."""
    lists, scores = bm25(text_of(data, "item"), text_of(data, "query"), N_ITEMS)
    score = {(q, int(i)): float(s) for q in range(N_QUERIES) for i, s in zip(lists[q], scores[q], strict=True)}
    ours, _ = bm25(text_of(data, "item"), text_of(data, "query"), 10, data.positives())
    rows = read(mine(data, tmp_path / "out", Mining(last=10, n=10, layout="table")))
    for q in range(N_QUERIES):
        found = rows.filter((pl.col("query") == q) & (pl.col("label") == 0))
        assert found["item"].to_list() == [i for i in ours[q].tolist() if i >= 0]
        for item, value in zip(found["item"], found["score"], strict=True):
            assert value == pytest.approx(score.get((q, item), 0.0), abs=1e-4)
    judged = read(mine(data, tmp_path / "two", Mining((bag,), guide="bm25", last=10, layout="table")))
    for q, item, value in judged.select("query", "item", "score").iter_rows():
        assert value == pytest.approx(score.get((q, item), 0.0), abs=1e-4)


def test_an_index_finds_the_exact_lists_of_a_small_corpus(data: Interactions, bag: str, tmp_path: Path) -> None:
    """With index="hnsw" over 50 items the rows equal those of the exact search."""
    pytest.importorskip("faiss")
    exact = read(mine(data, tmp_path / "exact", Mining((bag,), last=20, relative=0.9)))
    assert exact.equals(read(mine(data, tmp_path / "graph", Mining((bag,), last=20, relative=0.9, index="hnsw"))))


def test_a_table_written_here_is_a_guide(data: Interactions, bag: str, tmp_path: Path) -> None:
    """A mining judged by a table of all scores equals one judged by the model; a missing positive is one line."""
    first = mine(data, tmp_path / "table", Mining((bag,), last=20, layout="table"))
    read(first).write_parquet(tmp_path / "scores.parquet")
    plan = Mining((bag,), last=20, margin=0.1)
    judged = mine(data, tmp_path / "judged", replace(plan, guide=str(tmp_path / "scores.parquet")))
    assert read(judged).equals(read(mine(data, tmp_path / "own", plan)))
    read(first).filter(pl.col("label") == 0).write_parquet(tmp_path / "negatives.parquet")
    with pytest.raises(UserError, match="no score"):
        mine(data, tmp_path / "missing", replace(plan, guide=str(tmp_path / "negatives.parquet")))


def test_the_page_shows_texts_and_reasons(data: Interactions, bag: str, tmp_path: Path) -> None:
    """The page names each example's query, positive, mined and dropped texts with the reason, escaped."""
    plan = Mining((bag,), last=20, relative=0.8, n=2)
    mined = mine(data, tmp_path / "out", plan)
    page = write_page(mined, plan, "sparring mine <x>", tmp_path / "page.html").read_text()
    example = next(e for e in mined.examples if any(c["fate"] == "dropped" for c in e["candidates"]))
    assert {c["fate"] for e in mined.examples for c in e["candidates"]} >= {"mined", "dropped"}
    for text in (example["query"], example["positive"], *(c["text"] for c in example["candidates"])):
        assert text in page
    assert "dropped (relative)" in page
    assert "&lt;x&gt;" in page
    assert len(mined.examples) == 24


@pytest.fixture
def folder(data: Interactions, tmp_path: Path) -> Path:
    """The data in the layout of BEIR."""
    out = tmp_path / "beir"
    (out / "qrels").mkdir(parents=True)
    for name, role in (("corpus", "item"), ("queries", "query")):
        texts = text_of(data, role).to_list()  # type: ignore[arg-type]
        lines = [json.dumps({"_id": f"{role}{i}", "text": text}) for i, text in enumerate(texts)]
        (out / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    rows = [f"query{q}\titem{i}\t1" for q, i in zip(data.queries, data.items, strict=True)]
    (out / "qrels" / "train.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *rows]) + "\n")
    return out


def test_the_command(folder: Path, bag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command mines a folder in the layout of BEIR, prints the counts as JSON, and writes the page."""
    words = ["mine", "--data", str(folder), "--source", bag, "--to", "20", "--margin", "0.1", "--json"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["rows"] == sum(len(pl.read_parquet(file)) for file in (tmp_path / "out" / "parts").iterdir())
    assert 0 < record["dropped"]["margin"] < record["offered"]
    assert (tmp_path / "out" / "report.html").is_file()


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        (["--source", "nowhere/at/all"], "nowhere/at/all"),
        (["--source", "REMOTE"], "auto_map"),
        (["--from", "9", "--to", "9"], "range"),
        (["-n", "7", "--to", "5"], "n is 7"),
        (["--relative", "1.5"], "relative"),
        (["--guide", "own"], "own"),
        (["--guide", "Q.npy+I.npy"], "width"),
        (["--guide", "Q.npy"], "Q.npy+I.npy"),
        (["--items", "EMPTY"], "no text"),
    ],
)
def test_bad_input_is_one_line(
    folder: Path, bag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: list[str], word: str
) -> None:
    """Unknown and unsafe models, empty ranges and texts, bounds and guides that do not fit end in exit code 2."""
    remote = tmp_path / "remote"
    remote.mkdir()
    (remote / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "theirs.Model"}, "hidden_size": 4}))
    np.save(tmp_path / "Q.npy", np.zeros((N_QUERIES, 3), np.float32))
    np.save(tmp_path / "I.npy", np.zeros((N_ITEMS, 4), np.float32))
    if extra[-1] == "EMPTY":
        lines = (folder / "corpus.jsonl").read_text().splitlines()
        lines[3] = json.dumps({"_id": "item3", "text": "  "})
        (folder / "corpus.jsonl").write_text("\n".join(lines) + "\n")
        extra = []
    files = {"REMOTE": str(remote), "Q.npy": f"{tmp_path}/Q.npy", "Q.npy+I.npy": f"{tmp_path}/Q.npy+{tmp_path}/I.npy"}
    words = [files.get(each, each) for each in extra]
    source = [] if "--source" in words else ["--source", bag]
    code = main(["mine", "--data", str(folder), "--out", str(tmp_path / "out"), *source, *words])
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert code == 2
    assert word in error
