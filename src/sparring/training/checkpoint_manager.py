"""What a training puts by as it goes, and takes up again: the best model so far, and checkpoints."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparring.core import files
from sparring.core.errors import UserError, first_line
from sparring.core.ranks import Group, local_world
from sparring.core.types import Ranks
from sparring.models.rowwise_tables import RowWiseTable
from sparring.models.towers import IdTower
from sparring.recipes.run import Run
from sparring.training import checkpoint
from sparring.training.checkpoint_writer import Background, Copies, Place, place
from sparring.training.optimizers import load_state_tensors, state_tensors
from sparring.training.row_optimizers import RowAdagrad


@dataclass
class State:
    """Where training stands, apart from tensors: all of it is in the checkpoint."""

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


class Keeper:
    """The model, all state and the generators of one training: to a folder, which rank 0 writes, or in memory.

    What goes to the folder is copied at once and written by a thread while training goes on: the best model, the checkpoint that knows of
    it, then the metrics. One such writing at a time: the next waits for it, and so does leaving `with keeper`. An error in it is raised by
    the next `check`. Where memory has no room for copies (background.SHARE) training waits instead.

    With tables=sharded the tables go to folders of their own, where every rank writes its rows; in one process too, so that a training
    can go on with any number of ranks. All other state is the same on every rank.
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
            _ = ranks.aside  # made here: a thread could not tell when the others make theirs
        self.best: dict[str, Tensor] | None = None  # where there is no folder
        self.kept: tuple[int, dict[str, Tensor]] | None = (
            None  # the best epoch and its model, until the next checkpoint writes it
        )
        self.random: dict[str, Tensor] = {}  # states of the global generators at the checkpoint
        self.background = Background()
        self.copies = Copies(), Copies()  # of the best model and of the state

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.background.join()
        if kind is None:
            self.background.check()

    def check(self) -> None:
        """Raise what went wrong with the last writing, once it has."""
        self.background.check()

    def keep(self, epoch: int) -> None:
        """Remember the model as it is now as the best so far; the next checkpoint writes it."""
        if self.folder is None:
            self.best = {name: tensor.detach().clone() for name, tensor in self._model().items()}
        elif self.sharded or self.ranks.rank == 0:
            self.background.wait()  # it may be writing the one before
            place = self._place()
            self.kept = epoch, self._spread(self.copies[0].take(self._model(), place))
            if place == "nowhere":
                self._write_best()

    def load_best(self, epoch: int) -> None:
        """Go back to the best model; with sharded tables it becomes one file here, for whoever serves it."""
        if self.folder is None:
            for name, tensor in self._model().items():
                if self.best is not None:
                    tensor.copy_(self.best[name])
            return
        path = self.folder / "model.safetensors"
        if self.sharded:
            checkpoint.read_tables(self.folder, checkpoint.best_tables(epoch), self._spread(self._model()), self.ranks)
            tables = {f"{name}.weight": table for name, table in self.tables.items()}
            checkpoint.write_model(path, files.tensors_of(self.model), tables, {"epoch": epoch}, self.ranks)
            return
        if self.ranks.rank == 0:
            files.load_tensors(self.model, files.map_tensors(path)[0], path)
        self.ranks.equalise(files.tensors_of(self.model).values())

    def save(self, state: State, total: Tensor) -> None:
        """The checkpoint: modules, optimisers, generators and state in one file, sharded tables in a folder that it names.

        `total` is each rank's own, and so are the states of the global generators: row r is that of rank r.
        """
        assert self.folder is not None
        own = {"loss": total, "random": torch.get_rng_state()}
        if total.is_cuda:
            own["random_cuda"] = torch.cuda.get_rng_state(total.device)
        with torch.no_grad():
            rows = {
                name: self.ranks.gather(tensor[None].to(total.device), self.ranks.world) for name, tensor in own.items()
            }
        self.background.wait()
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
        fields = dataclasses.asdict(state)

        def write() -> None:
            assert self.folder is not None
            self._write_best()
            if self.sharded:
                parts = self._spread({name: copies[name] for name in tables})
                checkpoint.write_tables(self.folder, fields["tables"], parts, self.ranks)
            if self.ranks.rank == 0:
                checkpoint.write(
                    self.folder, {name: copy for name, copy in copies.items() if name not in tables}, fields
                )
                self.write_metrics(fields["history"])
            for kept in self.copies:
                kept.drop()

        if place == "nowhere":
            write()
        elif copies:
            self.background.start(partial(_on_a_stream, write, total.device))

    def write_metrics(self, history: list[dict[str, Any]]) -> None:
        """One line for each epoch."""
        assert self.folder is not None
        lines = "".join(json.dumps(record) + "\n" for record in history)
        files.write(self.folder / "metrics.jsonl", lambda file: file.write_text(lines))

    def _write_best(self) -> None:
        if self.kept is None:
            return
        assert self.folder is not None
        (epoch, tensors), self.kept = self.kept, None
        if self.sharded:
            checkpoint.write_tables(self.folder, checkpoint.best_tables(epoch), tensors, self.ranks)
        else:
            files.write_tensors(self.folder / "model.safetensors", tensors, {"epoch": epoch})

    def _place(self) -> Place:
        """Where there is room for copies of the model and of all state."""
        tensors = [
            *self._model().values(),
            *files.tensors_of(self.modules).values(),
            *state_tensors(self.optimizers).values(),
        ]
        needed = sum(tensor.nbytes for tensor in tensors) + sum(
            t.weight.nbytes + t.sums.nbytes for t in self.tables.values()
        )
        return place(tensors[0].device, needed, local_world() if self.sharded else 1)

    def load(self, total: Tensor, say: Callable[[str], None]) -> State | None:
        """Take up the last checkpoint that is whole, written by any number of ranks; None where there is none."""
        assert self.folder is not None
        found = checkpoint.find(self.folder, self.ranks)
        if found is None:
            return None
        path, warning = found
        if warning:
            say(warning)
        tensors, fields = files.map_tensors(path)
        modules = {name.removeprefix("module."): t for name, t in tensors.items() if name.startswith("module.")}
        saved = {name.removeprefix("optimizer."): t for name, t in tensors.items() if name.startswith("optimizer.")}
        own = {f"model.{name}.weight": module.weight for name, module in self.whole.items()}
        files.load_tensors(self.modules, modules | own, path)
        try:
            load_state_tensors(self._plain_optimizers(), saved)
            self.generator.set_state(tensors["generator"])
            rank, same = self.ranks.rank, len(tensors["loss"]) == self.ranks.world
            # another number of ranks begins new streams, and its rank 0 takes over the loss of all
            total.copy_(tensors["loss"][rank] if same else tensors["loss"].sum() * (rank == 0))
            # copies: torch.set_rng_state crashes on a row inside a larger tensor
            self.random = (
                {name: tensors[name][rank].clone() for name in ("random", "random_cuda") if name in tensors}
                if same
                else {}
            )
            state = State(**fields)
        except (ValueError, KeyError, TypeError, RuntimeError, IndexError) as error:
            raise UserError(f"{path} does not fit this run: {first_line(error)}") from error
        if self.sharded:
            checkpoint.read_tables(self.folder, state.tables, self._spread(self._model() | self._sums()), self.ranks)
        return state

    def _model(self) -> dict[str, Tensor]:
        """The tensors of the model; of sharded tables the rows that lie here."""
        rows = {f"{name}.weight": table.weight for name, table in self.tables.items()}
        return {name: tensor.detach() for name, tensor in files.tensors_of(self.model).items()} | rows

    def _sums(self) -> dict[str, Tensor]:
        """What row-wise Adagrad keeps of sharded tables; in one process RowAdagrad does."""
        found = {f"{name}.sum": table.sums for name, table in self.tables.items()}
        for name, module in self.whole.items():
            state = next(o for o in self.optimizers if isinstance(o, RowAdagrad)).state[module.weight]
            if not state:
                state["sum"] = torch.zeros_like(module.weight[:, 0])
            found[f"{name}.sum"] = state["sum"]
        return found

    def _spread(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same, rows of sharded tables as parts of the whole: as a checkpoint knows them."""
        tables = {f"{name}.{what}": table for name, table in self.tables.items() for what in ("weight", "sum")}
        return {
            name: checkpoint.rows_of(tables[name], tensor) if name in tables else tensor
            for name, tensor in tensors.items()
        }

    def _state_of_modules(self) -> dict[str, Tensor]:
        tables = {f"model.{name}.weight" for name in self.whole}
        return {name: tensor for name, tensor in files.tensors_of(self.modules).items() if name not in tables}

    def _plain_optimizers(self) -> list[Optimizer]:
        return [o for o in self.optimizers if not (self.sharded and isinstance(o, RowAdagrad))]


def _on_a_stream(work: Callable[[], None], device: torch.device) -> None:
    """A GPU reads the copies on a stream of its own, beside training."""
    with torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext():
        work()
