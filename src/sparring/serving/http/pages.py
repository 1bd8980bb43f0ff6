"""What only the page of the service needs: its files, search as you type, curves, reports, images, and the negatives an item met.

    app.include_router(pages(live, parts))

`live` is asked at every request, so a run that is swapped in and items that are changed are seen at once. `parts` reads a run's data again,
split as its training split it; without it the page says that negatives cannot be shown. Nothing here changes anything.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import polars as pl
from fastapi import APIRouter, FastAPI, Query
from fastapi.responses import FileResponse, Response

from sparring.core.errors import UserError
from sparring.data.interactions import Split
from sparring.recipes.finding import short
from sparring.recipes.run import Run
from sparring.recipes.setup import flat
from sparring.serving.http.finding import Finder, Kind, finder, label
from sparring.serving.http.limits import ID, Refused
from sparring.serving.http.runs import Live
from sparring.serving.http.served_run import Served
from sparring.training.trained import Trained

Parts = Callable[[Trained], Split]

FILES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
IMAGES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".gif": "image/gif", ".webp": "image/webp"}
# a report holds its own style and script; the sandbox keeps them away from this page, its token and its answers
REPORT_POLICY = (
    "sandbox allow-scripts allow-popups; default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
)
MOST_PAIRS = 20_000_000  # of training data that is read again for an item's negatives
WAIT = 2.0  # seconds that a request waits for negatives before it is told to ask again
QUEUED, KEPT = 8, 256  # items whose negatives are still to be worked out, and items in all

RunName = Annotated[str | None, Query(max_length=ID)]
ItemId = Annotated[str, Query(min_length=1, max_length=ID)]


class Shown:
    """What the page's routes keep between requests, for each run that is served; made anew when a newer run takes its place."""

    def __init__(self, parts: Parts | None) -> None:
        self.parts = parts
        self.worker = ThreadPoolExecutor(1, "negatives")
        self.finders: dict[tuple[str, Kind], tuple[Served, Finder]] = {}
        self.built: dict[str, tuple[Served, Run, Split]] = {}
        self.asked: dict[tuple[str, int], tuple[Served, Future[dict[str, Any]]]] = {}

    def finder(self, served: Served, kind: Kind) -> Finder:
        known = self.finders.get((served.name, kind))
        if known is None or known[0] is not served:
            known = self.finders[served.name, kind] = served, finder(served, kind)
        return known[1]

    def search(self, served: Served, kind: Kind, text: str, limit: int) -> dict[str, Any]:
        """What matches, with the items as they are now: changed ones by their new titles, deleted ones not at all."""
        text, changed = " ".join(text.lower().split()), dict(served.catalogue.changed) if kind == "item" else {}
        base = self.finder(served, kind)
        left_out = {*changed, *(at for at in tuple(served.moved) if not served.listed(at))} if kind == "item" else set()
        without = np.array(sorted(at for at in left_out if at < len(base.ids)), dtype=np.int64)
        found, total = base.find(text, limit, without)
        now = [at for at in changed if served.listed(at)]
        if now:
            ids = pl.Series([str(name) for name in served.catalogue.names(np.array(now))])
            titles = pl.Series([label(changed[at]) for at in now], dtype=pl.String)
            counts = np.array([base.counts[at] if at < len(base.counts) else 0 for at in now])
            more, number = Finder(ids, titles, counts).find(text, limit, np.empty(0, np.int64))
            found, total = (
                sorted([*found, *more], key=lambda each: (each[0], -each[1]["count"]))[:limit],
                total + number,
            )
        return {"found": [row for _, row in found], "total": total}

    def negatives(self, served: Served, item: int) -> dict[str, Any]:
        """What an item met, worked out by one thread, one item at a time, and kept; asked for again until it is there."""
        key = (served.name, item)
        known = self.asked.get(key)
        if known is None or known[0] is not served:
            done = [each for each, (_, future) in list(self.asked.items()) if future.done()]
            if len(self.asked) - len(done) >= QUEUED:
                return {"state": "working"}
            for each in done[: max(0, len(self.asked) + 1 - KEPT)]:
                self.asked.pop(each, None)
            known = self.asked[key] = served, self.worker.submit(self._met, served, item)
        try:
            return known[1].result(WAIT)
        except Late:
            return {"state": "working"}
        except (UserError, OSError, RuntimeError, ValueError, KeyError, TypeError, MemoryError) as error:
            self.asked.pop(key, None)  # what is wrong may be put right: it is tried again when it is asked for again
            return {"state": "absent", "why": " ".join(str(error).split()) or type(error).__name__}

    def _met(self, served: Served, item: int) -> dict[str, Any]:
        from dataclasses import asdict

        from sparring.experiments.diagnose.item_negatives import met

        ids = served.trained.ids.item_ids
        if item >= len(ids):
            raise UserError("it was added after the training, and met no negatives")
        _, run, split = self._built(served)
        found = asdict(met(run, split, int(split.train.item_ids.encode([ids.decode([item])[0]])[0])))
        dense = ids.encode(split.train.item_ids.decode(np.array(found.pop("items"), dtype=np.int64)))
        rows = zip(self.finder(served, "item").named(dense), found.pop("times"), found.pop("shares"), strict=True)
        items = [
            {"id": each["id"], "title": each["title"], "times": times, "share": share} for each, times, share in rows
        ]
        return {"state": "ready", "items": items, "sampler": served.trained.meta.get("batch", []), **found}

    def _built(self, served: Served) -> tuple[Served, Run, Split]:
        from sparring.experiments.diagnose import samplers

        known = self.built.get(served.name)
        if known is not None and known[0] is served:
            return known
        pairs = int(served.trained.meta.get("data", {}).get("train", 0))
        if self.parts is None:
            raise UserError("this service was started without the means to read the data of its runs again")
        if pairs > MOST_PAIRS:
            raise UserError(
                f"the {pairs:,} training pairs are too many to be read again here, where {MOST_PAIRS:,} are the most"
            )
        split = self.parts(served.trained)
        self.built.pop(served.name, None)
        while len(self.built) > 1:  # two runs side by side
            self.built.pop(next(iter(self.built)))
        self.built[served.name] = served, samplers.own(served.folder, split), split
        return self.built[served.name]

    def close(self) -> None:
        self.worker.shutdown(wait=False, cancel_futures=True)


