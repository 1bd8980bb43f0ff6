"""The training loop: step, observe; validate, save checkpoints, stop early, resume."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import unwrap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparring.core.errors import UserError
from sparring.core.part import Part, listeners
from sparring.core.ranks import sum_gradients
from sparring.core.sparse_rows import row_gradients
from sparring.core.types import ALONE, Corpus, Positives, Ranks
from sparring.data.interactions import Interactions, Split
from sparring.evaluation.ranking import Evaluation, evaluate
from sparring.models.retriever import Retriever
from sparring.recipes.run import Run
from sparring.training.checkpoint import CheckpointManager, State
from sparring.training.cuda_graph import CudaGraphStep
from sparring.training.eligibility import listed_items
from sparring.training.freed_memory import keep_freed
from sparring.training.light_optimizers import Adam
from sparring.training.optimizers import (
    Schedule,
    about_large_tables,
    clip_gradients,
    fitting_warmup,
    optimizers,
    set_lr,
)
from sparring.training.pairwise_step import pairwise_step
from sparring.training.step import TrainingRows, training_step

WITHIN_EPOCH = 600.0  # seconds between checkpoints within an epoch, unless save_seconds is given
AFTER_EPOCH = 10.0  # and after epochs: a checkpoint can take longer than a short epoch
ASK_STEPS = 16  # steps after which several ranks agree on whether to save

log = logging.getLogger(__name__)


@dataclass
class TrainingProgress:
    """Callbacks of a training; each does nothing unless replaced. `step` and `epoch` may return True to save now.

    `stop` is asked after each epoch whether that was the last. `fit` calls `begin` once, with all settings, and `end`
    once, with the test metrics, or None if the training failed or was interrupted. It calls `start` for each training:
    a refit and a run with classifiers have two. `stage` names one that is not the run itself: selection, classifiers.
    """

    start: Callable[[int, int], None] = lambda epochs, steps: None
    step: Callable[[int, int, Callable[[], float]], bool | None] = lambda epoch, step, loss: None  # loss() waits
    epoch: Callable[[dict[str, Any]], bool | None] = lambda record: None
    stop: Callable[[], bool] = lambda: False
    begin: Callable[[Mapping[str, Any]], None] = lambda settings: None
    stage: Callable[[str], None] = lambda name: None
    end: Callable[[Mapping[str, float] | None], None] = lambda metrics: None


class Trainer:
    """The state of one training: rows on the device, optimisers, generator, progress, checkpoints."""

    def __init__(
        self,
        run: Run,
        split: Split,
        device: torch.device,
        folder: Path | None,
        progress: TrainingProgress,
        ranks: Ranks = ALONE,
        save_seconds: float | None = None,
        epochs: int | None = None,
    ):
        self.run, self.split, self.device, self.folder = run, split, device, folder
        self.progress, self.ranks, self.save_seconds = progress, ranks, save_seconds
        self.setup, setup, training = run.setup, run.setup, run.setup.training
        self.scheduled = training.epochs_on(device.type)
        self.epochs = epochs or self.scheduled  # a refit takes the chosen ones, under the schedule of all
        self.modules = run.modules().to(device)
        trained = nn.ModuleDict({"model": run.model, "temperature": run.temperature})
        self.trained = list(trained.parameters())
        self.optimizers = optimizers(trained, training.optimizer, training.lr, training.weight_decay)
        # without the hooks of torch, which nothing registers here and whose profiling takes longer than a small update
        self.updates = [(unwrap(type(optimizer).step), optimizer) for optimizer in self.optimizers]
        self.observers = listeners(self.modules, "observe")
        self.refreshers = listeners(self.modules, "refresh")
        self.reporters = listeners(self.modules, "report")
        self.generator = torch.Generator(device).manual_seed(setup.seed)
        train = split.train
        self.weight = None if train.weight is None else torch.from_numpy(train.weight).to(device)
        self.mean_weight = 1.0 if train.weight is None else float(train.weight.mean())
        self.positives = Positives.lazy(lambda: train.positives().to(device))
        self.rows = TrainingRows(run, train, device)
        if device.type == "cpu":
            keep_freed()
        alone = device.type == "cpu" and ranks.world == 1
        self.by_rows = alone and all(isinstance(optimizer, Adam) for optimizer in self.optimizers)
        paired = alone and self.rows.kind == "pairs"
        pairs = self.rows.queries, self.rows.items
        self.direct = pairwise_step(run, pairs, self.positives, self.optimizers) if paired else None
        total = self.scheduled * len(self.rows.batches)
        warmup = fitting_warmup(training.warmup, total)
        self.schedule = Schedule(training.schedule, warmup, training.lr_decay, training.lr_decay_every, total)
        most = setup.validation.valid_queries
        self.valid = None if split.valid is None else sample_queries(split.valid, most, setup.seed)
        self.seen = split.seen_for("valid").to(device) if self.valid is not None else None
        self.listed = listed_items(run.model, train)
        self.checkpoints = CheckpointManager(run, self.modules, self.optimizers, self.generator, folder, ranks)
        self.state = State()
        self.total = torch.zeros((), device=device, dtype=torch.float64)  # this rank's summed loss of the epoch so far
        self.factor: float | None = None  # the last factor on the learning rates
        self.saved, self.save_asked = time.monotonic(), False
        # the gradient cache reads the state of the global generator, which a graph cannot capture
        captured = device.type == "cuda" and ranks.world == 1 and setup.batches.chunk is None
        self.step: Callable[..., None] = CudaGraphStep(self.work, self.generator) if captured else self.work
        self.sweeps = None if run.solver is None else run.solver.sweeps(run.model, train)

    @property
    def epoch_steps(self) -> int:
        """Steps of an epoch; a sweep is one."""
        return len(self.rows.batches) if self.sweeps is None else 1

    @property
    def best_is_last(self) -> bool:
        """Whether the best epoch on the validation part is the last that was allowed; a closed form has no others."""
        closed = self.run.solver is not None and self.run.solver.closed_form
        return self.valid is not None and not closed and self.state.best_epoch == self.scheduled

    def train(self) -> None:
        """Train until the last epoch, or until the validation metric stops improving."""
        asked, warmup, total = self.setup.training.warmup, self.schedule.warmup, f"{self.schedule.total:,}"
        if warmup < asked:
            log.info("warmup=%s exceeds half of the %s steps: %s steps warm up", asked, total, warmup)
        line = about_large_tables(self.run.model, self.setup.training.optimizer)
        if line is not None:
            log.info(line)
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            self.set_random()
            while not self.state.done:
                self.validate(self.epoch())
                wait = AFTER_EPOCH if self.save_seconds is None else self.save_seconds
                if self.state.done or self.ranks.share(self.save_asked or time.monotonic() - self.saved >= wait):
                    self.save()
                else:
                    self.write_metrics()

    def first(self, epochs: int) -> float:
        """Train the first epochs; returns the metric that chooses the epoch to keep."""
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            self.set_random()
            for _ in range(epochs):
                self.epoch()
                self.state.epoch, self.state.step, self.state.rows = self.state.epoch + 1, 0, 0
        return self.ranked().metrics[self.setup.validation.select]

    def ranked(self, model: Retriever | None = None, queries: int | None = None) -> Evaluation:
        """The validation part, or at most so many of its queries, ranked by the current model or another one."""
        assert self.valid is not None
        valid = self.valid if queries is None else sample_queries(self.valid, queries, self.setup.seed)
        metric, cutoff = selected(self.setup.validation.select)
        names = tuple(dict.fromkeys((metric, "recall", "ndcg")))
        model = self.run.model if model is None else model
        return evaluate(model, valid, self.seen, (cutoff,), names, ranks=self.ranks, among=self.listed)

    def set_random(self) -> None:
        """Seed or restore torch's global generator, which dropout inside transformers uses."""
        random = self.checkpoints.random
        if not random:
            torch.manual_seed(self.setup.seed + self.ranks.rank)
            return
        torch.set_rng_state(random["random"])
        if "random_cuda" in random and self.device.type == "cuda":
            torch.cuda.set_rng_state(random["random_cuda"], self.device)

    def epoch(self) -> float:
        """Train the rest of the current epoch; returns its mean loss."""
        if self.sweeps is not None:
            return self.sweep(self.sweeps)
        state = self.state
        began = time.monotonic()
        if state.step == 0:
            self.total.zero_()
            self.refresh()
        for step in self.rows.batches.steps(state.epoch, state.step, self.device):
            self.set_rate(self.schedule.lr_at(state.epoch * len(self.rows.batches) + state.step, state.epoch))
            self.step(*step)
            state.rows += self.rows.count(step)
            state.step += 1
            self.save_asked |= bool(self.progress.step(state.epoch, state.step, self.mean))
            self.checkpoints.check()
            if self.folder is not None and self.due(time.monotonic() - max(began, self.saved)):
                self._finite()
                state.seconds += time.monotonic() - began
                began = time.monotonic()
                self.save()
        mean = self._finite() / max(state.rows, 1)
        state.seconds += time.monotonic() - began
        return mean

    @torch.no_grad()
    def sweep(self, sweeps: Iterator[float]) -> float:
        """One sweep of the solver; returns its loss."""
        began = time.monotonic()
        loss = next(sweeps)
        self.state.seconds += time.monotonic() - began
        self.save_asked |= bool(self.progress.step(self.state.epoch, 1, lambda: loss))
        self.checkpoints.check()
        return loss

    def work(self, *step: Tensor) -> None:
        """One step, given by the tensors of `TrainingRows.batches`; nothing waits for the device."""
        if self.direct is not None:
            (pairs,) = step
            self.total += self.direct(pairs, self.generator, self.weights(pairs)).sum()
            return
        for parameter in self.trained:  # first, because a failed graph capture leaves gradients without values
            parameter.grad = None
        pairs, context = self.rows.drawn(step, self.generator)
        with row_gradients(self.by_rows):
            losses, taken, outcome = training_step(
                self.run, *self.rows.ids(pairs), self.generator, self.positives, self.ranks, context
            )
            weights = self.weights(pairs)
            weighed = losses if weights is None else losses * self.ranks.own(weights)
            weighed.backward(torch.full_like(weighed, 1 / len(pairs)))
        sum_gradients(self.trained, self.ranks)
        if self.setup.training.clip is not None:
            clip_gradients(self.modules.parameters(), self.setup.training.clip)
        with torch.no_grad():
            for update, optimizer in self.updates:
                update(optimizer)
            for table in self.checkpoints.tables.values():
                table.step(self.setup.training.lr * (1.0 if self.factor is None else self.factor))
            for observer in self.observers:
                observer.observe(taken, outcome)
        self.total += outcome.loss.sum()

    def weights(self, pairs: Tensor) -> Tensor | None:
        """The weights of these pairs, of mean 1 over all; None if they have none."""
        return None if self.weight is None else self.weight[pairs] / self.mean_weight

    def mean(self) -> float:
        """The mean loss of this rank's rows of the epoch so far; waits for the device."""
        return float(self.total) * self.ranks.world / max(self.state.rows, 1)

    def due(self, seconds: float) -> bool:
        """Whether to save within an epoch. Rank 0 decides; several ranks agree on it every ASK_STEPS steps."""
        due = self.save_asked or seconds > (WITHIN_EPOCH if self.save_seconds is None else self.save_seconds)
        if self.ranks.world == 1:
            return due
        first = torch.tensor(int(due and self.ranks.rank == 0), device=self.device)
        return self.state.step % ASK_STEPS == 0 and bool(self.ranks.sum(first))

    def set_rate(self, factor: float) -> None:
        if factor != self.factor:
            set_lr(self.optimizers, factor)
            self.factor = factor

    def _finite(self) -> float:
        """The summed loss; raises if training has diverged, before that replaces the last good checkpoint."""
        value = float(self.ranks.sum(self.total))
        if not math.isfinite(value):
            raise UserError(
                f"the loss is {value} in epoch {self.state.epoch + 1}: "
                f"lower lr (now {self.setup.training.lr}) or set clip"
            )
        return value

    @torch.no_grad()
    def refresh(self) -> None:
        """Before an epoch, let every module rebuild its state from the complete catalogue."""
        if not self.refreshers:
            return
        model = self.run.model
        items = partial(model.item_vectors, ranks=self.ranks)
        corpus = Corpus(
            self.state.epoch, items, model.query_vectors, self.positives, self.generator, self.ranks, self.copied
        )
        for module in self.refreshers:
            module.refresh(corpus)
            self.ranks.equalise(module.buffers())  # sums on several GPUs may differ in the last bits
        if isinstance(self.step, CudaGraphStep) and not all(
            isinstance(module, Part) and module.in_place for module in self.refreshers
        ):
            self.step.forget()  # rebuilt tensors may have other addresses

    def copied(self, device: torch.device) -> Corpus:
        """The catalogue under a copy of the current model, for work that runs beside training."""
        model, positives = copy.deepcopy(self.run.model).to(device), self.positives.to(device)
        return Corpus(self.state.epoch, model.item_vectors, model.query_vectors, positives, self.generator)

    def validate(self, loss: float) -> None:
        """End the epoch: evaluate on the validation part, keep the best model, decide whether to stop."""
        state, setup = self.state, self.setup
        record: dict[str, Any] = {"epoch": state.epoch + 1, "loss": loss, "seconds": round(state.seconds, 3)}
        last = state.epoch + 1 >= self.epochs
        if self.valid is not None and ((state.epoch + 1) % setup.validation.eval_every == 0 or last):
            result = self.ranked()
            record |= result.metrics | {"valid_seconds": round(result.seconds, 3)}
            score = result.metrics[setup.validation.select]
            state.stale = 0 if score > state.best else state.stale + 1
            if score > state.best:
                state.best, state.best_epoch = score, state.epoch + 1
                self.checkpoints.keep(state.best_epoch)
        elif last and self.valid is None:
            state.best_epoch = state.epoch + 1
            self.checkpoints.keep(state.best_epoch)
        record["tau"] = round(self.tau(), 6)
        for module in self.reporters:
            record |= module.report()
        state.history.append(record)
        stopped = setup.validation.patience is not None and state.stale >= setup.validation.patience
        if stopped:
            epoch = state.epoch + 1
            log.info(
                "no better %s for %s validations: stopping at epoch %s", setup.validation.select, state.stale, epoch
            )
        state.epoch, state.step, state.rows = state.epoch + 1, 0, 0
        self.save_asked |= bool(self.progress.epoch(record))
        state.done = self.ranks.share(last or stopped or self.progress.stop())

    @torch.no_grad()
    def tau(self) -> float:
        """The temperature; if it depends on the query, its mean over all queries."""
        tau: Tensor = self.run.temperature(torch.zeros(1, dtype=torch.long, device=self.device))
        if tau.dim():
            tau = self.run.temperature(torch.arange(self.split.train.n_queries, device=self.device))
        return float(tau.mean())

    def save(self) -> None:
        """Save a checkpoint, where there is a folder."""
        if self.folder is not None:
            self.saved, self.save_asked = time.monotonic(), False
            self.checkpoints.save(self.state, self.total)

    def write_metrics(self) -> None:
        """Write the metrics of all epochs, unless a checkpoint is being written, which does so too."""
        if self.folder is not None and self.ranks.rank == 0 and not self.checkpoints.writer.busy():
            self.checkpoints.write_metrics(self.state.history)

    def load(self) -> None:
        """Resume from the last checkpoint; without one, training starts from the beginning."""
        state = self.checkpoints.load(self.total)
        if state is None:
            log.info("%s has no checkpoint yet: starting from the beginning", self.folder)
            return
        self.state = state
        self.write_metrics()  # a kill may have come between the checkpoint and the metrics
        log.info("resuming from epoch %s, step %s", state.epoch + 1, state.step)


def selected(select: str) -> tuple[str, int]:
    """The metric and the cutoff that choose the best epoch: ndcg@10 -> ("ndcg", 10)."""
    metric, _, cutoff = select.partition("@")
    if not cutoff.isdigit() or int(cutoff) < 1:
        raise UserError(f"select must name a metric and a cutoff such as ndcg@10, got {select!r}")
    return metric, int(cutoff)


def sample_queries(valid: Interactions, most: int, seed: int) -> Interactions:
    """At most this many queries of the validation part, the same in every epoch."""
    present = np.unique(valid.queries)
    if len(present) <= most:
        return valid
    keep = np.zeros(valid.n_queries, dtype=bool)
    keep[np.random.default_rng(seed).choice(present, most, replace=False)] = True
    return valid.subset(keep[valid.queries])
