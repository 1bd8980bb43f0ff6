"""Items put and deleted while serving, in SQLite: a change is acknowledged only when it is on disk."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from sparring.core.errors import UserError
from sparring.core.locks import HeldError, Lock
from sparring.serving.http.schema import RequestError

_TABLES = """
CREATE TABLE IF NOT EXISTS items (
    id TEXT PRIMARY KEY, sequence INTEGER NOT NULL, deleted INTEGER NOT NULL, content TEXT NOT NULL,
    vector BLOB, model TEXT
);
CREATE INDEX IF NOT EXISTS by_sequence ON items (sequence);
CREATE TABLE IF NOT EXISTS state (key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


@dataclass(frozen=True)
class Change:
    """The merged changes of one item: its columns and placement, or its deletion."""

    id: int | str
    columns: dict[str, Any] = field(default_factory=dict)
    text: str | None = None
    like: list[int | str] | None = None
    vector: np.ndarray | None = None
    model: str | None = None  # SHA-256 of the model file under which it was placed; a vector is in its space
    deleted: bool = False


class Store:
    """Changes of items, one row per item, ordered by the last change.

    SQLite in WAL mode with synchronous=FULL: once `write` returns, neither a kill nor a power cut loses the change.
    Only one service may open it; the lock ends with the process.

        store = Store("runs/first/serve/items.sqlite")
        store.write([Change("espresso", {"title": "Espresso"}, like=["ristretto"])])
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self._lock = Lock(self.path.with_name(self.path.name + ".lock"))
        except HeldError as error:
            raise UserError(
                f"{self.path} is in use by another service: stop it, or choose another file with --store FILE"
            ) from error
        except OSError as error:
            raise UserError(
                f"cannot store changes in {self.path}: {error.strerror}; choose another file with --store FILE"
            ) from error
        try:
            self._db = sqlite3.connect(self.path, check_same_thread=False, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(_TABLES)
            self._db.execute("SELECT content FROM items LIMIT 0")  # fails on a store of another version
            self.sequence = int(self._db.execute("SELECT coalesce(max(sequence), 0) FROM items").fetchone()[0])
        except sqlite3.Error as error:
            how = "restore it from a backup, or choose another file with --store FILE"
            raise UserError(f"{self.path} cannot be opened: {error}; {how}") from error

    def write(self, changes: Sequence[Change]) -> int:
        """Store changes, all or none; returns the sequence number of the last. Durable on return."""
        rows = [
            (
                str(change.id),
                self.sequence + number,
                change.deleted,
                orjson.dumps(
                    {"id": change.id, "columns": change.columns, "text": change.text, "like": change.like},
                    option=orjson.OPT_NON_STR_KEYS,
                ).decode(),
                None if change.vector is None else change.vector.astype("<f4").tobytes(),
                change.model,
            )
            for number, change in enumerate(changes, 1)
        ]
        self._transaction("INSERT OR REPLACE INTO items VALUES (?, ?, ?, ?, ?, ?)", rows)
        self.sequence += len(rows)
        return self.sequence

    def get(self, item: int | str) -> Change | None:
        row = self._db.execute(
            "SELECT deleted, content, vector, model FROM items WHERE id = ?", (str(item),)
        ).fetchone()
        return None if row is None else _change(*row)

    def since(self, sequence: int) -> Iterator[Change]:
        """Changes after this sequence number, oldest first."""
        rows = self._db.execute(
            "SELECT deleted, content, vector, model FROM items WHERE sequence > ? ORDER BY sequence", (sequence,)
        )
        return (_change(*row) for row in rows.fetchall())

    def counts(self) -> tuple[int, int]:
        """(items added or changed, items deleted)."""
        put, deleted = self._db.execute(
            "SELECT coalesce(sum(1 - deleted), 0), coalesce(sum(deleted), 0) FROM items"
        ).fetchone()
        return int(put), int(deleted)

    def read_state(self, key: str) -> str | None:
        row = self._db.execute("SELECT value FROM state WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def write_state(self, key: str, value: str) -> None:
        self._transaction("INSERT OR REPLACE INTO state VALUES (?, ?)", [(key, value)])

    def close(self) -> None:
        self._db.close()
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


def _change(deleted: int, content: str, vector: bytes | None, model: str | None) -> Change:
    fields = orjson.loads(content)
    numbers = None if vector is None else np.frombuffer(vector, "<f4")
    return Change(fields["id"], fields["columns"], fields["text"], fields["like"], numbers, model, bool(deleted))
