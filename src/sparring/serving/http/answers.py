"""From a request to its response: look up ids, resolve filters, search, and write the result as JSON."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np
import orjson

from sparring import __version__
from sparring.recipes.finding import short
from sparring.serving.http import schema as s
from sparring.serving.http.conditions import check_column
from sparring.serving.http.runs import RunRegistry
from sparring.serving.http.schema import MAX_VALUES, Listed, Query, Recommend, RequestError, Similar
from sparring.serving.http.searcher import Searcher, SearchJob
from sparring.serving.http.served_run import ServedRun
from sparring.serving.http.threads import in_thread
from sparring.training.sources import Sources

_Q = TypeVar("_Q", Recommend, Similar)
_NONE = np.empty(0, np.int64)
_KINDS = ("user", "users", "history", "text", "texts")
_PLAIN = frozenset({"user", "k", "run", "fields", "exclude_seen"})  # of requests without filters
_TEXTS = 8  # texts encoded at a time; a request that has ended encodes no more


class Answering:
    """Answers queries to the runs that are served now.

    Slow work leaves the event loop: one thread (`encoder`) encodes texts and histories, another (`filterer`) resolves
    filters, and `searcher` searches.
    """

    def __init__(self, registry: RunRegistry, searcher: Searcher, encoder: Executor, filterer: Executor) -> None:
        self.registry, self.searcher, self.encoder, self.filterer = registry, searcher, encoder, filterer

    def plain_recommend(self, body: bytes) -> Awaitable[bytes] | None:
        """The response to a valid request; None for any other: the application names its error."""
        query = _parsed(Recommend, body)
        if query is None:
            return None
        if query.user is None or not query.model_fields_set <= _PLAIN:
            return self.recommend(query)
        return self.searcher.submit(self._user_job(query))

    def plain_similar(self, body: bytes) -> Awaitable[bytes] | None:
        """The response to a valid request; None for any other: the application names its error."""
        query = _parsed(Similar, body)
        if query is None:
            return None
        return self.similar(query) if _filtered(query) else self.searcher.submit(self._item_job(query))

    async def recommend(self, query: Recommend) -> bytes:
        """The best items for users, for a history or for texts; the JSON of `Answers`."""
        kinds = _kinds(query)
        if len(kinds) != 1:
            both = f", not {' and '.join(kinds)} together" if kinds else ""
            raise RequestError(422, f"give one of {', '.join(_KINDS)}{both}")
        if kinds[0] == "history":
            job = await self._history_job(query, query.history or [])
        elif kinds[0] in ("text", "texts"):
            job = await self._text_job(query, [query.text or ""] if query.texts is None else query.texts)
        else:
            job = self._user_job(query)
        return await self._search(query, job)

    async def similar(self, query: Similar) -> bytes:
        """The nearest neighbours of each item, without the item itself."""
        return await self._search(query, self._item_job(query))

    def _user_job(self, query: Recommend) -> SearchJob:
        served = self.registry.served(query.run)
        queries = [query.user] if query.user is not None else query.users or []
        users, missing = _find_known(served.users.find_one, queries, "user", served)
        fields = _fields(served, query, len(queries))
        exclude = [served.seen(user) for user in users] if _excludes_seen(served, query) else [_NONE] * len(users)
        return SearchJob(served, queries, users, None, query.k, exclude, fields=fields, missing=missing)

    def _item_job(self, query: Similar) -> SearchJob:
        served = self.registry.served(query.run)
        if (query.item is None) == (query.items is None):
            raise RequestError(422, "give one of item, items")
        queries = [query.item] if query.item is not None else query.items or []
        known, missing = _find_known(served.catalogue.find_one, queries, "item", served)
        items = np.array(known, np.int64)
        vectors, fields = served.item_queries(items), _fields(served, query, len(queries))
        own = list(items[:, None])
        return SearchJob(served, queries, None, vectors, query.k, own, fields=fields, missing=missing, similar=True)

    async def _history_job(self, query: Recommend, history: list[int | str]) -> SearchJob:
        served = self.registry.served(query.run)
        fields = _fields(served, query)
        items, usable, vector = await in_thread(self.encoder, _history, served, history)
        exclude = [items[items >= 0] if _excludes_seen(served, query) else _NONE]
        unknown = [history[row] for row in np.flatnonzero(~usable).tolist()]
        return SearchJob(served, [history], None, vector, query.k, exclude, fields=fields, unknown=unknown)

    async def _text_job(self, query: Recommend, texts: list[str]) -> SearchJob:
        served = self.registry.served(query.run)
        if "text" not in served.answers:
            message = f"the query tower of run {served.name} does not read texts: ask for a user or a history"
            raise RequestError(422, message)
        fields = _fields(served, query, len(texts))
        parts = [texts[begin : begin + _TEXTS] for begin in range(0, len(texts), _TEXTS)]
        vectors = np.concatenate([await in_thread(self.encoder, _text_vectors, served, part) for part in parts])
        return SearchJob(served, texts, None, vectors, query.k, [_NONE] * len(texts), fields=fields)

    async def _search(self, query: Query, job: SearchJob) -> bytes:
        if _filtered(query):
            await in_thread(self.filterer, _resolve_filters, job, query)
        return await self.searcher.submit(job)

    def info(self, limits: s.Limits) -> s.Info:
        """The runs, the item columns and the limits."""
        default = self.registry.served()
        changed, deleted = self.registry.store.counts()
        return s.Info(
            version=__version__,
            run=_run_info(default),
            runs=[_run_info(served) for served in self.registry.runs],
            columns=[
                s.ColumnInfo(name=name, type=kind, dtype=dtype) for name, kind, dtype in default.catalogue.columns
            ],
            changed=changed,
            deleted=deleted,
            limits={
                "k": s.MAX_K,
                "queries": s.MAX_QUERIES,
                "ids": s.MAX_IDS,
                "items": s.MAX_ITEMS,
                "values": MAX_VALUES,
                "body": limits.body,
                "seconds": limits.seconds,
            },
        )

    def item(self, id: str, run: str | None) -> s.ItemInfo:
        """One item with all its columns."""
        served = self.registry.served(run)
        catalogue, dense = served.catalogue, served.find_item(id)
        listed = served.listed(dense)
        if not listed and dense in served.moved:
            raise RequestError(404, f"item {id[:200]!r} was deleted")
        columns = {name: _json_value(value) for name, value in catalogue.row(dense).items() if name != "title"}
        one = np.array([dense])
        changed = dense in catalogue.changed or dense in served.moved
        source: Any = "added" if dense >= len(catalogue.base) else "changed" if changed else "run"
        title = catalogue.values(one, "title")[0]
        return s.ItemInfo(id=catalogue.original(one)[0], title=title, columns=columns, source=source, placed=listed)

    def user(self, id: str, run: str | None, limit: int) -> s.UserInfo:
        """One user: history and columns."""
        served = self.registry.served(run)
        dense = served.users.find_one(id)
        if dense < 0:
            raise RequestError(404, f"run {served.name} does not know user {id[:200]!r}")
        items, ordered = served.history(dense)
        last = items[-limit:].astype(np.int64)
        named = zip(served.catalogue.original(last), served.catalogue.values(last, "title"), strict=True)
        table = served.trained.ids.query_table
        row = {} if table is None else table.row(dense, named=True)
        return s.UserInfo(
            id=served.users.original(np.array([dense]))[0],
            history=[s.HistoryItem(id=item, title=title) for item, title in named],
            total=len(items),
            ordered=ordered,
            columns={name: _json_value(value) for name, value in row.items()},
        )


def write_responses(jobs: Sequence[SearchJob], scores: np.ndarray, items: np.ndarray) -> list[bytes]:
    """The responses of a batch as JSON: per query its items with id, title, score and the requested columns.

    The catalogue has the JSON of ids and titles; columns are looked up once per batch.
    """
    served = jobs[0].served
    present = items >= 0
    dense = items[present]
    rounded = scores[present].astype(np.float64).round(6)
    texts = orjson.dumps(rounded, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1].split(b",") if len(dense) else []
    for name in jobs[0].fields:
        key, values = b",%b:" % orjson.dumps(name), served.catalogue.values(dense, name)
        texts = [text + key + orjson.dumps(value, default=str) for text, value in zip(texts, values, strict=True)]
    parts = [b""] * (2 * len(dense))
    parts[::2], parts[1::2] = served.catalogue.listed(dense), texts
    ends = present.sum(1).cumsum().tolist()
    run = b'],"run":%b,"generation":%d' % (orjson.dumps(served.name), served.generation)
    responses, query, start = [], 0, 0
    for job in jobs:
        results = []
        for asked in job.queries:
            listed, unknown = b"", job.unknown
            if job.missing and asked in job.missing:
                unknown = [asked]
            else:
                if ends[query] > start:
                    listed = b"".join(parts[2 * start : 2 * ends[query]])[2:] + b"}"
                query, start = query + 1, ends[query]
            rest = b',"unknown":%b' % orjson.dumps(unknown) if unknown else b""
            results.append(b'{"query":%b,"items":[%b]%b}' % (orjson.dumps(asked), listed, rest))
        sources = b',"sources":%b' % orjson.dumps(job.sources) if job.sources else b""
        responses.append(b'{"results":[%b%b%b}' % (b",".join(results), run, sources))
    return responses


def _parsed(kind: type[_Q], body: bytes) -> _Q | None:
    try:
        return kind.__pydantic_validator__.validate_json(body)  # type: ignore[no-any-return]
    except ValueError:  # the application reports the error
        return None


def _filtered(query: Query) -> bool:
    return query.allow is not None or bool(query.deny) or bool(query.where)


def _kinds(query: Recommend) -> list[str]:
    return [name for name in _KINDS if getattr(query, name) is not None]


def _excludes_seen(served: ServedRun, query: Recommend) -> bool:
    """Whether to leave out seen items: as asked, else unless the run keeps repeats."""
    return not served.trained.lists_seen(None if query.exclude_seen is None else not query.exclude_seen)


def _find_known(
    find: Callable[[int | str], int], asked: Sequence[int | str], what: str, served: ServedRun
) -> tuple[list[int], frozenset[int | str]]:
    """(dense ids of the known ones, the unknown ones); an error if none is known."""
    dense = [find(id) for id in asked]
    if -1 not in dense:
        return dense, frozenset()
    known = [row for row in dense if row >= 0]
    if not known:
        raise RequestError(404, f"run {served.name} does not know {what} {str(asked[0])[:200]!r}")
    return known, frozenset(id for id, row in zip(asked, dense, strict=True) if row < 0)


def _fields(served: ServedRun, query: Query, queries: int = 1) -> tuple[str, ...]:
    """The columns to return besides id, title and score; an error if the response would be too large."""
    asked = query.fields or ()
    for name in asked:
        check_column(name, served.catalogue.schema)
    fields = tuple([name for name in dict.fromkeys(asked) if name not in Listed.model_fields]) if asked else ()
    values = queries * query.k * (3 + len(fields))
    if values > MAX_VALUES:
        how = "ask for fewer queries, a smaller k or fewer fields"
        raise RequestError(422, f"the response would have {values:,} values; the limit is {MAX_VALUES:,}: {how}")
    return fields


def _resolve_filters(job: SearchJob, query: Query) -> None:
    """Set the items that a job may and may not list, and a key that is equal for equal filters."""
    catalogue = job.served.catalogue
    where = [(condition.column, condition.op, condition.value) for condition in query.where or ()]
    asked = orjson.dumps([where, query.allow, query.deny])  # in JSON 1, 1.0, "1" and true differ; in Python most agree
    job.filters = blake2b(asked, digest_size=16).digest(), catalogue.version
    job.deny = None if not query.deny else _known(catalogue.find(query.deny))
    job.passing = catalogue.passing(where) if where else None
    if query.allow is not None:
        allow = _known(catalogue.find(query.allow))
        if job.passing is not None:
            bits = np.unpackbits(job.passing)
            allow, job.passing = allow[allow < len(bits)], None
            allow = allow[bits[allow] == 1]
        job.allow = allow


def _known(dense: np.ndarray) -> np.ndarray:
    return np.unique(dense[dense >= 0])


def _history(served: ServedRun, history: list[int | str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(dense ids, which of them are usable, the vector of those)."""
    items = served.catalogue.find(history)
    usable = served.usable_in_history(items)
    if not usable.any():
        raise RequestError(404, f"run {served.name} knows none of the {len(history)} items in the history")
    return items, usable, served.history_vector(items[usable])


