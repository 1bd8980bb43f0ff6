"""Rows into buckets with Spark, on as many machines as it has: the same rows in the same buckets as with polars.

Only the ids come to the machine that calls it. The folder must lie where all machines see it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from sparring.core.errors import UserError, first_line
from sparring.data.cleaning import CLICKS, PARTS, SHORT, check_codes, tell_dropped
from sparring.data.opening import inner_texts
from sparring.data.prepared.encoding import Encoded, Raw, Tell, numbered
from sparring.data.prepared.polars_engine import broken_part

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_WHOLE = ("tinyint", "smallint", "int", "bigint")
_FLOAT = ("float", "double")


def encode(raw: Raw, folder: Path, tell: Tell, check_space: Callable[[int], None]) -> Encoded:
    """The rows of `raw` in buckets under `folder`, from the active Spark session, or from a local one that is stopped afterwards."""
    if not raw.files:
        raise UserError(f"the engine spark reads Parquet, and {raw.source} is of another kind: use the engine polars")
    found = raw.found()
    with _session() as spark, _reading(raw):
        from pyspark.sql import functions as F

        tell("counting rows", 0, None)
        parts = spark.read.parquet(*(file.absolute().as_uri() for file in raw.files))
        rows, notes = _clean(
            parts.select(*(F.col(f"`{column}`").alias(SHORT[role]) for role, column in found.items())), raw, found
        )
        beside = folder.parent / "ids"
        tell("numbering queries", 0, None)
        queries = _fetched(rows.groupBy("q").agg(F.count("*").alias("n")), beside / "q")
        tell("numbering items", 0, None)
        items = _fetched(rows.select("i").distinct(), beside / "i")["i"]
        numbers = numbered(queries, items, raw, found)
        check_space(int(queries["n"].sum()))
        tell("rows into buckets", 0, None)
        for name, table in (("q", numbers.queries), ("i", numbers.items)):
            path = beside / f"{name}.parquet"
            table.rename({"dense": f"d{name}"}).write_parquet(path)
            rows = rows.join(spark.read.parquet(path.as_uri()), name)
        others = [name for name in rows.columns if name in ("t", "w", "s", "l")]
        rows = rows.select("b", F.col("dq").alias("q"), F.col("di").alias("i"), *others)
        buckets = len(numbers.first) - 1
        rows.repartition(buckets, "b").write.partitionBy("b").option("compression", "none").parquet(folder.as_uri())
        tables = {"item": raw.items, "query": raw.queries}
        for role in tables:
            key, texts = inner_texts(raw.frame, role, raw.named.get(role), raw.source)
            if tables[role] is None and texts:
                grouped = parts.filter(F.col(f"`{key}`").isNotNull()).groupBy(F.col(f"`{key}`").alias(key))
                tables[role] = _fetched(
                    grouped.agg(*(F.min(f"`{name}`").alias(name) for name in texts)), beside / f"{role}_table"
                )
    for path in sorted(beside.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    beside.rmdir()
    return Encoded(
        folder, numbers.query_ids, numbers.item_ids, numbers.first, found, notes, tables["item"], tables["query"]
    )


def _clean(rows: DataFrame, raw: Raw, found: Mapping[str, str]) -> tuple[DataFrame, list[str]]:
    """What `cleaning.clean` does, in Spark's words."""
    from pyspark.sql import functions as F

    kinds = {SHORT[role]: dict(rows.dtypes)[SHORT[role]] for role in found}
    typed: dict[str, Column] = {}
    for role, column in found.items():
        name, kind = SHORT[role], kinds[SHORT[role]]
        if role in ("query", "item"):
            typed[name] = _id(name, kind, column, raw.source)
        elif role == "time":
            typed[name] = _time(name, kind, column, raw.source)
        elif role in ("weight", "rating"):
            if kind not in (*_WHOLE, *_FLOAT):
                raise UserError(
                    f"column {column!r} of {raw.source} holds {kind}; the engine spark expects whole numbers or floats"
                )
            typed[name] = _known(F.col(name).cast("double"))
        else:
            typed[name] = F.regexp_replace(
                F.lower(F.regexp_replace(F.col(name).cast("string"), r"^\s+|\s+$", "")), r"\.0$", ""
            )
    rows = rows.select(*(column.alias(name) for name, column in typed.items()))
    for role, codes in (("split", PARTS), ("label", CLICKS)):
        if role in found:
            values = [row[0] for row in rows.select(SHORT[role]).distinct().limit(1000).collect()]
            check_codes(values, role, found[role], codes, raw.source)
            code = F.create_map(*(F.lit(each) for pair in codes.items() for each in pair))[F.col(SHORT[role])]
            rows = rows.withColumn(SHORT[role], code.cast("tinyint"))
    if "weight" in found:
        wrong = rows.filter((F.col("w") < 0) | (F.col("w") == float("inf"))).select("w").head(1)
        if wrong:
            value = f"{wrong[0][0]:g}; weights must be finite and not negative"
            raise UserError(f"the weight column {found['weight']!r} of {raw.source} holds {value}")
    no_id = F.col("q").isNull() | F.col("i").isNull()
    low = F.col("r").isNull() | (F.col("r") < raw.min_rating) if raw.min_rating is not None else F.lit(False)
    no_time = F.col("t").isNull() if "time" in found else F.lit(False)
    no_weight = F.col("w").isNull() if "weight" in found else F.lit(False)
    keep = ~no_id & ~low
    kept = {
        "without_id": no_id,
        "below": ~no_id & low,
        "untimed": keep & no_time,
        "left": keep,
        "unweighted": keep & no_weight,
    }
    counted = rows.agg(
        F.count("*").alias("rows"), *(F.count_if(which).alias(name) for name, which in kept.items())
    ).head()
    assert counted is not None
    notes, timed = tell_dropped(counted.asDict(), found, raw.min_rating, raw.source, raw.named.get("time") is None)
    return (rows.filter(keep & ~no_time) if timed else rows.filter(keep).drop("t")).drop("r"), notes


