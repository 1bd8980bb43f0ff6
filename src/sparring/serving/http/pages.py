"""Routes that only the page needs: its files, search as you type, curves, reports, images and the negatives of an item.

    app.include_router(pages(registry, read_split))

The registry is read for every request, so swapped runs and changed items show up at once. `read_split` reads and
splits the data of a run as training did; without it the page cannot show negatives. These routes change nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotReady
from contextlib import asynccontextmanager
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import polars as pl
from fastapi import APIRouter, FastAPI
from fastapi import Query as Parameter
from fastapi.responses import FileResponse, Response

from sparring.core.errors import UserError, first_line
from sparring.data.interactions import Split
from sparring.recipes.finding import short
from sparring.recipes.run import Run
from sparring.recipes.setup import flat
from sparring.serving.http.conditions import check_column
from sparring.serving.http.runs import RunRegistry
from sparring.serving.http.schema import MAX_ID, RequestError
from sparring.serving.http.served_run import ServedRun
from sparring.training.folder import read_manifest
from sparring.training.trained import Trained

ReadSplit = Callable[[Trained], Split]
Side = Literal["user", "item"]

FILES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
IMAGES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".gif": "image/gif", ".webp": "image/webp"}
# a report brings its own style and script; the sandbox separates them from this page, its token and its responses
REPORT_POLICY = (
    "sandbox allow-scripts allow-popups; default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
)
LABELS = ("title", "name", "text")  # the first of these columns labels a user or an item
MAX_PAIRS = 20_000_000  # training pairs that are read again to find an item's negatives
WAIT = 2.0  # seconds that a request waits for negatives before the page has to ask again
QUEUED, CACHED = 8, 256  # items whose negatives are being computed, and items in all
_NO_MATCH = 4

RunName = Annotated[str | None, Parameter(max_length=MAX_ID)]
ItemId = Annotated[str, Parameter(min_length=1, max_length=MAX_ID)]


class Finder:
    """Search as you type, over the ids and titles of users or items.

    The order is: equal id, id prefix, title prefix, title with all the words; within each, most interactions first.
    """

    def __init__(self, ids: pl.Series, titles: pl.Series | None, counts: np.ndarray) -> None:
        self.ids, self.titles, self.counts = ids, titles, counts
        self._lower_ids = ids.cast(pl.String).str.to_lowercase()
        self._lower_titles = None if titles is None else titles.str.to_lowercase().fill_null("")

    @classmethod
    def of_run(cls, served: ServedRun, side: Side) -> Finder:
        """The users or items of a run, without later changes."""
        ids = served.trained.ids
        if side == "item":
            counts = np.bincount(served.seen_items, minlength=len(ids.item_ids))
            return cls(ids.item_ids.ids, _titles(ids.item_table), counts)
        return cls(ids.query_ids.ids, _titles(ids.query_table), np.diff(served.seen_start))

    def find(self, text: str, limit: int, without: np.ndarray) -> tuple[list[tuple[int, dict[str, Any]]], int]:
        """(at most `limit` pairs of match quality (0 is best) and row, number of matches)."""
        quality = np.full(len(self.ids), _NO_MATCH if text else 0, dtype=np.int8)
        if text:
            if self._lower_titles is not None:
                all_words = np.ones(len(self.ids), dtype=bool)
                for word in text.split():
                    all_words &= self._lower_titles.str.contains(word, literal=True).to_numpy()
                quality[all_words] = 3
                quality[self._lower_titles.str.starts_with(text).to_numpy()] = 2
            quality[self._lower_ids.str.starts_with(text).to_numpy()] = 1
            quality[(self._lower_ids == text).to_numpy()] = 0
        quality[without] = _NO_MATCH
        rows = np.flatnonzero(quality < _NO_MATCH)
        total = len(rows)
        if total > limit:  # avoid sorting the many matches of a short text
            most = int(self.counts.max(initial=0))
            key = (quality[rows].astype(np.int64) * (most + 1) + most - self.counts[rows]) * len(self.ids) + rows
            rows = rows[np.argpartition(key, limit - 1)[:limit]]
        rows = rows[np.lexsort((rows, -self.counts[rows], quality[rows]))]
        return list(zip(quality[rows].tolist(), self.named(rows), strict=True)), total

    def named(self, rows: np.ndarray) -> list[dict[str, Any]]:
        titles = [None] * len(rows) if self.titles is None else self.titles.gather(pl.Series(rows)).to_list()
        ids, counts = self.ids.gather(pl.Series(rows)).to_list(), self.counts[rows].tolist()
        return [
            {"id": id, "title": title, "count": count} for id, title, count in zip(ids, titles, counts, strict=True)
        ]


class PageState:
    """Caches of the page's routes, per served run; rebuilt when a newer run replaces it."""

    def __init__(self, registry: RunRegistry, read_split: ReadSplit | None) -> None:
        self.registry, self.read_split = registry, read_split
        self.worker = ThreadPoolExecutor(1, "negatives")
        self.finders: dict[tuple[str, Side], tuple[ServedRun, Finder]] = {}
        self.runs: dict[str, tuple[ServedRun, Run, Split]] = {}
        self.jobs: dict[tuple[str, int], tuple[ServedRun, Future[dict[str, Any]]]] = {}

    def finder(self, served: ServedRun, side: Side) -> Finder:
        cached = self.finders.get((served.name, side))
        if cached is None or cached[0] is not served:
            cached = self.finders[served.name, side] = served, Finder.of_run(served, side)
        return cached[1]

    def search(self, served: ServedRun, side: Side, text: str, limit: int) -> dict[str, Any]:
        """Matches among the current items: changed items by their new titles, deleted items not at all."""
        text, changed = " ".join(text.lower().split()), dict(served.catalogue.changed) if side == "item" else {}
        base = self.finder(served, side)
        deleted = [item for item in tuple(served.moved) if not served.listed(item)] if side == "item" else []
        without = np.array(sorted(item for item in {*changed, *deleted} if item < len(base.ids)), dtype=np.int64)
        matches, total = base.find(text, limit, without)
        listed = [item for item in changed if served.listed(item)]
        if listed:
            ids = pl.Series([str(id) for id in served.catalogue.original(np.array(listed))])
            titles = pl.Series([_label(changed[item]) for item in listed], dtype=pl.String)
            counts = np.array([base.counts[item] if item < len(base.counts) else 0 for item in listed])
            more, number = Finder(ids, titles, counts).find(text, limit, np.empty(0, np.int64))
            matches = sorted([*matches, *more], key=lambda match: (match[0], -match[1]["count"]))[:limit]
            total += number
        return {"found": [row for _, row in matches], "total": total}

    def negatives(self, served: ServedRun, item: int) -> dict[str, Any]:
        """The negatives of an item, computed by one thread and cached; the page asks again until they are ready."""
        key = (served.name, item)
        cached = self.jobs.get(key)
        if cached is None or cached[0] is not served:
            done = [other for other, (_, future) in list(self.jobs.items()) if future.done()]
            if len(self.jobs) - len(done) >= QUEUED:
                return {"state": "working"}
            for other in done[: max(0, len(self.jobs) + 1 - CACHED)]:
                self.jobs.pop(other, None)
            cached = self.jobs[key] = served, self.worker.submit(self._negatives, served, item)
        try:
            return cached[1].result(WAIT)
        except NotReady:
            return {"state": "working"}
        except (UserError, OSError, RuntimeError, ValueError, KeyError, TypeError, MemoryError) as error:
            self.jobs.pop(key, None)  # the cause may be fixed before the next request
            return {"state": "absent", "why": " ".join(str(error).split()) or type(error).__name__}

    def _negatives(self, served: ServedRun, item: int) -> dict[str, Any]:
        from sparring.experiments.diagnose.item_negatives import negatives_of_item

        ids = served.trained.ids.item_ids
        if item >= len(ids):
            raise UserError("this item was added after training, so it has no negatives")
        _, run, split = self._training(served)
        facts = asdict(negatives_of_item(run, split, int(split.train.item_ids.encode([ids.decode([item])[0]])[0])))
        dense = ids.encode(split.train.item_ids.decode(np.array(facts.pop("items"), dtype=np.int64)))
        rows = zip(self.finder(served, "item").named(dense), facts.pop("times"), facts.pop("shares"), strict=True)
        items = [{"id": row["id"], "title": row["title"], "times": times, "share": share} for row, times, share in rows]
        return {"state": "ready", "items": items, "sampler": served.trained.meta.get("batch", []), **facts}

    def _training(self, served: ServedRun) -> tuple[ServedRun, Run, Split]:
        """The run and the split that the served model was trained on."""
        from sparring.experiments.diagnose import samplers

        cached = self.runs.get(served.name)
        if cached is not None and cached[0] is served:
            return cached
        pairs = int(served.trained.meta.get("data", {}).get("train", 0))
        if self.read_split is None:
            raise UserError("this service cannot read the training data, so negatives are not available")
        if pairs > MAX_PAIRS:
            raise UserError(f"negatives are not available for {pairs:,} training pairs; the limit is {MAX_PAIRS:,}")
        split = self.read_split(served.trained)
        self.runs.pop(served.name, None)
        while len(self.runs) > 1:  # keep two, for runs side by side
            self.runs.pop(next(iter(self.runs)))
        registry = self.registry
        run = samplers.load_for_diagnosis(served.folder, split, "cpu", registry.recipe, registry.trust, registry.model)
        self.runs[served.name] = served, run, split
        return self.runs[served.name]

    def close(self) -> None:
        self.worker.shutdown(wait=False, cancel_futures=True)


