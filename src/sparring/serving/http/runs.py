"""The registry of served runs: the store of changes, and the swap of a newer run for an older one."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sparring.core.errors import UserError
from sparring.serving.http.schema import RequestError
from sparring.serving.http.served_run import ServedRun, load_served
from sparring.serving.http.store import Change, Store
from sparring.serving.http.threads import contained
from sparring.training.trained import How

_DRAIN_SECONDS = 2.0  # after a swap, until the memory of the replaced run is released


class Peers(Protocol):
    """The other workers of a service, as a registry sees them (worker.py); a service of one process has none."""

    def published(self) -> tuple[int, int]:
        """(sequence number, generation) that every answer must have from now on."""

    def turn(self) -> AbstractContextManager[None]:
        """The right to write, which one worker has at a time. When it ends, all have applied what it wrote."""

    def reload(self, name: str, folder: Path) -> float:
        """Load a run in every worker and swap it in, or raise RequestError: seconds."""


class RunRegistry:
    """The served runs by name; the first is the default.

    A request holds one `ServedRun` until it is answered, so a swap neither drops requests nor mixes runs. Changes of
    items go to the store first, then to every run; a run that is loaded later applies them before it serves. Writes
    are serialised. `current` has the folder and the generation of each run by name, for a worker that joins others.

        registry = RunRegistry([Path("runs/first")], Store("runs/first/serve/items.sqlite"))
        registry.served().catalogue
    """

    def __init__(
        self,
        folders: Sequence[Path],
        store: Store,
        roots: Sequence[Path] = (),
        log: Callable[..., None] = lambda event, **facts: None,
        as_given: bool = False,
        *,
        recipe: str | None = None,
        trust: bool = False,
        unfinished: bool = False,
        model: str | None = None,
        novelty: float | None = None,
        ranking: How | None = None,
        peers: Peers | None = None,
        current: Mapping[str, tuple[Path, int]] | None = None,
    ) -> None:
        if not folders:
            raise UserError("give at least one run to serve")
        self.store, self.log, self.recipe, self.trust, self.unfinished = store, log, recipe, trust, unfinished
        self.model, self.novelty, self.ranking = model, novelty, ranking
        self.peers = peers
        self.problems: dict[str, str] = {}  # run -> why the watch could not reload it
        self.roots = [root.resolve() for root in roots] or [folder.resolve().parent for folder in folders]
        self._writing, self._loading = threading.Lock(), threading.Lock()
        self._runs: dict[str, ServedRun] = {}
        self._given: dict[str, Path] = {}
        self._generation = 0
        self._prepared: tuple[int, ServedRun] | None = None  # a run that waits for its generation
        for folder in folders:
            name = _unique_name(folder, self._given)
            self._given[name] = folder
            if current is None:
                self._adopt(self._load_first(name, folder, as_given))
            else:
                self._adopt(self._load(current[name][0], name), current[name][1])
        self.state = self.store.sequence, self._generation  # of all answers from now on

    def served(self, name: str | None = None) -> ServedRun:
        """The run of this name, or the default run."""
        if name is None:
            return next(iter(self._runs.values()))
        served = self._runs.get(name)
        if served is None:
            raise RequestError(404, f"unknown run {name!r}: the runs are {', '.join(self._runs)}")
        return served

    @property
    def runs(self) -> list[ServedRun]:
        return list(self._runs.values())

    def put(self, items: Sequence[Mapping[str, Any]]) -> tuple[int, dict[str, list[int | str]]]:
        """Add or change items, all or none: (sequence number, items that runs cannot place). Durable on return."""
        with self._turn(), self._writing:
            default = self.served()
            changes: dict[str, Change] = {}
            for item in items:
                change = self._merged(item, changes.get(str(item["id"])), default)
                default.catalogue.check(change.columns)
                _check_placement(default, change, changes)
                changes[str(change.id)] = change
            return self._commit(list(changes.values()))

    def delete(self, ids: Sequence[int | str]) -> tuple[int, dict[str, list[int | str]]]:
        """Delete items, all or none; an item that no run ever knew is an error. Durable on return."""
        with self._turn(), self._writing:
            for item in ids:
                if all(served.catalogue.find_one(item) < 0 and str(item) not in served.waiting for served in self.runs):
                    raise RequestError(404, f"unknown item {item!r}")
            return self._commit([Change(item, deleted=True) for item in dict.fromkeys(ids)])

    def reload(self, run: str | None = None, name: str | None = None) -> tuple[ServedRun, float]:
        """Load a run (by default the current one, again), validate it and swap it in: (the new run, seconds).

        If anything is wrong with it, the current run stays. The swap survives a restart of the service.
        """
        current = self.served(name)
        slot, folder = current.name, current.folder if run is None else self._allowed(run)
        del current  # must not keep the replaced run in memory
        if self.peers is not None:
            seconds = self.peers.reload(slot, folder)
            return self.served(slot), seconds
        if not self._loading.acquire(blocking=False):
            raise RequestError(409, "another run is being loaded; try again when it is done")
        began = time.perf_counter()
        try:
            new = contained(self._load, folder, slot)
            self._adopt(new)
        except Exception as error:  # whatever is wrong with the new run, the current one keeps serving
            why = " ".join(str(error).split()) or type(error).__name__
            self.log("reload failed", run=slot, folder=str(folder), why=why)
            raise RequestError(422, f"could not load {folder}; still serving the previous run: {why}") from error
        finally:
            self._loading.release()
        with self._writing:
            remember_swap(self.store, self._given[slot], new.folder)
        _release_memory_soon()
        seconds = time.perf_counter() - began
        self.log("reloaded", run=slot, folder=str(folder), generation=new.generation, seconds=round(seconds, 3))
        return new, seconds

    def prepare(self, generation: int, name: str, folder: Path) -> ServedRun:
        """Load a run that `catch_up` swaps in when this generation is published."""
        new = contained(self._load, folder, name)
        self._apply_all(new)
        with self._writing:
            self._prepared = generation, new
        return new

    def drop_prepared(self) -> None:
        with self._writing:
            self._prepared = None

    @property
    def behind(self) -> bool:
        """Whether other workers have published changes or a run that this one has yet to take over."""
        if self.peers is None:
            return False
        sequence, generation = self.peers.published()
        return sequence > self.state[0] or generation != self.state[1]

    def catch_up(self, sequence: int = 0) -> None:
        """Take over the published run, and the changes that were published or come up to `sequence`."""
        assert self.peers is not None
        with self._writing:
            published, generation = self.peers.published()
            self.store.sequence = sequence = max(sequence, published, self.state[0])
            prepared = None if self._prepared is None else self._prepared[1]
            for served in (*self.runs, *([] if prepared is None else [prepared])):
                if served.sequence < sequence:
                    served.apply(self.store.since(served.sequence), sequence)
            if generation != self._generation:
                if self._prepared is None or self._prepared[0] != generation:  # it was leaving, and was not asked
                    raise RequestError(503, "this worker is stopping; try again")
                new, self._prepared, self._generation = self._prepared[1], None, generation
                self._swap_in(new, generation)
                _release_memory_soon()
            self.state = sequence, generation

    def close(self) -> None:
        with self._writing:
            self.store.close()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        if self.peers is None:
            yield
            return
        with self.peers.turn():
            self.catch_up(self.store.last())  # a change that a dead process committed may not be published
            yield

    def _load_first(self, name: str, folder: Path, as_given: bool) -> ServedRun:
        """The run to start with: the one that replaced `folder` in an earlier swap, if it can still be loaded."""
        swapped = None if as_given else self.store.read_state(f"swapped {folder.resolve()}")
        if swapped and Path(swapped) != folder.resolve():
            try:
                self.log("swapped earlier", run=name, given=str(folder), folder=swapped)
                return contained(self._load, Path(swapped), name)
            except Exception as error:
                self.log("swapped run lost", run=name, folder=swapped, why=" ".join(str(error).split()))
        return self._load(folder, name)

    def _load(self, folder: Path, name: str) -> ServedRun:
        options = self.recipe, self.trust, self.unfinished, self.model, self.novelty, self.ranking
        return load_served(folder, name, *options)

    def _apply_all(self, new: ServedRun) -> None:
        sequence = self.store.sequence  # first: a change that arrives meanwhile is applied twice, not lost
        new.apply(self.store.since(0), sequence)

    def _adopt(self, new: ServedRun, generation: int | None = None) -> None:
        self._apply_all(new)
        with self._writing:
            if new.sequence < self.store.sequence:  # changes that arrived meanwhile
                new.apply(self.store.since(new.sequence), self.store.sequence)
            generation = self._generation + 1 if generation is None else generation
            self._generation = max(self._generation, generation)
            self._swap_in(new, generation)

    def _swap_in(self, new: ServedRun, generation: int) -> None:
        new.generation = generation
        self._runs[new.name] = new
        if new.waiting:
            why = "unknown to this run: no training data, no known items they are like, and a vector of another model"
            self.log(
                "items wait", run=new.name, items=len(new.waiting), first=next(iter(new.waiting.values())), why=why
            )

    def _allowed(self, run: str) -> Path:
        try:
            folder = Path(run).resolve(strict=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise RequestError(422, f"no such run folder: {run[:200]!r}") from error
        if not any(folder.is_relative_to(root) for root in self.roots):
            how = "start the service with --root FOLDER to allow it"
            raise RequestError(403, f"{run[:200]!r} is outside the folders that runs may be loaded from: {how}")
        return folder

    def _merged(self, item: Mapping[str, Any], pending: Change | None, default: ServedRun) -> Change:
        """An item's earlier changes, updated by the new ones."""
        old = pending or self.store.get(item["id"]) or Change(item["id"])
        columns = {key: value for key, value in item.items() if key not in ("id", "text", "vector", "like")}
        if item.get("text") is not None and "text" in default.catalogue.schema:
            columns["text"] = item["text"]
        columns = {**({} if old.deleted else old.columns), **columns}
        text, like, numbers = item.get("text"), item.get("like"), item.get("vector")
        if not old.deleted and text is None and like is None and numbers is None:
            return Change(item["id"], columns, old.text, old.like, old.vector, old.model)
        vector = None if numbers is None else np.asarray(numbers)  # the newest placement replaces all earlier ones
        if vector is not None and not bool((np.abs(vector) < 1e30).all()):
            raise RequestError(422, f"the vector of item {item['id']!r} has values that are not finite or too large")
        vector = None if vector is None else vector.astype(np.float32)
        return Change(item["id"], columns, text, like, vector, default.placer.model)

    def _commit(self, changes: list[Change]) -> tuple[int, dict[str, list[int | str]]]:
        sequence = self.store.write(changes)
        for served in self.runs:
            served.apply(changes, sequence)
        self.state = sequence, self.state[1]
        keys = {str(change.id) for change in changes}
        waiting = {served.name: [served.waiting[key] for key in served.waiting.keys() & keys] for served in self.runs}
        return sequence, {name: items for name, items in waiting.items() if items}


