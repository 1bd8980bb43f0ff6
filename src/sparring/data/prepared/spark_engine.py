"""The Spark engine: rows into buckets on a cluster, the same rows in the same buckets as the polars engine.

Only the ids reach the machine that calls it. All machines must see the folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import polars as pl

from sparring.core.errors import UserError, first_line, one_line
from sparring.core.extras import optional
from sparring.data.cleaning import SHORT, clean
from sparring.data.columns import order_notes
from sparring.data.opening import inline_texts
from sparring.data.prepared.polars_engine import broken_part
from sparring.data.prepared.row_buckets import Buckets, StageProgress, number_ids
from sparring.data.table import OpenTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_KINDS = dict.fromkeys(("tinyint", "smallint", "int", "bigint"), "integer") | dict.fromkeys(
    ("float", "double"), "float"
)
_KINDS |= dict.fromkeys(("timestamp", "timestamp_ntz"), "timestamp")
_KINDS |= {"string": "text", "boolean": "boolean", "date": "date", "void": "null"}


def fill_buckets(
    table: OpenTable, folder: Path, progress: StageProgress, check_space: Callable[[int], None]
) -> Buckets:
    """Write the rows of a table into buckets under `folder`, in the active Spark session or a temporary local one."""
    if table.text:
        raise UserError(f"the engine spark reads Parquet, and {table.source} is of another kind: use the engine polars")
    roles = table.roles()
    with _session() as spark, _spark_errors(table):
        from pyspark.sql import functions as F

        progress("counting rows", 0, None)
        parts = spark.read.parquet(*(file.absolute().as_uri() for file in table.files))
        short = parts.select(*(F.col(f"`{column}`").alias(SHORT[role]) for role, column in roles.items()))
        cleaned, notes = clean(SparkRows(short), roles, table.columns, table.source)
        notes += order_notes(roles, table.columns)
        rows = cleaned.frame
        exchange = folder.parent / "ids"
        progress("numbering queries", 0, None)
        queries = _fetch(rows.groupBy("q").agg(F.count("*").alias("n")), exchange / "q")
        progress("numbering items", 0, None)
        items = _fetch(rows.select("i").distinct(), exchange / "i")["i"]
        numbers = number_ids(queries, items, table, roles)
        check_space(int(queries["n"].sum()))
        progress("rows into buckets", 0, None)
        for name, numbered in (("q", numbers.queries), ("i", numbers.items)):
            path = exchange / f"{name}.parquet"
            numbered.rename({"dense": f"d{name}"}).write_parquet(path)
            rows = rows.join(spark.read.parquet(path.as_uri()), name)
        others = [name for name in rows.columns if name in ("t", "w", "s", "l")]
        rows = rows.select("b", F.col("dq").alias("q"), F.col("di").alias("i"), *others)
        n_buckets = len(numbers.first) - 1
        rows.repartition(n_buckets, "b").write.partitionBy("b").option("compression", "none").parquet(folder.as_uri())
        tables = {"item": table.items, "query": table.queries}
        for role in tables:
            key, texts = inline_texts(table, role)
            if tables[role] is None and texts:
                grouped = parts.filter(F.col(f"`{key}`").isNotNull()).groupBy(F.col(f"`{key}`").alias(key))
                smallest = grouped.agg(*(F.min(f"`{name}`").alias(name) for name in texts))
                tables[role] = _fetch(smallest, exchange / f"{role}_table")
    shutil.rmtree(exchange)
    ids = numbers.query_ids, numbers.item_ids
    return Buckets(folder, *ids, numbers.first, roles, notes, tables["item"], tables["query"])


@dataclass(frozen=True)
class SparkRows:
    """Unread rows of Spark. Text times and numbers are refused: Spark parses other forms than polars does."""

    frame: DataFrame

    id_kinds: ClassVar[tuple[str, ...]] = ("integer", "float", "text", "boolean", "date")  # as text, equal in both
    microseconds: ClassVar[str] = "unix_micros(CAST(t AS TIMESTAMP))"

    def kind(self, name: str) -> tuple[str, object]:
        dtype = dict(self.frame.dtypes)[name]
        return _KINDS.get(dtype, "other"), dtype

    def with_column(self, name: str, expression: str) -> SparkRows:
        from pyspark.sql import functions as F

        return SparkRows(self.frame.withColumn(name, F.expr(expression)))

    def with_parsed_text(self, name: str, holds: str) -> SparkRows:
        raise UserError(f"{holds} text; the engine spark expects numbers{' or dates' if name == 't' else ''}")

    def with_codes(self, name: str, codes: Mapping[str, int]) -> SparkRows:
        from pyspark.sql import functions as F

        word = F.col(name).cast("string")
        code = F.coalesce(*(F.when(word == text, F.lit(code)) for text, code in codes.items()), F.lit(None))
        return SparkRows(self.frame.withColumn(name, code.cast("tinyint")))

    def where(self, condition: str) -> SparkRows:
        return SparkRows(self.frame.filter(condition))

    def drop(self, name: str) -> SparkRows:
        return SparkRows(self.frame.drop(name))

    def distinct(self, name: str) -> list[str | None]:
        return [row[0] for row in self.frame.selectExpr(f"CAST({name} AS STRING)").distinct().limit(1000).collect()]

    def first(self, expression: str, condition: str) -> Any:
        rows = self.frame.filter(condition).selectExpr(expression).head(1)
        return rows[0][0] if rows else None

    def count(self, conditions: Mapping[str, str]) -> Mapping[str, int]:
        from pyspark.sql import functions as F

        sums = (F.count_if(F.expr(condition)).alias(name) for name, condition in conditions.items())
        counted = self.frame.agg(F.count("*").alias("rows"), *sums).head()
        assert counted is not None
        return dict(counted.asDict())


def _fetch(rows: DataFrame, folder: Path) -> pl.DataFrame:
    """A result of Spark as a polars frame, through files: they hold more than a driver may collect."""
    rows.write.parquet(folder.as_uri())
    return pl.read_parquet(folder / "*.parquet")


@contextmanager
def _session() -> Iterator[SparkSession]:
    optional("pyspark", "spark", "the engine spark")
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    with one_line("Spark did not start", PySparkException, OSError, then="it needs Java 17 or later"):
        builder = SparkSession.builder.appName("sparring prepare").config("spark.ui.showConsoleProgress", "false")
        spark = active or builder.getOrCreate()
    try:
        session = spark.newSession()  # with separate settings
        session.conf.set("spark.sql.session.timeZone", "UTC")
        session.sparkContext.setLogLevel("ERROR")
        yield session
    finally:
        if active is None:
            spark.stop()


@contextmanager
def _spark_errors(table: OpenTable) -> Iterator[None]:
    """Turn an error of Spark into one line that names the bad file."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    errors: tuple[type[BaseException], ...] = (PySparkException, Py4JError, pl.exceptions.PolarsError, OSError)
    try:
        yield
    except errors as error:
        reason = first_line(error).split("Exception: ")[-1]  # without the names of Java's classes
        raise UserError(broken_part(table) or f"Spark cannot read {table.source}: {reason}") from error