def _known(number: Column) -> Column:
    """NaN says nothing."""
    from pyspark.sql import functions as F

    return F.when(~F.isnan(number), number)


def _id(name: str, kind: str, column: str, source: str) -> Column:
    from pyspark.sql import functions as F

    if kind not in (*_WHOLE, *_FLOAT, "string", "boolean", "date"):
        raise UserError(
            f"column {column!r} of {source} holds {kind}; the engine spark expects ids that are whole numbers or text"
        )
    return _known(F.col(name)) if kind in _FLOAT else F.col(name)


def _time(name: str, kind: str, column: str, source: str) -> Column:
    from pyspark.sql import functions as F

    if kind in _WHOLE:
        return F.col(name).cast("bigint")
    if kind in _FLOAT:
        return _known(F.col(name).cast("double"))
    if kind in ("date", "timestamp", "timestamp_ntz"):
        return F.unix_micros(F.col(name).cast("timestamp"))
    raise UserError(f"the time column {column!r} of {source} holds {kind}; the engine spark expects numbers or dates")


def _fetched(rows: DataFrame, folder: Path) -> pl.DataFrame:
    """A result of Spark, here: through files, which hold more than a driver may collect."""
    rows.write.parquet(folder.as_uri())
    return pl.read_parquet(folder / "*.parquet")


@contextmanager
def _session() -> Iterator[SparkSession]:
    try:
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise UserError('the engine spark needs pyspark: pip install "sparring[spark]"') from error
    active = SparkSession.getActiveSession()
    try:
        builder = SparkSession.builder.appName("sparring prepare").config("spark.ui.showConsoleProgress", "false")
        spark = active or builder.getOrCreate()
    except (PySparkException, OSError) as error:
        raise UserError(f"Spark did not start: {first_line(error)}; it needs Java 17 or later") from error
    try:
        own = spark.newSession()  # settings of its own
        own.conf.set("spark.sql.session.timeZone", "UTC")
        own.sparkContext.setLogLevel("ERROR")
        yield own
    finally:
        if active is None:
            spark.stop()


@contextmanager
def _reading(raw: Raw) -> Iterator[None]:
    """Turn what Spark says about bad files into one line that names them."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    errors: tuple[type[BaseException], ...] = (PySparkException, Py4JError, pl.exceptions.PolarsError, OSError)
    try:
        yield
    except errors as error:
        raise UserError(broken_part(raw) or f"Spark cannot read {raw.source}: {_reason(error)}") from error


def _reason(error: Any) -> str:
    """The sentence of a Java error: its class and its trace say nothing to a user."""
    text = first_line(error)
    return text.split("Exception: ")[-1]
