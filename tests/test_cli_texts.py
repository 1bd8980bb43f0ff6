"""The command line on folders of texts: detected by their files, trained, ranked with their filters and propensities."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from sparring import runs
from sparring.cli import main

COLOURS = ["red", "blue", "green", "black", "white", "pink"]
THINGS = ["shoe", "hat", "coat", "sock", "glove"]
LABELS = COLOURS + THINGS
N_TRAIN, N_TEST = 60, 12
QUICK = ["--set", "encoder=bag", "--set", "dim=8", "--set", "batch_size=32", "--device", "cpu", "--quiet"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder `xc` whose points name a colour and a thing, their two labels, and a run trained on it."""
    root = tmp_path_factory.mktemp("texts")
    folder = root / "xc"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name, n in (("trn", N_TRAIN), ("tst", N_TEST)):
        pairs = np.stack([rng.integers(0, len(COLOURS), n), len(COLOURS) + rng.integers(0, len(THINGS), n)], 1)
        (folder / f"{name}_X.txt").write_text("".join(f"a {LABELS[c]} {LABELS[t]}\n" for c, t in pairs))
        rows = "".join(f"{c}:1.0 {t}:1.0\n" for c, t in pairs)
        (folder / f"{name}_X_Y.txt").write_text(f"{n} {len(LABELS)}\n{rows}")
        hidden = [(i, next(x for x in range(len(LABELS)) if x not in pairs[i])) for i in range(0, n, 2)]
        (folder / f"{name}_filter_labels.txt").write_text("".join(f"{i} {x}\n" for i, x in hidden))
    (folder / "Y.txt").write_text("".join(f"{label}\n" for label in LABELS))
    assert main(["train", "--data", str(folder), "--recipe", "ssl", *QUICK, "--epochs", "2", "--k", "1,5", "--out", str(root / "run")]) == 0
    return root


def evaluated(capsys: pytest.CaptureFixture[str], *words: object) -> dict:
    capsys.readouterr()
    assert main(["evaluate", *map(str, words), "--k", "1,5", "--json", "--device", "cpu"]) == 0
    found: dict = json.loads(capsys.readouterr().out)
    return found


def test_show_says_what_a_folder_holds(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes, parts, pairs that are never recommended, and an example."""
    assert main(["data", "show", str(world / "xc")]) == 0
    out = capsys.readouterr().out
    assert f"{N_TRAIN + N_TEST} queries x {len(LABELS)} items, {2 * (N_TRAIN + N_TEST)} interactions" in out
    assert f"pairs never recommended: {(N_TRAIN + N_TEST) // 2}" in out
    assert "for example: 'a " in out


def test_training_measures_psp_and_leaves_hidden_pairs_out(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The result has psp and psndcg, equal at 1, for single queries too; what the run knows as seen has the filter of the test points."""
    result = json.loads((world / "run" / "result.json").read_text())["test"]["metrics"]
    assert result["psp@1"] == pytest.approx(result["psndcg@1"])
    single = pl.read_parquet(world / "run" / "per_query.parquet")
    assert single["psp@5"].mean() == pytest.approx(result["psp@5"], rel=1e-5)
    seen = runs.load(world / "run").seen
    rows = [line.split() for line in (world / "xc" / "tst_filter_labels.txt").read_text().splitlines()]
    for row, label in rows:
        query = N_TRAIN + int(row)
        assert seen.items[seen.start[query] : seen.start[query + 1]].tolist() == [int(label)]


def test_evaluate_repeats_the_result_in_the_dialect_xc(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run's own test part is ranked again: the same precision under the dialect's name, the same psp, ten bins or fewer."""
    result = json.loads((world / "run" / "result.json").read_text())["test"]["metrics"]
    found = evaluated(capsys, world / "run", "--dialect", "xc")
    assert found["ranked"] == "its own test part"
    assert found["metrics"]["precision_xc@5"] == pytest.approx(result["precision@5"])
    assert found["metrics"]["psp@5"] == pytest.approx(result["psp@5"])
    assert sum(row["precision@5"] for row in found["bins"]) == pytest.approx(result["precision@5"])


def test_constants_of_the_propensities_can_be_set(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another A and B change psp and nothing else; a single number is refused."""
    other = evaluated(capsys, world / "run", "--propensity", "0.6,2.6")["metrics"]
    plain = evaluated(capsys, world / "run")["metrics"]
    assert other["precision@5"] == plain["precision@5"]
    assert other["psp@5"] != plain["psp@5"]
    assert main(["evaluate", str(world / "run"), "--propensity", "0.6"]) == 2
    assert "not two numbers" in capsys.readouterr().err
