"""What is served now: one or more runs, the store of changes, and how a newer run takes the place of an older one."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from sparring.core.errors import UserError
from sparring.serving.http.limits import Refused
from sparring.serving.http.served_run import Served, load_served, signature
from sparring.serving.http.store import Change, Store

_REST = 2.0  # seconds
Say = Callable[..., None]  # say(event, **facts): a line of the log


def _quiet(event: str, **facts: object) -> None:
    return None


class Live:
    """The runs that answer now, by name; the first is the default.

    A request takes one `Served` and keeps it to its end, so that a swap drops nothing and mixes nothing. Changes are written to the store
    first, then applied to every run; a run that is loaded later takes them over before it answers. One change at a time.

        live = Live([Path("runs/first")], Store("runs/first/serve/items.sqlite"));  live.served().catalogue
    """

    def __init__(
        self,
        folders: Sequence[Path],
        store: Store,
        roots: Sequence[Path] = (),
        say: Say = _quiet,
        as_given: bool = False,
    ) -> None:
        if not folders:
            raise UserError("give at least one run to serve")
        self.store, self.say = store, say
        self.roots = [root.resolve() for root in roots] or [folder.resolve().parent for folder in folders]
        self._writing, self._loading = threading.Lock(), threading.Lock()
        self._runs: dict[str, Served] = {}
        self._given: dict[str, Path] = {}
        self._generation = 0
        for folder in folders:
            name = _name(folder, self._given)
            self._given[name] = folder
            self._adopt(self._first(name, folder, as_given))

    def served(self, name: str | None = None) -> Served:
        """One of the runs, the default one where no name is given."""
        if name is None:
            return next(iter(self._runs.values()))
        found = self._runs.get(name)
        if found is None:
            raise Refused(404, f"no run {name!r} is served: there are {', '.join(self._runs)}")
        return found

    @property
    def runs(self) -> list[Served]:
        return list(self._runs.values())

    def put(self, items: Sequence[Mapping[str, Any]]) -> tuple[int, dict[str, list[int | str]]]:
        """Add or change items: (number of the change, items that a run cannot place). Durable when it returns; all or none."""
        with self._writing:
            default = self.served()
            changes: dict[str, Change] = {}
            for item in items:
                change = self._merged(item, changes.get(str(item["id"])), default)
                default.catalogue.check(change.columns)
                self._check_place(default, change, changes)
                changes[str(change.id)] = change
            return self._commit(list(changes.values()))

    def delete(self, ids: Sequence[int | str]) -> tuple[int, dict[str, list[int | str]]]:
        """Delete items; one that no run ever knew is refused, and nothing is deleted. Durable when it returns."""
        with self._writing:
            for item in ids:
                if all(served.catalogue.find_one(item) < 0 and str(item) not in served.waiting for served in self.runs):
                    raise Refused(404, f"there is no item {item!r}")
            return self._commit([Change(item, deleted=True) for item in dict.fromkeys(ids)])

    def reload(self, run: str | None = None, name: str | None = None) -> tuple[Served, float]:
        """Load a run (that of now, again, by default), check it and put it in the place of one that is served; (the new one, seconds).

        Whatever is wrong with it, the one of now stays. The swap is remembered: started again, the service comes back with it.
        """
        before = self.served(name)
        slot, folder = before.name, before.folder if run is None else self._allowed(run)
        del before  # nothing here may keep the run of before in memory
        if not self._loading.acquire(blocking=False):
            raise Refused(409, "another run is being loaded: try again when it is done")
        began = time.perf_counter()
        try:
            new = load_served(folder, slot)
            self._adopt(new)
        except (UserError, OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError, MemoryError) as error:
            line = " ".join(str(error).split()) or type(error).__name__
            self.say("reload refused", run=slot, folder=str(folder), why=line)
            raise Refused(422, f"{folder} was not loaded, and the run of before goes on: {line}") from error
        finally:
            self._loading.release()
        self._remember(new)
        later = threading.Timer(
            _REST, _give_back
        )  # when the last requests that the run of before had taken are answered
        later.daemon = True
        later.start()
        seconds = time.perf_counter() - began
        self.say("reloaded", run=new.name, folder=str(folder), generation=new.generation, seconds=round(seconds, 3))
        return new, seconds

    def changed_on_disk(self) -> list[str]:
        """Names of runs whose folder was written since they were loaded."""
        return [served.name for served in self.runs if signature(served.folder) != served.sign]

    def close(self) -> None:
        with self._writing:
            self.store.close()

    def _first(self, name: str, folder: Path, as_given: bool) -> Served:
        """The run that is served at the start: the one that it was swapped for, where that can still be loaded."""
        swapped = None if as_given else self.store.read_state(f"swapped {folder.resolve()}")
        if swapped and Path(swapped) != folder.resolve():
            try:
                self.say("swapped before", run=name, given=str(folder), folder=swapped)
                return load_served(Path(swapped), name)
            except (UserError, OSError) as error:
                self.say("swapped run lost", run=name, folder=swapped, why=str(error))
        return load_served(folder, name)

    def _adopt(self, new: Served) -> None:
        new.apply(self.store.since(0), self.store.sequence)
        with self._writing:  # what was written while it was prepared
            if new.sequence < self.store.sequence:
                new.apply(self.store.since(new.sequence), self.store.sequence)
            self._generation += 1
            new.generation = self._generation
            self._runs[new.name] = new
        if new.waiting:
            why = (
                "this run knows neither them nor what they are like, and a vector of another model means nothing in it"
            )
            self.say(
                "items wait", run=new.name, items=len(new.waiting), first=next(iter(new.waiting.values())), why=why
            )

    def _remember(self, new: Served) -> None:
        given = self._given[new.name].resolve()
        with self._writing:
            self.store.write_state(f"swapped {given}", str(new.folder.resolve()))

    def _allowed(self, run: str) -> Path:
        try:
            folder = Path(run).resolve(strict=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise Refused(422, f"no such run folder: {run[:200]!r}") from error
        if not any(folder.is_relative_to(root) for root in self.roots):
            raise Refused(
                403,
                f"{run[:200]!r} does not lie under a folder that runs may be loaded from: start the service with --root FOLDER",
            )
        return folder

    def _merged(self, item: Mapping[str, Any], first: Change | None, default: Served) -> Change:
        """What is now known of an item: what was said before, and what is said now on top."""
        old = first or self.store.get(item["id"]) or Change(item["id"])
        columns = {key: value for key, value in item.items() if key not in ("id", "text", "vector", "like")}
        if item.get("text") is not None and "text" in default.catalogue.schema:
            columns["text"] = item["text"]
        before = {} if old.deleted else old.columns
        told = {key: item.get(key) for key in ("text", "vector", "like")}
        if old.deleted or any(value is not None for value in told.values()):  # the newest way of placing it counts
            vector = None if told["vector"] is None else np.asarray(told["vector"])
            if vector is not None and not bool((np.abs(vector) < 1e30).all()):
                raise Refused(422, f"the vector of item {item['id']!r} holds values that are not finite, or too large")
            vector = None if vector is None else vector.astype(np.float32)
            return Change(item["id"], {**before, **columns}, told["text"], told["like"], vector, default.placing.model)
        return Change(item["id"], {**before, **columns}, old.text, old.like, old.vector, old.model)

    def _check_place(self, default: Served, change: Change, before: Mapping[str, Change]) -> None:
        if (
            change.vector is not None
            and change.model == default.placing.model
            and len(change.vector) != default.placing.dim
        ):
            raise Refused(
                422,
                f"the vector of item {change.id!r} has {len(change.vector)} numbers; those of {default.name} have {default.placing.dim}",
            )
        if (
            change.text is not None
            and change.like is None
            and change.vector is None
            and "text" not in default.placing.ways
        ):
            known = default.catalogue.find_one(change.id) >= 0
            if not known and "features" not in default.placing.ways:
                raise Refused(
                    422,
                    f"the item tower of {default.name} reads no texts: give item {change.id!r} a vector or items that it is like",
                )
        if change.like is not None and str(change.id) in map(str, change.like):
            raise Refused(422, f"item {change.id!r} cannot be like itself")
        for other in change.like or ():
            if default.catalogue.find_one(other) < 0 and str(other) not in before:
                raise Refused(422, f"item {change.id!r} cannot be like {other!r}: there is no such item")
        if not any(str(other) in before for other in change.like or ()):
            default.place(change)

    def _commit(self, changes: list[Change]) -> tuple[int, dict[str, list[int | str]]]:
        sequence = self.store.write(changes)
        for served in self.runs:
            served.apply(changes, sequence)
        asked = {str(change.id) for change in changes}
        waiting = {served.name: [served.waiting[key] for key in served.waiting.keys() & asked] for served in self.runs}
        return sequence, {name: items for name, items in waiting.items() if items}


def _give_back() -> None:
    """Memory of the run of before to the system: the C library would keep much of it for later."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _name(folder: Path, taken: Mapping[str, Path]) -> str:
    """The folder's name, with a number where two have the same."""
    name = folder.resolve().name
    number = 2
    while name in taken:
        name, number = f"{folder.resolve().name}-{number}", number + 1
    return name
