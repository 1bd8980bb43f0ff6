"""Checkpoints of a training, and the best model so far: written while training runs, read on resume.

    checkpoint.safetensors, checkpoint.previous.safetensors    modules, optimisers, generators and state
    checkpoint.EPOCH.STEP.tables/, best.EPOCH.tables/          with tables=sharded: one part per rank (shards.py)

Until training is done, the previous checkpoint is kept as a fallback for a damaged one. Any number of ranks can read
sharded tables. A checkpoint file names the folder that belongs to it and is written after it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparring.core import files
from sparring.core.errors import UserError, one_line
from sparring.core.manifest import read_manifest
from sparring.core.ranks import Group, local_world
from sparring.core.types import Ranks
from sparring.models.retriever import Retriever
from sparring.models.rowwise_tables import RowWiseTable
from sparring.models.towers import IdTower
from sparring.recipes.run import Run
from sparring.training.checkpoint_writer import BackgroundWriter, Copies, Place, place_for
from sparring.training.optimizers import load_state_tensors, state_tensors
from sparring.training.row_optimizers import RowAdagrad
from sparring.training.shards import Rows, check_tables, read_tables, write_model, write_tables

log = logging.getLogger(__name__)

NAME, PREVIOUS = "checkpoint.safetensors", "checkpoint.previous.safetensors"
ADDED = "closed_form.", "trend."  # names of the tensors of what is added after training
_ADVICE = "train again, or restore it from a copy"


@dataclass
class State:
    """The progress of a training, apart from its tensors; part of every checkpoint."""

    epoch: int = 0
    step: int = 0  # within the epoch
    rows: int = 0  # of the epoch so far
    best: float = -math.inf
    best_epoch: int = -1
    stale: int = 0  # validations since the best
    seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)
    tables: str = ""  # the folder of sharded tables that goes with the checkpoint
    done: bool = False


class CheckpointManager:
    """Saves and restores the state of one training in its folder; without a folder, keeps the best model in memory.

    Everything is copied at once and written by a thread while training continues: the best model, the checkpoint that
    refers to it, then the metrics. Only one write runs at a time: the next one waits for it, and so does leaving the
    `with` block. The next `check` raises its error. If memory has no room for copies (checkpoint_writer.SHARE),
    training waits for the write.

    With tables=sharded every rank writes its rows of the tables to folders, in one process too, so that training can
    resume with any number of ranks. All other state is equal on every rank, and rank 0 writes it.
    """

    def __init__(
        self,
        run: Run,
        modules: nn.Module,
        optimizers: list[Optimizer],
        generator: torch.Generator,
        folder: Path | None,
        ranks: Ranks,
    ):
        self.model, self.modules, self.optimizers, self.generator, self.folder, self.ranks = (
            run.model, modules, optimizers, generator, folder, ranks
        )  # fmt: skip
        self.sharded = run.setup.model.tables == "sharded"
        self.tables = {name: module for name, module in run.model.named_modules() if isinstance(module, RowWiseTable)}
        self.whole = {name: m for name, m in run.model.named_modules() if self.sharded and isinstance(m, IdTower)}
        if self.sharded and folder is not None and isinstance(ranks, Group):
            _ = ranks.aside  # created here: all ranks must do so together, and threads are not in step
        self.best: dict[str, Tensor] | None = None  # the best model, without a folder
        self.unwritten: tuple[int, dict[str, Tensor]] | None = None  # the best epoch and its model
        self.random: dict[str, Tensor] = {}  # states of the global generators at the checkpoint
        self.writer = BackgroundWriter()
        self.copies = Copies(), Copies()  # of the best model and of the state

    @cached_property
    def owner(self) -> str:
        """The id of the run, which its files repeat; rank 0 writes it, and others may not see the folder yet."""
        return run_id(self.folder) if self.folder is not None and self.ranks.rank == 0 else ""

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.writer.join()
        if kind is None:
            self.writer.check()

    def check(self) -> None:
        """Raise the error of the last write, if it failed."""
        self.writer.check()

    def keep(self, epoch: int) -> None:
        """Copy the current model as the best so far; the next checkpoint writes it."""
        if self.folder is None:
            self.best = {name: tensor.detach().clone() for name, tensor in self._model().items()}
        elif self.sharded or self.ranks.rank == 0:
            self.writer.wait()  # it may still be writing the previous best
            place = self._place()
            self.unwritten = epoch, self.copies[0].take(self._model(), place)
            if place == "nowhere":
                self._write_best()

    def load_best(self, epoch: int) -> None:
        """Restore the best model; sharded tables are also written as one model.safetensors."""
        if self.folder is None:
            for name, tensor in self._model().items():
                if self.best is not None:
                    tensor.copy_(self.best[name])
            return
        path = self.folder / "model.safetensors"
        if self.sharded:
            read_tables(self.folder / best_tables(epoch), self._spread(self._model()), self.ranks)
            tables = {f"{name}.weight": table for name, table in self.tables.items()}
            write_model(path, files.tensors_of(self.model), tables, {"epoch": epoch, "run": self.owner}, self.ranks)
            return
        if self.ranks.rank == 0:
            tensors = own_tensors(path, self.owner)[0]
            own = {name: tensor for name, tensor in tensors.items() if not name.startswith(ADDED)}
            files.load_tensors(self.model, own, path)
        self.ranks.equalise(files.tensors_of(self.model).values())

    def write_model(self, model: Retriever, epoch: int) -> None:
        """Write the best model with what is added to it: a closed form and a trend."""
        assert self.folder is not None
        path, about = self.folder / "model.safetensors", {"epoch": epoch, "run": self.owner}
        files.write_tensors(path, files.tensors_of(model), about)

    def save(self, state: State, total: Tensor) -> None:
        """Save a checkpoint: modules, optimisers, generators and state in one file; tables in a folder.

        `total` and the states of the global generators differ between ranks: row r belongs to rank r.
        """
        assert self.folder is not None
        local = {"loss": total, "random": torch.get_rng_state()}
        if total.is_cuda:
            local["random_cuda"] = torch.cuda.get_rng_state(total.device)
        with torch.no_grad():
            rows = {
                name: self.ranks.gather(tensor[None].to(total.device), self.ranks.world)
                for name, tensor in local.items()
            }
        self.writer.wait()
        tensors: dict[str, Tensor] = {}
        if self.sharded:
            state.tables = f"checkpoint.{state.epoch}.{state.step}.tables"
            tensors = self._model() | self._sums()
        tables = set(tensors)
        if self.ranks.rank == 0:
            tensors |= {f"module.{name}": tensor for name, tensor in self._state_of_modules().items()}
            tensors |= {f"optimizer.{name}": tensor for name, tensor in state_tensors(self._plain_optimizers()).items()}
            tensors |= {"generator": self.generator.get_state(), **rows}
        place = self._place()
        copies = self.copies[1].take(tensors, place)
        fields = {**dataclasses.asdict(state), "run": self.owner}

        def write() -> None:
            assert self.folder is not None
            self._write_best()
            if self.sharded:
                parts = self._spread({name: copies[name] for name in tables})
                write_tables(self.folder / fields["tables"], parts, self.ranks)
            if self.ranks.rank == 0:
                write_checkpoint(
                    self.folder, {name: copy for name, copy in copies.items() if name not in tables}, fields
                )
                self.write_metrics(fields["history"])
            for copied in self.copies:
                copied.drop()

        if place == "nowhere":
            write()
        elif copies:
            self.writer.start(partial(_on_a_stream, write, total.device))

    def write_metrics(self, history: list[dict[str, Any]]) -> None:
        """Write metrics.jsonl, one line per epoch."""
        assert self.folder is not None
        lines = "".join(json.dumps(record) + "\n" for record in history)
        files.write_text(self.folder / "metrics.jsonl", lines)

    def _write_best(self) -> None:
        if self.unwritten is None:
            return
        assert self.folder is not None
        (epoch, tensors), self.unwritten = self.unwritten, None
        if self.sharded:
            write_tables(self.folder / best_tables(epoch), self._spread(tensors), self.ranks)
        else:
            files.write_tensors(self.folder / "model.safetensors", tensors, {"epoch": epoch, "run": self.owner})

    def _place(self) -> Place:
        """The device on which copies of the model and of all state fit."""
        tensors = [
            *self._model().values(),
            *files.tensors_of(self.modules).values(),
            *state_tensors(self.optimizers).values(),
        ]
        needed = sum(tensor.nbytes for tensor in tensors) + sum(
            t.weight.nbytes + t.sums.nbytes for t in self.tables.values()
        )
        return place_for(tensors[0].device, needed, local_world() if self.sharded else 1)

    def load(self, total: Tensor) -> State | None:
        """Restore the last undamaged checkpoint, written by any number of ranks; None if there is none."""
        assert self.folder is not None
        path = find_checkpoint(self.folder, self.ranks)
        if path is None:
            return None
        tensors, fields = own_tensors(path, run_id(self.folder))
        del fields["run"]
        modules = {name.removeprefix("module."): t for name, t in tensors.items() if name.startswith("module.")}
        saved = {name.removeprefix("optimizer."): t for name, t in tensors.items() if name.startswith("optimizer.")}
        tables = {f"model.{name}.weight": module.weight for name, module in self.whole.items()}
        files.load_tensors(self.modules, modules | tables, path)
        with one_line(f"{path} does not fit this run", ValueError, KeyError, TypeError, RuntimeError, IndexError):
            load_state_tensors(self._plain_optimizers(), saved)
            self.generator.set_state(tensors["generator"])
            rank, same = self.ranks.rank, len(tensors["loss"]) == self.ranks.world
            # with another number of ranks, random streams restart and rank 0 takes over the loss of all
            total.copy_(tensors["loss"][rank] if same else tensors["loss"].sum() * (rank == 0))
            # copies: torch.set_rng_state crashes on a row inside a larger tensor
            self.random = (
                {name: tensors[name][rank].clone() for name in ("random", "random_cuda") if name in tensors}
                if same
                else {}
            )
            state = State(**fields)
            for name, default in vars(State()).items():
                value, kind = getattr(state, name), (int, float) if isinstance(default, float) else type(default)
                if not isinstance(value, kind):
                    raise TypeError(f"its {name} is {value!r:.80}")
        if self.sharded:
            place = files.inside(self.folder, state.tables)
            read_tables(place, self._spread(self._model() | self._sums()), self.ranks)
        return state

    def _model(self) -> dict[str, Tensor]:
        """The tensors of the model; of sharded tables this rank's rows."""
        rows = {f"{name}.weight": table.weight for name, table in self.tables.items()}
        return {name: tensor.detach() for name, tensor in files.tensors_of(self.model).items()} | rows

    def _sums(self) -> dict[str, Tensor]:
        """The accumulators of row-wise Adagrad for sharded tables; in one process RowAdagrad has them."""
        sums = {f"{name}.sum": table.sums for name, table in self.tables.items()}
        for name, module in self.whole.items():
            state = next(o for o in self.optimizers if isinstance(o, RowAdagrad)).state[module.weight]
            if not state:
                state["sum"] = torch.zeros_like(module.weight[:, 0])
            sums[f"{name}.sum"] = state["sum"]
        return sums

    def _spread(self, tensors: dict[str, Tensor]) -> dict[str, Tensor | Rows]:
        """The tensors; those of sharded tables as this rank's rows."""
        tables = {f"{name}.{what}": table for name, table in self.tables.items() for what in ("weight", "sum")}
        return {
            name: Rows(tensor, tables[name].bounds[self.ranks.rank], tables[name].n) if name in tables else tensor
            for name, tensor in tensors.items()
        }

    def _state_of_modules(self) -> dict[str, Tensor]:
        tables = {f"model.{name}.weight" for name in self.whole}
        return {name: tensor for name, tensor in files.tensors_of(self.modules).items() if name not in tables}

    def _plain_optimizers(self) -> list[Optimizer]:
        return [o for o in self.optimizers if not (self.sharded and isinstance(o, RowAdagrad))]


