"""A finished run: recommendations for known queries, histories and texts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
import torch
from torch import Tensor

from sparring.core.choices import RANKINGS
from sparring.core.errors import UserError
from sparring.core.types import Positives
from sparring.data.interactions import Ids, Split
from sparring.data.pairs import pair_keys
from sparring.data.texts.texts import as_series
from sparring.models.fusion import FILE, Fused
from sparring.models.named import Model
from sparring.models.retriever import Retriever
from sparring.models.text import text_tower
from sparring.models.towers import HistoryReader
from sparring.recipes.finding import Recipe
from sparring.recipes.setup import parse_setup
from sparring.training.eligibility import ClassifierRanking, Eligibility, FusedRanking, Ranking
from sparring.training.folder import read_manifest, read_run
from sparring.training.hub import SCHEME, pulled
from sparring.training.item_vectors import item_queries, item_vectors, mean_query
from sparring.training.novelty import novel_run
from sparring.training.sources import Sources, is_fused, read_fused

How = Literal["fused", "classifiers", "towers"]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainedModel:
    """A trained model, ready to recommend: towers, id maps, titles, and the items that each query has taken."""

    model: Retriever
    ids: Ids
    eligibility: Eligibility
    repeats: bool = field(
        default=False, kw_only=True
    )  # the data keeps them, so lists hold items that a query has taken
    novelty: float = field(default=0.0, kw_only=True)  # of `model`

    @property
    def name(self) -> str:
        """The run, for messages."""
        return "this run"

    @property
    def seen(self) -> Positives:
        """The training and validation pairs, which evaluation excludes; recommendations exclude the test part too."""
        return self.eligibility.seen

    def recommend(
        self,
        queries: Sequence[object] | str | int,
        k: int = 10,
        with_seen: bool | None = None,
        ranking: How | None = None,
    ) -> pl.DataFrame:
        """The k best items of each query (original ids): query, rank, item, title where known, score.

        Untrained items are left out, and so are items that a query is known to have taken, unless the data keeps
        repeats; `with_seen` decides otherwise. A warning names untrained queries.
        `ranking` is "towers", the towers alone; for a run with classifiers (stages.py) also "classifiers" or "fused",
        towers and classifiers together. By default it is the best of them on the validation part.
        """
        asked = _listed(queries)
        dense = self.ids.query_ids.encode(asked)
        if (dense < 0).any():
            unknown = asked[int(np.argmax(dense < 0))]
            reads_text = text_tower(self.model.query) is not None
            how = "its text (recommend_text, --text)" if reads_text else "its history of items"
            raise UserError(
                f"query {unknown!r} is not in the training data of {self.name}; describe a new one by {how}"
            )
        rows = torch.from_numpy(dense)
        blank = np.isin(dense, self.eligibility.queries.numpy())
        if blank.any():
            log.warning("no training interactions, so not personalised: query %s", _first_few(asked, blank))
        taken = None if self.lists_seen(with_seen) else self.eligibility.taken(rows)
        scores, items = self._best(self.model.query_vectors(rows), k, taken, ranking)
        return self._named(np.asarray(asked), scores, items)

    def lists_seen(self, asked: bool | None = None) -> bool:
        """Whether lists hold items that a query has taken: as asked, else if the data keeps repeats."""
        return self.repeats if asked is None else asked

    def recommend_history(
        self,
        items: Sequence[object] | str | int,
        k: int = 10,
        with_seen: bool | None = None,
        ranking: How | None = None,
    ) -> pl.DataFrame:
        """The k best items for a new query that is given by its items, oldest first; a warning names unknown items.

        The query tower encodes them if it reads histories; otherwise the mean of their vectors is the query.
        """
        asked = _listed(items)
        dense = self.ids.item_ids.encode(asked)
        unknown = (dense < 0) | np.isin(dense, self.eligibility.items.numpy())
        known = torch.from_numpy(dense[~unknown])
        if not len(known):
            names = _first_few(asked, unknown)
            raise UserError(f"no item of the history ({names}) is in the training data of {self.name}")
        if unknown.any():
            names = _first_few(asked, unknown)
            log.warning("left out of the history, because %s was not trained on them: %s", self.name, names)
        with torch.no_grad():
            if self.reads_histories:
                vector = self.model.encode_histories(known.unsqueeze(0))
            else:
                vector = torch.from_numpy(mean_query(self.model, self.item_vectors()[known].float().numpy()))
        seen = Positives(torch.tensor([0, len(known.unique())]), known.unique().int())
        scores, best = self._best(vector, k, None if self.lists_seen(with_seen) else seen, ranking)
        return self._named(np.asarray(["history"]), scores, best)

    def similar_items(self, items: Sequence[object] | str | int, k: int = 10) -> pl.DataFrame:
        """The k nearest items of each item (original ids) by the towers: item, rank, similar, title where known, score.

        An item is not its own neighbour; popularity, as an item bias or by novelty, does not count.
        """
        asked = _listed(items)
        dense = self.ids.item_ids.encode(asked)
        unknown = (dense < 0) | np.isin(dense, self.eligibility.items.numpy())
        if unknown.any():
            raise UserError(f"no training pair of {self.name} has the item {_first_few(asked, unknown)}")
        rows = torch.from_numpy(dense)
        vectors = self.model.item_queries(rows) if isinstance(self.model, Sources) else item_queries(self.model, rows)
        itself = Positives(torch.arange(len(rows) + 1), rows.int())
        scores, best = self._best(vectors, k, itself, None if isinstance(self.model, Sources) else "towers")
        found = self._named(np.asarray(asked), scores, best)
        return found.rename({"item": "similar", "query": "item"})

    @property
    def reads_histories(self) -> bool:
        """Whether the query tower encodes histories; if not, the mean of the items' vectors is the query."""
        return isinstance(self.model.query, HistoryReader)

    def recommend_text(self, texts: Sequence[str], k: int = 10, ranking: How | None = None) -> pl.DataFrame:
        """The k best items for new queries that are given by their texts; needs a text query tower."""
        texts = [texts] if isinstance(texts, str) else texts
        scores, best = self._best(self.encode_texts(texts, "query"), k, None, ranking)
        return self._named(np.asarray(texts), scores, best)

    @property
    def has_vectors(self) -> bool:
        """Whether an item is a vector: neither an item-item matrix nor a fused run has any."""
        return not (self.model.scores_items or isinstance(self.model, Sources))

    def item_vectors(self) -> Tensor:
        """Vectors (N, D) of all items; those of text towers in a run folder are computed once and cached there."""
        if not self.has_vectors:
            why = "is fused of several runs" if isinstance(self.model, Sources) else "has an item-item matrix"
            raise UserError(f"{self.name} {why} and has no item vectors; `recommend --all` writes its lists")
        return self._item_vectors()

    def _item_vectors(self) -> Tensor:
        return self.model.item_vectors()

    def encode_texts(self, texts: Sequence[str], side: Literal["query", "item"]) -> Tensor:
        """Vectors (n, D) of new queries or items from their texts, as scored; a query needs a known token."""
        if side not in ("query", "item"):
            raise UserError(f'side is {side!r}; it must be "query" or "item"')
        try:
            vectors = self.model.encode_texts(texts, side)
        except ValueError as error:
            raise UserError(str(error) if isinstance(error, UserError) else f"{error} (encoder=bag)") from error
        empty = (as_series(texts).str.strip_chars() == "").to_numpy() | ~vectors.any(1).cpu().numpy()
        if side == "query" and empty.any():
            text = texts[int(np.argmax(empty))]
            raise UserError(f"the text {text!r} has no known tokens, so it cannot be encoded")
        return vectors

    @property
    def fused(self) -> Fused | None:
        """The fused ranking of towers and classifiers; None if the run has no later stages (stages.py)."""
        return None

    def how(self, asked: How | None = None) -> How:
        """The requested ranking; by default the best one on the validation part, if the run has several.

        With a novelty it is the towers alone.
        """
        if asked not in (None, *RANKINGS):
            raise UserError(f"ranking is {asked!r}; it must be {', '.join(RANKINGS)}")
        if isinstance(self.model, Sources):
            if asked not in (None, "fused"):
                raise UserError(f"{self.name} is fused of several runs: for the {asked} of one, give its folder")
            return "fused"
        if asked not in (None, "towers") and self.fused is None:
            raise UserError(f"{self.name} has no {asked} ranking: train it with clf_epochs=N and clf_fusion=true")
        if self.novelty:
            if asked not in (None, "towers"):
                raise UserError(f"novelty corrects the ranking by the towers alone, not the {asked} one: choose one")
            return "towers"
        return asked or ("towers" if self.fused is None else self.fused.ranking)  # type: ignore[return-value]

    def ranking(self, asked: How | None = None) -> Ranking | FusedRanking | Sources:
        """Ranks all items for vectors of queries; see `recommend`."""
        if isinstance(self.model, Sources):
            self.how(asked)
            return self.model
        if self.model.scores_items:
            return self.eligibility.ranking(None, self.model.n_items)
        how = self.how(asked)
        if how == "towers" or self.fused is None:
            return self.eligibility.ranking(self.item_vectors())
        if how == "classifiers":
            return ClassifierRanking(self.fused.clf.item_vectors(), self.eligibility.items)
        return FusedRanking(self.fused, self.item_vectors(), self.eligibility.items)

    def _best(self, q: Tensor, k: int, taken: Positives | None, how: How | None) -> tuple[Tensor, Tensor]:
        if not 1 <= k <= self.model.n_items:
            raise UserError(f"k is {k}; it must be between 1 and the {self.model.n_items:,} items of the catalogue")
        return self.ranking(how).best(q, k, taken)

    def _named(self, queries: np.ndarray, scores: Tensor, items: Tensor) -> pl.DataFrame:
        row, rank = np.nonzero(items.numpy() >= 0)
        dense = items.numpy()[row, rank]
        table = pl.DataFrame({"query": queries[row], "rank": rank + 1, "item": self.ids.item_ids.decode(dense)})
        if self.ids.item_table is not None and "title" in self.ids.item_table.columns:
            table = table.with_columns(self.ids.item_table["title"].gather(dense))
        return table.with_columns(pl.Series("score", scores.numpy()[row, rank]))


