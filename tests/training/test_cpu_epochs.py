"""`default` trains fewer epochs on a CPU, unless epochs are set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sparring import build, fit, load, split
from sparring.core.errors import UserError
from sparring.core.manifest import write_manifest
from sparring.data import Split
from sparring.data.synthetic_world import make_world
from sparring.training.fitting import _as_recorded, _with_epochs
from sparring.training.folder import read_meta
from sparring.training.loop import TrainingProgress

SMALL = {"dim": 4, "batch_size": 64, "eval_every": 1, "tau": 0.2, "closed_form": 0}


@pytest.fixture(scope="module")
def parts() -> Split:
    return split(make_world(queries=60, items=40, seed=1).interactions, "random", valid=0.2, test=0.2, seed=0)


@pytest.mark.parametrize(
    ("given", "on_cpu", "on_gpu"),
    [({}, 16, 32), ({"epochs": None}, 16, 32), ({"epochs": 5}, 5, 5), ({"epochs": 32}, 32, 32)],
)
def test_a_device_has_its_epochs_and_epochs_that_are_set_are_kept(
    parts: Split, given: dict[str, object], on_cpu: int, on_gpu: int
) -> None:
    run = build("default", parts.train, {**SMALL, **given})
    for kind, expected in (("cpu", on_cpu), ("cuda", on_gpu)):
        assert _with_epochs(run, torch.device(kind)).setup.training.epochs == expected


def test_a_run_records_its_epochs_and_resumes_with_them_on_any_device(parts: Split, tmp_path: Path) -> None:
    """A stopped run ends as one that was not, which here chooses the epoch of a refit."""

    class Stop(Exception):
        pass

    def stop(record: dict[str, object]) -> bool:
        if record["epoch"] == 2:
            raise Stop
        return True

    whole = fit(build("default", parts.train, SMALL), parts, k=(5,), device="cpu", refit=True)
    assert whole.selection is not None
    assert len(whole.selection.history) == 16
    out = tmp_path / "run"
    with pytest.raises(Stop):
        fit(
            build("default", parts.train, SMALL),
            parts,
            out,
            k=(5,),
            device="cpu",
            save_seconds=0,
            progress=TrainingProgress(epoch=stop),
        )
    assert json.loads((out / "run.json").read_text())["setup"]["training"]["epochs"] == 16
    run = build("default", parts.train, SMALL)
    assert _as_recorded(run, read_meta(out)).setup.training.epochs == 16
    again = fit(run, parts, out, resume=True, k=(5,), device="cpu")
    assert [each["loss"] for each in again.history] == [each["loss"] for each in whole.selection.history]


def test_no_epochs_are_an_error(parts: Split) -> None:
    with pytest.raises((ValueError, UserError), match="at least 1, or none, got 0"):
        build("default", parts.train, {"epochs": 0})


def test_a_run_with_epochs_for_a_cpu_among_its_arguments_loads_and_resumes(parts: Split, tmp_path: Path) -> None:
    """Development versions of `default` had an argument cpu_epochs, which run.json recorded."""
    out = tmp_path / "run"
    fit(build("default", parts.train, SMALL), parts, out, k=(5,), device="cpu")
    meta = json.loads((out / "run.json").read_text())
    meta["arguments"]["cpu_epochs"] = 16
    (out / "manifest.json").unlink()
    (out / "run.json").write_text(json.dumps(meta))
    write_manifest(out)
    assert len(load(out).recommend([0], k=5)) == 5
    assert fit(build("default", parts.train, SMALL), parts, out, resume=True, k=(5,), device="cpu").best_epoch