def pages(live: Live, parts: Parts | None = None) -> APIRouter:
    """The router of the page: `/`, and what it asks for under `/page/`."""
    shown = Shown(parts)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        shown.close()

    router = APIRouter(include_in_schema=False, lifespan=lifespan)

    @router.get("/")
    def index() -> Response:
        return _file("index.html")

    @router.get("/page/files/{name}")
    def file(name: str) -> Response:
        return _file(name)

    @router.get("/page/search")
    def search(
        text: Annotated[str, Query(max_length=200)] = "",
        kind: Kind = "item",
        limit: Annotated[int, Query(ge=1, le=50)] = 8,
        run: RunName = None,
    ) -> dict[str, Any]:
        return shown.search(live.served(run), kind, text, limit)

    @router.get("/page/values")
    def values(column: Annotated[str, Query(max_length=ID)], run: RunName = None) -> dict[str, Any]:
        return {"values": _values(live.served(run), column)}

    @router.get("/page/runs")
    def training() -> dict[str, Any]:
        return {"runs": [_training(served) for served in live.runs]}

    @router.get("/page/report")
    def report(which: Literal["comparison", "index"] = "comparison", run: RunName = None) -> Response:
        served = live.served(run)
        path = _reports(served.folder).get(which)
        if path is None:
            raise Refused(404, f"no {which} report lies with {served.name}")
        return Response(
            path.read_bytes(), media_type="text/html; charset=utf-8", headers={"Content-Security-Policy": REPORT_POLICY}
        )

    @router.get("/page/image")
    def image(item: ItemId, run: RunName = None) -> Response:
        served = live.served(run)
        path = _image(served, _dense(served, item))
        return FileResponse(
            path, media_type=IMAGES[path.suffix.lower()], headers={"Cache-Control": "private, max-age=3600"}
        )

    @router.get("/page/negatives")
    def negatives(item: ItemId, run: RunName = None) -> dict[str, Any]:
        served = live.served(run)
        return shown.negatives(served, _dense(served, item))

    return router