@dataclass(frozen=True)
class Trained(TrainedModel):
    """A finished run, read from its folder."""

    meta: dict[str, Any]
    folder: Path

    @property
    def name(self) -> str:
        return str(self.folder)

    @property
    def own_novelty(self) -> float:
        """The novelty in the run's settings."""
        return parse_setup(self.meta["setup"]).ranking.novelty

    def cut(self, dim: int) -> Trained:
        """The same run with the first `dim` dimensions of its vectors; train with matryoshka=DIM for good lists.

        load("runs/first").cut(64).recommend([1042])
        """
        if not isinstance(self.model, Retriever) or not self.has_vectors:
            raise UserError(f"{self.name} has no vectors of two towers that could be cut")
        return replace(self, model=self.model.cut(dim))

    def with_novelty(self, novelty: float) -> Trained:
        """The same run with a novelty (models/novelty.py); the run must have been loaded with novelty=0.

        load("runs/first", novelty=0).with_novelty(0.3).recommend([1042])
        """
        if self.novelty:
            raise UserError(f"this run already has novelty {self.novelty:g}: load it with novelty=0")
        return replace(self, model=novel_run(self.model, novelty, self.eligibility, self.folder), novelty=novelty)

    def _item_vectors(self) -> Tensor:
        return item_vectors(self.model, self.folder)

    @cached_property
    def fused(self) -> Fused | None:
        """The fused ranking of towers and classifiers; None if the run has no later stages (stages.py)."""
        listed = read_manifest(self.folder)
        if not listed.lists(FILE):
            return None
        for name in (FILE, "classifiers/manifest.json"):
            listed.path(name)
        classifiers = load(self.folder / "classifiers", novelty=0).model
        return Fused.load(self.folder, self.model, classifiers, self.eligibility.listed(self.model.n_items))


