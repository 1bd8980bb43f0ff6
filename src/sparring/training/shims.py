"""Callbacks of ours inside the trainers of others: Lightning's and that of Hugging Face."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from sparring.core.extras import optional
from sparring.training.loop import TrainingProgress
from sparring.training.progress import together


class _Epochs:
    """Passes the events of another trainer to our callbacks, with a record for each epoch: loss, seconds, metrics."""

    def __init__(self, callbacks: tuple[TrainingProgress, ...]) -> None:
        self.ours, self.began, self.epoch = together(callbacks), time.monotonic(), 0
        self.total, self.steps, self.last = 0.0, 0, dict[str, float]()

    def start(self, settings: Mapping[str, Any], epochs: int, steps: int) -> None:
        self.began = time.monotonic()
        self.ours.begin(settings)
        self.ours.start(epochs, steps)

    def step(self, loss: float | None) -> bool:
        """One step; whether a callback asks to save."""
        self.steps += 1
        self.total += 0.0 if loss is None else loss
        return bool(self.ours.step(self.epoch, self.steps, self.mean))

    def mean(self) -> float:
        return self.total / max(self.steps, 1)

    def end_epoch(self, metrics: Mapping[str, Any], loss: float | None = None) -> tuple[bool, bool]:
        """The end of an epoch; whether a callback asks to save, and whether one asks to stop."""
        self.epoch += 1
        self.last = {name: float(value) for name, value in metrics.items() if name not in ("loss", "epoch")}
        seconds = round(time.monotonic() - self.began, 3)
        record = {"epoch": self.epoch, "loss": self.mean() if loss is None else loss, "seconds": seconds, **self.last}
        save = bool(self.ours.epoch(record))
        self.total, self.steps = 0.0, 0
        return save, bool(self.ours.stop())


def lightning_callback(*callbacks: TrainingProgress) -> Any:
    """A callback for Lightning's Trainer that calls these: trackers, or functions of yours.

    The record of an epoch has its mean loss and the metrics that the module logged. Where `stop` says so, training
    stops; checkpoints are Lightning's own business.

        lightning.Trainer(callbacks=[lightning_callback(track("trackio"))])
    """
    base = optional("lightning.pytorch", "lightning", "a callback for Lightning").Callback
    epochs = _Epochs(callbacks)

    class SparringCallback(base):  # type: ignore[misc, valid-type]
        def on_train_start(self, trainer: Any, module: Any) -> None:
            epochs.start(dict(module.hparams), int(trainer.max_epochs or -1), int(trainer.num_training_batches))

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int) -> None:
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            epochs.step(None if loss is None else float(loss))

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            _, stop = epochs.end_epoch(trainer.callback_metrics)
            trainer.should_stop = trainer.should_stop or stop

        def on_train_end(self, trainer: Any, module: Any) -> None:
            epochs.ours.end(epochs.last)

        def on_exception(self, trainer: Any, module: Any, error: BaseException) -> None:
            epochs.ours.end(None)

    return SparringCallback()


def transformers_callback(*callbacks: TrainingProgress) -> Any:
    """A callback for the Trainer of transformers, and that of sentence-transformers, that calls these.

    The record of an epoch has the loss that was logged last, and the metrics of the evaluation that ends it, if there
    is one. Requests to save and to stop are passed on.

        SentenceTransformerTrainer(..., callbacks=[transformers_callback(track("mlflow"))])
    """
    base = optional("transformers", "text", "a callback for transformers").TrainerCallback
    epochs = _Epochs(callbacks)
    loss: float | None = None
    waits = ""  # for the evaluation or the log that ends an epoch

    def ended(control: Any, metrics: Mapping[str, Any]) -> None:
        nonlocal waits
        waits, plain = "", {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        save, stop = epochs.end_epoch(plain, loss)
        control.should_save, control.should_training_stop = (
            control.should_save or save,
            (control.should_training_stop or stop),
        )

    class SparringCallback(base):  # type: ignore[misc, valid-type]
        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            whole = max(int(args.num_train_epochs), 1)
            epochs.start(args.to_dict(), whole, max(state.max_steps // whole, 1))

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
            nonlocal loss
            loss = (logs or {}).get("loss", loss)
            if waits == "log":
                ended(control, {})

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            control.should_save = epochs.step(loss) or control.should_save

        def on_epoch_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            nonlocal waits
            waits = "evaluation" if args.eval_strategy == "epoch" else "log" if args.logging_strategy == "epoch" else ""
            if not waits:
                ended(control, {})

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **more: Any) -> None:
            if waits == "evaluation":
                ended(control, metrics or {})

        def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            epochs.ours.end(epochs.last)

    return SparringCallback()
