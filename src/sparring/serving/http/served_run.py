"""One run as it is served: model, index, catalogue, and the changes made to its items since; loaded whole and checked, or refused."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparring.core.errors import UserError
from sparring.models.text import TextTower
from sparring.models.towers import HistoryTower, IdTower
from sparring.serving.http.catalogue import Catalogue
from sparring.serving.http.limits import Refused
from sparring.serving.http.names import Names
from sparring.serving.http.placement import Placing
from sparring.serving.http.store import Change
from sparring.serving.index import Index, files
from sparring.serving.index.run_index import FOLDER, open_index
from sparring.training import trained as runs
from sparring.training.item_vectors import mean_query
from sparring.training.trained import Trained

_PROBED = 16  # queries and items that a newly loaded run is tried on
_SIGNS = ("run.json", "model.safetensors", f"{FOLDER}/{files.META}")


@dataclass(eq=False)
class Served:
    """A run that answers: `load_served` makes it; a newer one takes its place whole, and this one answers what it was asked before."""

    name: str
    folder: Path
    trained: Trained
    index: Index
    catalogue: Catalogue
    users: Names
    placing: Placing
    sign: tuple[Any, ...]
    generation: int = 1
    sequence: int = 0  # the last change that was applied
    notes: list[str] = field(default_factory=list)
    waiting: dict[str, int | str] = field(default_factory=dict)  # items that this run cannot place
    moved: set[int] = field(
        default_factory=set
    )  # dense ids whose vector in the index is not, or was not always, the run's own
    loaded: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        seen, test = self.trained.eligibility.seen, self.trained.eligibility.test
        self.seen_start, self.seen_items = seen.start.numpy(), seen.items.numpy()
        self.held = None if test is None else (test.start.numpy(), test.items.numpy())
        self.untrained = frozenset(
            self.trained.eligibility.items.tolist()
        )  # listed only where they were given another vector
        query = self.trained.model.query
        self.user_table = query.weight.detach().numpy() if isinstance(query, IdTower) else None
        self.by_history = self.trained.reads_histories

    @property
    def answers(self) -> list[str]:
        """The kinds of question that it can answer."""
        text = ["text"] if isinstance(self.trained.model.query, TextTower) else []
        return ["user", "history", *text, "similar"]

    def seen(self, user: int) -> np.ndarray:
        """What the data of the run knows a user to have taken, its test part too; dense item ids."""
        seen = self.seen_items[self.seen_start[user] : self.seen_start[user + 1]]
        if self.held is None:
            return seen
        start, items = self.held
        held = items[start[user] : start[user + 1]]
        return np.union1d(seen, held) if len(held) else seen

    def history(self, user: int) -> tuple[np.ndarray, bool]:
        """(a user's items, whether they are in time order, oldest first): histories of the tower, or what the user has seen."""
        tower = self.trained.model.query
        if isinstance(tower, HistoryTower):
            return tower.items[int(tower.start[user]) : int(tower.start[user + 1])].numpy(), True
        return self.seen(user), False

    def user_vectors(self, dense: np.ndarray) -> np.ndarray:
        """Vectors (n, D) of users. A table is read by numpy: every call of torch gives the interpreter away and waits to get it back."""
        if self.user_table is None:
            return self.trained.model.query_vectors(torch.from_numpy(dense)).float().numpy()
        vectors = self.user_table[dense]
        if self.placing.cosine:
            vectors /= np.maximum(np.sqrt(np.einsum("nd,nd->n", vectors, vectors)), 1e-6)[:, None]
        return np.concatenate([vectors, np.ones_like(vectors[:, :1])], 1) if self.placing.biased else vectors

    def readable(self, dense: np.ndarray) -> np.ndarray:
        """Which items of a history count for its vector, (n,) bool: those that have one; for a tower that reads them, those it learned."""
        known = dense >= 0
        own = known & (dense < self.trained.model.n_items)
        if self.untrained:
            blank = np.isin(dense, self.trained.eligibility.items.numpy())
            known &= ~blank | np.fromiter(map(self.listed, dense.tolist()), bool, len(dense))
            own &= ~blank
        return own if self.by_history and own.any() else known

    def history_vector(self, dense: np.ndarray) -> np.ndarray:
        """(1, D) of readable items: through the query tower, where it reads histories and knows them, else the mean of their vectors."""
        if self.by_history and int(dense.max()) < self.trained.model.n_items:
            with torch.no_grad():
                return self.trained.model.encode_histories(torch.from_numpy(dense).unsqueeze(0)).float().numpy()
        return mean_query(self.trained.model, self.vectors(dense))

    def item_queries(self, dense: np.ndarray) -> np.ndarray:
        """Items as queries for items like them; how popular those are does not count."""
        vectors = self.vectors(dense)
        if self.placing.biased:
            vectors[:, -1] = 0.0
        return vectors

    def vectors(self, dense: np.ndarray) -> np.ndarray:
        try:
            return self.index.vectors_of(dense)
        except UserError as error:  # deleted, or not placed
            raise Refused(404, f"item {self._missing(dense)!r} is not listed in {self.name}") from error

    def listed(self, dense: int) -> bool:
        """Whether an item can be found: it is placed and not deleted."""
        return self.index.has(dense)

    def _missing(self, dense: np.ndarray) -> int | str:
        for at in dense.tolist():
            if not self.index.has(at):
                return self.catalogue.names(np.array([at]))[0]
        return self.catalogue.names(dense[:1])[0]

    def place(self, change: Change) -> np.ndarray | None:
        """The vector that a change gives an item: None where it stays as it is (the run's own), Refused where there is none.

        An item that this run was trained on has the run's vector, unless it was placed anew under this very model.
        """
        dense = self.catalogue.find_one(change.id)
        own = 0 <= dense < self.trained.model.n_items
        if own and change.model != self.placing.model and dense not in self.untrained:
            return None
        vector = self.placing.given(change)
        if vector is None and change.text is not None:
            vector = self.placing.from_text(change.text, change.columns)
        if vector is None and change.like:
            vector = self._from_like(change.like)
        if vector is None and not own:
            vector = self.placing.from_columns(change.columns)
            if vector is None:
                raise Refused(422, f"item {change.id!r} is new to {self.name}: give it {' or '.join(self._ways())}")
        if vector is not None and (not np.isfinite(vector).all() or not vector.any()):
            raise Refused(422, f"item {change.id!r} would get a vector of zeros or of values that are not finite")
        return vector

    def _ways(self) -> list[str]:
        return [
            f"a {way} of {self.placing.dim} numbers" if way == "vector" else way
            for way in self.placing.ways
            if way != "features"
        ]

    def _from_like(self, like: Sequence[int | str]) -> np.ndarray | None:
        dense = self.catalogue.find(like)
        blank = np.fromiter((at in self.untrained for at in dense.tolist()), bool, len(dense))
        own = dense[
            (dense >= 0) & (dense < len(self.index.ids)) & ~blank
        ]  # of the run, even where they are deleted since
        added = dense[(dense >= len(self.index.ids)) | blank]
        found = [np.asarray(self.index.vectors[own])] if len(own) else []
        found += [self.index.vectors_of(np.array([at])) for at in added.tolist() if self.index.has(at)]
        return self.placing.from_like(np.concatenate(found)) if found else None

    def apply(self, changes: Iterable[Change], sequence: int) -> None:
        """Take over changes that are in the store; an item that this run cannot place waits for one that can."""
        removed: set[int] = set()
        placed: dict[int, np.ndarray] = {}
        changes, later = list(changes), list[Change]()
        for change in changes:
            self.waiting.pop(str(change.id), None)
            if change.deleted:
                dense = self.catalogue.find_one(change.id)
                if dense >= 0:
                    placed.pop(dense, None)
                    removed.add(dense)
                    self.catalogue.forget(dense)
                continue
            try:
                vector = self.place(change)
            except Refused:
                self.waiting[str(change.id)] = change.id
                later += [change] if change.like else []
                continue
            dense = self.catalogue.put(change.id, change.columns)
            removed.discard(dense)
            if vector is None:
                if dense not in self.moved or dense in self.untrained:  # its columns alone have changed
                    continue
                vector = np.asarray(self.index.vectors[dense])
            placed[dense] = vector
            if change.like is not None:  # a later one may be like this one
                self.index.add(np.array([dense]), vector[None])
        self.moved |= removed | placed.keys()
        if removed:
            self.index.remove(np.fromiter(removed, np.int64, len(removed)))
        if placed:
            self.index.add(np.fromiter(placed, np.int64, len(placed)), np.stack(list(placed.values())))
        self.sequence = sequence
        if 0 < len(later) < len(changes):  # what they are like may have come after them
            self.apply(later, sequence)


def signature(folder: Path) -> tuple[Any, ...]:
    """Changes whenever the run or its index was written again."""
    found = []
    for name in _SIGNS:
        try:
            about = (folder / name).stat()
            found.append((about.st_mtime_ns, about.st_size, about.st_ino))
        except OSError:
            found.append((0, 0, 0))
    return tuple(found)


def load_served(folder: Path, name: str) -> Served:
    """Load a run and its index, and try both: vectors are finite, those of the index are the model's, and searches find items.

    A run without an index is searched exactly. An index that is damaged, or of another model, is refused.
    """
    sign = signature(folder)
    trained = runs.load(folder)
    notes = []
    if (folder / FOLDER / files.META).is_file():
        index = open_index(folder)
        model = str(index.meta["model"])  # compared with the file's hash by open_index
    else:
        model = files.sha256(folder / "model.safetensors")
        vectors = trained.item_vectors().float().contiguous().numpy()
        index = Index(vectors, np.arange(len(vectors)))
        if len(vectors) > 100_000:
            notes.append(
                f"no index: {len(vectors):,} items are searched exactly; `sparring index {folder}` makes it faster"
            )
    served = Served(
        name,
        folder,
        trained,
        index,
        Catalogue(trained.ids),
        Names(trained.ids.query_ids),
        Placing(trained, model),
        sign,
        notes=notes,
    )
    _check(served)
    untrained = trained.eligibility.items.numpy()
    if len(untrained):
        index.remove(untrained)
        notes.append(
            f"{len(untrained):,} items have no training pair: they are not recommended unless put with a vector or like others"
        )
    return served


def _check(served: Served) -> None:
    n, index, where = served.trained.model.n_items, served.index, served.folder
    if len(index.ids) != n or int(index.ids[0]) != 0 or int(index.ids[-1]) != n - 1:
        raise UserError(
            f"the index of {where} holds {len(index.ids):,} items, its run {n:,}: build it again with `sparring index {where}`"
        )
    if index.dim != served.trained.model.dim:
        raise UserError(f"the index of {where} has {index.dim} dimensions, its run {served.trained.model.dim}")
    items = np.unique(np.linspace(0, n - 1, min(n, _PROBED)).astype(np.int64))
    with torch.no_grad():
        truth = served.trained.model.encode_items(torch.from_numpy(items)).float().numpy()
    if not np.allclose(truth, index.vectors[items], rtol=1e-3, atol=1e-4):
        raise UserError(
            f"the index of {where} does not hold the vectors of its model: build it again with `sparring index {where}`"
        )
    users = np.arange(min(len(served.users), _PROBED))
    scores, found = index.search(served.user_vectors(users), 1) if len(users) else (np.zeros((1, 1)), np.zeros((1, 1)))
    if not np.isfinite(scores).all() or bool((found < 0).any()):
        raise UserError(
            f"{where} gives scores that are not finite, or finds nothing: the model has diverged, train it again"
        )
