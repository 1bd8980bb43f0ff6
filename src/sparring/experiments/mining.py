"""Mining: from a corpus and queries to hard negatives with their scores, in blocks, and without the false ones.

Sources propose candidates: text encoders, runs and BM25. A guide scores them and the positives, and the bounds of
`Unless` drop candidates that are too near. Every block of queries is one file; a mining that was stopped continues
with the first block that is missing, and ends with the same bytes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import polars as pl
import torch
from torch import Tensor

from sparring.core import files
from sparring.core.errors import UserError
from sparring.core.extras import optional
from sparring.core.list_fusion import reciprocal_ranks, union
from sparring.core.locks import writing
from sparring.core.topk import in_order, top_k
from sparring.core.types import Positives, Step
from sparring.data.cache import hash_of
from sparring.data.interactions import TRAIN, Interactions
from sparring.data.pairs import csr
from sparring.data.texts.texts import ROLES, Role, text_of
from sparring.evaluation.bm25 import Bm25
from sparring.models.scorers import Vectors, is_cross_encoder, text_vectors
from sparring.negatives import Guide, ScoreFunction
from sparring.negatives.filtered import Bounds, first_left
from sparring.recipes.guides import OWN, TABLES, open_guide
from sparring.training.trained import load

Layout = Literal["triplet", "n-tuple", "n-tuple-scores", "labeled-pair", "labeled-list", "table"]
BM25 = "bm25"
SETTINGS = "mining.json"
_TEXTS = 8192  # items encoded and searched at a time
_PAIRS = 1 << 16  # pairs of vectors multiplied at a time
_EXAMPLES = 24  # queries shown in the report
_SPARE = 6  # candidates of an example beside those that were mined

Progress = Callable[[str, int, int | None], None]


@dataclass(frozen=True)
class Mining:
    """The settings of a mining: candidates of the ranks `first` to `last` (from 0, `last` excluded), `n` for each pair.

    `source` names one or more proposers: an encoder (bag, minilm, a folder), a run folder, or bm25. Several are joined
    by reciprocal ranks. The `guide` judges; it is the first source, unless named: another source, or a file or
    cross-encoder (recipes/guides.py). Ranks are counted before the guide drops any. `pick` takes the best n that are
    left, or n at random. `index` searches by a graph (hnsw) instead of exactly.
    """

    source: tuple[str, ...] = ("bm25",)
    guide: str | None = None
    first: int = 0
    last: int = 100
    n: int = 3
    relative: float | None = None
    margin: float | None = None
    most: float | None = None
    pick: Literal["top", "random"] = "top"
    layout: Layout = "triplet"
    scores: bool = False
    form: Literal["parquet", "jsonl"] = "parquet"
    index: Literal["exact", "hnsw"] = "exact"
    block: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.source:
            raise UserError(f"name a source of candidates: an encoder, a run folder or {BM25}")
        if not 0 <= self.first < self.last:
            raise UserError(f"the range {self.first} to {self.last} is empty: it needs 0 <= from < to")
        if not 1 <= self.n <= self.last - self.first:
            raise UserError(f"n is {self.n}; it must be between 1 and the {self.last - self.first} places of the range")
        if self.block < 1:
            raise UserError(f"block is {self.block}; it must be at least 1")
        try:
            self.bounds()
        except ValueError as error:
            raise UserError(str(error)) from error

    def bounds(self) -> Bounds:
        return Bounds(self.relative, self.margin, self.most)


@dataclass
class Mined:
    """The result: the folder, its files, counts, and examples for a person to look at."""

    folder: Path
    files: list[Path]
    pairs: int = 0
    rows: int = 0
    offered: int = 0
    left: int = 0  # of the offered, those that no bound dropped
    dropped: dict[str, int] = field(default_factory=dict)  # by each bound; several may drop one candidate
    short: int = 0  # pairs with fewer than n negatives
    unknown: int = 0  # candidates without a score of the guide
    examples: list[dict[str, Any]] = field(default_factory=list)


def mine(
    data: Interactions,
    out: str | Path,
    mining: Mining = Mining(),
    *,
    device: str = "auto",
    progress: Progress | None = None,
    overwrite: bool = False,
) -> Mined:
    """Mine hard negatives for the training pairs of the data, into the folder `out`.

    The corpus is the item table, the queries are those with a training pair (all pairs where the data has no split).
    All known positives of a query are left out. Rows hold texts, as sentence-transformers writes and reads them
    (`mine_hard_negatives`); layout="table" holds ids with a score for every candidate, such as a guide reads.
    Memory holds a block of queries, a part of the item vectors, and the texts.

        mine(read("scifact"), "mined", Mining(("minilm",), first=10, last=100, relative=0.95, n=5))
    """
    with writing(Path(out)):
        return _mined(data, Path(out), mining, device, progress or (lambda name, done, total: None), overwrite)


def _mined(data: Interactions, out: Path, mining: Mining, device: str, report: Progress, overwrite: bool) -> Mined:
    if overwrite and (out / SETTINGS).is_file():
        shutil.rmtree(out)
    texts = {role: _texts(data, role) for role in ROLES}
    _begin(out, mining, data, texts)
    pairs = np.flatnonzero(data.split == TRAIN) if data.split is not None else np.arange(len(data))
    if not len(pairs):
        raise UserError("the data has no training pair: there is nothing to mine negatives for")
    pairs = pairs[np.argsort(data.queries[pairs], kind="stable")]
    queries = np.unique(data.queries[pairs])
    made: dict[str, _Source] = {}

    def source(name: str) -> _Source:
        if name not in made:
            made[name] = _source(name, out / "work" / str(len(made)), texts, mining.index, device, report)
        return made[name]

    def guide() -> Guide:
        name = mining.source[0] if mining.guide is None else mining.guide
        if name == OWN:
            raise UserError(f"guide={OWN} is the model in training: name an encoder, a run, {BM25}, a file or a folder")
        if ".npy" in name or name.endswith(TABLES) or is_cross_encoder(name):
            return open_guide(name, data.subset(pairs))
        return ScoreFunction(source(name).scores)

    blocks = np.array_split(queries, np.arange(mining.block, len(queries), mining.block))
    shown = set(queries[np.linspace(0, len(queries) - 1, min(_EXAMPLES, len(queries))).astype(int)].tolist())
    mined, judge, known = Mined(out, []), None, data.positives()
    for number, block in enumerate(blocks):
        part, facts = out / "parts" / f"{number:05d}.{mining.form}", out / "facts" / f"{number:05d}.json"
        if not part.is_file():
            sources, judge = [source(name) for name in mining.source], judge or guide()
            found = _block(mining, data, texts, sources, judge, block, pairs, known, shown, number)
            files.write_json(facts, found.facts)
            _write(found.rows, part)
        _add(mined, files.read_json(facts))
        mined.files.append(part)
        report("mining", min((number + 1) * mining.block, len(queries)), len(queries))
    shutil.rmtree(out / "work", ignore_errors=True)
    return mined


@dataclass(frozen=True)
class _Found:
    rows: pl.DataFrame
    facts: dict[str, Any]


def _block(
    mining: Mining,
    data: Interactions,
    texts: dict[Role, pl.Series],
    sources: Sequence[_Source],
    guide: Guide,
    queries: np.ndarray,
    pairs: np.ndarray,
    known: Positives,
    shown: set[int],
    number: int,
) -> _Found:
    """The rows of one block of queries, and its facts for the report."""
    of_pairs = data.queries[pairs]  # ascending
    rows = pairs[np.searchsorted(of_pairs, queries[0]) : np.searchsorted(of_pairs, queries[-1], "right")]
    of, positive = torch.from_numpy(data.queries[rows]).long(), torch.from_numpy(data.items[rows]).long()
    candidates = _candidates(mining, sources, queries, known)
    ids = candidates[torch.from_numpy(np.searchsorted(queries, of.numpy()))]
    step = _step(of, positive)
    scores = guide(step, ids, None)
    own = guide(step, positive.unsqueeze(1), None)
    _check_scored(own, of, positive, data, mining)
    offered = ids >= 0
    reached = {name: mask & offered for name, mask in mining.bounds().reached(scores, own).items()}
    left = offered.clone()
    for mask in reached.values():
        left &= ~mask
    order = -torch.arange(ids.shape[1]).float().expand(ids.shape)
    if mining.pick == "random":
        generator = torch.Generator().manual_seed((mining.seed << 20) + number)
        order = torch.rand(ids.shape, generator=generator)
    chosen, places = first_left(order, left, ids, mining.n)
    values = scores.gather(1, places)
    facts: dict[str, Any] = {
        "pairs": len(rows),
        "offered": int(offered.sum()),
        "left": int(left.sum()),
        "dropped": {name: int(mask.sum()) for name, mask in reached.items()},
        "short": int(((chosen >= 0).sum(1) < mining.n).sum()),
        "unknown": int((scores.isnan() & offered).sum()),
        "examples": _examples(mining, data, texts, of, positive, own, ids, scores, left, chosen, reached, shown),
    }
    layout = LAYOUT[mining.layout]
    table = layout(_Rows(data, texts, of, positive, own.flatten(), chosen, values, ids, scores, left, mining))
    return _Found(table, facts | {"rows": len(table)})


def _candidates(mining: Mining, sources: Sequence[_Source], queries: np.ndarray, known: Positives) -> Tensor:
    """(B, last - first): the candidates of each query by rank, -1 for none; known positives are left out."""
    lists = [source.search(queries, mining.last, known)[1] for source in sources]
    if len(lists) == 1:
        ids = lists[0]
    else:
        items = union(lists)
        ranks = torch.stack([reciprocal_ranks(items, listed) for listed in lists]).sum(0)
        ids = in_order(ranks.masked_fill(items < 0, -torch.inf), items, min(mining.last, items.shape[1]))[1]
    return ids[:, mining.first : mining.last]


def _step(queries: Tensor, items: Tensor) -> Step:
    """A step that knows ids alone, for guides that score by ids."""
    nothing = torch.zeros(len(queries), 1)
    return Step(queries, items, nothing, nothing, torch.ones(()), lambda ids: ids, torch.Generator())


def _check_scored(own: Tensor, of: Tensor, positive: Tensor, data: Interactions, mining: Mining) -> None:
    missing = own.isnan().flatten()
    if bool(missing.any()) and (mining.bounds().compares or mining.scores):
        first = int(missing.int().argmax())
        pair = f"query {data.query_ids.ids[int(of[first])]} and item {data.item_ids.ids[int(positive[first])]}"
        raise UserError(f"the guide {mining.guide} has no score for the pair of {pair}: score every training pair")


# Sources


class _Source(Protocol):
    """Candidates of queries, and scores of pairs."""

    def search(self, queries: np.ndarray, k: int, known: Positives) -> tuple[Tensor, Tensor]:
        """Scores and ids (B, k) of the best items of each query, without known positives; -1 for none."""

    def scores(self, queries: Tensor, items: Tensor) -> Tensor:
        """(P,) the scores of pairs."""


class _Dense:
    """Vectors of a text model: those of items in files, a part at a time; those of queries when they are needed."""

    def __init__(self, encode: Vectors, texts: dict[Role, pl.Series], folder: Path, index: str, report: Progress):
        self.encode, self.texts = encode, texts
        paths = _encoded(encode, texts["item"], folder, report)
        self.parts = [files.read_array(path, np.float32) for path in paths]  # memory maps
        self.begin = np.arange(len(self.parts)) * _TEXTS
        self.graph = None if index == "exact" else _graph(self.parts, folder / "graph.faiss")
        self._last: tuple[np.ndarray, Tensor] = np.zeros(0, np.int64), torch.zeros(0, 1)

    def vectors(self, queries: np.ndarray) -> Tensor:
        """Vectors of queries, ascending ids; the last block is kept."""
        if not np.array_equal(self._last[0], queries):
            self._last = queries, self.encode(self.texts["query"].gather(queries).to_list(), "query").cpu()
        return self._last[1]

    def search(self, queries: np.ndarray, k: int, known: Positives) -> tuple[Tensor, Tensor]:
        q = self.vectors(queries)
        if self.graph is not None:
            return _by_graph(self.graph, q, queries, k, known)
        best, ids = torch.full((len(q), k), -torch.inf), torch.full((len(q), k), -1)
        taken = known.of(torch.from_numpy(queries).long())
        assert taken.rows is not None
        rows, items = taken.rows.numpy(), taken.ids.numpy()
        for begin, part in zip(self.begin.tolist(), self.parts, strict=True):
            inside = (items >= begin) & (items < begin + len(part))
            seen = csr(rows[inside], items[inside] - begin, len(q), len(part))
            values, found = top_k(q, torch.from_numpy(np.array(part)), k, seen, torch.arange(len(q)))
            found = torch.where(found >= 0, found + begin, -1)
            best, ids = in_order(torch.cat([best, values], 1), torch.cat([ids, found], 1), k)
        return best, torch.where(torch.isneginf(best), -1, ids)

    def scores(self, queries: Tensor, items: Tensor) -> Tensor:
        distinct, which = np.unique(queries.numpy(), return_inverse=True)
        q, found = self.vectors(distinct), torch.empty(len(queries))
        for begin in range(0, len(queries), _PAIRS):
            at = items[begin : begin + _PAIRS].numpy()
            v = torch.empty(len(at), q.shape[1])
            for number in np.unique(at // _TEXTS).tolist():
                here = np.flatnonzero(at // _TEXTS == number)
                v[here] = torch.from_numpy(self.parts[number][at[here] - number * _TEXTS])
            found[begin : begin + _PAIRS] = (q[which[begin : begin + _PAIRS]] * v).sum(1)
        return found


class _Lexical:
    """Words alone (evaluation/bm25.py)."""

    def __init__(self, texts: dict[Role, pl.Series]):
        self.texts, self.index = texts["query"], Bm25(texts["item"])

    def search(self, queries: np.ndarray, k: int, known: Positives) -> tuple[Tensor, Tensor]:
        ids, scores = map(torch.from_numpy, self.index.best(self.texts.gather(queries), k, known, queries))
        return scores.masked_fill(ids < 0, -torch.inf), ids

    def scores(self, queries: Tensor, items: Tensor) -> Tensor:
        distinct, which = np.unique(queries.numpy(), return_inverse=True)
        found = torch.empty(len(queries))
        order = np.argsort(which, kind="stable")
        places = np.split(order, np.cumsum(np.bincount(which))[:-1])
        for here, row in zip(places, self.index.scores(self.texts.gather(distinct)), strict=True):
            found[here] = torch.from_numpy(np.asarray(row, np.float32)[items.numpy()[here]])
        return found


def _source(
    name: str, folder: Path, texts: dict[Role, pl.Series], index: str, device: str, report: Progress
) -> _Source:
    if name == BM25:
        return _Lexical(texts)
    if (Path(name) / "run.json").is_file():
        trained = load(name)

        def encode(strings: Sequence[str], role: Role) -> Tensor:
            return trained.encode_texts(strings, role).float()

        return _Dense(encode, texts, folder, index, report)
    return _Dense(text_vectors(name, device), texts, folder, index, report)


def _encoded(encode: Vectors, texts: pl.Series, folder: Path, report: Progress) -> list[Path]:
    """Files of the vectors of items, _TEXTS in each; those that exist are kept."""
    paths = []
    for number in range(-(-len(texts) // _TEXTS)):
        path = folder / f"{number:05d}.npy"
        if not path.is_file():
            part = encode(texts.slice(number * _TEXTS, _TEXTS).to_list(), "item")
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write_array(path, part.cpu().numpy())
        paths.append(path)
        report("encoding items", min((number + 1) * _TEXTS, len(texts)), len(texts))
    return paths


def _graph(parts: Sequence[np.ndarray], path: Path) -> Any:
    """A graph over all item vectors, built once by one thread, so that its lists do not depend on the machine."""
    faiss = optional("faiss", "serve", "mining by an index")
    if not path.is_file():
        threads = faiss.omp_get_max_threads()
        faiss.omp_set_num_threads(1)
        graph = faiss.IndexHNSWFlat(parts[0].shape[1], 32, faiss.METRIC_INNER_PRODUCT)
        for part in parts:
            graph.add(np.ascontiguousarray(part))
        faiss.omp_set_num_threads(threads)
        files.write(path, lambda beside: faiss.write_index(graph, str(beside)))
    return faiss.read_index(str(path))


def _by_graph(graph: Any, q: Tensor, queries: np.ndarray, k: int, known: Positives) -> tuple[Tensor, Tensor]:
    taken = known.of(torch.from_numpy(queries).long())
    assert taken.rows is not None
    most = int(torch.bincount(taken.rows, minlength=1).max())
    graph.hnsw.efSearch = max(128, 2 * (k + most))
    values, ids = (torch.from_numpy(part) for part in graph.search(q.numpy(), min(k + most, graph.ntotal)))
    values[taken.hits(ids)] = -torch.inf
    values, ids = in_order(values.masked_fill(ids < 0, -torch.inf), ids, min(k, ids.shape[1]))
    return values, torch.where(torch.isneginf(values), -1, ids)


# Layouts


@dataclass(frozen=True)
class _Rows:
    """The pairs of a block with their negatives."""

    data: Interactions
    texts: dict[Role, pl.Series]
    queries: Tensor  # (P,)
    positives: Tensor  # (P,)
    own: Tensor  # (P,) scores of the positives
    chosen: Tensor  # (P, n) negatives, -1 for none
    values: Tensor  # (P, n) their scores
    offered: Tensor  # (P, C) candidates
    scores: Tensor  # (P, C)
    left: Tensor  # (P, C) not dropped
    mining: Mining

    def text(self, role: Role, ids: Tensor) -> list[str]:
        return self.texts[role].gather(ids.numpy()).to_list()

    def taken(self) -> Tensor:
        """(P,) bool: pairs with all n negatives."""
        return (self.chosen >= 0).all(1)


def _triplet(rows: _Rows) -> pl.DataFrame:
    """A row for each pair and negative."""
    at, place = torch.nonzero(rows.chosen >= 0).unbind(1)
    table = {
        "anchor": rows.text("query", rows.queries[at]),
        "positive": rows.text("item", rows.positives[at]),
        "negative": rows.text("item", rows.chosen[at, place]),
    }
    if rows.mining.scores:
        table["scores"] = torch.stack([rows.own[at], rows.values[at, place]], 1).tolist()
    return pl.DataFrame(table, schema_overrides=_TYPES)


def _n_tuple(rows: _Rows) -> pl.DataFrame:
    """A row for each pair that has all n negatives."""
    full = rows.taken()
    chosen = rows.chosen[full]
    table = {
        "anchor": rows.text("query", rows.queries[full]),
        "positive": rows.text("item", rows.positives[full]),
        **{f"negative_{j + 1}": rows.text("item", chosen[:, j]) for j in range(rows.mining.n)},
    }
    if rows.mining.scores or rows.mining.layout == "n-tuple-scores":
        table["scores"] = torch.cat([rows.own[full].unsqueeze(1), rows.values[full]], 1).tolist()
    return pl.DataFrame(table, schema_overrides=_TYPES)


def _labeled_pair(rows: _Rows) -> pl.DataFrame:
    """A row for each positive (label 1) and each negative of a query (0), or with their scores instead."""
    listed: dict[tuple[int, int], tuple[int, float]] = {}
    for query, positive, own, chosen, values in zip(
        rows.queries.tolist(),
        rows.positives.tolist(),
        rows.own.tolist(),
        rows.chosen.tolist(),
        rows.values.tolist(),
        strict=True,
    ):
        listed.setdefault((query, positive), (1, own))
        for item, value in zip(chosen, values, strict=True):
            if item >= 0:
                listed.setdefault((query, item), (0, value))
    order = sorted(listed, key=lambda pair: (pair[0], -listed[pair][0]))
    ids = torch.tensor(order, dtype=torch.long).reshape(-1, 2)
    table: dict[str, Any] = {"anchor": rows.text("query", ids[:, 0]), "positive": rows.text("item", ids[:, 1])}
    labels = [listed[pair] for pair in order]
    table |= {"score": [own for _, own in labels]} if rows.mining.scores else {"label": [label for label, _ in labels]}
    return pl.DataFrame(table, schema_overrides=_TYPES)


def _labeled_list(rows: _Rows) -> pl.DataFrame:
    """A row for each pair with a negative: the list of its texts, the positive first, and their labels or scores."""
    found: dict[str, list[Any]] = {"anchor": [], "positive": [], "scores" if rows.mining.scores else "labels": []}
    for at in torch.nonzero((rows.chosen >= 0).any(1)).flatten().tolist():
        kept = rows.chosen[at] >= 0
        found["anchor"] += rows.text("query", rows.queries[at : at + 1])
        found["positive"].append(rows.text("item", torch.cat([rows.positives[at : at + 1], rows.chosen[at][kept]])))
        if rows.mining.scores:
            found["scores"].append([float(rows.own[at]), *rows.values[at][kept].tolist()])
        else:
            found["labels"].append([1, *[0] * int(kept.sum())])
    kinds: dict[str, Any] = {"anchor": pl.String, "positive": pl.List(pl.String)}
    kinds |= {"scores": pl.List(pl.Float64)} if rows.mining.scores else {"labels": pl.List(pl.Int64)}
    return pl.DataFrame(found, schema=kinds)


def _table(rows: _Rows) -> pl.DataFrame:
    """A row for each query and item that was scored, by id: a table of scores for a guide."""
    at, place = torch.nonzero(rows.offered >= 0).unbind(1)
    parts = [
        (rows.queries, rows.positives, rows.own, torch.ones(len(rows.queries), dtype=torch.long)),
        (rows.queries[at], rows.offered[at, place], rows.scores[at, place], torch.zeros(len(at), dtype=torch.long)),
    ]
    query, item, score, label = (torch.cat(columns) for columns in zip(*parts, strict=True))
    table = pl.DataFrame(
        {
            "query": rows.data.query_ids.decode(query.numpy()),
            "item": rows.data.item_ids.decode(item.numpy()),
            "score": score.double().numpy(),
            "label": label.numpy(),
        }
    )
    return table.unique(["query", "item"], keep="first", maintain_order=True)


_TYPES = {"anchor": pl.String, "positive": pl.String, "negative": pl.String}
LAYOUT: dict[str, Callable[[_Rows], pl.DataFrame]] = {
    "triplet": _triplet,
    "n-tuple": _n_tuple,
    "n-tuple-scores": _n_tuple,
    "labeled-pair": _labeled_pair,
    "labeled-list": _labeled_list,
    "table": _table,
}


# Files


def _texts(data: Interactions, role: Role) -> pl.Series:
    """The texts of queries or items; an empty one is an error."""
    texts = text_of(data, role)
    empty = (texts.str.strip_chars() == "").to_numpy()
    if empty.any():
        ids = data.query_ids if role == "query" else data.item_ids
        named = f"{int(empty.sum()):,} of {len(texts):,} {'queries' if role == 'query' else 'items'}"
        raise UserError(
            f"{named} have no text, such as {ids.ids[int(empty.argmax())]!r}: give them one or leave them out"
        )
    return texts


def _begin(out: Path, mining: Mining, data: Interactions, texts: dict[Role, pl.Series]) -> None:
    """Make the folder, or check that it holds the same mining."""
    if mining.last - mining.first > data.n_items and mining.first >= data.n_items:
        raise UserError(f"the range begins at {mining.first}, beyond the {data.n_items:,} items")
    arrays = [data.queries, data.items, *([] if data.split is None else [data.split])]
    content = hash_of([*(array.tobytes() for array in arrays), *(text for role in ROLES for text in texts[role])])
    wanted = json.loads(json.dumps({**asdict(mining), "data": content}))
    if (out / SETTINGS).is_file():
        found = files.read_json(out / SETTINGS)
        changed = [name for name in wanted if found.get(name) != wanted[name]]
        if changed:
            was = ", ".join(f"{name}={found.get(name)}" for name in changed if name != "data") or "other data"
            raise UserError(f"{out} holds a mining with {was}: choose another folder, or --overwrite")
    elif out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty and holds no mining: choose another folder")
    for folder in (out / "parts", out / "facts"):
        folder.mkdir(parents=True, exist_ok=True)
        files.sweep(folder)
    files.write_json(out / SETTINGS, wanted)


def _write(rows: pl.DataFrame, path: Path) -> None:
    if path.suffix == ".parquet":
        files.write_table(rows, path)
    else:
        files.write(path, lambda beside: rows.write_ndjson(beside))


def _add(mined: Mined, facts: dict[str, Any]) -> None:
    for name in ("pairs", "rows", "offered", "left", "short", "unknown"):
        setattr(mined, name, getattr(mined, name) + facts[name])
    for name, number in facts["dropped"].items():
        mined.dropped[name] = mined.dropped.get(name, 0) + number
    mined.examples += facts["examples"]


def _examples(
    mining: Mining,
    data: Interactions,
    texts: dict[Role, pl.Series],
    of: Tensor,
    positive: Tensor,
    own: Tensor,
    ids: Tensor,
    scores: Tensor,
    left: Tensor,
    chosen: Tensor,
    reached: dict[str, Tensor],
    shown: set[int],
) -> list[dict[str, Any]]:
    """Some pairs with their first candidates: taken, left over, or dropped and why."""
    examples, done = [], set()
    for row, query in enumerate(of.tolist()):
        if query not in shown or query in done:
            continue
        done.add(query)
        taken, spare = set(chosen[row].tolist()), 0
        listed: list[dict[str, Any]] = []
        for place in range(ids.shape[1]):
            item = int(ids[row, place])
            why = [name for name, mask in reached.items() if bool(mask[row, place])]
            fate = "dropped" if why else "mined" if item in taken else "not needed"
            spare += fate != "mined"
            if item < 0 or (spare > _SPARE and fate != "mined"):
                continue
            value = float(scores[row, place])
            listed.append(
                {
                    "rank": mining.first + place,
                    "item": str(data.item_ids.ids[item]),
                    "text": texts["item"][item],
                    "score": None if np.isnan(value) else value,
                    "fate": fate,
                    "why": ", ".join(why),
                }
            )
        examples.append(
            {
                "query": texts["query"][query],
                "positive": texts["item"][int(positive[row])],
                "score": None if bool(own[row].isnan()) else float(own[row]),
                "candidates": listed,
            }
        )
    return examples
