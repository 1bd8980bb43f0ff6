"""The training loop: encode, contrast, step, observe; validate, checkpoint, stop early, resume."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparring.core.errors import UserError
from sparring.core.part import Part, listeners
from sparring.core.ranks import sum_gradients
from sparring.core.types import ALONE, Corpus, Positives, Ranks
from sparring.data.batches import batches_for, query_rows
from sparring.data.interactions import Split
from sparring.evaluation.ranking import evaluate
from sparring.recipes.run import Run
from sparring.training.checkpoint_manager import Keeper, State
from sparring.training.cuda_graph import Recorded
from sparring.training.optimizers import Schedule, clip_gradients, fitting_warmup, optimizers, set_lr
from sparring.training.step import contrast
from sparring.training.validation import sample_queries, selected

CHECKPOINT_SECONDS = 600.0  # how much work a kill inside a long epoch may cost
ASK_STEPS = 16  # between two questions of several ranks whether it is time
BETWEEN_SECONDS = 10.0  # and after short ones: a checkpoint can take longer than an epoch


@dataclass
class Progress:
    """Called as training goes on; every method does nothing unless replaced."""

    start: Callable[[int, int], None] = lambda epochs, steps: None
    step: Callable[[int, int, Callable[[], float]], None] = lambda epoch, step, loss: (
        None
    )  # calling loss() waits for the device
    epoch: Callable[[dict[str, Any]], None] = lambda record: None
    say: Callable[[str], None] = lambda line: None


class Trainer:
    """The moving parts of one training: tensors on the device, optimisers, generator, state."""

    def __init__(
        self,
        run: Run,
        split: Split,
        device: torch.device,
        folder: Path | None,
        progress: Progress,
        ranks: Ranks = ALONE,
        save_seconds: float | None = None,
    ):
        self.run, self.setup, self.split, self.device, self.folder, self.progress = (
            run,
            run.setup,
            split,
            device,
            folder,
            progress,
        )
        self.ranks, self.save_seconds, setup = ranks, save_seconds, run.setup
        self.modules = run.modules().to(device)
        trained = nn.ModuleDict({"model": run.model, "temperature": run.temperature})
        self.trained = list(trained.parameters())
        self.optimizers = optimizers(trained, setup.training.optimizer, setup.training.lr, setup.training.weight_decay)
        self.observers = listeners(self.modules, "observe")
        self.refreshers = listeners(self.modules, "refresh")
        self.reporters = listeners(self.modules, "report")
        self.generator = torch.Generator(device).manual_seed(setup.seed)
        train = split.train
        self.queries, self.items = (column.to(device) for column in train.pairs())
        self.weight = None if train.weight is None else torch.from_numpy(train.weight).to(device)
        self.mean_weight = 1.0 if train.weight is None else float(train.weight.mean())
        self.positives = Positives.lazy(lambda: train.positives().to(device))
        self.rows = query_rows(train, setup.batches.draw, device) if setup.batches.rows == "queries" else None
        self.batches = (
            batches_for(train, self.rows, setup.batches.batch_size, setup.seed) if run.batches is None else run.batches
        )
        total = setup.training.epochs * len(self.batches)
        self.schedule = Schedule(
            setup.training.schedule,
            fitting_warmup(setup.training.warmup, total),
            setup.training.lr_decay,
            setup.training.lr_decay_every,
            total,
        )
        self.valid = (
            None if split.valid is None else sample_queries(split.valid, setup.validation.valid_queries, setup.seed)
        )
        self.seen = split.seen_for("valid").to(device) if self.valid is not None else None
        self.keeper = Keeper(run, self.modules, self.optimizers, self.generator, folder, ranks)
        self.state = State()
        self.total = torch.zeros(
            (), device=device, dtype=torch.float64
        )  # loss over this rank's rows of the epoch so far
        self.factor: float | None = None  # on the learning rates, as set last
        self.saved = time.monotonic()
        # the gradient cache asks for the state of dropout's generator, which cannot be recorded
        recorded = device.type == "cuda" and ranks.world == 1 and setup.batches.chunk is None
        self.step: Callable[[Tensor], None] = Recorded(self.work, self.generator) if recorded else self.work

    def train(self) -> None:
        self.progress.start(self.setup.training.epochs, len(self.batches))
        if self.schedule.warmup < self.setup.training.warmup:
            steps = f"{self.schedule.total:,} steps: {self.schedule.warmup} of them warm up"
            self.progress.say(f"warmup={self.setup.training.warmup} is more than half of a training of {steps}")
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            self.set_random()
            while not self.state.done:
                self.validate(self.epoch())
                wait = BETWEEN_SECONDS if self.save_seconds is None else self.save_seconds
                if self.state.done or self.ranks.share(time.monotonic() - self.saved >= wait):
                    self.save()
                else:
                    self.write_metrics()

    def set_random(self) -> None:
        """Begin, or go on, with the random numbers that are not ours to draw: dropout inside a transformer."""
        random = self.keeper.random
        if not random:
            torch.manual_seed(self.setup.seed + self.ranks.rank)
            return
        torch.set_rng_state(random["random"])
        if "random_cuda" in random and self.device.type == "cuda":
            torch.cuda.set_rng_state(random["random_cuda"], self.device)

    def epoch(self) -> float:
        """The rest of the current epoch; its mean loss."""
        state = self.state
        began = time.monotonic()
        if state.step == 0:
            self.total.zero_()
            self.refresh()
        for rows in self.batches.epoch(state.epoch, state.step, self.device):
            self.set_rate(self.schedule.lr_at(state.epoch * len(self.batches) + state.step, state.epoch))
            self.step(rows)
            state.rows += len(rows)
            state.step += 1
            self.progress.step(state.epoch, state.step, self.mean)
            self.keeper.check()
            if self.folder is not None and self.due(time.monotonic() - max(began, self.saved)):
                self._finite()
                state.seconds += time.monotonic() - began
                began = time.monotonic()
                self.save()
        mean = self._finite() / max(state.rows, 1)
        state.seconds += time.monotonic() - began
        return mean

    def work(self, rows: Tensor) -> None:
        """One step on these rows of the training data; everything stays on the device, and nothing is read back."""
        for (
            optimizer
        ) in self.optimizers:  # before the step: a recording that failed leaves gradients that were never computed
            optimizer.zero_grad(set_to_none=True)
        pairs = rows if self.rows is None else self.rows.pairs(rows, self.generator)
        queries, items = self.queries[pairs].long(), self.items[pairs].long()
        losses, step, outcome = contrast(self.run, queries, items, self.generator, self.positives, self.ranks)
        weighed = losses if self.weight is None else losses * self.ranks.own(self.weight[pairs] / self.mean_weight)
        (weighed.sum() / len(pairs)).backward()
        sum_gradients(self.trained, self.ranks)
        if self.setup.training.clip is not None:
            clip_gradients(self.modules.parameters(), self.setup.training.clip)
        for optimizer in self.optimizers:
            optimizer.step()
        for table in self.keeper.tables.values():
            table.step(self.setup.training.lr * (1.0 if self.factor is None else self.factor))
        with torch.no_grad():
            for observer in self.observers:
                observer.observe(step, outcome)
        self.total += outcome.loss.sum()

    def mean(self) -> float:
        """The mean loss of this rank's part of the epoch so far; waits for the device."""
        return float(self.total) * self.ranks.world / max(self.state.rows, 1)

    def due(self, seconds: float) -> bool:
        """Whether it is time to save within an epoch, as rank 0 sees it; several ranks ask it now and then only."""
        due = seconds > (CHECKPOINT_SECONDS if self.save_seconds is None else self.save_seconds)
        if self.ranks.world == 1:
            return due
        asked = torch.tensor(int(due and self.ranks.rank == 0), device=self.device)
        return self.state.step % ASK_STEPS == 0 and bool(self.ranks.sum(asked))

    def set_rate(self, factor: float) -> None:
        if factor != self.factor:
            set_lr(self.optimizers, factor)
            self.factor = factor

    def _finite(self) -> float:
        """The summed loss as a number; a run that has diverged must not replace the last good checkpoint."""
        value = float(self.ranks.sum(self.total))
        if not math.isfinite(value):
            raise UserError(
                f"the loss is {value} in epoch {self.state.epoch + 1}: lower lr (now {self.setup.training.lr}) or set clip"
            )
        return value

    @torch.no_grad()
    def refresh(self) -> None:
        """Before an epoch: let every module that keeps something of the whole catalogue rebuild it."""
        if not self.refreshers:
            return
        model = self.run.model
        items = partial(model.item_vectors, ranks=self.ranks)
        corpus = Corpus(
            self.state.epoch, items, model.query_vectors, self.positives, self.generator, self.ranks, self.copied
        )
        for module in self.refreshers:
            module.refresh(corpus)
            self.ranks.equalise(module.buffers())  # sums on a GPU may end in other bits on each
        if isinstance(self.step, Recorded) and not all(
            isinstance(module, Part) and module.in_place for module in self.refreshers
        ):
            self.step.forget()  # what was rebuilt may lie elsewhere

    def copied(self, device: torch.device) -> Corpus:
        """The catalogue by a copy of the model as it is now, for work beside training."""
        model = copy.deepcopy(self.run.model).to(device)
        positives = self.positives.to(device)
        return Corpus(self.state.epoch, model.item_vectors, model.query_vectors, positives, self.generator)

    def validate(self, loss: float) -> None:
        """Close the epoch: measure on the validation part, keep the best model, decide whether to go on."""
        state, setup = self.state, self.setup
        record: dict[str, Any] = {"epoch": state.epoch + 1, "loss": loss, "seconds": round(state.seconds, 3)}
        last = state.epoch + 1 >= setup.training.epochs
        if self.valid is not None and ((state.epoch + 1) % setup.validation.eval_every == 0 or last):
            metric, cutoff = selected(setup.validation.select)
            names = tuple(dict.fromkeys((metric, "recall", "ndcg")))
            result = evaluate(self.run.model, self.valid, self.seen, (cutoff,), names, ranks=self.ranks)
            record |= result.metrics | {"valid_seconds": round(result.seconds, 3)}
            score = result.metrics[setup.validation.select]
            state.stale = 0 if score > state.best else state.stale + 1
            if score > state.best:
                state.best, state.best_epoch = score, state.epoch + 1
                self.keeper.keep(state.best_epoch)
        elif last and self.valid is None:
            state.best_epoch = state.epoch + 1
            self.keeper.keep(state.best_epoch)
        record["tau"] = round(self.tau(), 6)
        for module in self.reporters:
            record |= module.report()
        state.history.append(record)
        stopped = setup.validation.patience is not None and state.stale >= setup.validation.patience
        if stopped:
            self.progress.say(
                f"no better {setup.validation.select} for {state.stale} validations: stopping at epoch {state.epoch + 1}"
            )
        state.epoch, state.step, state.rows, state.done = state.epoch + 1, 0, 0, last or stopped
        self.progress.epoch(record)

    @torch.no_grad()
    def tau(self) -> float:
        """The temperature; where each query has its own, their mean over all queries."""
        tau: Tensor = self.run.temperature(torch.zeros(1, dtype=torch.long, device=self.device))
        if tau.dim():
            tau = self.run.temperature(torch.arange(self.split.train.n_queries, device=self.device))
        return float(tau.mean())

    def save(self) -> None:
        """The checkpoint, then the metrics as lines."""
        if self.folder is not None:
            self.saved = time.monotonic()
            self.keeper.save(self.state, self.total)

    def write_metrics(self) -> None:
        """The metrics as lines; while a checkpoint is written they wait for the next time."""
        if self.folder is not None and self.ranks.rank == 0 and not self.keeper.background.busy():
            self.keeper.write_metrics(self.state.history)

    def load(self) -> None:
        """Go on from the last checkpoint; from the beginning where the run was stopped before its first."""
        state = self.keeper.load(self.total, self.progress.say)
        if state is None:
            self.progress.say(f"{self.folder} has no checkpoint yet: starting from the beginning")
            return
        self.state = state
        self.write_metrics()  # a kill may have come between the checkpoint and its lines
        self.progress.say(f"going on from epoch {self.state.epoch + 1}, step {self.state.step}")
