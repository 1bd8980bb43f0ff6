"""The command line on folders of texts: detected, trained, and ranked with their filters and propensities."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from sparring.cli import main
from sparring.training import trained
from support.texts import tiny_bert

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
    assert (
        main(
            [
                "train",
                "--data",
                str(folder),
                "--recipe",
                "ssl",
                *QUICK,
                "--epochs",
                "2",
                "--k",
                "1,5",
                "--out",
                str(root / "run"),
            ]
        )
        == 0
    )
    return root


def evaluated(capsys: pytest.CaptureFixture[str], *words: object) -> dict:
    capsys.readouterr()
    assert main(["evaluate", *map(str, words), "--k", "1,5", "--json", "--device", "cpu"]) == 0
    found: dict = json.loads(capsys.readouterr().out)
    return found


def test_show_says_what_a_folder_holds(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`data show` prints sizes, parts, the number of filtered pairs and an example."""
    assert main(["data", "show", str(world / "xc")]) == 0
    out = capsys.readouterr().out
    assert f"{N_TRAIN + N_TEST} queries x {len(LABELS)} items, {2 * (N_TRAIN + N_TEST)} interactions" in out
    assert f"pairs never recommended: {(N_TRAIN + N_TEST) // 2}" in out
    assert "for example: 'a " in out


