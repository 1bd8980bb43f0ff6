"""Odd inputs: files that people have, and what reading each of them must give. The guide prints the same list."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl

NAN, INF = float("nan"), float("inf")
USERS, ITEMS = ["a", "b", "c", "c"], [1, 2, 3, 1]
PLAIN = {("a", 1), ("b", 2), ("c", 3), ("c", 1)}
TWO = {("a", 1), ("b", 2)}
SIX = {"user": ["a"] * 4 + ["b"] * 4, "item": [1, 2, 3, 4, 1, 2, 3, 5]}
EIGHT = set(zip(SIX["user"], SIX["item"], strict=True))
NOON = datetime(2022, 1, 1)
MICROSECONDS = 1_640_995_200_000_000  # 2022-01-01 in UTC
HOUR = 3_600_000_000

Source = dict[str, Any] | str | bytes | Callable[[Path], Path]


@dataclass(frozen=True)
class Odd:
    """One odd input: its line in the guide, its content, and the expected pairs or the keyword of the refusal."""

    group: str
    name: str
    outcome: str
    source: Source  # columns of a Parquet file, the content of a CSV file, or a function that writes into a folder
    pairs: set[tuple[Any, Any]] | None = None  # None: refused
    says: str = ""  # a part of the note, or of the refusal
    options: dict[str, Any] = field(default_factory=dict)
    how: str = "auto"
    sizes: tuple[int, int, int] | None = None  # of the parts, where they are the point
    times: dict[tuple[Any, Any], float] | None = None
    meanwhile: str = ""  # "change": the file grows while it is read; "panic": polars panics

    def write(self, folder: Path) -> Path:
        if isinstance(self.source, dict):
            path = folder / "pairs.parquet"
            pl.DataFrame(self.source).write_parquet(path)
        elif isinstance(self.source, (str, bytes)):
            path = folder / "pairs.csv"
            path.write_bytes(self.source.encode() if isinstance(self.source, str) else self.source)
        else:
            path = self.source(folder)
        return path

    def arguments(self, folder: Path) -> dict[str, Any]:
        """The arguments of `read`: tables as files."""
        tables = {name: folder / f"{name}.parquet" for name in self.options if isinstance(self.options[name], dict)}
        for name, path in tables.items():
            pl.DataFrame(self.options[name]).write_parquet(path)
        return {**self.options, **tables}


def items(values: Any) -> dict[str, Any]:
    """The plain pairs with other item ids."""
    return {"user": USERS, "item": values}


def users(values: Any) -> dict[str, Any]:
    return {"user": values, "item": ITEMS}


def plain(**more: Any) -> dict[str, Any]:
    return {"user": USERS, "item": ITEMS, **more}


def timed(times: Any) -> dict[str, Any]:
    return plain(timestamp=times)


def table(**columns: Any) -> dict[str, Any]:
    """The option of an items table."""
    return {"items": columns}


def text_pairs(*values: str) -> set[tuple[str, str]]:
    return set(zip(USERS, values, strict=True))


def damaged_gzip(folder: Path) -> Path:
    path = folder / "pairs.csv.gz"
    path.write_bytes(gzip.compress(b"user,item\n" + b"a,1\nb,2\n" * 1000)[:-20])
    return path


def damaged_parquet(folder: Path) -> Path:
    path = folder / "pairs.parquet"
    path.write_bytes(b"user,item\na,1\nb,2\n")
    return path


def parts(second: dict[str, Any]) -> Callable[[Path], Path]:
    """A folder of two Parquet parts."""

    def write(folder: Path) -> Path:
        (folder / "parts").mkdir()
        pl.DataFrame(plain()).write_parquet(folder / "parts" / "1.parquet")
        pl.DataFrame(second).write_parquet(folder / "parts" / "2.parquet")
        return folder / "parts"

    return write


IDS, TIMES, PARTS, TABLES, WEIGHTS, SIZES, FILES = "ids", "times", "parts", "tables", "weights", "sizes", "files"
LEAK = {"user": SIX["user"] + ["a", "b"], "item": SIX["item"] + [1, 4], "split": ["train"] * 8 + ["test"] * 2}
ODD = [
    Odd(IDS, "whole numbers as floats", "are integers", items([1.0, 2.0, 3.0, 1.0]), PLAIN),
    Odd(IDS, "NaN", "row dropped, counted", items([1.0, NAN, 3.0, 1.0]), PLAIN - {("b", 2)}, "dropped 1 row with"),
    Odd(IDS, "null", "row dropped, counted", items([1, None, 3, 1]), PLAIN - {("b", 2)}, "dropped 1 row with"),
    Odd(IDS, "an empty string", "row dropped, counted", users(["a", "", "c", "c"]), PLAIN - {("b", 2)}, "dropped 1"),
    Odd(IDS, "only nulls", "refused", users(pl.Series([None] * 4, dtype=pl.String)), says="null or empty"),
    Odd(IDS, "fractions", "refused", items([1.5, 2.0, 3.0, 1.0]), says="1.5"),
    Odd(IDS, "infinite", "refused", items([INF, 2.0, 3.0, 1.0]), says="inf"),
    Odd(IDS, "floats above 2^53", "refused: digits are lost", items([1e17, 2.0, 3.0, 1.0]), says="digits"),
    Odd(IDS, "numbers and words mixed", "are text", "user,item\na,1\nb,x\nc,2\n", {("a", "1"), ("b", "x"), ("c", "2")}),
    Odd(
        IDS,
        "unsigned 64-bit integers",
        "are integers",
        items(pl.Series([2**64 - 1, 2, 3, 1], dtype=pl.UInt64)),
        {("a", 2**64 - 1), ("b", 2), ("c", 3), ("c", 1)},
    ),
    Odd(
        IDS,
        "integers beyond 64 bits",
        "are text",
        f"user,item\na,1\nb,{2**70}\nc,2\n",
        {("a", "1"), ("b", str(2**70)), ("c", "2")},
    ),
    Odd(
        IDS,
        "128-bit integers",
        "are text",
        items(pl.Series([2**70, 2, 3, 1], dtype=pl.Int128)),
        text_pairs(str(2**70), "2", "3", "1"),
    ),
    Odd(IDS, "negative integers", "are integers", items([-1, 2, 3, 1]), {("a", -1), ("b", 2), ("c", 3), ("c", 1)}),
    Odd(
        IDS,
        "leading zeros",
        "are text: 007, 07 and 7 differ",
        "user,item\na,007\nb,7\nc,07\n",
        {("a", "007"), ("b", "7"), ("c", "07")},
    ),
    Odd(
        IDS,
        "text of one look in two Unicode forms",
        "differ, and a note shows them",
        items(["caf\u00e9", "cafe\u0301", "x", "y"]),
        text_pairs("caf\u00e9", "cafe\u0301", "x", "y"),
        "Unicode form",
    ),
    Odd(
        IDS,
        "spaces around text",
        "differ, and a note shows them",
        users(["a", "a ", "c", "c"]),
        {("a", 1), ("a ", 2), ("c", 3), ("c", 1)},
        "in spaces",
    ),
    Odd(
        IDS,
        "words for nothing (NA, nan, NULL)",
        "are ids, and a note shows them",
        "user,item\na,1\nb,NA\nc,nan\n",
        {("a", "1"), ("b", "NA"), ("c", "nan")},
        "'NA', 'nan'",
    ),
    Odd(
        IDS,
        "10,000 characters",
        "are text",
        users(["a" * 10_000, "b" * 10_000, "c", "c"]),
        {("a" * 10_000, 1), ("b" * 10_000, 2), ("c", 3), ("c", 1)},
    ),
    Odd(
        IDS,
        "booleans",
        "are text",
        users([True, False, True, False]),
        {("true", 1), ("false", 2), ("true", 3), ("false", 1)},
    ),
    Odd(
        IDS,
        "dates",
        "are text",
        users([date(2020, 1, day) for day in (1, 2, 3, 3)]),
        {("2020-01-01", 1), ("2020-01-02", 2), ("2020-01-03", 3), ("2020-01-03", 1)},
    ),
    Odd(IDS, "categories", "are text", users(pl.Series(USERS, dtype=pl.Categorical)), PLAIN),
    Odd(IDS, "decimals", "are text", items([Decimal(i) for i in ITEMS]), text_pairs("1", "2", "3", "1")),
    Odd(IDS, "lists", "refused", users([[1], [2], [3], [3]]), says="not ids"),
    Odd(IDS, "nested records", "refused", users([{"id": n} for n in (1, 2, 3, 3)]), says="not ids"),
    Odd(IDS, "bytes that are not UTF-8", "refused", users([b"\xff", b"\xfe", b"c", b"c"]), says="utf8"),
    Odd(TIMES, "null, split at random", "row kept", timed([None, 1, 2, 3]), PLAIN, "1 row without a timestamp"),
    Odd(
        TIMES,
        "null, split by time",
        "row counts as the earliest and trains",
        {**SIX, "timestamp": [9, None, 2, 3, None, None, None, None]},
        EIGHT,
        "as the earliest",
        how="leave-last-out",
        sizes=(6, 1, 1),
    ),
    Odd(TIMES, "only nulls", "column ignored", timed([None] * 4), PLAIN, "ignored the column timestamp"),
    Odd(TIMES, "NaN", "as null", timed([NAN, 1.0, 2.0, 3.0]), PLAIN, "1 row without a timestamp"),
    Odd(TIMES, "infinite", "refused", timed([INF, 1.0, 2.0, 3.0]), says="finite"),
    Odd(
        TIMES,
        "text: 2022-01-01",
        "are dates",
        "user,item,timestamp\na,1,2022-01-01\nb,2,2022-01-02\n",
        TWO,
        times={("a", 1): MICROSECONDS, ("b", 2): MICROSECONDS + 24 * HOUR},
    ),
    Odd(
        TIMES,
        "text in several time zones",
        "are compared in UTC",
        timed([f"2022-01-01T00:00:00{zone}" for zone in ("+02:00", "Z", "-05:00", "+00:00")]),
        PLAIN,
        times={("a", 1): MICROSECONDS - 2 * HOUR, ("b", 2): MICROSECONDS, ("c", 3): MICROSECONDS + 5 * HOUR},
    ),
    Odd(
        TIMES,
        "text with and without a zone",
        "refused",
        timed(["2022-01-01T00:00:00+02:00", *["2022-01-01T00:00:00"] * 3]),
        says="neither a number nor a date",
    ),
    Odd(
        TIMES,
        "text: 01/02/2022",
        "is 1 February, and a note says so",
        timed(["01/02/2022", "11/02/2022", "02/03/2022", "02/03/2022"]),
        PLAIN,
        "day/month/year",
        times={("a", 1): MICROSECONDS + 31 * 24 * HOUR},
    ),
    Odd(TIMES, "text: 02/13/2022", "refused", timed(["02/13/2022"] * 4), says="neither a number nor a date"),
    Odd(TIMES, "dates and numbers mixed", "refused", timed(["2022-01-01", "17", "18", "19"]), says="'2022-01-01'"),
    Odd(
        TIMES,
        "timestamps with a time zone",
        "are compared in UTC",
        timed(pl.Series([NOON] * 4).dt.replace_time_zone("Europe/Berlin")),
        PLAIN,
        times=dict.fromkeys(PLAIN, MICROSECONDS - HOUR),
    ),
    Odd(
        TIMES,
        "nanoseconds",
        "are microseconds",
        timed(pl.Series([NOON] * 4, dtype=pl.Datetime("ns"))),
        PLAIN,
        times=dict.fromkeys(PLAIN, MICROSECONDS),
    ),
    Odd(TIMES, "times of day", "refused", timed([time(hour) for hour in range(4)]), says="dates"),
    Odd(
        TIMES,
        "a column `position`",
        "orders the items of a query",
        {**SIX, "position": [1, 2, 3, 4] * 2},
        EIGHT,
        "position is the order",
        how="leave-last-out",
        sizes=(4, 2, 2),
    ),
    Odd(
        TIMES,
        "`position` and a temporal split",
        "refused",
        {**SIX, "position": [1, 2, 3, 4] * 2},
        says="positions",
        how="temporal",
    ),
    Odd(PARTS, "an unknown word", "refused", {**SIX, "split": ["train"] * 7 + ["later"]}, says="'later'"),
    Odd(PARTS, "null", "refused", {**SIX, "split": ["train"] * 7 + [None]}, says="null"),
    Odd(PARTS, "train only", "no test part, noted", {**SIX, "split": ["train"] * 8}, EIGHT, "no test rows"),
    Odd(PARTS, "test only", "refused", {**SIX, "split": ["test"] * 8}, says="no training rows"),
    Odd(PARTS, "a pair in train and test", "trains; test shrinks, counted", LEAK, EIGHT | {("b", 4)}, "from 2 to 1"),
    Odd(PARTS, "every test pair in train", "refused", {**LEAK, "item": SIX["item"] + [1, 2]}, says="all 2 pairs"),
    Odd(
        PARTS,
        "no test query in train",
        "works; `train` counts them",
        {"user": ["a", "a", "b", "b"], "item": [1, 2, 1, 2], "split": ["train"] * 2 + ["test"] * 2},
        {("a", 1), ("a", 2), ("b", 1), ("b", 2)},
        sizes=(2, 0, 2),
    ),
    Odd(PARTS, "a label other than 0 and 1", "refused", plain(label=[1, 0, 7, 1]), says="'7'"),
    Odd(PARTS, "no label 1", "refused", plain(label=[0] * 4), says="no positives"),
    Odd(
        TABLES,
        "an id twice",
        "the first row counts, noted",
        plain(),
        PLAIN,
        "ignored 1 row of the item table",
        table(item=[1, 1, 2, 3], title=["x", "y", "z", "w"]),
    ),
    Odd(
        TABLES,
        "items without a row",
        "kept, counted",
        plain(),
        PLAIN,
        "1 of 3 items are not in",
        table(item=[1, 2], title=["x", "y"]),
    ),
    Odd(
        TABLES,
        "rows without interactions",
        "ignored, counted",
        plain(),
        PLAIN,
        "ignored 2 rows of the item table",
        table(item=[1, 2, 3, 4, None], title=["x", "y", "z", "w", "v"]),
    ),
    Odd(
        TABLES,
        "ids as text, interactions as integers",
        "match",
        plain(),
        PLAIN,
        options=table(item=["1", "2", "3"], title=["x", "y", "z"]),
    ),
    Odd(
        TABLES,
        "no id in common",
        "refused",
        plain(),
        says="no id of the item table",
        options=table(item=[8, 9], title=["x", "y"]),
    ),
    Odd(
        TABLES,
        "no id column",
        "refused",
        plain(),
        says="which column is the item",
        options=table(foo=[1, 2], title=["x", "y"]),
    ),
    Odd(WEIGHTS, "negative", "refused", plain(weight=[-1, 1, 1, 1]), says="-1"),
    Odd(WEIGHTS, "infinite", "refused", plain(weight=[INF, 1, 1, 1]), says="finite"),
    Odd(WEIGHTS, "all 0", "refused", plain(weight=[0, 0, 0, 0]), says="no weight above 0"),
    Odd(WEIGHTS, "null or NaN", "counts as 1, noted", plain(weight=[None, NAN, 2.0, 3.0]), PLAIN, "counted 2 rows"),
    Odd(WEIGHTS, "all equal", "noted", plain(weight=[2, 2, 2, 2]), PLAIN, "does not change the loss"),
    Odd(WEIGHTS, "a moderate spread", "counts, noted", plain(weight=[1, 2, 3, 4]), PLAIN, "1 to 4, median 2.5"),
    Odd(WEIGHTS, "one above 100 medians", "refused until named", plain(weight=[1, 1, 1, 1000]), says="1,000 times"),
    Odd(
        WEIGHTS,
        "the same, named",
        "counts, noted",
        plain(weight=[1, 1, 1, 1000]),
        PLAIN,
        "1 to 1,000, median 1",
        {"weight": "weight"},
    ),
    Odd(WEIGHTS, "the same, named `none`", "ignored", plain(weight=[1, 1, 1, 1000]), PLAIN, options={"weight": "none"}),
    Odd(WEIGHTS, "a decimal comma", "refused", "user;item;weight\na;1;1,5\nb;2;2,5\n", says="'1,5'"),
    Odd(SIZES, "one user", "refused", {"user": ["a"] * 3, "item": [1, 2, 3]}, says="only one query"),
    Odd(SIZES, "one item", "refused", users(USERS) | {"item": [1] * 4}, says="only one item"),
    Odd(SIZES, "no rows", "refused", "user,item\n", says="no rows"),
    Odd(SIZES, "an empty file", "refused", b"", says="is empty"),
    Odd(
        SIZES,
        "a pair three times",
        "merged, counted",
        {"user": ["a"] * 3 + ["b"], "item": [1] * 3 + [2]},
        TWO,
        "merged 2",
    ),
    Odd(FILES, "semicolons, tabs or bars in a .csv", "are read", "user;item\na;1\nb;2\n", TWO),
    Odd(FILES, "a byte order mark", "is skipped", b"\xef\xbb\xbfuser,item\na,1\nb,2\n", TWO),
    Odd(FILES, "Windows line ends", "are read", "user,item\r\na,1\r\nb,2\r\n", TWO),
    Odd(FILES, "blank lines", "dropped, counted", "user,item\n\na,1\n\nb,2\n", TWO, "dropped 2 rows"),
    Odd(
        FILES,
        "line feeds and separators in quotes",
        "are read",
        'user,item\n"a\nb",1\n"c,""d",2\n',
        {("a\nb", 1), ('c,"d', 2)},
    ),
    Odd(FILES, "Latin-1 ids", "refused", "user,item\nJos\u00e9,1\nb,2\n".encode("latin1"), says="not UTF-8"),
    Odd(FILES, "UTF-16", "refused", "user,item\na,1\nb,2\n".encode("utf16"), says="not UTF-8"),
    Odd(FILES, "a row with too many fields", "refused", "user,item\na,1\nb,2,3\n", says="more fields"),
    Odd(FILES, "a row with too few fields", "fields are null", "user,item\na,1\nc\nb,2\n", TWO, "dropped 1 row with"),
    Odd(FILES, "an open quote", "refused", 'user,item\n"a,1\nb,2\n', says="could not parse"),
    Odd(FILES, "no header", "refused", "1,2\n3,4\n", says="which column is the query"),
    Odd(FILES, "a column name twice", "refused", "user,user,item\na,x,1\nb,y,2\n", says="two columns"),
    Odd(
        FILES, "two columns for one role", "refused", {"user_id": USERS, "uid": USERS, "item": ITEMS}, says="could each"
    ),
    Odd(
        FILES,
        "nested columns that are not used",
        "ignored",
        plain(tags=[["x"], [], None, []], more=[{"x": 1}] * 4),
        PLAIN,
    ),
    Odd(FILES, "a damaged gzip file", "refused", damaged_gzip, says="cannot read"),
    Odd(FILES, "a .parquet file that is none", "refused", damaged_parquet, says="cannot read"),
    Odd(FILES, "a Parquet file that makes its reader panic", "refused", plain(), says="cannot read", meanwhile="panic"),
    Odd(FILES, "Parquet parts with other columns", "refused", parts({"user": ["z"]}), says="lacks the column"),
    Odd(
        FILES,
        "Parquet parts with other types",
        "ids are text",
        parts({"user": ["z"], "item": ["9"]}),
        text_pairs("1", "2", "3", "1") | {("z", "9")},
    ),
    Odd(FILES, "a file that changes while it is read", "refused", plain(), says="changed while", meanwhile="change"),
]
