"""What is known of the runs, of one item and of one user, for those who look rather than ask for a list."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparring import __version__
from sparring.recipes.finding import short
from sparring.serving.http import limits as most
from sparring.serving.http import schema as s
from sparring.serving.http.limits import Limits, Refused
from sparring.serving.http.runs import Live
from sparring.serving.http.served_run import Served


def info(live: Live, limits: Limits) -> s.Info:
    default = live.served()
    changed, deleted = live.store.counts()
    bounds = {
        "k": most.K,
        "queries": most.QUERIES,
        "ids": most.IDS,
        "items": most.ITEMS,
        "body": limits.body,
        "seconds": limits.seconds,
    }
    return s.Info(
        version=__version__,
        run=about(default),
        runs=[about(served) for served in live.runs],
        columns=[s.Column(name=name, type=kind, dtype=dtype) for name, kind, dtype in default.catalogue.columns],
        changed=changed,
        deleted=deleted,
        limits=bounds,
    )


def about(served: Served) -> s.RunInfo:
    measured = served.index.meta.get("measured") or {}
    return s.RunInfo(
        name=served.name,
        folder=str(served.folder),
        recipe=short(str(served.trained.meta.get("recipe", ""))),
        items=len(served.index),
        queries=len(served.users),
        dim=served.index.dim,
        score=served.trained.model.score,
        index=served.index.kind,
        recall=1.0 if served.index.kind == "exact" else measured.get("recall"),
        answers=served.answers,
        history_by="tower" if served.by_history else "mean",
        places_by=served.placing.ways,
        generation=served.generation,
        notes=served.notes,
        waiting=len(served.waiting),
    )


def item(served: Served, id: str) -> s.ItemInfo:
    dense = served.catalogue.find_one(id)
    if dense < 0:
        raise Refused(404, f"item {id[:200]!r} is not known to {served.name}")
    listed = served.listed(dense)
    if not listed and dense in served.moved:
        raise Refused(404, f"item {id[:200]!r} was deleted")
    row = {name: plain(value) for name, value in served.catalogue.row(dense).items() if name != "title"}
    at = np.array([dense])
    title = served.catalogue.values(at, "title")[0]
    own = dense < len(served.catalogue.base)
    source: Any = (
        "added" if not own else "changed" if dense in served.catalogue.changed or dense in served.moved else "run"
    )
    return s.ItemInfo(id=served.catalogue.names(at)[0], title=title, columns=row, source=source, placed=listed)


def user(served: Served, id: str, limit: int) -> s.UserInfo:
    dense = served.users.find_one(id)
    if dense < 0:
        raise Refused(404, f"user {id[:200]!r} is not known to {served.name}")
    items, ordered = served.history(dense)
    shown = items[-limit:].astype(np.int64)
    names, titles = served.catalogue.names(shown), served.catalogue.values(shown, "title")
    table = served.trained.ids.query_table
    columns = {} if table is None else {name: plain(value) for name, value in table.row(dense, named=True).items()}
    history = [s.Taken(id=name, title=title) for name, title in zip(names, titles, strict=True)]
    return s.UserInfo(
        id=served.users.of(np.array([dense]))[0], history=history, total=len(items), ordered=ordered, columns=columns
    )


def plain(value: Any) -> Any:
    """A value that JSON can hold; long lists of numbers, such as image features, are cut."""
    if isinstance(value, float) and not np.isfinite(value):
        return None
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return [plain(each) for each in value[:64]] if isinstance(value, (list, tuple)) else str(value)
