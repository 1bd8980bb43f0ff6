"""The items of a run in PostgreSQL with the extension pgvector."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import polars as pl

from sparring.core.errors import UserError, first_line

_MOST_INDEXED = 2000  # dimensions: the limit of hnsw in pgvector


class PostgresItems:
    """A table of items: id (bigint or text, primary key), vector, title; searched by inner product.

    `address` is a connection string (postgresql://user@host/database; password from PGPASSWORD or ~/.pgpass). A
    missing extension or table is created; a table with another type of ids or another dimension raises UserError.
    Every call is one transaction.

        store = PostgresItems("postgresql://localhost/shop", "items", dim=64, text_ids=True)
        store.upsert(ids, vectors)
        store.build_index()
        store.search(q, k=10)
    """

    def __init__(self, address: str, table: str, dim: int, text_ids: bool) -> None:
        try:
            import psycopg
            from psycopg import sql
        except ImportError as error:
            raise UserError('PostgreSQL needs psycopg: pip install "sparring[pgvector]"') from error
        self._psycopg, self._sql, self.dim, self.text_ids = psycopg, sql, dim, text_ids
        self.shown, self.table = table, sql.Identifier(*table.split("."))
        try:
            self._connection: Any = psycopg.connect(address, autocommit=True)
        except psycopg.Error as error:
            raise UserError(f"cannot reach PostgreSQL: {first_line(error)}") from error
        try:
            self._create()
        except UserError:
            self.close()
            raise

    def _create(self) -> None:
        kind = "text" if self.text_ids else "bigint"
        create = "create table if not exists {} (id {} primary key, vector vector({}) not null, title text)"
        with self._errors("open"), self._connection.transaction():
            self._run("create extension if not exists vector")
            self._run(create, self.table, self._sql.SQL(kind), self._sql.SQL(str(self.dim)))
            query = (
                "select attname, format_type(atttypid, atttypmod) from pg_attribute "
                "where attrelid = %s::regclass and attnum > 0"
            )
            name = self.table.as_string(self._connection)
            columns = dict(self._connection.execute(query, [name]).fetchall())
        expected = {"id": kind, "vector": f"vector({self.dim})", "title": "text"}
        for column, wanted in expected.items():
            if columns.get(column) != wanted:
                raise UserError(
                    f"table {self.shown!r} has {column} {columns.get(column)}, not {wanted}: choose another table"
                )

    def upsert(self, ids: pl.Series, vectors: np.ndarray, titles: pl.Series | None = None) -> None:
        """Insert or replace items."""
        titles = pl.Series("title", [None] * len(ids), dtype=pl.String) if titles is None else titles.cast(pl.String)
        numbers = pl.Series(
            "vector", np.ascontiguousarray(vectors, dtype=np.float32), dtype=pl.Array(pl.Float32, vectors.shape[1])
        )
        table = pl.DataFrame({"id": ids, "title": titles, "vector": numbers})
        joined = pl.col("vector").arr.to_list().cast(pl.List(pl.String)).list.join(",")
        table = table.with_columns(pl.format("[{}]", joined).alias("vector"))
        text = io.BytesIO()
        table.write_csv(text, include_header=False, quote_style="non_numeric")
        with self._errors("upsert"), self._connection.transaction():
            self._run(
                "create temp table arriving on commit drop as select id, title, vector from {} where false", self.table
            )
            with self._connection.cursor().copy("copy arriving from stdin (format csv)") as copy:
                copy.write(text.getbuffer())
            self._run(
                "insert into {} (id, title, vector) select id, title, vector from arriving "
                "on conflict (id) do update set title = excluded.title, vector = excluded.vector",
                self.table,
            )

    def delete(self, ids: pl.Series) -> int:
        """Delete items; returns how many were present."""
        with self._errors("delete"):
            done = self._connection.execute(
                self._sql.SQL("delete from {} where id = any(%s)").format(self.table), [ids.to_list()]
            )
            return int(done.rowcount)

    def ids(self) -> pl.Series:
        """All ids in the table."""
        with self._errors("read ids"):
            rows = self._run("select id from {}", self.table).fetchall()
        return pl.Series("id", [row[0] for row in rows], dtype=pl.String if self.text_ids else pl.Int64)

    def build_index(self) -> bool:
        """Create the approximate index (hnsw) if it is missing; False if the vectors have too many dimensions."""
        if self.dim > _MOST_INDEXED:
            return False
        name = self._sql.Identifier(f"{self.shown.split('.')[-1]}_vector_hnsw")
        with self._errors("build an index"):
            self._run("create index if not exists {} on {} using hnsw (vector vector_ip_ops)", name, self.table)
        return True

    def search(self, q: np.ndarray, k: int) -> list[list[tuple[Any, float]]]:
        """(id, score) of the k best items for each query (B, D), best first."""
        query = self._sql.SQL(
            "select id, -(vector <#> %s::vector) from {} order by vector <#> %s::vector limit %s"
        ).format(self.table)
        lists = []
        with self._errors("search"), self._connection.transaction():
            self._run("set local hnsw.ef_search = {}", self._sql.SQL(str(min(1000, max(40, k)))))
            for vector in q.tolist():
                rows = self._connection.execute(query, [str(vector), str(vector), k]).fetchall()
                lists.append([(row[0], float(row[1])) for row in rows])
        return lists

    def close(self) -> None:
        self._connection.close()

    def _run(self, text: str, *names: Any) -> Any:
        return self._connection.execute(self._sql.SQL(text).format(*names))

    def _errors(self, what: str) -> _UserErrors:
        return _UserErrors(self._psycopg.Error, f"PostgreSQL could not {what} table {self.shown!r}")


class _UserErrors:
    """Turns errors of the database into UserError with one line."""

    def __init__(self, kind: type[Exception], what: str) -> None:
        self.kind, self.what = kind, what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, self.kind):
            raise UserError(f"{self.what}: {first_line(error)}") from error
