"""Items put and deleted while serving, in SQLite: a change is acknowledged only when it is on disk."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import xxhash

from sparring.core.errors import UserError, first_line, one_line
from sparring.core.locks import HeldError, Lock
from sparring.core.manifest import Problem
from sparring.serving.http.schema import RequestError

FORMAT = 2  # the user_version of the file
_TABLES = f"""
CREATE TABLE items (
    id TEXT PRIMARY KEY, sequence INTEGER NOT NULL, deleted INTEGER NOT NULL, content TEXT NOT NULL,
    vector BLOB, model TEXT, hash TEXT NOT NULL
);
CREATE INDEX by_sequence ON items (sequence);
CREATE TABLE state (key TEXT PRIMARY KEY, value TEXT NOT NULL, hash TEXT NOT NULL);
PRAGMA user_version = {FORMAT};
"""
_ITEMS = "SELECT id, sequence, deleted, content, vector, model, hash FROM items WHERE "
_ADVICE = "restore it from a backup, or choose another file with --store FILE"


@dataclass(frozen=True)
class Change:
    """The merged changes of one item: its columns and placement, or its deletion."""

    id: int | str
    columns: dict[str, Any] = field(default_factory=dict)
    text: str | None = None
    like: list[int | str] | None = None
    vector: np.ndarray | None = None
    model: str | None = None  # the hash of the model file under which it was placed; a vector is in its space
    deleted: bool = False


class Store:
    """Changes of items, one row per item, ordered by the last change.

    SQLite in WAL mode with synchronous=FULL: once `write` returns, neither a kill nor a power cut loses the change.
    Each row has a hash of its values, and opening checks the structure, so damage is an error and never an answer.
    Only one service may open it; the lock ends with the process. The workers of a service open it `held` by their
    parent; their `sequence` is then the last change that they know of.

        store = Store("runs/first/serve/items.sqlite")
        store.write([Change("espresso", {"title": "Espresso"}, like=["ristretto"])])
    """

    def __init__(self, path: str | Path, held: bool = False) -> None:
        self.path = Path(path)
        try:
            self._lock = None if held else Lock(self.path.with_name(self.path.name + ".lock"))
        except HeldError as error:
            raise UserError(
                f"{self.path} is in use by another service: stop it, or choose another file with --store FILE"
            ) from error
        except OSError as error:
            raise UserError(
                f"cannot store changes in {self.path}: {error.strerror}; choose another file with --store FILE"
            ) from error
        try:
            self._db = self._opened()
        except BaseException:
            if self._lock is not None:
                self._lock.release()
            raise
        self.sequence = self.last()

    def _opened(self) -> sqlite3.Connection:
        with one_line(f"{self.path} cannot be opened", sqlite3.Error, UnicodeDecodeError, then=_ADVICE):
            db = sqlite3.connect(self.path, check_same_thread=False, isolation_level=None)
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=FULL")
            if not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                db.executescript(f"BEGIN; {_TABLES} COMMIT;")
            problems = _structure(db)
        if problems:
            db.close()
            raise UserError(f"{self.path} is corrupt: {problems[0]}; {_ADVICE}")
        return db

    def write(self, changes: Sequence[Change]) -> int:
        """Store changes, all or none; returns the sequence number of the last. Durable on return."""
        rows = [
            (
                str(change.id),
                self.sequence + number,
                int(change.deleted),
                orjson.dumps(
                    {"id": change.id, "columns": change.columns, "text": change.text, "like": change.like},
                    option=orjson.OPT_NON_STR_KEYS,
                ).decode(),
                None if change.vector is None else change.vector.astype("<f4").tobytes(),
                change.model,
            )
            for number, change in enumerate(changes, 1)
        ]
        hashed = [(*row, row_hash(row)) for row in rows]
        self._transaction("INSERT OR REPLACE INTO items VALUES (?, ?, ?, ?, ?, ?, ?)", hashed)
        self.sequence += len(rows)
        return self.sequence

    def last(self) -> int:
        """The sequence number of the last change in the file."""
        return int(self._db.execute("SELECT coalesce(max(sequence), 0) FROM items").fetchone()[0])

    def get(self, item: int | str) -> Change | None:
        rows = self._rows(_ITEMS + "id = ?", str(item))
        return _change(rows[0]) if rows else None

    def since(self, sequence: int) -> Iterator[Change]:
        """Changes after this sequence number, oldest first."""
        return map(_change, self._rows(_ITEMS + "sequence > ? ORDER BY sequence", sequence))

    def counts(self) -> tuple[int, int]:
        """(items added or changed, items deleted)."""
        put, deleted = self._db.execute(
            "SELECT coalesce(sum(1 - deleted), 0), coalesce(sum(deleted), 0) FROM items"
        ).fetchone()
        return int(put), int(deleted)

    def read_state(self, key: str) -> str | None:
        rows = self._rows("SELECT key, value, hash FROM state WHERE key = ?", key)
        return str(rows[0][1]) if rows else None

    def write_state(self, key: str, value: str) -> None:
        row = key, value
        self._transaction("INSERT OR REPLACE INTO state VALUES (?, ?, ?)", [(*row, row_hash(row))])

    def _rows(self, query: str, *given: str | int) -> list[tuple[Any, ...]]:
        """The rows that a query finds, without their hashes, which must match."""
        with one_line(f"{self.path} cannot be read", sqlite3.Error, then=_ADVICE):
            rows = self._db.execute(query, given).fetchall()
        for row in rows:
            if row_hash(row[:-1]) != row[-1]:
                name = str(row[0])[:80]
                raise UserError(f"{self.path} is corrupt: the hash of row {name!r} does not match; {_ADVICE}")
        return [row[:-1] for row in rows]

    def close(self) -> None:
        self._db.close()
        if self._lock is not None:
            self._lock.release()

    def _transaction(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany(statement, rows)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise RequestError(507, f"the change was not stored: {error}") from error


def row_hash(row: tuple[Any, ...]) -> str:
    """The hash of a row's values."""
    return xxhash.xxh3_128_hexdigest(b"\0".join([v if isinstance(v, bytes) else repr(v).encode() for v in row]))


def check_store(path: Path) -> list[Problem]:
    """All damage in a store, which a service may have open meanwhile."""
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as db:
            found = _structure(db)
            for table in () if found else ("items", "state"):
                for row in db.execute(f"SELECT * FROM {table}"):  # noqa: S608
                    if row_hash(row[:-1]) != row[-1]:
                        found.append(f"the hash of row {str(row[0])[:80]!r} in {table} does not match")
    except (sqlite3.Error, ValueError) as error:
        found = [first_line(error)]
    return [Problem(path, "damaged", line) for line in found]


def _structure(db: sqlite3.Connection) -> list[str]:
    """The damage that SQLite finds in its own pages and indexes, or tables other than ours."""
    lines = [str(line) for (line,) in db.execute("PRAGMA integrity_check(1)") if line != "ok"]
    schema = "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name"
    with closing(sqlite3.connect(":memory:")) as ours:
        ours.executescript(_TABLES)
        wanted = ours.execute(schema).fetchall()
    if db.execute("PRAGMA user_version").fetchone()[0] != FORMAT or db.execute(schema).fetchall() != wanted:
        lines.append("its tables are not those that this version writes")
    return lines


def _change(row: tuple[Any, ...]) -> Change:
    _, _, deleted, content, vector, model = row
    fields = orjson.loads(content)
    numbers = None if vector is None else np.frombuffer(vector, "<f4")
    return Change(fields["id"], fields["columns"], fields["text"], fields["like"], numbers, model, bool(deleted))