def _file(name: str) -> Response:
    kind = FILES.get(name.rpartition(".")[2])
    found = {
        each.name: each for each in (files("sparring.serving.http") / "page").iterdir()
    }  # never a path made of what a request says
    if kind is None or name not in found:
        raise Refused(404, f"the page has no file {name[:200]!r}")
    return Response(
        found[name].read_bytes(), media_type=f"{kind}; charset=utf-8", headers={"Cache-Control": "no-cache"}
    )


def _dense(served: Served, item: str) -> int:
    at = served.catalogue.find_one(item)
    if at < 0:
        raise Refused(404, f"item {item[:200]!r} is not known to {served.name}")
    return at


def _values(served: Served, column: str) -> list[dict[str, Any]]:
    """The most frequent values of an item column, to choose a filter from."""
    if column not in served.catalogue.schema:
        raise Refused(404, f"there is no item column {column[:200]!r}: there are {', '.join(served.catalogue.schema)}")
    table, dtype = served.catalogue.table, served.catalogue.schema[column]
    few = dtype in (pl.String, pl.Boolean, pl.Categorical, pl.Enum) or dtype.is_integer()
    if table is None or column not in table.columns or not few:
        return []
    counts = table[column].drop_nulls().value_counts(sort=True).head(200)
    return [{"value": value, "count": count} for value, count in counts.iter_rows()]


def _training(served: Served) -> dict[str, Any]:
    """What a run's folder says of its training; a file that is not there, or is being written, leaves its part empty."""
    meta, setup = served.trained.meta, flat(served.trained.meta.get("setup", {}))
    result = (_lines(served.folder / "result.json", whole=True) or [{}])[0]
    about = {
        "name": served.name,
        "recipe": short(meta["recipe"]),
        "arguments": meta.get("arguments", {}),
        "data": {"name": Path(str(meta.get("source", {}).get("data", "its own data"))).name, **meta.get("data", {})},
        "setup": {key: setup.get(key) for key in ("dim", "score", "tau", "batch_size", "optimizer", "lr", "seed")},
        "select": setup.get("select", "ndcg@10"),
        "epochs": _lines(served.folder / "metrics.jsonl"),
        "best_epoch": result.get("best_epoch"),
        "seconds": result.get("train_seconds"),
        "test": result.get("test", {}).get("metrics", {}),
        "batch": meta.get("batch", []),
        "reports": sorted(_reports(served.folder)),
    }
    return {name: _finite(value) for name, value in about.items()}


def _lines(path: Path, whole: bool = False) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines, or of one JSON file; those that cannot be read are left out."""
    found: list[dict[str, Any]] = []
    try:
        text = path.read_text()
    except OSError:
        return found
    for line in [text] if whole else text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        found += [value] if isinstance(value, dict) else []
    return found


def _finite(value: Any) -> Any:
    """The same with null for what JSON has no number for."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _reports(folder: Path) -> dict[str, Path]:
    """The reports that lie with a run: of the comparison it was trained for, in one of the three folders above it; and of its index."""
    above = [place / "report.html" for place in folder.resolve().parents[:3] if (place / "comparison.json").is_file()]
    found = {"comparison": above[0]} if above else {}
    found["index"] = folder / "index" / "report" / "report.html"
    return {which: path for which, path in found.items() if path.is_file()}


def _image(served: Served, item: int) -> Path:
    """The file in the item's column `image`, below the run's folder or below that of its data; nothing else is ever served."""
    value = served.catalogue.row(item).get("image")
    if not isinstance(value, str) or not value:
        raise Refused(404, "this item has no image")
    data = Path(str(served.trained.meta.get("source", {}).get("data", "")))
    roots = [served.folder.resolve()]
    if data.is_absolute() and data.exists():
        roots.append((data if data.is_dir() else data.parent).resolve())
    for root in roots:
        try:
            path = (root / value).resolve()
            if path.is_relative_to(root) and path.suffix.lower() in IMAGES and path.is_file():
                return path
        except (OSError, ValueError, RuntimeError):  # a name too long, a zero byte, links that go round
            continue
    raise Refused(404, "the image of this item is no picture below the folder of its run or of its data")
