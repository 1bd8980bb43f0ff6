"""One table in four formats: formatted and escaped for people, with full precision for programs."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path

import pytest

from sparring.core.errors import UserError
from sparring.experiments.report.tables import Column, Table, escaped, shown

ROWS = [
    {"recipe": "ssl_pop", "mean": 0.123456789012345, "std": 0.001, "p": 0.03},
    {"recipe": "a|b & 5%", "mean": 0.2, "std": None, "p": None},
]
TABLE = Table(
    (
        Column("recipe", "{recipe}", text=True),
        Column("mean ± std", "{mean:.4f}[[ ± {std:.4f}]]"),
        Column("p", "{p:.2g}"),
    ),
    ROWS,
    "Tests_1",
)


def test_cells_leave_out_missing_fields() -> None:
    """A part in [[ ]] is left out with its field; a cell without its field is empty; inner brackets stay."""
    assert TABLE.cells() == [
        ["recipe", "mean ± std", "p"],
        ["ssl_pop", "0.1235 ± 0.0010", "0.03"],
        ["a|b & 5%", "0.2000", ""],
    ]
    assert shown("{x}[[ [{y}, {z}]]]", {"x": 1, "y": 2, "z": 3}) == "1 [2, 3]"
    assert shown("{x}[[ [{y}, {z}]]]", {"x": 1, "y": 2, "z": None}) == "1"
    assert shown("{x}", {}) == ""


def test_markdown() -> None:
    """Markdown has a heading, a rule that aligns numbers right, lines of equal width, and escaped pipes."""
    lines = TABLE.markdown().splitlines()
    assert lines[0] == "Tests_1"
    assert [cell.strip() for cell in lines[2].strip("|").split("|")] == ["recipe", "mean ± std", "p"]
    rules = [cell.strip() for cell in lines[3].strip("|").split("|")]
    assert [rule.endswith(":") for rule in rules] == [False, True, True]
    assert "a\\|b & 5%" in lines[5]
    assert len({len(line) for line in lines[2:]}) == 1
    assert lines[3].count("|") == 4


def test_csv_and_json_have_full_precision() -> None:
    """CSV and JSON read back to the same rows: all fields, all digits, None as empty."""
    back = list(csv.DictReader(io.StringIO(TABLE.csv())))
    assert float(back[0]["mean"]) == ROWS[0]["mean"]
    assert (back[1]["std"], back[1]["recipe"]) == ("", "a|b & 5%")
    whole = json.loads(TABLE.json())
    assert whole["rows"] == ROWS
    assert whole["caption"] == "Tests_1"
    strange = json.loads(Table((), [{"x": math.nan, "y": math.inf, "z": 1.5}]).json())
    assert strange["rows"] == [{"x": None, "y": None, "z": 1.5}]


def test_latex() -> None:
    """Every LaTeX row has the declared number of columns and no unescaped special character."""
    text = TABLE.latex()
    assert r"\begin{tabular}{lrr}" in text
    body = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert len(body) == 3
    assert all(line.replace(r"\&", "").count("&") == 2 for line in body)
    assert r"ssl\_pop & 0.1235 $\pm$ 0.0010 & 0.03 \\" in text
    assert r"a$|$b \& 5\%" in text
    assert r"\caption{Tests\_1}" in text
    assert escaped("a\\b~c^d{e}#$") == r"a\textbackslash{}b\textasciitilde{}c\textasciicircum{}d\{e\}\#\$"


def test_write_makes_four_files(tmp_path: Path) -> None:
    """Four complete files in a new folder; a file in place of the folder is a one-line error."""
    paths = TABLE.write(tmp_path / "new", "quality")
    assert [path.name for path in paths] == ["quality.md", "quality.csv", "quality.tex", "quality.json"]
    assert [path.read_text(encoding="utf-8") for path in paths] == [
        TABLE.markdown(),
        TABLE.csv(),
        TABLE.latex(),
        TABLE.json(),
    ]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(path.name for path in paths)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*quality\.md"):
        TABLE.write(tmp_path / "file", "quality")


def test_an_empty_table() -> None:
    """A table without rows has a heading alone."""
    empty = Table((Column("a", "{a}"),), [])
    assert empty.cells() == [["a"]]
    assert json.loads(empty.json())["rows"] == []
