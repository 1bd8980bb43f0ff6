"""Rows of a run in PostgreSQL with the extension pgvector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from sparring.core.errors import one_line
from sparring.core.extras import optional
from sparring.serving.export.conditions import Dialect, Where
from sparring.serving.export.rows import TIME, vector_text
from sparring.serving.export.store import Found, check_columns, column_types, denied

_MOST_INDEXED = 2000  # dimensions: the limit of hnsw in pgvector
_KINDS = {
    pl.Boolean: "boolean",
    pl.Int64: "bigint",
    pl.Float64: "double precision",
    pl.String: "text",
    TIME: "timestamp without time zone",
}


class PostgresItems:
    """A table of PostgreSQL (see `Store`). Every call is one transaction.

    `address` is a connection string (postgresql://user@host/database; password from PGPASSWORD or ~/.pgpass). A
    missing extension is created.

        store = PostgresItems("postgresql://localhost/shop", "items", rows.schema)
        store.upsert(rows.part(0, 1000))
        store.search(q, k=10, where=[("price", "<", 10)])
    """

    def __init__(self, address: str, table: str, schema: pl.Schema) -> None:
        self._psycopg: Any = optional("psycopg", "pgvector", "PostgreSQL")
        self._sql, self.schema = self._psycopg.sql, schema
        self.shown, self.table = table, self._sql.Identifier(*table.split("."))
        with one_line("cannot reach PostgreSQL", self._psycopg.Error):
            self._connection: Any = self._psycopg.connect(address, autocommit=True)
        try:
            self._create()
        except BaseException:
            self.close()
            raise

    def _create(self) -> None:
        key = "text" if self.schema["id"] == pl.String else "bigint"
        vector = f"vector({self.schema['vector'].size})"  # type: ignore[attr-defined]
        expected = {"id": key, "vector": vector, **column_types(self.schema, _KINDS, "{}[]")}
        rules = {"id": " primary key", "vector": " not null"}
        # texts are in the order of their bytes, as here, whatever the language of the database
        kinds = {name: kind + (' collate "C"' if kind.startswith("text") else "") for name, kind in expected.items()}
        columns = [
            self._sql.SQL("{} {}").format(self._sql.Identifier(name), self._sql.SQL(kind + rules.get(name, "")))
            for name, kind in kinds.items()
        ]
        with self._asking("open"), self._connection.transaction():
            self._run("create extension if not exists vector")
            self._run("create table if not exists {} ({})", self.table, self._sql.SQL(", ").join(columns))
            query = (
                "select attname, format_type(atttypid, atttypmod) from pg_attribute "
                "where attrelid = %s::regclass and attnum > 0"
            )
            name = self.table.as_string(self._connection)
            found = dict(self._connection.execute(query, [name]).fetchall())
            version = self._run("select extversion from pg_extension where extname = 'vector'").fetchone()[0]
        check_columns(self.shown, found, expected)
        self._scans_on = tuple(map(int, version.split(".")[:2])) >= (0, 8)

    def upsert(self, rows: pl.DataFrame) -> None:
        rows = rows.with_columns(vector_text(rows))
        names = self._sql.SQL(", ").join(map(self._sql.Identifier, rows.columns))
        new = [self._sql.SQL("{0} = excluded.{0}").format(self._sql.Identifier(name)) for name in rows.columns[1:]]
        with self._asking("upsert"), self._connection.transaction():
            self._run("create temp table arriving on commit drop as select {} from {} where false", names, self.table)
            with self._connection.cursor().copy("copy arriving from stdin") as copy:
                for row in rows.iter_rows():
                    copy.write_row(row)
            self._run(
                "insert into {} ({}) select * from arriving on conflict (id) do update set {}",
                self.table,
                names,
                self._sql.SQL(", ").join(new),
            )

    def delete(self, ids: pl.Series) -> int:
        with self._asking("delete"):
            done = self._connection.execute(
                self._sql.SQL("delete from {} where id = any(%s)").format(self.table), [ids.to_list()]
            )
            return int(done.rowcount)

    def ids(self) -> pl.Series:
        with self._asking("read ids"):
            rows = self._run("select id from {}", self.table).fetchall()
        return pl.Series("id", [row[0] for row in rows], dtype=self.schema["id"])

    def finish(self) -> None:
        """Create the approximate index (hnsw) if it is missing; vectors of too many dimensions get none."""
        if self.schema["vector"].size <= _MOST_INDEXED:  # type: ignore[attr-defined]
            name = self._sql.Identifier(f"{self.shown.split('.')[-1]}_vector_hnsw")
            with self._asking("build an index"):
                self._run("create index if not exists {} on {} using hnsw (vector vector_ip_ops)", name, self.table)

    def search(self, q: np.ndarray, k: int, where: Where = (), deny: Sequence[Sequence[Any]] | None = None) -> Found:
        condition = self._sql.SQL(self._filters().all(where, self.schema).replace("%", "%%") or "true")
        query = self._sql.SQL(
            "select id, -(vector <#> %s::vector) from {} where {} and id <> all(%s) "
            "order by vector <#> %s::vector limit %s"
        ).format(self.table, condition)
        lists = Found()
        with self._asking("search"), self._connection.transaction():
            self._run("set local hnsw.ef_search = {}", self._sql.SQL(str(min(1000, max(40, k)))))
            if self._scans_on:  # until k rows have passed the filter
                self._run("set local hnsw.iterative_scan = strict_order")
            for vector, ids in zip(map(str, q.tolist()), denied(deny, len(q)), strict=True):
                rows = self._connection.execute(query, [vector, list(ids), vector, k]).fetchall()
                lists.append([(row[0], float(row[1])) for row in rows])
        return lists

    def close(self) -> None:
        self._connection.close()

    def _filters(self) -> Dialect:
        sql, connection = self._sql, self._connection
        return Dialect(
            "PostgreSQL",
            lambda name: str(sql.Identifier(name).as_string(connection)),
            lambda value: str(sql.Literal(value).as_string(connection)),
            "{1} = any({0})",
            "strpos(lower({0}), {1}) > 0",
            nothing="false",
        )

    def _run(self, text: str, *names: Any) -> Any:
        return self._connection.execute(self._sql.SQL(text).format(*names))

    def _asking(self, what: str) -> Any:
        return one_line(f"PostgreSQL could not {what} table {self.shown!r}", self._psycopg.Error)
