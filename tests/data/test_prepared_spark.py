"""Spark prepares the same files as polars, bit for bit. Skipped where pyspark or Java is missing."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from sparring.cli import main
from sparring.core.errors import UserError
from sparring.data.prepared import row_buckets
from sparring.data.prepared.preparation import prepare
from support.cleaning import CleaningContract
from support.odd_inputs import ODD, Odd

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    """A local session with two threads, shared by the tests."""
    sql = pytest.importorskip("pyspark.sql", reason="pyspark is not installed: the engine spark was not tested")
    if shutil.which("java") is None:
        pytest.skip("Java is not installed: the engine spark was not tested")
    settings = {"spark.sql.shuffle.partitions": "3", "spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1"}
    # small jobs end before an optimising compiler pays off
    settings["spark.driver.extraJavaOptions"] = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    builder = sql.SparkSession.builder.master("local[2]").config(
        map=settings | {"spark.driver.bindAddress": "127.0.0.1"}
    )
    session = builder.getOrCreate()
    yield session
    session.stop()


@pytest.fixture(autouse=True)
def _many_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_buckets, "BUCKET", 90)


def rows(n: int = 900) -> pl.DataFrame:
    """Every kind of column: accented text ids, negative numbers, weighted duplicates, nulls, NaN, a split, labels."""
    random = np.random.default_rng(3)
    names = np.array([f"u{k}" for k in range(60)] + ["é", "Ünal", "a b", "Z", "100", "9", "", "日本"])
    frame = pl.DataFrame(
        {
            "user_id": names[random.integers(0, len(names), n)],
            "item_id": (random.zipf(1.4, n) % 50) * 1_000_003 - 7,
            "timestamp": random.integers(-500, 500, n),
            "weight": random.integers(0, 9, n) / 7,
            "rating": random.integers(1, 6, n).astype(np.float32),
            "split": random.choice(["train", " Train", "valid", "TEST"], n),
            "label": random.integers(0, 2, n),
            "title": random.choice(["ax", "bx", "Ä"], n),
        }
    )
    at = pl.int_range(pl.len())
    return frame.with_columns(
        pl.when(at % 97 != 5).then("user_id").alias("user_id"),
        pl.when(at % 89 != 5).then("item_id").alias("item_id"),
        pl.when(at % 79 != 5).then("timestamp").alias("timestamp"),
        pl.when(at % 83 == 5).then(float("nan")).when(at % 83 == 6).then(None).otherwise("weight").alias("weight"),
    )


CASES: dict[str, tuple[Callable[[pl.DataFrame], pl.DataFrame], dict[str, Any]]] = {
    "everything": (lambda frame: frame, {"min_rating": 2}),
    "random": (lambda frame: frame.drop("split", "label", "timestamp", "title"), {"how": "random", "seed": 5}),
    "dates": (
        lambda frame: frame.drop("split", "label", "weight", "title").with_columns(
            timestamp=pl.lit(datetime(2020, 2, 29, 12)) + pl.duration(microseconds=pl.col("timestamp") * 1_000_003),
            item_id=pl.col("item_id").cast(pl.Float64),
        ),
        {"how": "temporal"},
    ),
    "days": (
        lambda frame: frame.drop("split", "label", "title").with_columns(
            timestamp=pl.lit(date(2020, 2, 29)) + pl.duration(days=pl.col("timestamp")),
            user_id=(pl.int_range(pl.len()) * 7 % 37).cast(pl.Int32),
        ),
        {"how": "leave-last-out"},
    ),
}


class TestSparkRows(CleaningContract):
    """Spark cleans rows by the rules that polars follows."""

    @pytest.fixture(autouse=True)
    def _session(self, spark: Any, tmp_path: Path) -> None:
        self.session, self.folder = spark.newSession(), tmp_path
        self.session.conf.set("spark.sql.session.timeZone", "UTC")

    def rows(self, frame: pl.DataFrame) -> Any:
        from sparring.data.prepared.spark_engine import SparkRows

        path = self.folder / "rows.parquet"
        frame.write_parquet(path)
        return SparkRows(self.session.read.parquet(path.as_uri()))

    def collect(self, rows: Any) -> dict[str, list]:
        return {name: [row[name] for row in rows.frame.collect()] for name in rows.frame.columns}


@pytest.mark.parametrize("case", CASES)
def test_spark_and_polars_write_the_same_files(case: str, spark: Any, tmp_path: Path) -> None:
    """All files, prepared.json with its checksums included, are equal byte for byte."""
    change, options = CASES[case]
    frame = change(rows())
    (tmp_path / "parts").mkdir()
    for k in range(2):
        frame.gather_every(2, k).write_parquet(tmp_path / "parts" / f"{k}.parquet")
    for engine in ("polars", "spark"):
        prepare(tmp_path / "parts", tmp_path / engine, engine=engine, **options)  # type: ignore[arg-type]
    names = sorted(path.name for path in (tmp_path / "polars").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "spark").iterdir())
    assert {"queries.npy", "items.npy", "prepared.json", "query_ids.parquet"} <= set(names)
    if case == "everything":
        assert {"time.npy", "weight.npy", "shown_items.npy", "item_table.parquet"} <= set(names)
    for name in names:
        assert (tmp_path / "polars" / name).read_bytes() == (tmp_path / "spark" / name).read_bytes(), name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts", "polars", "spark"]


SHARED = ("an empty string", "null, split by time", "a column `position`")
SHARED += ("a pair in train and test", "one above 100 medians")


@pytest.mark.parametrize("odd", [odd for odd in ODD if odd.name in SHARED], ids=lambda odd: f"{odd.group}: {odd.name}")
def test_spark_agrees_on_odd_inputs(odd: Odd, spark: Any, tmp_path: Path) -> None:
    """The files are those of polars, note for note; or both refuse the input in the same line."""
    path, lines = odd.write(tmp_path), []
    for engine in ("polars", "spark"):
        options: dict[str, Any] = {"how": odd.how, "engine": engine, **odd.arguments(tmp_path)}
        try:
            prepare(path, tmp_path / engine, **options)
            lines.append((tmp_path / engine / "prepared.json").read_text())
        except UserError as error:
            lines.append(str(error))
    assert lines[0] == lines[1]
    assert (tmp_path / "spark").exists() == (odd.pairs is not None)


def test_spark_refuses_in_one_line(spark: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Input that Spark cannot read or does not support raises one line that names it and leaves nothing behind."""
    frame = rows().drop("split", "label")
    path = tmp_path / "rows.parquet"
    wrong: dict[str, tuple[pl.DataFrame, str]] = {
        "weights": (frame.with_columns(weight=-pl.col("weight") - 1), "must be finite and not negative"),
        "words": (frame.with_columns(weight=pl.lit("much")), "text"),
        "when": (frame.with_columns(timestamp=pl.lit("2020-01-01")), "dates"),
        "part": (frame.with_columns(split=pl.lit("later")), "'later'"),
        "nulls": (frame.with_columns(user_id=pl.lit(None, dtype=pl.String)), "null or empty 'user_id'"),
        "empty": (frame.clear(), "is empty"),
    }
    for table, words in wrong.values():
        table.write_parquet(path)
        with pytest.raises(UserError, match=words):
            prepare(path, tmp_path / "out", engine="spark")
    frame.write_csv(tmp_path / "rows.csv")
    with pytest.raises(UserError, match="reads Parquet"):
        prepare(tmp_path / "rows.csv", tmp_path / "out", engine="spark")
    frame.write_parquet(path)
    content = path.read_bytes()
    path.write_bytes(content[:4] + b"\xff" * (len(content) - 3000) + content[-2996:])
    capfd.readouterr()
    assert main(["prepare", str(path), "--out", str(tmp_path / "out"), "--engine", "spark"]) == 2
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("sparring: ")]
    assert len(told) == 1
    assert str(path) in told[0]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["rows.csv", "rows.parquet"]