def _text_vectors(served: ServedRun, texts: list[str]) -> np.ndarray:
    return served.trained.encode_texts(texts, "query").float().numpy()


def _run_info(served: ServedRun) -> s.RunInfo:
    measured = served.index.meta.get("measured") or {}
    return s.RunInfo(
        name=served.name,
        folder=str(served.folder),
        recipe=short(str(served.trained.meta.get("recipe", ""))),
        items=len(served.index),
        queries=len(served.users),
        dim=served.index.dim,
        score=served.trained.model.score,
        ranking=served.ranking,
        index=served.index.kind,
        recall=1.0 if served.index.kind == "exact" else measured.get("recall"),
        answers=served.answers,
        sources=_weights(served),
        history_by="tower" if served.by_history else "mean",
        places_by=served.placer.ways,
        generation=served.generation,
        notes=served.notes,
        waiting=len(served.waiting),
    )


def _weights(served: ServedRun) -> dict[str, float] | None:
    model = served.trained.model
    if not isinstance(model, Sources):
        return None
    return {source.name: round(float(weight), 6) for source, weight in zip(model.sources, model.weights, strict=True)}


def _json_value(value: Any) -> Any:
    """A value as JSON; long lists of numbers, such as image features, are truncated."""
    if isinstance(value, float) and not np.isfinite(value):
        return None
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return [_json_value(part) for part in value[:64]] if isinstance(value, (list, tuple)) else str(value)
