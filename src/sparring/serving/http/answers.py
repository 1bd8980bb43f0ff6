"""From a request to its answer: ids looked up, filters resolved, the search asked for, its result written as JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np
import orjson

from sparring.core.errors import UserError
from sparring.serving.http.filters import Conditions
from sparring.serving.http.limits import Refused
from sparring.serving.http.runs import Live
from sparring.serving.http.schema import Asked, Recommend, Similar
from sparring.serving.http.search import Ask, Searcher
from sparring.serving.http.served_run import Served

_NONE = np.empty(0, np.int64)
_WAYS = ("user", "users", "history", "text", "texts")


class Answering:
    """Questions to the runs that are served now. Whatever may take more than a moment is done off the event loop: encoding a text or a
    history by `encoder`, filters by `sieve` (one thread each), searching by `searcher`."""

    def __init__(self, live: Live, searcher: Searcher, encoder: Executor, sieve: Executor) -> None:
        self.live, self.searcher, self.encoder, self.sieve = live, searcher, encoder, sieve

    def plain(self, asked: Asked) -> Ask | None:
        """The search that a question comes down to where no filter, history or text has to be worked out first; None for the others."""
        if asked.allow is not None or asked.deny or asked.where:
            return None
        if isinstance(asked, Recommend):
            return self._of_users(asked) if _given(asked) in (["user"], ["users"]) else None
        return self._of_items(asked) if isinstance(asked, Similar) else None

    async def recommend(self, asked: Recommend) -> bytes:
        """The best items of users, of a history or of texts; JSON as `Answers` describes it."""
        given = _given(asked)
        if len(given) != 1:
            both = f", not {' and '.join(given)} at once" if given else ""
            raise Refused(422, f"give one of {', '.join(_WAYS)}{both}")
        if given[0] == "history":
            ask = await self._of_history(asked, asked.history or [])
        elif given[0] in ("text", "texts"):
            ask = await self._of_texts(asked, [asked.text or ""] if asked.texts is None else asked.texts)
        else:
            ask = self._of_users(asked)
        return await self._searched(asked, ask)

    async def similar(self, asked: Similar) -> bytes:
        """The items nearest to each of some items, themselves left out."""
        return await self._searched(asked, self._of_items(asked))

    def _of_users(self, asked: Recommend) -> Ask:
        served = self.live.served(asked.run)
        queries = [asked.user] if asked.user is not None else asked.users or []
        users, missing = _known(served.users.find_one, queries, "user", served)
        exclude = [served.seen(user) for user in users] if asked.exclude_seen else [_NONE] * len(users)
        return Ask(served, queries, users, None, asked.k, exclude, fields=_fields(served, asked), missing=missing)

    def _of_items(self, asked: Similar) -> Ask:
        served = self.live.served(asked.run)
        if (asked.item is None) == (asked.items is None):
            raise Refused(422, "give one of item, items")
        queries = [asked.item] if asked.item is not None else asked.items or []
        found, missing = _known(served.catalogue.find_one, queries, "item", served)
        items = np.array(found, np.int64)
        vectors, fields = served.item_queries(items), _fields(served, asked)
        return Ask(served, queries, None, vectors, asked.k, list(items[:, None]), fields=fields, missing=missing)

    async def _of_history(self, asked: Recommend, history: list[int | str]) -> Ask:
        served = self.live.served(asked.run)
        items = served.catalogue.find(history)
        read = served.readable(items)
        if not read.any():
            raise Refused(404, f"none of the {len(history)} items of the history is known to {served.name}")
        vector = await self._encoded(served.history_vector, items[read])
        exclude = [items[items >= 0] if asked.exclude_seen else _NONE]
        unknown = [history[at] for at in np.flatnonzero(~read).tolist()]
        return Ask(served, [history], None, vector, asked.k, exclude, fields=_fields(served, asked), unknown=unknown)

    async def _of_texts(self, asked: Recommend, texts: list[str]) -> Ask:
        served = self.live.served(asked.run)
        if "text" not in served.answers:
            raise Refused(422, f"the query tower of {served.name} reads no texts: ask for a user or a history")
        vectors = await self._encoded(_text_vectors, served, texts)
        return Ask(served, texts, None, vectors, asked.k, [_NONE] * len(texts), fields=_fields(served, asked))

    async def _encoded(self, encode: Any, *given: Any) -> np.ndarray:
        try:
            return np.asarray(await asyncio.get_running_loop().run_in_executor(self.encoder, encode, *given))
        except UserError as error:
            raise Refused(422, str(error)) from error

    async def _searched(self, asked: Asked, ask: Ask) -> bytes:
        if asked.allow is not None or asked.deny or asked.where:
            ask.allow, ask.deny, ask.filters = await asyncio.get_running_loop().run_in_executor(
                self.sieve, _filters, ask.served, asked
            )
        return await self.searcher.search(ask)


def written(asks: Sequence[Ask], scores: np.ndarray, found: np.ndarray) -> list[bytes]:
    """The answers as JSON: for every query its items with id, title, score and the columns asked for. Looked up for all at once."""
    served, fields = asks[0].served, asks[0].fields
    inside = found >= 0
    dense = found[inside]
    columns: list[list[Any]] = [served.catalogue.names(dense), served.catalogue.values(dense, "title")]
    columns.append(scores[inside].astype(np.float64).round(6).tolist())
    columns += [served.catalogue.values(dense, name) for name in fields]
    rows: list[dict[str, Any]]
    if not fields:
        rows = [{"id": item, "title": title, "score": score} for item, title, score in zip(*columns, strict=True)]
    else:
        keys = ("id", "title", "score", *fields)
        rows = [dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)]
    ends = inside.sum(1).cumsum().tolist()
    answers, query, at = [], 0, 0
    for ask in asks:
        results: list[dict[str, Any]] = []
        for each in ask.queries:
            if ask.missing and each in ask.missing:
                results.append({"query": each, "items": [], "unknown": [each]})
                continue
            results.append({"query": each, "items": rows[at : ends[query]]})
            query, at = query + 1, ends[query]
        if ask.unknown:
            results[0]["unknown"] = ask.unknown
        answers.append(
            orjson.dumps({"results": results, "run": served.name, "generation": served.generation}, default=str)
        )
    return answers


def _given(asked: Recommend) -> list[str]:
    return [name for name in _WAYS if getattr(asked, name) is not None]


def _known(
    find: Callable[[int | str], int], asked: Sequence[int | str], what: str, served: Served
) -> tuple[list[int], frozenset[int | str]]:
    """(dense ids, those that are not known); refused where none is known."""
    dense = [find(each) for each in asked]
    if -1 not in dense:
        return dense, frozenset()
    found = [each for each in dense if each >= 0]
    if not found:
        raise Refused(404, f"{what} {str(asked[0])[:200]!r} is not known to {served.name}")
    return found, frozenset(each for each, at in zip(asked, dense, strict=True) if at < 0)


def _fields(served: Served, asked: Asked) -> tuple[str, ...]:
    for name in asked.fields or ():
        if name not in served.catalogue.schema:
            raise Refused(422, f"there is no item column {name!r}: there are {', '.join(served.catalogue.schema)}")
    return tuple(asked.fields or ())


def _filters(served: Served, asked: Asked) -> tuple[np.ndarray | None, np.ndarray | None, Any]:
    """(allow, deny, key): dense ids, and what is equal where they are."""
    catalogue = served.catalogue
    where: Conditions = tuple(
        (each.column, each.op, tuple(each.value) if isinstance(each.value, list) else each.value)
        for each in asked.where or ()
    )
    allow = None if asked.allow is None else _of(catalogue.find(asked.allow))
    deny = None if not asked.deny else _of(catalogue.find(asked.deny))
    if where:
        passing = catalogue.passing(where)
        allow = passing if allow is None else np.intersect1d(allow, passing)
    key = (
        where,
        None if asked.allow is None else allow.tobytes() if allow is not None else None,
        None if deny is None else deny.tobytes(),
    )
    return allow, deny, (*key, -1 if allow is None else len(allow))


def _of(dense: np.ndarray) -> np.ndarray:
    return np.unique(dense[dense >= 0])


def _text_vectors(served: Served, texts: list[str]) -> np.ndarray:
    return served.trained.encode_texts(texts, "query").float().numpy()