def _on_a_stream(work: Callable[[], None], device: torch.device) -> None:
    """Run `work` on a CUDA stream of its own, so that reading the copies does not delay training."""
    with torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext():
        work()


# Files


def run_id(folder: Path) -> str:
    """The id of the run in a folder."""
    return str(files.read_json(read_manifest(folder, _ADVICE).path("run.json"))["id"])


def own_tensors(path: Path, run: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """`files.map_tensors` of a file that belongs to the run of this id."""
    tensors, state = files.map_tensors(path)
    check_owner(path, state, run)
    return tensors, state


def check_owner(path: Path, state: Mapping[str, Any], run: str) -> None:
    """Raise if a file with this JSON value was written by another run."""
    if state.get("run") != run:
        raise UserError(f"{path} belongs to another run; {_ADVICE}")


def write_checkpoint(folder: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Write a checkpoint; until training is done, keep the previous one."""
    path, previous = folder / NAME, folder / PREVIOUS
    if path.is_file():
        with suppress(OSError):  # a file system without hard links has no previous one
            files.link(path, previous)
    files.write_tensors(path, tensors, state)
    if state["done"]:
        previous.unlink(missing_ok=True)
    if state["tables"]:
        _forget(folder, "checkpoint.*.tables", {_tables_of(file) for file in (path, previous) if file.is_file()})
        _forget(folder, "best.*.tables", {best_tables(state["best_epoch"])})


def find_checkpoint(folder: Path, ranks: Ranks) -> Path | None:
    """The newest undamaged checkpoint as rank 0 sees it, or None; a damaged one is replaced by the previous one."""
    newest: Path | UserError | None = None
    if ranks.rank == 0:
        try:
            newest = _newest(folder)
        except UserError as error:
            newest = error
    newest = ranks.share(newest)
    if isinstance(newest, UserError):
        raise newest
    return newest


def _newest(folder: Path) -> Path | None:
    path, previous = folder / NAME, folder / PREVIOUS
    if not path.is_file():
        return previous if previous.is_file() else None
    try:
        state = _check_complete(path)
        if state.get("done"):
            previous.unlink(missing_ok=True)  # a kill may have come before this
    except UserError as error:
        if not previous.is_file():
            raise
        state = _check_complete(previous)
        os.replace(previous, path)  # so that the damaged file does not become the next previous one
        log.warning("%s; falling back to the previous checkpoint", str(error).split(";")[0])
    if state["best_epoch"] >= 0 and not state["tables"]:
        own_tensors(folder / "model.safetensors", state["run"])  # else the end of training would find it damaged
    return path


def _check_complete(path: Path) -> dict[str, Any]:
    """The state in a checkpoint; raises if its file or its tables are damaged."""
    state = own_tensors(path, run_id(path.parent))[1]
    tables = state.get("tables")
    if tables:
        check_tables(files.inside(path.parent, tables))
    return state


def _tables_of(path: Path) -> str:
    with suppress(UserError):
        return str(files.read_state(path).get("tables"))
    return ""


def _forget(folder: Path, pattern: str, kept: set[str]) -> None:
    for old in folder.glob(pattern):
        if old.name not in kept:
            shutil.rmtree(old, ignore_errors=True)


def clear_tables(folder: Path) -> None:
    """Delete the sharded tables of an earlier run."""
    _forget(folder, "*.tables", set())


def best_tables(epoch: int) -> str:
    """The folder with the sharded tables of the best epoch."""
    return f"best.{epoch}.tables"
