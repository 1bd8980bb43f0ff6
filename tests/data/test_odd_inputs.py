"""Every odd input gives what a person expects and a line that says so, or one line of refusal, with both readers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from sparring.core.errors import UserError
from sparring.data import read, split
from sparring.data import table as tables
from sparring.data.interactions import Interactions, Split
from sparring.data.prepared.preparation import prepare
from support.odd_inputs import ODD, Odd

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "odd_inputs.md"


def read_in_memory(path: Path, folder: Path, odd: Odd) -> tuple[Interactions, Split]:
    data = read(path, **odd.arguments(folder))
    return data, split(data, odd.how)


def read_prepared(path: Path, folder: Path, odd: Odd) -> tuple[Interactions, Split]:
    data = prepare(path, folder / "prepared", how=odd.how, **odd.arguments(folder))
    return data, split(data)


@pytest.mark.parametrize("reader", [read_in_memory, read_prepared])
@pytest.mark.parametrize("odd", ODD, ids=lambda odd: f"{odd.group}: {odd.name}")
def test_odd_input(odd: Odd, reader: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pairs, times and parts are the expected ones and a note has the keyword; or the refusal is one such line."""
    path = odd.write(tmp_path)
    if odd.meanwhile:
        _disturb(odd, path, monkeypatch)
    if odd.pairs is None:
        with pytest.raises(UserError) as caught:
            reader(path, tmp_path, odd)
        line = str(caught.value)
        assert odd.says in line
        assert len(line.splitlines()) == 1
        return
    data, parts = reader(path, tmp_path, odd)
    pairs = list(
        zip(data.query_ids.decode(data.queries).tolist(), data.item_ids.decode(data.items).tolist(), strict=True)
    )
    assert len(pairs) == len(set(pairs))
    assert set(pairs) == odd.pairs
    assert any(odd.says in note for note in data.notes) if odd.says else data.notes == ()
    if odd.sizes is not None:
        assert tuple(0 if part is None else len(part) for part in (parts.train, parts.valid, parts.test)) == odd.sizes
    if odd.times is not None:
        assert data.time is not None
        assert odd.times.items() <= dict(zip(pairs, data.time.tolist(), strict=True)).items()


def _disturb(odd: Odd, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the file grow after it was opened, or polars panic while it is read."""
    clean = tables.clean

    def disturbed(*arguments: Any) -> Any:
        if odd.meanwhile == "panic":
            raise pl.exceptions.PanicException("index out of range")
        pl.concat([pl.read_parquet(path)] * 2).write_parquet(path)
        return clean(*arguments)

    monkeypatch.setattr(tables, "clean", disturbed)


def test_the_guide_has_the_same_list() -> None:
    """The tables of the guide are those of the tests, row for row."""
    rows = [line for line in GUIDE.read_text().splitlines() if line.startswith("| ")]
    shown = [row for row in rows if not row.startswith("| input |")]
    assert shown == [f"| {odd.name} | {odd.outcome} |" for odd in ODD]
    assert len(ODD) >= 60
