"""The run folder: what training leaves behind, and how it is read back.

    run.json            recipe, arguments, setup, data source, versions: enough to run it again
    metrics.jsonl       one line per epoch
    result.json         the test metrics of the chosen epoch
    per_query.parquet   the same of every single test query, float32, for paired tests: query, recall@10, ndcg@10, ...
    model.safetensors   the towers of the chosen epoch
    checkpoint.safetensors   everything that training needs to go on
    seen.safetensors    what each query has already taken, the test part by itself; queries and items that were never trained
    *_ids.parquet, *_table.parquet   id maps, titles and other columns
    encoder/, query_texts/, item_texts/   of text towers: a folder that transformers reads (or a bag's own), and the tokens of all texts
    curve.png, README.md   the training curve and a short model card

Every file is written beside its target and renamed, so a kill or a full disk leaves the last good one. Tensors are safetensors:
nothing executable is ever loaded from the folder. Towers of your own are built by the recipe that run.json names (rebuilt.py).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
import torch
from torch import Tensor

from sparring.core import files
from sparring.core.errors import UserError, first_line
from sparring.core.types import Positives
from sparring.data.features import Histories
from sparring.data.interactions import Ids, Split
from sparring.data.pairs import pair_keys
from sparring.data.texts.texts import as_series
from sparring.models.fusion import FILE, Fused
from sparring.models.retriever import Retriever
from sparring.models.text import text_tower
from sparring.models.towers import HistoryTower
from sparring.recipes.run import build_towers
from sparring.recipes.setup import parse_setup
from sparring.training.custom_towers import own_model
from sparring.training.eligibility import FusedRanking, Offers, Ranking
from sparring.training.item_vectors import item_vectors, mean_query

How = Literal["fused", "encoder"]


@dataclass(frozen=True)
class Trained:
    """A finished run, ready to recommend: towers, id maps, titles, what each query has seen.

    `seen` is what evaluation leaves out, the training and validation parts; lists leave out the test part too (`offers`).
    """

    folder: Path
    model: Retriever
    ids: Ids
    seen: Positives
    meta: dict[str, Any]
    offers: Offers

    def recommend(
        self, queries: Sequence[object] | str | int, k: int = 10, with_seen: bool = False, ranking: How | None = None
    ) -> pl.DataFrame:
        """The k best items of each query (original ids): query, rank, item, title where known, score.

        What the data knows a query to have is left out, and so are items that were never trained; a warning names such queries. `ranking`
        is "encoder", the towers alone, or "fused", towers and classifiers together: the default where the run has them (stages.py).
        """
        asked = _listed(queries)
        dense = self.ids.query_ids.encode(asked)
        if (dense < 0).any():
            stranger = asked[int(np.argmax(dense < 0))]
            new = (
                "its text (recommend_text, --text)"
                if text_tower(self.model.query) is not None
                else "its history of items"
            )
            raise UserError(
                f"query {stranger!r} is not in the training data of {self.folder}; a new one is known by {new}"
            )
        at = torch.from_numpy(dense)
        blank = np.isin(dense, self.offers.queries.numpy())
        if blank.any():
            warnings.warn(
                f"no training pair, so a list that says nothing of who asks: query {_some(asked, blank)}", stacklevel=2
            )
        scores, items = self._best(
            self.model.query_vectors(at), k, None if with_seen else self.offers.taken(at), ranking
        )
        return self._named(np.asarray(asked), scores, items)

    def recommend_history(
        self, items: Sequence[object] | str | int, k: int = 10, with_seen: bool = False, ranking: How | None = None
    ) -> pl.DataFrame:
        """The k best items for a new query known only by its items, oldest first; a warning names those that the run does not know.

        Through the query tower where it reads histories, else by the mean of the items' vectors (see `reads_histories`).
        """
        asked = _listed(items)
        dense = self.ids.item_ids.encode(asked)
        strange = (dense < 0) | np.isin(dense, self.offers.items.numpy())
        known = torch.from_numpy(dense[~strange])
        if not len(known):
            raise UserError(
                f"no item of the history ({_some(asked, strange)}) is in the training data of {self.folder}"
            )
        if strange.any():
            warnings.warn(
                f"left out of the history, since {self.folder} was not trained on them: {_some(asked, strange)}",
                stacklevel=2,
            )
        with torch.no_grad():
            if self.reads_histories:
                vector = self.model.encode_histories(known.unsqueeze(0))
            else:
                vector = torch.from_numpy(mean_query(self.model, self.item_vectors()[known].float().numpy()))
        seen = Positives(torch.tensor([0, len(known.unique())]), known.unique().int())
        scores, best = self._best(vector, k, None if with_seen else seen, ranking)
        return self._named(np.asarray(["history"]), scores, best)

    @property
    def reads_histories(self) -> bool:
        """Whether a history goes through the query tower; if not, the mean of its items' vectors stands for it."""
        return isinstance(self.model.query, HistoryTower)

    def recommend_text(self, texts: Sequence[str], k: int = 10, ranking: How | None = None) -> pl.DataFrame:
        """The k best items for new queries known only by their texts; needs a query tower that reads text."""
        texts = [texts] if isinstance(texts, str) else texts
        scores, best = self._best(self.encode_texts(texts, "query"), k, None, ranking)
        return self._named(np.asarray(texts), scores, best)

    def item_vectors(self) -> Tensor:
        """Vectors (N, D) of all items; those of text towers are computed once and kept beside the run."""
        return item_vectors(self.model, self.folder)

    def encode_texts(self, texts: Sequence[str], side: Literal["query", "item"]) -> Tensor:
        """Vectors (n, D) of new queries or new items known only by their texts, as they are compared; a query must say something."""
        if side not in ("query", "item"):
            raise UserError(f'side is {side!r}; it must be "query" or "item"')
        try:
            vectors = self.model.encode_texts(texts, side)
        except ValueError as error:
            raise UserError(str(error) if isinstance(error, UserError) else f"{error} (encoder=bag)") from error
        empty = (as_series(texts).str.strip_chars() == "").to_numpy() | ~vectors.any(1).cpu().numpy()
        if side == "query" and empty.any():
            text = texts[int(np.argmax(empty))]
            raise UserError(f"the text {text!r} is empty to the query tower: any item would be as near as any other")
        return vectors

    @cached_property
    def fused(self) -> Fused | None:
        """Towers and classifiers ranked together, where all stages of the run were trained (stages.py); None where not."""
        if not (self.folder / FILE).is_file():
            return None
        return Fused.load(self.folder, self.model, load(self.folder / "classifiers").model)

    def how(self, asked: How | None = None) -> How:
        """The ranking asked for; without one, fused where the run has that."""
        if asked not in (None, "fused", "encoder"):
            raise UserError(f'ranking is {asked!r}; it must be "fused" or "encoder"')
        if asked == "fused" and self.fused is None:
            raise UserError(
                f"{self.folder} has no fused ranking: that needs clf_epochs=N and clf_fusion=true in training"
            )
        return asked or ("encoder" if self.fused is None else "fused")

    def ranking(self, asked: How | None = None) -> Ranking | FusedRanking:
        """What ranks all items for vectors of queries: see `recommend`."""
        if self.how(asked) == "encoder" or self.fused is None:
            return self.offers.ranking(self.item_vectors())
        return FusedRanking(self.fused, self.item_vectors(), self.offers.items)

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


