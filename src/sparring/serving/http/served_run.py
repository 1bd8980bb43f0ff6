"""One served run: model, index, catalogue, and the changes made to its items; validated before it serves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparring.core import manifest
from sparring.core.errors import UserError
from sparring.models.retriever import Retriever
from sparring.models.text import TextTower
from sparring.models.towers import IdTower
from sparring.serving.http.catalogue import Catalogue, IdLookup
from sparring.serving.http.placement import ItemPlacer
from sparring.serving.http.schema import RequestError
from sparring.serving.http.store import Change
from sparring.serving.index import Index, index_files
from sparring.serving.index.run_index import (
    FOLDER,
    cut_as_indexed,
    has_index,
    open_index,
    open_staged,
    ranking_of,
)
from sparring.serving.index.scored import FusedItems, ScoredItems
from sparring.serving.index.searchable import Searchable
from sparring.serving.index.staged import StagedItems
from sparring.training import trained as runs
from sparring.training.folder import model_hash
from sparring.training.item_vectors import item_queries, item_vectors, mean_query
from sparring.training.sources import Sources
from sparring.training.trained import How, Trained

_PROBES = 16  # queries and items that a newly loaded run is tried on
# The manifest is written last: an interrupted run that is resumed may end with the model that it already had.
_RUN = ("run.json", "model.safetensors", manifest.NAME)
_SIGNED = (*_RUN, f"{FOLDER}/{index_files.META}")


@dataclass(eq=False)
class ServedRun:
    """A run that answers requests. Built by `load_served`; when a newer run replaces it, it finishes its requests."""

    name: str
    folder: Path
    trained: Trained
    index: Searchable
    catalogue: Catalogue
    users: IdLookup
    placer: ItemPlacer
    signature: tuple[Any, ...]
    ranking: How = "towers"
    generation: int = 1
    sequence: int = 0  # the last change that was applied
    notes: list[str] = field(default_factory=list)
    waiting: dict[str, int | str] = field(default_factory=dict)  # items that this run cannot place
    moved: set[int] = field(default_factory=set)  # dense ids that were deleted or whose vector was ever replaced

    def __post_init__(self) -> None:
        seen, test = self.trained.eligibility.seen, self.trained.eligibility.test
        self.seen_start, self.seen_items = seen.start.numpy(), seen.items.numpy()
        self.held_out = None if test is None else (test.start.numpy(), test.items.numpy())
        self.untrained = frozenset(self.trained.eligibility.items.tolist())  # listed only if they were given a vector
        self.by_table = isinstance(self.trained.model.query, IdTower)
        self.by_history = self.trained.reads_histories

    @property
    def answers(self) -> list[str]:
        """The kinds of query that it supports."""
        text = ["text"] if isinstance(self.trained.model.query, TextTower) else []
        return ["user", "history", *text, "similar"]

    def seen(self, user: int) -> np.ndarray:
        """Dense ids of the items that a user has interacted with in the data of the run, the test part included."""
        seen = self.seen_items[self.seen_start[user] : self.seen_start[user + 1]]
        if self.held_out is None:
            return seen
        start, items = self.held_out
        test = items[start[user] : start[user + 1]]
        return np.union1d(seen, test) if len(test) else seen

    def history(self, user: int) -> tuple[np.ndarray, bool]:
        """(items of a user, whether they are in time order): the history that the tower reads, or the items seen."""
        readers = self.trained.model.past_readers()
        if not readers:
            return self.seen(user), False
        past = readers[0].past
        return past.items[int(past.start[user]) : int(past.start[user + 1])].numpy(), past.ordered

    def user_vectors(self, dense: np.ndarray) -> np.ndarray:
        """Vectors (n, D) of users."""
        model = self.trained.model
        if self.by_table:
            return model.table_queries(dense)
        return model.query_vectors(torch.from_numpy(dense)).float().numpy()

    def usable_in_history(self, dense: np.ndarray) -> np.ndarray:
        """(n,) bool: items of a history that have a vector, and that the tower was trained on if it reads histories."""
        known = dense >= 0
        trained = known & (dense < self.trained.model.n_items)
        if self.untrained:
            untrained = np.isin(dense, self.trained.eligibility.items.numpy())
            known &= ~untrained | np.fromiter(map(self.listed, dense.tolist()), bool, len(dense))
            trained &= ~untrained
        return trained if self.by_history and trained.any() else known

    def history_vector(self, dense: np.ndarray) -> np.ndarray:
        """(1, D) of usable items: by the query tower if it reads histories and knows them, else their mean vector."""
        if self.by_history and int(dense.max()) < self.trained.model.n_items:
            with torch.no_grad():
                return self.trained.model.encode_histories(torch.from_numpy(dense).unsqueeze(0)).float().numpy()
        return mean_query(self.trained.model, self.vectors(dense))

    def item_queries(self, dense: np.ndarray) -> np.ndarray:
        """Items as queries for similar items, by the towers; the bias, which reflects popularity, does not count."""
        if not isinstance(self.index, Index | StagedItems):
            self._check_listed(dense)
            items, model = torch.from_numpy(dense), self.trained.model
            found = model.item_queries(items) if isinstance(model, Sources) else item_queries(model, items)
            return found.float().numpy()
        vectors = self.vectors(dense)
        vectors[:, self.trained.model.width :] = 0.0
        return vectors

    def vectors(self, dense: np.ndarray) -> np.ndarray:
        assert isinstance(self.index, Index | StagedItems)
        try:
            return self.index.vectors_of(dense)
        except UserError:
            self._check_listed(dense)
            raise

    def _check_listed(self, dense: np.ndarray) -> None:
        for item in dense.tolist():
            if not self.listed(item):
                name = self.catalogue.original(np.array([item]))[0]
                raise RequestError(
                    404, f"run {self.name} does not list item {name!r}: it was deleted or cannot be placed"
                )

    def find_item(self, id: int | str) -> int:
        """The dense id of an item; an error if it is unknown."""
        dense = self.catalogue.find_one(id)
        if dense < 0:
            raise RequestError(404, f"run {self.name} does not know item {str(id)[:200]!r}")
        return dense

    def listed(self, dense: int) -> bool:
        """Whether searches can find an item: it is placed and not deleted."""
        return self.index.has(dense)

    def place(self, change: Change, placed: Mapping[int, np.ndarray] | None = None) -> np.ndarray | None:
        """The vector that a change gives an item; None to keep the trained vector; RequestError if there is none.

        An item in the training data keeps its trained vector unless the change was made under this very model.
        `placed` has vectors by dense id that are not in the index yet.
        """
        dense = self.catalogue.find_one(change.id)
        trained = 0 <= dense < self.trained.model.n_items
        if trained and change.model != self.placer.model and dense not in self.untrained:
            return None
        if not self.placer.ways:
            if trained and dense not in self.untrained and change.vector is None and not change.like:
                return None
            raise RequestError(422, f"run {self.name} scores only items that it was trained on, not item {change.id!r}")
        vector = self.placer.given(change)
        if vector is None and change.text is not None:
            vector = self.placer.from_text(change.text, change.columns)
        if vector is None and change.like:
            vector = self._from_like(change.like, placed or {})
        if vector is None and not trained:
            vector = self.placer.from_columns(change.columns)
            if vector is None:
                ways = [
                    f"a vector of {self.placer.dim} numbers" if way == "vector" else way
                    for way in self.placer.ways
                    if way != "features"
                ]
                raise RequestError(422, f"item {change.id!r} is new to run {self.name}: give it {' or '.join(ways)}")
        if vector is not None and (not np.isfinite(vector).all() or not vector.any()):
            raise RequestError(422, f"item {change.id!r} would get a vector that is zero or not finite")
        return vector

    def _from_like(self, like: Sequence[int | str], placed: Mapping[int, np.ndarray]) -> np.ndarray | None:
        assert isinstance(self.index, Index | StagedItems)
        dense = self.catalogue.find(like)
        untrained = np.fromiter((item in self.untrained for item in dense.tolist()), bool, len(dense))
        trained = dense[(dense >= 0) & (dense < len(self.index.ids)) & ~untrained]  # even if deleted since
        others = dense[(dense >= len(self.index.ids)) | untrained]
        vectors = [np.asarray(self.index.vectors[trained])] if len(trained) else []
        for item in others.tolist():
            if item in placed:
                vectors.append(placed[item][None])
            elif self.index.has(item):
                vectors.append(self.index.vectors_of(np.array([item])))
        return self.placer.from_like(np.concatenate(vectors)) if vectors else None

    def apply(self, changes: Iterable[Change], sequence: int) -> None:
        """Apply changes from the store. An item that this run cannot place waits for a run that can."""
        removed: set[int] = set()
        restored: set[int] = set()
        placed: dict[int, np.ndarray] = {}  # joined to the index at once: every addition copies the earlier ones
        for change in _after_those_they_are_like(list(changes)):
            self.waiting.pop(str(change.id), None)
            if change.deleted:
                dense = self.catalogue.find_one(change.id)
                if dense >= 0:
                    placed.pop(dense, None)
                    restored.discard(dense)
                    removed.add(dense)
                    self.catalogue.forget(dense)
                continue
            try:
                vector = self.place(change, placed)
            except RequestError:
                self.waiting[str(change.id)] = change.id
                continue
            dense = self.catalogue.put(change.id, change.columns)
            removed.discard(dense)
            if vector is None:
                if dense not in self.moved or dense in self.untrained:  # only its columns have changed
                    continue
                placed.pop(dense, None)
                restored.add(dense)
                continue
            restored.discard(dense)
            placed[dense] = vector
        self.moved |= removed | restored | placed.keys()
        if removed:
            self.index.remove(np.fromiter(removed, np.int64, len(removed)))
        if restored:
            self.index.restore(np.fromiter(restored, np.int64, len(restored)))
        if placed:
            assert isinstance(self.index, Index | StagedItems)
            self.index.add(np.fromiter(placed, np.int64, len(placed)), np.stack(list(placed.values())))
        self.sequence = sequence


def _after_those_they_are_like(changes: list[Change]) -> list[Change]:
    """The changes, one per item, in their order, except that each follows the items of the same list that it is like.

    Without recursion: a chain of items, each like the next, may have any length. A circle is cut at its first change.
    """
    by_id = {str(change.id): change for change in changes}
    ordered: dict[str, Change] = {}
    begun: set[str] = set()
    for first in by_id:
        stack = [first]
        while stack:
            key = stack[-1]
            if key not in begun:
                begun.add(key)
                like = map(str, by_id[key].like or ())
                stack += [other for other in like if other in by_id and other not in begun]
            else:
                ordered.setdefault(stack.pop(), by_id[key])
    return list(ordered.values())


def signature(folder: Path, names: Sequence[str] = _SIGNED) -> tuple[Any, ...]:
    """A value that changes whenever the run or its index is written again."""
    stats = []
    for name in names:
        try:
            stat = (folder / name).stat()
            stats.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
        except OSError:
            stats.append((0, 0, 0))
    return tuple(stats)


def load_served(
    folder: Path,
    name: str,
    recipe: str | None = None,
    trust: bool = False,
    unfinished: bool = False,
    model: str | None = None,
    novelty: float | None = None,
    ranking: How | None = None,
) -> ServedRun:
    """Load a run with its index and probe them: finite vectors, an index of this model, searches that find items.

    `recipe`, `model`, `trust`, `unfinished` and `novelty` as in `load`, `ranking` as in `ranking_of`. A run without an
    index is searched exactly. A damaged index, or that of another model, novelty or ranking, raises UserError.
    """
    before = signature(folder)
    trained = runs.load(folder, model, recipe=recipe, trust=trust, unfinished=unfinished, novelty=novelty)
    notes: list[str] = []
    if trained.novelty:
        notes.append(f"novelty {trained.novelty:g}: scores are corrected for the popularity of items")
    how = ranking_of(trained, ranking)
    if trained.has_vectors and how != trained.how():
        better = f"`sparring index {folder}` builds one for it" if has_index(folder) else "as asked"
        notes.append(f"ranked by {how}, not by {trained.how()}, which is the run's own: {better}")
    trained = _with_lists(trained)
    index: Searchable
    if isinstance(trained.model, Sources):
        parts = [_index(each.model, each.folder, trained.novelty, notes) for each in trained.model.sources]
        index = FusedItems(trained.model, parts)
    elif how != "towers":
        index = open_staged(trained, how)
        if not has_index(folder):
            _note_exact(len(index.ids), folder, notes)
    else:
        index = _index(trained.model, folder, trained.novelty, notes)
    catalogue, users = Catalogue(trained.ids), IdLookup(trained.ids.query_ids)
    placer = ItemPlacer(trained, model_hash(folder))
    served = ServedRun(name, folder, trained, index, catalogue, users, placer, before, how, notes=notes)
    _check(served)
    if signature(folder, _RUN) != before[: len(_RUN)]:  # an index is replaced at once, and was read whole
        raise UserError(f"{folder} was written while it was read: try again when that is done")
    untrained = trained.eligibility.items.numpy()
    if len(untrained):
        index.remove(untrained)
        but = "recommended only if put with a vector, a text or items that they are like"
        listed = but if placer.ways else "not recommended"
        notes.append(f"{len(untrained):,} items have no training interactions: they are {listed}")
    return served


def _with_lists(trained: Trained) -> Trained:
    """A run with each of its item-item matrices cut to the neighbours in its index, and vectors to its dimensions."""
    model = trained.model
    if isinstance(model, Sources):
        sources = [replace(each, model=cut_as_indexed(each.model, each.folder)) for each in model.sources]
        return replace(trained, model=Sources(sources, model.by, model.weights.tolist(), model.depth).eval())
    return replace(trained, model=cut_as_indexed(model, trained.folder))


def _index(model: Retriever, folder: Path, novelty: float, notes: list[str]) -> Index | ScoredItems:
    """The index of a run; without one its items are searched exactly, and a note says so where they are many."""
    if model.scores_items:
        if has_index(folder):  # `_with_lists` has cut the matrix
            return ScoredItems(model.n_items, index_files.LISTS, index_files.read_meta(folder / FOLDER))
        return ScoredItems(model.n_items)
    if has_index(folder):
        index = open_index(folder, novelty=novelty)
    else:
        vectors = item_vectors(model, folder).float().contiguous().numpy()
        index = Index(vectors, np.arange(len(vectors)))
        _note_exact(len(vectors), folder, notes)
    _check_vectors(index, model, folder)
    return index


def _note_exact(n: int, folder: Path, notes: list[str]) -> None:
    if n > 100_000:
        notes.append(f"no index: searching {n:,} items exactly; build one with `sparring index {folder}`")


def _check_vectors(index: Index, model: Retriever, folder: Path) -> None:
    """Raise unless an index has the vectors of its run, by a sample of them."""
    n = model.n_items
    rebuild = f"build it again with `sparring index {folder}`"
    if len(index.ids) != n or int(index.ids[0]) != 0 or int(index.ids[-1]) != n - 1:
        raise UserError(f"the index of {folder} has {len(index.ids):,} items, its run has {n:,}: {rebuild}")
    if index.dim != model.dim:
        raise UserError(f"the index of {folder} has {index.dim} dimensions, its run has {model.dim}: {rebuild}")
    items = np.unique(np.linspace(0, n - 1, min(n, _PROBES)).astype(np.int64))
    with torch.no_grad():
        truth = model.encode_items(torch.from_numpy(items)).float().numpy()
    if not np.allclose(truth, index.vectors[items], rtol=1e-3, atol=1e-4):
        raise UserError(f"the vectors in the index of {folder} are not those of its model: {rebuild}")


def _check(served: ServedRun) -> None:
    """Raise unless a run finds items for some of its users."""
    users, folder = np.arange(min(len(served.users), _PROBES)), served.folder
    if not len(users):
        return
    scores, nearest = served.index.search(served.user_vectors(users), 1)
    if not np.isfinite(scores).all() or bool((nearest < 0).any()):
        raise UserError(
            f"{folder} returns scores that are not finite, or no items: the model has diverged, train it again"
        )
