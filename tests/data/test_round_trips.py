"""Any sequence of edits, files and splits: the rows that were written are the rows that are read and split."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from random import Random

import polars as pl
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from sparring.core.errors import UserError
from sparring.data import Interactions, Split, read, split
from sparring.data.prepared.preparation import prepare
from support.settings import effort

Pair = tuple[str, int]


def pairs(part: Interactions | None) -> list[Pair]:
    if part is None:
        return []
    return list(zip(part.query_ids.decode(part.queries), part.item_ids.decode(part.items), strict=True))


def parts(found: Split) -> list[list[Pair]]:
    return [sorted(pairs(part)) for part in (found.train, found.valid, found.test)]


class Files(RuleBasedStateMachine):
    """Interactions with names as queries and numbers as items, in memory as a dictionary and on the disk as files."""

    def __init__(self) -> None:
        super().__init__()
        self.home, self.number = Path(tempfile.mkdtemp()), 0
        self.rows: dict[Pair, int] = {}

    @initialize()
    def begin(self) -> None:
        for number in range(12):
            self.rows[f"u{number % 3}", number % 5] = number

    @rule(
        query=st.sampled_from(["u0", "u1", "u2", "007", "ünï", "a,b", 'say "x"', " "]),
        item=st.integers(0, 9),
        time=st.integers(0, 99),
    )
    def add(self, query: str, item: int, time: int) -> None:
        self.rows[query, item] = time

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        if len(self.rows) > 8:
            del self.rows[data.draw(st.sampled_from(sorted(self.rows)))]

    @rule(kind=st.sampled_from(["parquet", "csv", "tsv", "parts"]), seed=st.integers(0, 99))
    def written(self, kind: str, seed: int) -> None:
        """Rows in another order and in another format are read as the same rows, and split into the same parts."""
        path, data = self.write(kind, seed), read(self.write("parquet", 0))
        again = read(path)
        assert sorted(pairs(again)) == sorted(self.rows)
        assert again.time is not None
        times = dict(zip(pairs(again), again.time.tolist(), strict=True))
        assert len(set(times.values())) == len(set(self.rows.values()))  # in whatever unit
        for how in ("random", "temporal", "leave-last-out"):
            outcomes: list[object] = []
            for each in (data, again):
                try:
                    outcomes.append(parts(split(each, how, 0.2, 0.3, seed=seed)))
                except UserError as error:
                    outcomes.append(str(error))
            assert outcomes[0] == outcomes[1]

    @rule(how=st.sampled_from(["random", "leave-last-out"]), seed=st.integers(0, 99))
    def prepared(self, how: str, seed: int) -> None:
        """A prepared folder holds the parts that a split in memory has, and each row once."""
        path = self.write("parquet", seed)
        expected = parts(split(read(path), how, 0.2, 0.3, seed=seed))
        prepare(path, self.home / f"prepared{self.number}", how=how, valid=0.2, test=0.3, seed=seed)
        found = parts(split(read(self.home / f"prepared{self.number}")))
        assert found == expected
        assert sorted(pair for part in found for pair in part) == sorted(self.rows)

    def write(self, kind: str, seed: int) -> Path:
        self.number += 1
        rows = [(query, item, time) for (query, item), time in self.rows.items()]
        Random(seed).shuffle(rows)
        table = pl.DataFrame(rows, schema=["user_id", "item_id", "timestamp"], orient="row")
        path = self.home / f"rows{self.number}.{kind}"
        if kind == "parts":
            path.mkdir()
            table.head(5).write_parquet(path / "a.parquet")
            table.slice(5).write_parquet(path / "b.parquet")
        elif kind == "parquet":
            table.write_parquet(path)
        else:
            table.write_csv(path, separator="\t" if kind == "tsv" else ",")
        return path

    def teardown(self) -> None:
        shutil.rmtree(self.home)


Files.TestCase.settings = settings(max_examples=effort(8, 150), stateful_step_count=effort(6, 15))
TestFiles = Files.TestCase
