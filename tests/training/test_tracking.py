"""Callbacks: one list of them sees a training from begin to end; trackers with their real clients, offline."""

from __future__ import annotations

import json
import logging
import sqlite3
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sparring.core.errors import UserError
from sparring.data.interactions import Split
from sparring.recipes.settings import build
from sparring.serving.checking import check
from sparring.training import lightning_callback, track, transformers_callback
from sparring.training.fitting import Fitted, fit
from sparring.training.loop import TrainingProgress
from support.settings import quick

QUICK = quick(epochs=3, patience=None)
Event = tuple[str, Any]


def listening(events: list[Event]) -> TrainingProgress:
    """Callbacks that note every event but the steps."""
    return TrainingProgress(
        begin=lambda settings: events.append(("begin", settings)),
        stage=lambda name: events.append(("stage", name)),
        start=lambda epochs, steps: events.append(("start", epochs)),
        epoch=lambda record: events.append(("epoch", dict(record))),
        end=lambda metrics: events.append(("end", metrics)),
    )


def train(parts: Split, out: Path | None = None, **more: Any) -> Fitted:
    run = build("tables", parts.train, QUICK)
    return fit(run, parts, out, k=(5,), metrics=("recall", "ndcg"), device="cpu", **more)


def test_every_callback_sees_the_training(parts: Split) -> None:
    """All callbacks of the list see all events in order, and the results do not depend on them."""
    first, second, shown = list[Event](), list[Event](), list[Event]()
    fitted = train(parts, callbacks=[listening(first), listening(second)], progress=listening(shown))
    assert first == second == shown
    assert [name for name, _ in first] == ["begin", "start", *["epoch"] * 3, "end"]
    assert {"recipe": "tables", "dim": 8, "epochs": 3, "items": 40}.items() <= dict(first[0][1]).items()
    assert [record for name, record in first if name == "epoch"] == fitted.history
    assert fitted.test is not None
    assert first[-1][1] == fitted.test.metrics == train(parts).test.metrics  # type: ignore[union-attr]


def test_a_refit_begins_and_ends_once(parts: Split) -> None:
    """The training that chooses the epoch is a stage of its own; begin and end frame both."""
    events: list[Event] = []
    fitted = train(parts, callbacks=[listening(events)], refit=True)
    told = [(name, value) for name, value in events if name in ("stage", "start")]
    assert told == [("stage", "selection"), ("start", 3), ("stage", ""), ("start", fitted.best_epoch)]
    assert [name for name, _ in events if name in ("begin", "end")] == ["begin", "end"]


def test_any_callback_stops_and_a_failure_ends_all(parts: Split) -> None:
    """Training stops where one callback says so; after an exception each callback gets end(None), then it is raised."""
    events: list[Event] = []
    stopping = TrainingProgress(stop=lambda: True)
    assert len(train(parts, callbacks=[listening(events), stopping, listening([])]).history) == 1

    def fail(record: Mapping[str, Any]) -> None:
        raise RuntimeError("the disk is gone")

    events.clear()
    with pytest.raises(RuntimeError, match="disk"):
        train(parts, callbacks=[listening(events), TrainingProgress(epoch=fail)])
    assert events[-1] == ("end", None)


# Trackers, with their clients


def expected(fitted: Fitted) -> dict[str, list[float]]:
    """The curves that a tracker must hold."""
    names = [name for name in fitted.history[0] if "@" in name or name in ("loss", "tau")]
    return {name.replace("@", "_at_"): [record[name] for record in fitted.history] for name in names}


def test_tensorboard_has_the_curves(parts: Split, tmp_path: Path) -> None:
    """The event files hold every metric of every epoch, the settings, and the test metrics."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: its event files were not read")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    fitted = train(parts, tmp_path / "run", callbacks=[track("tensorboard", tmp_path / "run")])
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    for name, values in expected(fitted).items():
        found = events.Scalars(name)
        assert [each.step for each in found] == [1, 2, 3]
        assert [each.value for each in found] == pytest.approx(values, rel=1e-6)
    assert fitted.test is not None
    assert events.Scalars("test/recall_at_5")[0].value == pytest.approx(fitted.test.metrics["recall@5"])
    assert "settings/text_summary" in events.Tags()["tensors"]
    assert not check(tmp_path / "run").problems  # the manifest has the event files as they are


def test_mlflow_has_the_curves(parts: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of MLflow holds parameters, every epoch and the end; a failed training is marked as failed."""
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: its store was not read")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    fitted = train(parts, tmp_path / "first", callbacks=[track("mlflow", tmp_path / "first", project="mine")])
    with pytest.raises(KeyboardInterrupt):
        train(parts, callbacks=[track("mlflow", run="second", project="mine"), TrainingProgress(epoch=interrupt)])
    client = mlflow.MlflowClient()
    found = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    runs = {run.info.run_name: run for run in found}
    assert {name: run.info.status for name, run in runs.items()} == {"first": "FINISHED", "second": "FAILED"}
    assert runs["first"].data.params["dim"] == "8"
    for name, values in expected(fitted).items():
        history = sorted(client.get_metric_history(runs["first"].info.run_id, name), key=lambda each: each.step)
        assert [(each.step, each.value) for each in history] == list(enumerate(values, 1))
    assert fitted.test is not None
    assert runs["first"].data.metrics["test/ndcg_at_5"] == fitted.test.metrics["ndcg@5"]


def interrupt(record: Mapping[str, Any]) -> None:
    raise KeyboardInterrupt


