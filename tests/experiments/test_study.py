"""The study engine: folders grow but never change, tuned settings are shared as declared, values average to results."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from sparring.core.errors import UserError
from sparring.experiments.study import Method, Study, check_folder, known_settings, query_values

UNS, BIR = Method("UNS", "uns", {"n": 8}), Method("BIR, B/2", "bir", {"tau": 0.2})


def test_a_folder_may_grow_but_not_change(tmp_path: Path) -> None:
    """New names and mappings are added to study.json; another kind, setting or value of a known name is an error."""
    out = tmp_path / "out"
    check_folder(out, "comparison", {"trials": 2}, {"data": {"a": 1}}, {"seeds": 1})
    check_folder(out, "comparison", {"trials": 2}, {"data": {"b": 2}}, {"seeds": 5})
    stored = json.loads((out / "study.json").read_text())
    assert (stored["growing"]["data"], stored["seeds"]) == ({"a": 1, "b": 2}, 5)
    for kind, trials, data, keyword in (
        ("reproduction of xir-table2", 2, {"a": 1}, "comparison"),
        ("comparison", 3, {"a": 1}, "trials=2, not 3"),
        ("comparison", 2, {"a": 9}, "data of a"),
    ):
        with pytest.raises(UserError, match=keyword):
            check_folder(out, kind, {"trials": trials}, {"data": data}, {})
    assert json.loads((out / "study.json").read_text()) == stored
    check_folder(out, "comparison", {"trials": 2}, {"rungs": {"a": 3}}, {"seeds": 5})
    assert json.loads((out / "study.json").read_text())["growing"]["rungs"] == {"a": 3}
    with pytest.raises(UserError, match="rungs of a"):
        check_folder(out, "comparison", {"trials": 2}, {"rungs": {"a": 4}}, {"seeds": 5})


def test_other_folders_are_not_touched(tmp_path: Path) -> None:
    """A file, a corrupt study.json and a folder with other content are one-line errors."""
    (tmp_path / "file").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("")
    (tmp_path / "corrupt").mkdir()
    (tmp_path / "corrupt" / "study.json").write_text("{")
    for name, keyword in (("file", "is a file"), ("other", "not empty"), ("corrupt", "corrupt")):
        with pytest.raises(UserError, match=keyword):
            check_folder(tmp_path / name, "comparison", {}, {}, {})


def test_the_first_method_may_tune_for_all(tmp_path: Path) -> None:
    """tuning="first" gives every method the first one's best settings, except those that define the method."""
    study = Study(tmp_path, (), {"d": (UNS, BIR)}, (0,), trials=2, tuning="first")
    path = study.trials_path("d", UNS)
    path.parent.mkdir(parents=True)
    trials = [
        {"number": 0, "settings": {"lr": 0.1, "tau": 1.0}, "value": 0.3, "seconds": 1.0},
        {"number": 1, "settings": {"lr": 0.2, "tau": 2.0}, "value": 0.4, "seconds": 1.0},
        {"number": 2, "settings": {"lr": 0.9, "tau": 9.0}, "value": 0.9, "seconds": 1.0},  # beyond the budget
    ]
    path.write_text("".join(json.dumps(trial) + "\n" for trial in trials))
    assert study.tuned_methods("d") == [UNS]
    assert study.tuned_settings("d", UNS) == {"lr": 0.2, "tau": 2.0}
    assert study.tuned_settings("d", BIR) == {"lr": 0.2}
    assert study.folder("d", BIR, 3) == tmp_path / "d" / "bir-b-2" / "3"


def test_values_average_to_the_reported_metric() -> None:
    """A metric over all queries is scaled to its reported mean; others stay unchanged; unknown ones are errors."""
    frame = pl.DataFrame({"query": [1, 2], "recall@5": [0.5, 1.0], "recall_xir_release@5": [0.5, 1.0]})
    metrics = {"recall@5": 0.75, "recall_xir_release@5": 0.6}
    assert query_values(frame, metrics, "recall@5").tolist() == [0.5, 1.0]
    np.testing.assert_allclose(query_values(frame, metrics, "recall_xir_release@5").mean(), 0.6)
    with pytest.raises(UserError, match="ndcg@5"):
        query_values(frame, metrics, "ndcg@5")


def test_settings_are_known_by_flat_and_dotted_names() -> None:
    """A method takes the settings that its recipe has, under flat names."""
    assert known_settings("xir", {"model.dim": 8, "lam": 0.2, "m_c": 3}) == {"dim": 8, "lam": 0.2}
