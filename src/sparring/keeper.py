"""What a training puts by as it goes, and takes up again: the best model so far, and checkpoints."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparring import checkpoint, runs
from sparring.composition import Run
from sparring.errors import UserError
from sparring.optim import load_state_tensors, state_tensors
from sparring.rows import RowAdagrad
from sparring.rowwise import RowWiseTable
from sparring.towers import IdTower
from sparring.types import Ranks


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

    With tables=sharded the tables go to folders of their own, where every rank writes its rows; in one process too, so that a training
    can go on with any number of ranks. All other state is the same on every rank.
    """

    def __init__(
        self, run: Run, modules: nn.Module, optimizers: list[Optimizer], generator: torch.Generator, folder: Path | None, ranks: Ranks
    ):
        self.model, self.modules, self.optimizers, self.generator, self.folder, self.ranks = (
            run.model, modules, optimizers, generator, folder, ranks
        )  # fmt: skip
        self.sharded = run.setup.tables == "sharded"
        self.tables = {name: module for name, module in run.model.named_modules() if isinstance(module, RowWiseTable)}
        self.whole = {name: m for name, m in run.model.named_modules() if self.sharded and isinstance(m, IdTower)}
        self.best: dict[str, Tensor] | None = None  # where there is no folder
        self.random: dict[str, Tensor] = {}  # states of the global generators at the checkpoint

    def keep(self, epoch: int) -> None:
        """Remember the model as it is now as the best so far."""
        if self.folder is None:
            self.best = {name: tensor.detach().clone() for name, tensor in self._model(here=True).items()}
        elif self.sharded:
            checkpoint.keep_best(self.folder, epoch, self._model(), self.ranks)
        elif self.ranks.rank == 0:
            runs.write_tensors(self.folder / "model.safetensors", runs.tensors_of(self.model), {"epoch": epoch})

    def load_best(self, epoch: int) -> None:
        """Go back to the best model; with sharded tables it becomes one file here, for whoever serves it."""
        if self.folder is None:
            for name, tensor in self._model(here=True).items():
                if self.best is not None:
                    tensor.copy_(self.best[name])
            return
        path = self.folder / "model.safetensors"
        if self.sharded:
            checkpoint.read_tables(self.folder, f"best.{epoch}.tables", self._model(), self.ranks)
            tables = {f"{name}.weight": table for name, table in self.tables.items()}
            checkpoint.write_model(path, runs.tensors_of(self.model), tables, {"epoch": epoch}, self.ranks)
            return
        if self.ranks.rank == 0:
            runs.load_tensors(self.model, runs.map_tensors(path)[0], path)
        self.ranks.equalise(runs.tensors_of(self.model).values())

    def save(self, state: State, total: Tensor) -> None:
        """The checkpoint: modules, optimisers, generators and state in one file, sharded tables in a folder that it names.

        `total` is each rank's own, and so are the states of the global generators: row r is that of rank r.
        """
        assert self.folder is not None
        own = {"loss": total, "random": torch.get_rng_state()}
        if total.is_cuda:
            own["random_cuda"] = torch.cuda.get_rng_state(total.device)
        with torch.no_grad():
            rows = {name: self.ranks.gather(tensor[None].to(total.device), self.ranks.world) for name, tensor in own.items()}
        if self.sharded:
            state.tables = f"checkpoint.{state.epoch}.{state.step}.tables"
            checkpoint.write_tables(self.folder, state.tables, self._model() | self._sums(), self.ranks)
        if self.ranks.rank:
            return
        tensors = {f"module.{name}": tensor for name, tensor in self._state_of_modules().items()}
        tensors |= {f"optimizer.{name}": tensor for name, tensor in state_tensors(self._plain_optimizers()).items()}
        tensors |= {"generator": self.generator.get_state(), **rows}
        checkpoint.write(self.folder, tensors, dataclasses.asdict(state))

    def load(self, total: Tensor, say: Callable[[str], None]) -> State | None:
        """Take up the last checkpoint that is whole, written by any number of ranks; None where there is none."""
        assert self.folder is not None
        found = checkpoint.find(self.folder, self.ranks)
        if found is None:
            return None
        path, warning = found
        if warning:
            say(warning)
        tensors, fields = runs.map_tensors(path)
        modules = {name.removeprefix("module."): t for name, t in tensors.items() if name.startswith("module.")}
        saved = {name.removeprefix("optimizer."): t for name, t in tensors.items() if name.startswith("optimizer.")}
        own = {f"model.{name}.weight": module.weight for name, module in self.whole.items()}
        runs.load_tensors(self.modules, modules | own, path)
        try:
            load_state_tensors(self._plain_optimizers(), saved)
            self.generator.set_state(tensors["generator"])
            rank, same = self.ranks.rank, len(tensors["loss"]) == self.ranks.world
            # another number of ranks begins new streams, and its rank 0 takes over the loss of all
            total.copy_(tensors["loss"][rank] if same else tensors["loss"].sum() * (rank == 0))
            # copies: torch.set_rng_state crashes on a row inside a larger tensor
            self.random = {name: tensors[name][rank].clone() for name in ("random", "random_cuda") if name in tensors} if same else {}
            state = State(**fields)
        except (ValueError, KeyError, TypeError, RuntimeError, IndexError) as error:
            raise UserError(f"{path} does not fit this run: {str(error).splitlines()[0]}") from error
        if self.sharded:
            checkpoint.read_tables(self.folder, state.tables, self._model() | self._sums(), self.ranks)
        return state

    def _model(self, here: bool = False) -> dict[str, Tensor]:
        """The tensors of the model; of sharded tables as a checkpoint knows them, or the rows that lie here."""
        tables = {name: (table, table.weight) for name, table in self.tables.items()}
        rows = {f"{name}.weight": own if here else checkpoint.rows_of(table, own) for name, (table, own) in tables.items()}
        return {name: tensor.detach() for name, tensor in runs.tensors_of(self.model).items()} | rows

    def _sums(self) -> dict[str, Tensor]:
        """What row-wise Adagrad keeps of sharded tables; in one process RowAdagrad does."""
        found = {f"{name}.sum": checkpoint.rows_of(table, table.sums) for name, table in self.tables.items()}
        for name, module in self.whole.items():
            state = next(o for o in self.optimizers if isinstance(o, RowAdagrad)).state[module.weight]
            if not state:
                state["sum"] = torch.zeros_like(module.weight[:, 0])
            found[f"{name}.sum"] = state["sum"]
        return found

    def _state_of_modules(self) -> dict[str, Tensor]:
        tables = {f"model.{name}.weight" for name in self.whole}
        return {name: tensor for name, tensor in runs.tensors_of(self.modules).items() if name not in tables}

    def _plain_optimizers(self) -> list[Optimizer]:
        return [o for o in self.optimizers if not (self.sharded and isinstance(o, RowAdagrad))]