def pages(registry: RunRegistry, read_split: ReadSplit | None = None) -> APIRouter:
    """The router of the page: `/`, and its requests under `/page/`."""
    state = PageState(registry, read_split)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        state.close()

    router = APIRouter(include_in_schema=False, lifespan=lifespan)

    @router.get("/")
    def index() -> Response:
        return _file("index.html")

    @router.get("/page/files/{name}")
    def file(name: str) -> Response:
        return _file(name)

    @router.get("/page/search")
    def search(
        text: Annotated[str, Parameter(max_length=200)] = "",
        kind: Side = "item",
        limit: Annotated[int, Parameter(ge=1, le=50)] = 8,
        run: RunName = None,
    ) -> dict[str, Any]:
        return state.search(registry.served(run), kind, text, limit)

    @router.get("/page/values")
    def values(column: Annotated[str, Parameter(max_length=MAX_ID)], run: RunName = None) -> dict[str, Any]:
        return {"values": _values(registry.served(run), column)}

    @router.get("/page/runs")
    def training() -> dict[str, Any]:
        return {"runs": [_training(served) for served in registry.runs]}

    @router.get("/page/report")
    def report(which: Literal["comparison", "index"] = "comparison", run: RunName = None) -> Response:
        served = registry.served(run)
        path = _reports(served.folder).get(which)
        if path is None:
            raise RequestError(404, f"run {served.name} has no {which} report")
        headers = {"Content-Security-Policy": REPORT_POLICY}
        return Response(path.read_bytes(), media_type="text/html; charset=utf-8", headers=headers)

    @router.get("/page/image")
    def image(item: ItemId, run: RunName = None) -> Response:
        served = registry.served(run)
        path = _image(served, served.find_item(item))
        headers = {"Cache-Control": "private, max-age=3600"}
        return FileResponse(path, media_type=IMAGES[path.suffix.lower()], headers=headers)

    @router.get("/page/negatives")
    def negatives(item: ItemId, run: RunName = None) -> dict[str, Any]:
        served = registry.served(run)
        return state.negatives(served, served.find_item(item))

    return router