def test_training_measures_psp_and_leaves_hidden_pairs_out(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The result has psp and psndcg, equal at 1, also per query; the run's exclusions include the test filter."""
    result = json.loads((world / "run" / "result.json").read_text())["test"]["metrics"]
    assert result["psp@1"] == pytest.approx(result["psndcg@1"])
    single = pl.read_parquet(world / "run" / "per_query.parquet")
    assert single["psp@5"].mean() == pytest.approx(result["psp@5"], rel=1e-5)
    seen = trained.load(world / "run").seen
    rows = [line.split() for line in (world / "xc" / "tst_filter_labels.txt").read_text().splitlines()]
    for row, label in rows:
        query = N_TRAIN + int(row)
        assert seen.items[seen.start[query] : seen.start[query + 1]].tolist() == [int(label)]


def test_evaluate_repeats_the_result_in_the_dialect_xc(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranking the test part again gives the same precision, by the dialect's name, the same psp, and up to ten bins."""
    result = json.loads((world / "run" / "result.json").read_text())["test"]["metrics"]
    found = evaluated(capsys, world / "run", "--dialect", "xc")
    assert found["ranked"] == "its own test part"
    assert found["metrics"]["precision_xc@5"] == pytest.approx(result["precision@5"])
    assert found["metrics"]["psp@5"] == pytest.approx(result["psp@5"])
    assert sum(row["precision@5"] for row in found["bins"]) == pytest.approx(result["precision@5"])


def test_constants_of_the_propensities_can_be_set(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other constants change psp and nothing else; a single number is refused."""
    other = evaluated(capsys, world / "run", "--propensity", "0.6,2.6")["metrics"]
    plain = evaluated(capsys, world / "run")["metrics"]
    assert other["precision@5"] == plain["precision@5"]
    assert other["psp@5"] != plain["psp@5"]
    assert main(["evaluate", str(world / "run"), "--propensity", "0.6"]) == 2
    assert "not two numbers" in capsys.readouterr().err


def dexa(world: Path, out: str, *more: str) -> list[str]:
    own = [
        f"--set={each}"
        for each in ("size=4", "every=3", "clf_epochs=12", "clf_batch_size=8", "auxiliary=2", "private=2", "warmup=2")
    ]
    words = [
        "train",
        "--data",
        str(world / "xc"),
        "--recipe",
        "dexa",
        "--out",
        str(world / out),
        "--epochs",
        "12",
        "--k",
        "1,5",
    ]
    return [sys.executable, "-m", "sparring", *words, *QUICK, "--set=batch_size=4", *own, *more]


def stages(out: Path) -> dict[str, dict[str, float]]:
    return {name: test["metrics"] for name, test in json.loads((out / "result.json").read_text())["stages"].items()}


@pytest.fixture(scope="module")
def whole(world: Path) -> dict[str, dict[str, float]]:
    """The test metrics of every stage of an uninterrupted run."""
    assert main(dexa(world, "whole")[3:]) == 0
    return stages(world / "whole")


@pytest.mark.parametrize("stage", [".", "classifiers"])
def test_dexa_killed_in_each_stage_and_resumed(world: Path, whole: dict[str, dict[str, float]], stage: str) -> None:
    """A training killed in the second epoch of a stage and resumed has the metrics of an uninterrupted run."""
    out = f"killed-{Path(stage).name}"
    going = subprocess.Popen(dexa(world, out), env={**os.environ, "OMP_NUM_THREADS": "1"})
    lines = world / out / stage / "metrics.jsonl"
    for _ in range(6000):
        if going.poll() is not None or (lines.is_file() and len(lines.read_text().splitlines()) >= 2):
            break
        time.sleep(0.01)
    going.kill()
    assert going.wait() == -signal.SIGKILL
    assert not (world / out / stage / "result.json").is_file()
    assert main(dexa(world, out, "--resume")[3:]) == 0
    assert stages(world / out) == whole


ODD = [
    b"",
    b"   ",
    b"caf\xe9 \xff\xfe",
    "\U0001f600 \U0001f9e6".encode(),
    b"\x00\x01\x0b\x1b[31m red",
    b"x" * 100_000,
    b"word " * 20_000,
]


@pytest.mark.parametrize("encoder", ["bag", "bert"])
def test_odd_texts_are_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], encoder: str
) -> None:
    """Empty, invalid, emoji and 100 kB texts are repaired, train to finite metrics, and can be queried."""
    monkeypatch.setenv("SPARRING_HOME", str(tmp_path / "home"))
    if encoder == "bert":
        pytest.importorskip("transformers")
    name = "bag" if encoder == "bag" else str(tiny_bert(tmp_path / "bert"))
    folder, n = tmp_path / "xc", len(ODD)
    folder.mkdir()
    for part in ("trn", "tst"):
        (folder / f"{part}_X.txt").write_bytes(b"".join(text + b"\n" for text in ODD + ODD))
        rows = "".join(f"{at % n}:1 {(at + 1) % n}:1\n" for at in range(2 * n))
        (folder / f"{part}_X_Y.txt").write_text(f"{2 * n} {n}\n{rows}")
    (folder / "Y.txt").write_bytes(b"".join(text + b"\n" for text in ODD))
    own = [
        f"--set={each}"
        for each in (f"encoder={name}", "dim=8", "batch_size=8", "clf_epochs=1", "select=ndcg@5", "epochs=2")
    ]
    words = [
        "train",
        "--data",
        str(folder),
        "--recipe",
        "dexa",
        "--device",
        "cpu",
        "--k",
        "1,5",
        "--out",
        str(tmp_path / "run"),
    ]
    assert main([*words, *own]) == 0
    for metrics in stages(tmp_path / "run").values():
        assert all(np.isfinite(value) for value in metrics.values())
    model = trained.load(tmp_path / "run").model
    assert bool(torch.isfinite(model.item_vectors()).all())
    capsys.readouterr()
    assert main(["data", "show", str(folder)]) == 0
    assert "replaced invalid UTF-8 in 2 lines of trn_X.txt, first in line 3" in capsys.readouterr().out
    assert main(["recommend", str(tmp_path / "run"), "--text", "\U0001f600", "--text", "x" * 100_000, "-k", "2"]) == 0
    for blank in ("", " "):
        capsys.readouterr()
        assert main(["recommend", str(tmp_path / "run"), "--text", blank, "-k", "2"]) == 2
        assert repr(blank) in capsys.readouterr().err
