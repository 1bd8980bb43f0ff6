"""Training logs under `sparring`: a program sees warnings by default, and can route or silence all messages."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import sparring
from sparring.cli import main
from sparring.data.interactions import Split
from sparring.data.synthetic_world import SyntheticWorld
from sparring.recipes.settings import build
from sparring.training.fitting import fit
from support.settings import quick

QUICK = quick()


def test_warnings_only_by_default(parts: Split, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The library attaches no handler and sets no level; a training prints nothing."""
    assert not logging.getLogger("sparring").handlers
    assert logging.getLogger("sparring.training.fitting").getEffectiveLevel() == logging.WARNING
    fit(build("ssl", parts.train, QUICK), parts, tmp_path / "run", k=(10,), device="cpu")
    assert capfd.readouterr() == ("", "")


def test_a_program_can_route_and_silence(parts: Split, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At INFO a training reports its batch and its test; above CRITICAL not even warnings arrive."""
    with caplog.at_level(logging.INFO, "sparring"):
        fit(build("ssl", parts.train, QUICK), parts, tmp_path / "run", k=(10,), device="cpu")
    assert {record.name.split(".")[0] for record in caplog.records} == {"sparring"}
    assert any("sampled_softmax" in message for message in caplog.messages)
    assert any("test query" in message for message in caplog.messages)
    caplog.clear()
    run = sparring.load(tmp_path / "run")
    known = int(parts.train.items[0])
    with caplog.at_level(logging.CRITICAL + 1, "sparring"):
        run.recommend_history([known, "unknown"], k=3)
    assert not caplog.records
    run.recommend_history([known, "unknown"], k=3)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_the_command_line_attaches_and_detaches(
    small_world: SyntheticWorld, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Notes go to stdout in training order; afterwards the logger is restored."""
    data, log = small_world.interactions, logging.getLogger("sparring")
    table = {"user_id": data.query_ids.decode(data.queries), "item_id": data.item_ids.decode(data.items)}
    import polars as pl

    pl.DataFrame(table).write_parquet(tmp_path / "pairs.parquet")
    words = ["train", "--data", str(tmp_path / "pairs.parquet"), "--recipe", "ssl", "--epochs", "1", "--k", "5"]
    assert main([*words, "--out", str(tmp_path / "run")]) == 0
    out, error = capfd.readouterr()
    assert out.index("queries x") < out.index("sampled_softmax") < out.index("epoch   1") < out.index("test query")
    assert not error
    assert not log.handlers
    assert log.level == logging.NOTSET
    assert main([*words, "--out", str(tmp_path / "quiet"), "--quiet"]) == 0
    assert len(capfd.readouterr().out.splitlines()) == 1