def _check_placement(served: ServedRun, change: Change, pending: Mapping[str, Change]) -> None:
    """Raise RequestError if the run cannot place the item; `pending` are earlier items of the same request."""
    item, placer = change.id, served.placer
    if not placer.ways:
        served.place(change)
        return
    if change.vector is not None and change.model == placer.model and len(change.vector) != placer.dim:
        message = f"the vector of item {item!r} has {len(change.vector)} numbers; run {served.name} needs {placer.dim}"
        raise RequestError(422, message)
    only_text = change.text is not None and change.like is None and change.vector is None
    if only_text and not {"text", "features"} & set(placer.ways) and served.catalogue.find_one(item) < 0:
        how = f"give item {item!r} a vector or items that it is like"
        raise RequestError(422, f"the item tower of run {served.name} does not read texts: {how}")
    if change.like is not None and str(item) in map(str, change.like):
        raise RequestError(422, f"item {item!r} cannot be like itself")
    for other in change.like or ():
        if served.catalogue.find_one(other) < 0 and str(other) not in pending:
            raise RequestError(422, f"item {item!r} cannot be like {other!r}: there is no such item")
    if not any(str(other) in pending for other in change.like or ()):
        served.place(change)


def remember_swap(store: Store, given: Path, folder: Path) -> None:
    """Let the next service that is started with `given` begin with `folder`."""
    store.write_state(f"swapped {given.resolve()}", str(folder.resolve()))


def _release_memory_soon() -> None:
    trim = threading.Timer(_DRAIN_SECONDS, _release_memory)
    trim.daemon = True
    trim.start()


def _release_memory() -> None:
    """Return the memory of a replaced run to the system; the C library would keep much of it."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _unique_name(folder: Path, taken: Mapping[str, Path]) -> str:
    """The name of the folder, with a number if it is taken."""
    name = folder.resolve().name
    number = 2
    while name in taken:
        name, number = f"{folder.resolve().name}-{number}", number + 1
    return name