def _listed(ids: Sequence[object] | str | int) -> list[object]:
    """Ids as a list; one by itself is a list of one."""
    return [ids] if isinstance(ids, (str, int, np.integer)) else list(ids)


def _some(asked: Sequence[object], which: np.ndarray) -> str:
    """The first few of these ids, to name them in a line."""
    at = np.flatnonzero(which)
    return ", ".join([repr(asked[place]) for place in at[:5]] + (["..."] if len(at) > 5 else []))


def load(folder: str | Path, model: Retriever | None = None) -> Trained:
    """Read a finished run. Towers of your own are built by the run's recipe, or where it had none are given as `model`, as for training.

    load("runs/xir").recommend([1042], k=10)
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"no such run folder: {folder}")
    meta = read_meta(folder)
    ids = Ids.load(folder)
    tensors, _ = files.read_tensors(folder / "model.safetensors")
    taken, _ = files.read_tensors(folder / "seen.safetensors")
    offers = Offers.read(taken)
    seen = offers.seen
    given = model is not None
    if model is None and meta.get("towers"):
        model = own_model(folder, meta, ids, seen)
    if model is None:
        setup = parse_setup(meta["setup"])
        past = None
        if setup.model.query_tower == "history":
            if not {"query.start", "query.items"} <= tensors.keys():
                raise UserError(
                    f"{folder / 'model.safetensors'} does not fit this run: it has no histories for the history tower"
                )
            past = Histories(tensors["query.start"], tensors["query.items"])
        model = build_towers(setup, ids, past, folder)
    try:
        files.load_tensors(model, tensors, folder / "model.safetensors")
    except UserError as error:
        if given or meta["recipe"] != "custom":
            raise
        raise UserError(
            f"{error}; a model that is not as its Setup says is given as sparring.load(folder, model=...)"
        ) from error
    return Trained(folder, model.eval(), ids, seen, meta, offers)


def read_meta(folder: Path) -> dict[str, Any]:
    path = folder / "run.json"
    if not path.is_file():
        raise UserError(f"{folder} is not a run folder: it has no run.json")
    try:
        meta = json.loads(path.read_text())
        meta["setup"], meta["recipe"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is corrupt: {first_line(error)}") from error
    return dict(meta)


def run_vectors(folder: str | Path, split: Split) -> tuple[np.ndarray, np.ndarray]:
    """Item vectors of a finished run, and the row of each item of this data in them (-1 where the run did not know it).

    A run that was trained on pairs of this split's test part is refused: its vectors would tell what is tested.
    """
    trained, data = load(folder), split.train
    item = trained.ids.item_ids.encode(data.item_ids.ids)
    if split.test is not None and len(split.test):
        query = trained.ids.query_ids.encode(data.query_ids.ids)
        tested = query[split.test.queries], item[split.test.items]
        known = (tested[0] >= 0) & (tested[1] >= 0)
        n_items = len(trained.ids.item_ids)
        taken = np.repeat(np.arange(len(trained.seen.start) - 1), trained.seen.start.diff().numpy())
        seen = pair_keys(taken, trained.seen.items.numpy(), n_items)
        leaked = int(np.isin(pair_keys(tested[0][known], tested[1][known], n_items), seen).sum())
        if leaked:
            raise UserError(
                f"{folder} was trained on {leaked:,} pairs that are tested here: train it with the same split and seed"
            )
    return trained.model.item_vectors().detach().cpu().numpy(), item