def _file(name: str) -> Response:
    kind = FILES.get(name.rpartition(".")[2])
    page = {path.name: path for path in (files("sparring.serving.http") / "page").iterdir()}  # names, never a path
    if kind is None or name not in page:
        raise RequestError(404, f"the page has no file {name[:200]!r}")
    headers = {"Cache-Control": "no-cache"}
    return Response(page[name].read_bytes(), media_type=f"{kind}; charset=utf-8", headers=headers)


def _values(served: ServedRun, column: str) -> list[dict[str, Any]]:
    """The most frequent values of an item column, as choices for a filter."""
    check_column(column, served.catalogue.schema, status=404)
    table, dtype = served.catalogue.table, served.catalogue.schema[column]
    discrete = dtype in (pl.String, pl.Boolean, pl.Categorical, pl.Enum) or dtype.is_integer()
    if table is None or column not in table.columns or not discrete:
        return []
    counts = table[column].drop_nulls().value_counts(sort=True).head(200)
    return [{"value": value, "count": count} for value, count in counts.iter_rows()]


def _training(served: ServedRun) -> dict[str, Any]:
    """The training of a run, read from its folder; missing, unfinished or damaged files leave their part empty."""
    meta, setup = served.trained.meta, flat(served.trained.meta.get("setup", {}))
    problems: list[str] = []
    result = next(iter(_objects(_text(served, "result.json", problems))), {})
    about = {
        "name": served.name,
        "recipe": short(meta["recipe"]),
        "arguments": meta.get("arguments", {}),
        "data": {"name": Path(str(meta.get("source", {}).get("data", "its own data"))).name, **meta.get("data", {})},
        "setup": {key: setup.get(key) for key in ("dim", "score", "tau", "batch_size", "optimizer", "lr", "seed")},
        "select": setup.get("select", "ndcg@10"),
        "epochs": _objects(*_text(served, "metrics.jsonl", problems).splitlines()),
        "best_epoch": result.get("best_epoch"),
        "seconds": result.get("train_seconds"),
        "test": result.get("test", {}).get("metrics", {}),
        "batch": meta.get("batch", []),
        "reports": sorted(_reports(served.folder)),
        "problems": problems,
    }
    return {name: _finite(value) for name, value in about.items()}


