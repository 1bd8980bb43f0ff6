"""sparring bench: all forms compute the same function, and figures, tables and JSON agree."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from sparring.cli import main
from sparring.experiments import bench


def test_all_forms_of_a_method_are_the_same_function() -> None:
    """All forms give the same values, so their times are comparable; drawn forms agree on average."""
    q, emb, log_w, ids = bench.problem(60, 16, torch.float32, torch.device("cpu"))
    ids = ids % 20  # some are repeated
    exact = torch.stack(
        [
            torch.logsumexp((q[i].double() @ emb.double().T + log_w)[ids != ids[i]], 0) for i in range(60)
        ]  # one query at a time
    )
    found: dict[str, list[torch.Tensor]] = {}
    for method, _, form in bench.forms(torch.device("cpu"), compiled=False):
        found.setdefault(method, []).append(form(q, emb, log_w, ids))
    assert len(found[bench.PLAIN]) == 2
    for value in found[bench.PLAIN]:
        assert torch.allclose(value.double(), exact, atol=1e-4)
    first, second = found[bench.EXPECTED]
    assert torch.allclose(first, second, atol=1e-4)
    assert not torch.allclose(first.double(), exact, atol=0.1)
    assert float((found[bench.DRAWN][0] - first).detach().abs().mean()) < 0.3


def test_rows_hold_times_and_the_floor() -> None:
    """Every form and size has a time and its ratio to the three products; forms that do not fit have no time."""
    rows = list(bench.measure(torch.device("cpu"), [16, 32], 8, "float32", rounds=1))
    assert {row.size for row in rows} == {16, 32}
    for row in rows:
        assert row.ms is not None
        assert row.ms > 0
        assert row.ratio == row.ms / row.floor_ms
        assert row.mib is None
    tight = list(bench.measure(torch.device("cpu"), [64], 8, "float32", rounds=1, most_gib=1e-6))
    assert [row.ms is None for row in tight] == [row.form == "eager" for row in tight]
    assert any("does not fit" in line for line in bench.cells(tight)[-1])


def test_command_writes_json_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints a table and writes bench.json and a figure; --json prints the content of the file."""
    words = ["bench", "--device", "cpu", "--sizes", "16,32", "--dim", "8", "--rounds", "1"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "three products" in shown
    about = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert about["dim"] == 8
    assert {row["size"] for row in about["rows"]} == {16, 32}
    assert (tmp_path / "out" / "bench.png").stat().st_size > 1000
    assert "three products" in (tmp_path / "out" / "bench.svg").read_text()
    assert main([*words, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert all(math.isfinite(row["ms"]) for row in printed["rows"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--sizes", "many"], "'many'"),
        (["--sizes", "8,0"], "'0'"),
        (["--precision", "int8"], "'int8' is not one of"),
        (["--dim", "0"], "not a whole number of at least 1"),
        (["--device", "cpu", "--precision", "bf16", "--sizes", "8"], "precision bf16 is for a GPU"),
    ],
)
def test_bad_input_is_one_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and one line that names the bad value."""
    assert main(["bench", *words]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
