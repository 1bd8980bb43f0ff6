"""Several finished runs as one retriever: each lists its best items, and the lists are fused.

    parts/NAME/         a copy of each run, without its checkpoint; its index, if it has one
    model.safetensors   the weights of the runs
    run.json            `parts`: where each run came from, its id and the hash of its model

All other files are those of any run folder (folder.py); fusing.py writes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparring.core import files, manifest
from sparring.core.errors import UserError
from sparring.core.list_fusion import Pool, query_weights
from sparring.core.types import Positives
from sparring.data.interactions import Ids
from sparring.models.named import Model
from sparring.models.popularity import ConstantTower
from sparring.models.retriever import Retriever
from sparring.models.towers import HistoryReader
from sparring.recipes.finding import Recipe
from sparring.training import folder as run_folder
from sparring.training.eligibility import Eligibility, Ranking
from sparring.training.item_vectors import item_queries, item_vectors, mean_query

By = Literal["scores", "ranks"]
BY: tuple[By, ...] = ("scores", "ranks")
PARTS = "parts"
DEPTH = 200  # items that each source lists
_BLOCK = 256  # queries whose lists are fused at once


@dataclass(frozen=True, eq=False)
class Source:
    """One of several runs that list items: its model, and the queries and items that it does not know."""

    name: str
    folder: Path
    model: Retriever
    eligibility: Eligibility

    @property
    def blank(self) -> Tensor:
        """Queries without a training pair; popularity has the same list for all."""
        known = isinstance(self.model.query, ConstantTower)
        return self.eligibility.queries[:0] if known else self.eligibility.queries

    def history(self, items: Tensor) -> Tensor:
        """Vectors (B, D) of histories (B, L), padded with -1; zeros where the source knows none of the items."""
        out = torch.zeros(len(items), self.model.dim, device=items.device)
        known = (items >= 0) & ~torch.isin(items, self.eligibility.items.to(items))
        for row in torch.nonzero(known.any(1)).flatten().tolist():
            own = items[row][known[row]]
            if isinstance(self.model.query, HistoryReader):
                out[row] = self.model.encode_histories(own.unsqueeze(0))[0].float()
            else:
                vectors = self.model.encode_items(own).float().cpu().numpy()
                out[row] = torch.from_numpy(mean_query(self.model, vectors)[0]).to(out)
        return out

    def similar(self, items: Tensor) -> Tensor:
        """Vectors (n, D) of items as queries for similar items; zeros for those that the source does not know."""
        unknown = torch.isin(items, self.eligibility.items.to(items))
        return item_queries(self.model, items).float().masked_fill(unknown.unsqueeze(1), 0.0)


class QueryVectors(HistoryReader):
    """A query as its vectors in all sources, one after another; zeros where a source does not know the query."""

    def __init__(self, sources: Sequence[Source]) -> None:
        super().__init__()
        self.sources = list(sources)
        self.models = nn.ModuleList(source.model for source in sources)
        self.dims = [source.model.dim for source in sources]
        for number, source in enumerate(sources):
            self.register_buffer(f"blank{number}", source.blank.long())

    def forward(self, ids: Tensor) -> Tensor:
        parts = []
        for number, source in enumerate(self.sources):
            unknown = torch.isin(ids, getattr(self, f"blank{number}"))
            parts.append(source.model.encode_queries(ids).float().masked_fill(unknown.unsqueeze(-1), 0.0))
        return torch.cat(parts, -1)

    def encode_history(self, items: Tensor) -> Tensor:
        return torch.cat([source.history(items) for source in self.sources], -1)


class ItemVectors(nn.Module):
    """An item as its vectors in all sources, one after another."""

    def __init__(self, sources: Sequence[Source]) -> None:
        super().__init__()
        self.models, self.n = nn.ModuleList(source.model for source in sources), sources[0].model.n_items

    def forward(self, ids: Tensor) -> Tensor:
        return torch.cat([model.encode_items(ids).float() for model in self.models], -1)  # type: ignore[operator]


class Sources(Retriever):
    """A retriever whose lists are those of several retrievers, fused.

        scores   sum_s w_s (x_s - m_s) / d_s     x_s: score of the item; m_s, d_s: mean and deviation over the list
        ranks    sum_s w_s / (60 + r_s)          r_s: rank of the item; sources that do not list it add nothing

    Each source lists its `depth` best items, or k where that is more. By scores, each source also scores the items
    that only others list. A source has no say where it does not know the query. Where no source with a weight does,
    all that know it count alike: popularity, for example, even with the weight 0.

        Sources([Source("ease", ...), Source("default", ...)], "scores", [0.7, 0.3]).lists(query_ids, 20, seen)
    """

    weights: Tensor

    def __init__(self, sources: Sequence[Source], by: By, weights: Sequence[float], depth: int = DEPTH) -> None:
        super().__init__(QueryVectors(sources), ItemVectors(sources), "dot")
        self.sources, self.by, self.depth = list(sources), by, depth
        self.register_buffer("weights", torch.tensor(list(weights), dtype=torch.float32))
        self._prepared: tuple[torch.device, list[Ranking]] | None = None

    def parted(self, q: Tensor) -> list[Tensor]:
        """The vectors of queries (B, D) in each source."""
        return list(q.split([source.model.dim for source in self.sources], 1))

    def item_queries(self, items: Tensor) -> Tensor:
        """Items (n,) as queries (n, D) for similar items."""
        return torch.cat([source.similar(items) for source in self.sources], 1)

    def weights_of(self, parts: Sequence[Tensor]) -> Tensor:
        """(B, S): the weight of each source for each query."""
        return query_weights(self.weights, torch.stack([part.any(1) for part in parts], 1))

    def pool(self, q: Tensor, n: int, taken: Positives | None, by: By) -> Pool:
        """The n best items of each source for queries (B, D); row i of `taken` is of query i."""
        parts, rankings = self.parted(q), self._rankings()
        lists = [ranking.best(part, n, taken) for ranking, part in zip(rankings, parts, strict=True)]

        def score(source: int, items: Tensor) -> Tensor:
            return rankings[source].scores(parts[source], items)

        return Pool.of(lists, self.depth, score if by == "scores" else None)

    @torch.no_grad()
    def best(self, q: Tensor, k: int, taken: Positives | None = None) -> tuple[Tensor, Tensor]:
        """Fused scores and ids (B, k) of the best items, id -1 where none is left; row i of `taken` is of query i."""
        found = []
        for begin in range(0, len(q), _BLOCK):
            part = q[begin : begin + _BLOCK]
            known = None if taken is None else _rows(taken, begin, begin + len(part))
            pool = self.pool(part, max(k, self.depth), known, self.by)
            found.append(pool.best(self.weights_of(self.parted(part)), k))
        return torch.cat([scores for scores, _ in found]), torch.cat([items for _, items in found])

    def lists(self, ids: Tensor, k: int, seen: Positives | None) -> Tensor:
        """(B, k): the best items of these training queries, padded with -1."""
        known = None if seen is None else Eligibility(seen.to(torch.device("cpu")))
        parts = []
        for block in ids.split(_BLOCK):
            taken = None if known is None else known.taken(block.cpu())
            parts.append(self.best(self.query_vectors(block), k, taken)[1])
        return torch.cat(parts)

    def refresh(self) -> None:
        """Rank by new item vectors, which a trend changes, from now on."""
        self._prepared = None

    def _rankings(self) -> list[Ranking]:
        """The exact ranking of each source, on the device of the towers."""
        if self._prepared is None or self._prepared[0] != self.device:
            self._prepared = self.device, [self._ranking(source) for source in self.sources]
        return self._prepared[1]

    def _ranking(self, source: Source) -> Ranking:
        if source.model.scores_items:
            return source.eligibility.ranking(None, source.model.n_items)
        return source.eligibility.ranking(item_vectors(source.model, source.folder).float().to(self.device))


def _rows(taken: Positives, begin: int, end: int) -> Positives:
    """Rows [begin, end) of lists of items."""
    start = taken.start[begin : end + 1]
    return Positives(start - start[0], taken.items[int(start[0]) : int(start[-1])])


def difference(one: Ids, other: Ids) -> str | None:
    """How the ids of another run differ, to end a sentence: "no item 17"; None if they do not."""
    for side, ours, theirs in (
        ("query", one.query_ids.ids, other.query_ids.ids),
        ("item", one.item_ids.ids, other.item_ids.ids),
    ):
        if ours.equals(theirs):
            continue
        if ours.dtype != theirs.dtype:
            return f"{side} ids of type {theirs.dtype}, not {ours.dtype}"
        for word, have, lack in (("no", ours, theirs), ("another", theirs, ours)):
            missing = have.filter(~have.is_in(lack.implode()))
            if len(missing):
                return f"{word} {side} {missing[0]!r}"
        return f"its {side} ids in another order"
    return None


def is_fused(folder: Path) -> bool:
    """Whether a folder holds a fused run."""
    return (folder / PARTS).is_dir() and PARTS in run_folder.read_meta(folder)


def read_fused(
    folder: Path, model: str | Model | None = None, recipe: str | Recipe | None = None, trust: bool = False
) -> tuple[Sources, Ids, Eligibility, dict[str, Any]]:
    """The model of a fused run, its ids, its eligibility and run.json; `model`, `recipe` and `trust` as in `load`."""
    meta, listed = run_folder.read_meta(folder), run_folder.read_manifest(folder)
    if not listed.finished:
        raise UserError(f"{folder} is not finished, its writer was interrupted: fuse the runs again with --overwrite")
    tensors, state = run_folder.own_tensors(listed, "model.safetensors", meta)
    names: Any = state.get("parts")
    by: Any = state.get("by")
    depth: Any = state.get("depth")
    fits = isinstance(names, list) and names and isinstance(depth, int) and depth > 0 and by in BY
    if not fits or set(tensors) != {"weights"} or tensors["weights"].shape != (len(names),):
        path = folder / "model.safetensors"
        raise UserError(f"{path} is corrupt: it has no weights of the fused runs; fuse them again")
    ids = Ids.load(folder, listed)
    sources = []
    for name in names:
        place = files.inside(folder / PARTS, name)
        listed.path(f"{PARTS}/{name}/{manifest.NAME}")
        part, own, eligibility, _ = run_folder.read_run(place, model, recipe, trust)
        sources.append(Source(name, place, part, eligibility))
        if missing := difference(ids, own):
            raise UserError(f"{place} does not fit {folder}: it has {missing}; fuse the runs again")
    fused = Sources(sources, by, tensors["weights"].tolist(), depth)
    return fused, ids, run_folder.read_eligibility(listed, meta, ids), meta
