"""Grades in ndcg and TREC's files, against trec_eval itself (pytrec_eval)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sparring.cli import main
from sparring.core.errors import UserError
from sparring.data import Interactions, read
from sparring.data.interactions import Vocabulary
from sparring.evaluation.accumulator import Misses
from sparring.evaluation.ranking import evaluate_lists
from sparring.evaluation.trec import RunFile, read_run, write_qrels

N, K = 40, 12
MEASURES = {"ndcg_trec": "ndcg_cut", "recall_trec": "recall", "map_trec": "map_cut"}


def judged(seed: int = 0) -> tuple[Interactions, np.ndarray]:
    """30 queries with 1 to 6 items of grades 1 to 3, and a list of 12 items for each."""
    draw = np.random.default_rng(seed)
    pairs = [(q, i) for q in range(30) for i in sorted(draw.choice(N, draw.integers(1, 7), replace=False))]
    queries, items = (np.array(column, dtype=np.int32) for column in zip(*pairs, strict=True))
    names = Vocabulary([f"q{i}" for i in range(30)]), Vocabulary([f"d{i}" for i in range(N)])
    grades = draw.integers(1, 4, len(pairs)).astype(np.float32)
    lists = np.stack([draw.permutation(N)[:K] for _ in range(30)])
    return Interactions(queries, items, *names, grade=grades), lists


def trec_eval(qrels: Path, run: Path, measure: str, k: int) -> dict[str, float]:
    pytrec_eval = pytest.importorskip("pytrec_eval")
    with open(qrels) as judgements, open(run) as lists:
        truth, found = pytrec_eval.parse_qrel(judgements), pytrec_eval.parse_run(lists)
    result = pytrec_eval.RelevanceEvaluator(truth, {f"{measure}.{k}"}).evaluate(found)
    return {query: values[f"{measure}_{k}"] for query, values in result.items()}


@pytest.mark.parametrize("k", [1, 5, 12])
def test_trec_eval_agrees_with_graded_ndcg(tmp_path: Path, k: int) -> None:
    """trec_eval reads our run file and qrels and gives every query the same ndcg, recall and map, grades included."""
    test, lists = judged()
    with RunFile(tmp_path / "run", test.query_ids, test.item_ids, "a name") as file:
        file(np.arange(10), lists[:10])
        file(np.arange(10, 30), lists[10:])
    write_qrels(test, tmp_path / "qrels")
    ours = evaluate_lists(lists, test, N, (k,), tuple(MEASURES))
    for name, measure in MEASURES.items():
        theirs = trec_eval(tmp_path / "qrels", tmp_path / "run", measure, k)
        names = test.query_ids.decode(ours.query_ids).tolist()
        np.testing.assert_allclose(ours.per_query[f"{name}@{k}"], [theirs[q] for q in names], rtol=0, atol=1e-12)
    binary = evaluate_lists(lists, Interactions(test.queries, test.items, test.query_ids, test.item_ids), N, (k,))
    graded = evaluate_lists(lists, test, N, (k,))
    assert binary.metrics[f"recall@{k}"] == graded.metrics[f"recall@{k}"]
    assert binary.metrics[f"ndcg@{k}"] != graded.metrics[f"ndcg@{k}"]


def test_strata_and_missing_items_have_grades_too() -> None:
    """In a stratum only its own grades count; relevant items that the model lacks count with grade 1, by a loop."""
    from sparring.evaluation.accumulator import MetricAccumulator
    from sparring.evaluation.metrics import STRATA, parse, popularity_strata

    test, lists = judged(1)
    counts = np.arange(N)[::-1].copy()
    missing = np.arange(30) % 3
    found = MetricAccumulator(test, N, [parse("ndcg")], [5], counts, None, Misses(missing, 0))
    found.add(0, lists)
    grade = {(q, i): g for q, i, g in zip(test.queries.tolist(), test.items.tolist(), test.grade, strict=True)}  # type: ignore[arg-type]

    def ndcg(query: int, inside: np.ndarray, extra: int) -> float:
        own = sorted([g for (q, i), g in grade.items() if q == query and inside[i]] + [1.0] * extra)[::-1][:5]
        gains = [grade.get((query, int(item)), 0) * inside[item] for item in lists[query, :5]]
        ideal = sum(g / np.log2(r + 2) for r, g in enumerate(own))
        return sum(g / np.log2(r + 2) for r, g in enumerate(gains)) / ideal if own else np.nan

    everything = np.ones(N, dtype=bool)
    want = [ndcg(query, everything, int(missing[query])) for query in range(30)]
    np.testing.assert_allclose(found.per_query["ndcg@5"], want)
    stratum = popularity_strata(counts)
    for at, name in enumerate(STRATA):
        inside = [ndcg(query, stratum == at, 0) for query in range(30)]
        assert found.strata()[name]["ndcg@5"] == pytest.approx(np.nanmean(inside))


def test_run_files_are_read_as_trec_eval_reads_them(tmp_path: Path) -> None:
    """Lists follow scores, then document ids descending, whatever the order of lines and ranks; unknown documents keep
    their place as misses."""
    test, _ = judged()
    rows = [
        "q1 Q0 d7 1 0.5 x",
        "q1 Q0 d9 9 0.75 x",
        "q1 Q0 d8 3 0.5 x",
        "q0 Q0 d1 1 3",
        "q0 Q0 new 1 4 x",
        "qq Q0 d1 1 1 x",
    ]
    (tmp_path / "run").write_text("\n".join(rows) + "\n")
    notes: list[str] = []
    lists = read_run(tmp_path / "run", test, 4, notes.append)
    ids = test.item_ids.encode(["d9", "d8", "d7", "d1"])
    first, second = (test.query_ids.encode([q])[0] for q in ("q0", "q1"))
    assert lists[second].tolist() == [*ids[:3], -1]
    assert lists[first].tolist() == [-1, ids[3], -1, -1]
    assert len(notes) == 2
    for wrong, match in (
        ("q1 Q0 d7", "line 1"),
        ("q1 Q0 d7 1 x y", "line 1"),
        ("a Q0 d1 1 1 x", "no list"),
        (f"{rows[0]}\n{rows[0]}", "twice"),
    ):
        (tmp_path / "run").write_text(wrong + "\n")
        with pytest.raises(UserError, match=match):
            read_run(tmp_path / "run", test, 4)
    spaced = Vocabulary(["a b"])
    with pytest.raises(UserError, match="space"):
        RunFile(tmp_path / "out", spaced, spaced, "x")


def test_the_command_reads_and_writes_run_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """evaluate prints trec_eval's ndcg of a run file on a graded BEIR folder; --trec-out writes the lists of a run."""
    folder = tmp_path / "beir"
    (folder / "qrels").mkdir(parents=True)
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"_id": f"d{i}", "text": "x"}) + "\n" for i in range(N)))
    (folder / "queries.jsonl").write_text("".join(json.dumps({"_id": f"q{i}", "text": "y"}) + "\n" for i in range(30)))
    test, lists = judged()
    write_qrels(test, tmp_path / "qrels")
    (folder / "qrels" / "test.tsv").write_text("query corpus score\n" + (tmp_path / "qrels").read_text())
    data = read(folder)
    assert data.grade is not None
    assert sorted(zip(data.query_ids.decode(data.queries), data.grade, strict=True)) == sorted(
        zip(test.query_ids.decode(test.queries), test.grade, strict=True)  # type: ignore[arg-type]
    )
    assert any("ndcg counts them" in note for note in data.notes)
    with RunFile(tmp_path / "run", test.query_ids, test.item_ids, "x") as file:
        file(np.arange(30), lists)
    assert main(["evaluate", str(tmp_path / "run"), "--data", str(folder), "-k", "5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["metrics"]["ndcg@5"]
    assert found == pytest.approx(
        np.mean(list(trec_eval(tmp_path / "qrels", tmp_path / "run", "ndcg_cut", 5).values()))
    )
    assert main(["evaluate", str(tmp_path / "run")]) == 2
    assert "--data" in capsys.readouterr().err
    run = str(tmp_path / "trained")
    settings = ["--set", "epochs=1", "--set", "dim=4"]
    assert main(["train", "--data", "world:30x20", "--recipe", "uns", "--no-baselines", *settings, "--out", run]) == 0
    assert main(["evaluate", run, "-k", "5", "--trec-out", str(tmp_path / "out.trec"), "--no-baselines"]) == 0
    lines = [line.split() for line in (tmp_path / "out.trec").read_text().splitlines()]
    assert {len(line) for line in lines} == {6}
    assert {line[3] for line in lines} == {"1", "2", "3", "4", "5"}
    assert lines[0][5] == "trained"