def _text(served: ServedRun, name: str, problems: list[str]) -> str:
    """The text of a file that agrees with the manifest; "" if it is missing, or damaged, which `problems` then says."""
    try:
        listed = read_manifest(served.folder)
        return listed.path(name).read_text() if listed.lists(name) else ""
    except (UserError, OSError, ValueError) as error:
        problems.append(first_line(error))
        return ""


def _objects(*texts: str) -> list[dict[str, Any]]:
    """The JSON objects among these texts; the others are skipped."""
    values = []
    for text in texts:
        try:
            values.append(json.loads(text))
        except ValueError:
            continue
    return [value for value in values if isinstance(value, dict)]


def _finite(value: Any) -> Any:
    """The value with null for NaN and infinity, which JSON lacks."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _reports(folder: Path) -> dict[str, Path]:
    """The reports of a run: of its comparison, up to three folders above it, and of its index."""
    above = [parent / "report.html" for parent in folder.resolve().parents[:3] if (parent / "study.json").is_file()]
    reports = {"comparison": above[0]} if above else {}
    reports["index"] = folder / "index" / "report" / "report.html"
    return {which: path for which, path in reports.items() if path.is_file()}


def _image(served: ServedRun, item: int) -> Path:
    """The file in the item's column `image`, inside the folder of the run or of its data; no other file is served."""
    value = served.catalogue.row(item).get("image")
    if not isinstance(value, str) or not value:
        raise RequestError(404, "this item has no image")
    data = Path(str(served.trained.meta.get("source", {}).get("data", "")))
    roots = [served.folder.resolve()]
    if data.is_absolute() and data.exists():
        roots.append((data if data.is_dir() else data.parent).resolve())
    for root in roots:
        try:
            path = (root / value).resolve()
            if path.is_relative_to(root) and path.suffix.lower() in IMAGES and path.is_file():
                return path
        except (OSError, ValueError, RuntimeError):  # a name that is too long, a zero byte, a loop of links
            continue
    raise RequestError(404, "the image of this item is not a picture inside the folder of its run or of its data")


def _label(row: Mapping[str, Any]) -> str | None:
    return next((str(row[name]) for name in LABELS if row.get(name) is not None), None)


def _titles(table: pl.DataFrame | None) -> pl.Series | None:
    name = next((name for name in LABELS if table is not None and name in table.columns), None)
    return None if table is None or name is None else table[name].cast(pl.String)