def _listed(ids: Sequence[object] | str | int) -> list[object]:
    """Ids as a list, those of numpy as Python's; a single id is a list of one."""
    found = [ids] if isinstance(ids, (str, int, np.integer)) else ids
    return [each.item() if isinstance(each, np.generic) else each for each in found]


def _first_few(ids: Sequence[object], which: np.ndarray) -> str:
    """The first five of the ids that `which` marks, in one line."""
    rows = np.flatnonzero(which)
    return ", ".join([repr(ids[row]) for row in rows[:5]] + (["..."] if len(rows) > 5 else []))


def load(
    folder: str | Path,
    model: Retriever | str | Model | None = None,
    *,
    recipe: str | Recipe | None = None,
    trust: bool = False,
    unfinished: bool = False,
    novelty: float | None = None,
) -> Trained:
    """Read a finished run. No code that the folder names runs, so it may come from a stranger.

    `folder` may be hf://OWNER/NAME or hf://OWNER/NAME@REVISION, a run on the Hugging Face hub (hub.py).

    A run with custom towers needs code to build them: pass its `model` (a function, FILE.py:FUNCTION or the name of an
    installed one; or the Retriever that was trained), or the `recipe` that builds it. `trust` imports the model or the
    recipe that run.json names, and logs it. With `unfinished`, also a run whose training was interrupted: the best
    epoch so far. `novelty` replaces that of the run's settings (models/novelty.py); a fused run has 0.

        load("runs/xir").recommend([1042], k=10);   load("runs/mine", model="mine.py:deep")
    """
    folder = pulled(folder) if isinstance(folder, str) and folder.startswith(SCHEME) else Path(folder)
    if not isinstance(model, Retriever) and is_fused(folder):
        trained = Trained(*read_fused(folder, model, recipe, trust), folder)
    else:
        trained = Trained(*read_run(folder, model, recipe, trust, unfinished), folder)
    if trained.meta.get("histories"):
        log.warning("%s was published without histories: lists may hold items that a query has taken", folder)
    trained = replace(trained, repeats=trained.meta.get("repeats") == "keep")
    return trained.with_novelty(trained.own_novelty if novelty is None else novelty)