def leveldb_records(path: Path) -> Iterator[bytes]:
    """The records of a .wandb file: after 7 bytes, blocks of 32 KiB of pieces with checksum, length and kind."""
    data, place, record = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            yield record
            record = b""


def test_wandb_has_the_curves(parts: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The offline file of Weights & Biases holds the settings, every epoch and the test metrics."""
    pytest.importorskip("wandb", reason="wandb is not installed: its offline file was not read")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    fitted = train(parts, tmp_path / "run", callbacks=[track("wandb", tmp_path / "run")])
    rows, config = list[dict[str, float]](), dict[str, Any]()
    for data in leveldb_records(next(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in items})
        for update in record.run.config.update:
            config[update.key] = json.loads(update.value_json)
    for name, values in expected(fitted).items():
        assert [row[name] for row in rows if name in row] == pytest.approx(values)
    assert config["recipe"] == "tables"
    assert fitted.test is not None
    assert fitted.test.metrics["recall@5"] in [row.get("test/recall_at_5") for row in rows]


def test_trackio_has_the_curves(parts: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The local database of trackio holds every epoch."""
    pytest.importorskip("trackio", reason="trackio is not installed: its database was not read")
    from trackio import sqlite_storage, utils

    for module in (utils, sqlite_storage):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio", raising=False)
    fitted = train(parts, tmp_path / "run", callbacks=[track("trackio", tmp_path / "run", project="mine")])
    database = next((tmp_path / "trackio").rglob("mine*.db"))
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select step, metrics from metrics order by step, id").fetchall()
    logged = [(step, json.loads(metrics)) for step, metrics in rows]
    for name, values in expected(fitted).items():
        assert [(step, row[name]) for step, row in logged if name in row] == list(enumerate(values, 1))


def test_a_tracker_that_fails_does_not_cost_the_training(
    parts: Split, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A client that raises while training is left out with one warning; one that cannot open a run is refused."""
    from sparring.training import tracking

    def broken(values: Mapping[str, float], step: int) -> None:
        raise ConnectionError("no route to the tracker")

    opened = tracking.Tracked(broken, lambda done: None)
    monkeypatch.setitem(tracking._OPENERS, "wandb", lambda *_: lambda settings: opened)
    with caplog.at_level(logging.WARNING, "sparring"):
        assert len(train(parts, callbacks=[track("wandb")]).history) == 3
    assert sum("no route" in record.getMessage() for record in caplog.records) == 1

    def closed(settings: Mapping[str, Any]) -> tracking.Tracked:
        raise ConnectionError("no route to the tracker")

    monkeypatch.setitem(tracking._OPENERS, "wandb", lambda *_: closed)
    with pytest.raises(UserError, match="cannot open a run of wandb: no route"):
        train(parts, callbacks=[track("wandb")])
    with pytest.raises(UserError, match="'wandb'"):
        track("wandbb")


# Trainers of others


class Line(nn.Module):
    """A linear model with a loss, for the Trainer of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.layer(x)[:, 0]
        return {"loss": (y - labels).square().mean(), "logits": y}


@pytest.mark.parametrize("evaluates", [False, True])
def test_the_trainer_of_transformers_calls_ours(tmp_path: Path, evaluates: bool) -> None:
    """Our callbacks see begin, epochs with loss and metrics, and the end; `stop` ends the training."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed: its Trainer was not started")
    events: list[Event] = []
    heard = listening(events)
    heard.stop = lambda: sum(name == "epoch" for name, _ in events) == 2
    rows = [{"x": torch.tensor([float(i), 1.0]), "labels": torch.tensor(float(i))} for i in range(8)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        num_train_epochs=5,
        per_device_train_batch_size=4,
        eval_strategy="epoch" if evaluates else "no",
        logging_strategy="epoch",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    callback = transformers_callback(heard)
    transformers.Trainer(Line(), arguments, train_dataset=rows, eval_dataset=rows, callbacks=[callback]).train()
    assert [name for name, _ in events] == ["begin", "start", "epoch", "epoch", "end"]
    assert events[1] == ("start", 5)
    records = [record for name, record in events if name == "epoch"]
    assert [record["epoch"] for record in records] == [1, 2]
    assert all(("eval_loss" in record) == evaluates for record in records)
    assert all(record["loss"] > 0 for record in records)


def test_lightning_calls_ours(tmp_path: Path) -> None:
    """Our callbacks see hyperparameters, mean losses and logged metrics of each epoch, and the end; `stop` stops."""
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed: its Trainer did not run")
    losses: list[float] = []

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, width: int) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = nn.Linear(width, 1)

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            loss = self.layer(batch).square().mean()
            losses.append(float(loss.detach()))
            self.log("size", float(len(batch)))
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    events: list[Event] = []
    heard = listening(events)
    heard.stop = lambda: sum(name == "epoch" for name, _ in events) == 2
    trainer = lightning.Trainer(
        max_epochs=5,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[lightning_callback(heard)],
    )
    trainer.fit(Module(2), torch.utils.data.DataLoader(torch.randn(8, 2), batch_size=4))
    assert [name for name, _ in events] == ["begin", "start", "epoch", "epoch", "end"]
    assert events[0][1] == {"width": 2}
    records = [record for name, record in events if name == "epoch"]
    assert [record["loss"] for record in records] == pytest.approx([sum(losses[:2]) / 2, sum(losses[2:4]) / 2])
    assert all(record["size"] == 4.0 for record in records)