def run_vectors(
    folder: str | Path,
    split: Split,
    recipe: str | Recipe | None = None,
    trust: bool = False,
    model: str | Model | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Item vectors of a finished run, and the row in them of each item of this data (-1 for unknown items).

    An item bias, which is popularity, is left out. A run that was trained on test pairs of this split is refused: its
    vectors would leak the test part.
    """
    trained = load(folder, model, recipe=recipe, trust=trust, novelty=0)
    leaked = leaked_pairs(trained, split)
    if leaked:
        raise UserError(
            f"{folder} was trained on {leaked:,} test pairs of this data: train it with the same split and seed"
        )
    rows = trained.ids.item_ids.encode(split.train.item_ids.ids)
    vectors = trained.item_vectors().detach().cpu().numpy()
    return vectors if trained.model.item_bias is None else vectors[:, :-1], rows


def leaked_pairs(trained: Trained, split: Split) -> int:
    """The number of test pairs of a split that a run was trained on or chosen by, repeats of earlier pairs apart."""
    if split.test is None:
        return 0
    ids, seen, n_items = trained.ids, trained.seen, len(trained.ids.item_ids)
    queries = ids.query_ids.encode(split.test.query_ids.ids)[split.test.queries]
    items = ids.item_ids.encode(split.test.item_ids.ids)[split.test.items]
    known = (queries >= 0) & (items >= 0) & ~_repeats(split)
    owners = np.repeat(np.arange(len(seen.start) - 1), seen.start.diff().numpy())
    tested, taken = pair_keys(queries[known], items[known], n_items), pair_keys(owners, seen.items.numpy(), n_items)
    return int(np.isin(tested, taken).sum())


def _repeats(split: Split) -> np.ndarray:
    """Which test pairs were also taken before the test part."""
    assert split.test is not None
    if not split.train.repeats:
        return np.zeros(len(split.test), dtype=bool)
    before, n_items = split.before("test"), split.train.n_items
    owners = np.repeat(np.arange(len(before.start) - 1), before.start.diff().numpy())
    tested, taken = ((split.test.queries, split.test.items), (owners, before.items.numpy()))
    return np.isin(pair_keys(*tested, n_items), pair_keys(*taken, n_items))
