"""The HTTP service: its routes, described by OpenAPI, and how it is put together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from sparring import __version__
from sparring.core.errors import UserError
from sparring.serving.http import describing
from sparring.serving.http import schema as s
from sparring.serving.http.access_log import Log
from sparring.serving.http.answers import Answering, written
from sparring.serving.http.gate import FAULT, Gate, refusal
from sparring.serving.http.limits import ID, Limits, Refused
from sparring.serving.http.metrics import Metrics
from sparring.serving.http.pages import Parts, pages
from sparring.serving.http.runs import Live
from sparring.serving.http.search import Searcher

_SAYS: dict[int | str, dict[str, Any]] = {
    status: {
        "description": text,
        "content": {"application/json": {"schema": {"type": "object", "properties": {"detail": {"type": "string"}}}}},
    }
    for status, text in {
        400: "not understood",
        401: "wrong token",
        404: "not known",
        413: "too large",
        415: "not JSON",
        422: "refused",
    }.items()
}


class Service:
    """Everything that one service holds; `gate` is the ASGI application, `close` stops its threads.

    service = Service(Live([Path("runs/first")], Store(...)));   uvicorn.run(service.gate)
    """

    def __init__(
        self,
        live: Live,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        token: str | None = None,
        hosts: Sequence[str] | None = None,
        log: Log | None = None,
        parts: Parts | None = None,
        threads: int = 1,
    ) -> None:
        self.live, self.limits = live, limits
        self.log = log or Log(requests=False)
        self.searcher = Searcher(written, threads, limits.waiting)
        self.encoder = ThreadPoolExecutor(1, "encode", torch.set_num_threads, (threads,))
        self.sieve, self.writer = ThreadPoolExecutor(1, "sieve"), ThreadPoolExecutor(1, "write")
        self.loader = ThreadPoolExecutor(2, "load")
        self.answering = Answering(live, self.searcher, self.encoder, self.sieve)
        self.metrics = Metrics(live, self.searcher)
        self.app = FastAPI(
            title="Sparring",
            version=__version__,
            docs_url=None,
            redoc_url=None,
            description="Recommendations from a trained retriever.",
        )
        self.app.state.service = self
        _errors(self.app)
        self.app.include_router(_routes(self))
        self.app.include_router(pages(live, parts))
        self.gate = Gate(self.app, self.metrics, self.log, limits, token, hosts)

    async def off_loop(self, pool: ThreadPoolExecutor, work: Callable[..., Any], *given: Any) -> Any:
        """Run what takes long in a thread, and wait for it to end even where the client has gone: what is begun is finished."""
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(pool, work, *given))

    def close(self) -> None:
        self.searcher.close()
        for pool in (self.encoder, self.sieve, self.writer, self.loader):
            pool.shutdown(wait=True, cancel_futures=True)
        self.live.close()


def _routes(service: Service) -> APIRouter:
    live, answering = service.live, service.answering
    routes = APIRouter()

    @routes.get("/healthz", tags=["state"])
    async def health() -> dict[str, str]:
        """The process answers."""
        return {"status": "ok"}

    @routes.get("/readyz", tags=["state"], responses={503: {"description": "not ready"}})
    async def ready() -> dict[str, Any]:
        """A run is loaded and searches run."""
        if not service.searcher.alive:
            raise Refused(503, "the searches have stopped")
        return {"status": "ready", "run": live.served().name, "generation": live.served().generation}

    @routes.get("/metrics", tags=["state"], response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Counters in the text form of Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @routes.get("/v1/info", tags=["state"], response_model=s.Info)
    async def info() -> s.Info:
        """What is served and what can be asked."""
        return describing.info(live, service.limits)

    @routes.post("/v1/recommend", tags=["questions"], response_model=s.Answers, responses=_SAYS)
    async def recommend(asked: s.Recommend) -> Response:
        """The best items for known users, for a history of items, or for texts."""
        return Response(await answering.recommend(asked), media_type="application/json")

    @routes.post("/v1/similar", tags=["questions"], response_model=s.Answers, responses=_SAYS)
    async def similar(asked: s.Similar) -> Response:
        """The items nearest to items."""
        return Response(await answering.similar(asked), media_type="application/json")

    @routes.put(
        "/v1/items",
        tags=["items"],
        response_model=s.Written,
        responses={**_SAYS, 507: {"description": "the disk is full"}},
    )
    async def put_items(asked: s.PutItems) -> s.Written:
        """Add or change items: all of them or none. They are on the disk, and found by the next search, when the answer is sent."""
        items = [item.model_dump(exclude_unset=True) for item in asked.items]
        sequence, waiting = await service.off_loop(service.writer, live.put, items)
        return s.Written(count=len(items), sequence=sequence, waiting=waiting)

    @routes.delete(
        "/v1/items",
        tags=["items"],
        response_model=s.Written,
        responses={**_SAYS, 507: {"description": "the disk is full"}},
    )
    async def delete_items(asked: s.DeleteItems) -> s.Written:
        """Delete items: all of them or none."""
        sequence, waiting = await service.off_loop(service.writer, live.delete, asked.ids)
        return s.Written(count=len(asked.ids), sequence=sequence, waiting=waiting)

    @routes.get("/v1/items/{id}", tags=["items"], response_model=s.ItemInfo, responses=_SAYS)
    async def item(id: str, run: str | None = None) -> s.ItemInfo:
        """One item with all its columns."""
        return describing.item(live.served(run), id)

    @routes.get("/v1/item", tags=["items"], response_model=s.ItemInfo, responses=_SAYS)
    async def item_by_query(id: str = Query(max_length=ID), run: str | None = None) -> s.ItemInfo:
        """The same, for ids with a slash."""
        return describing.item(live.served(run), id)

    @routes.get("/v1/users/{id}", tags=["users"], response_model=s.UserInfo, responses=_SAYS)
    async def user(id: str, run: str | None = None, limit: int = Query(1000, ge=1, le=10_000)) -> s.UserInfo:
        """One user: what it has taken, the newest last where the order is known."""
        return describing.user(live.served(run), id, limit)

    @routes.get("/v1/user", tags=["users"], response_model=s.UserInfo, responses=_SAYS)
    async def user_by_query(
        id: str = Query(max_length=ID), run: str | None = None, limit: int = Query(1000, ge=1, le=10_000)
    ) -> s.UserInfo:
        """The same, for ids with a slash."""
        return describing.user(live.served(run), id, limit)

    @routes.post(
        "/v1/reload",
        tags=["state"],
        response_model=s.Reloaded,
        responses={**_SAYS, 403: {"description": "outside the roots"}, 409: {}},
    )
    async def reload(asked: s.Reload) -> s.Reloaded:
        """Load a run or its index anew and swap it in; whatever is wrong with it, the one of now stays."""
        new, seconds = await service.off_loop(service.loader, live.reload, asked.run, asked.name)
        return s.Reloaded(
            run=new.name,
            folder=str(new.folder),
            generation=new.generation,
            items=len(new.index),
            seconds=round(seconds, 3),
            waiting=list(new.waiting.values())[:100],
        )

    return routes


def _errors(app: FastAPI) -> None:
    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> Response:
        headers, body = refusal(error)
        return Response(body, error.status, {name.decode(): value.decode() for name, value in headers})

    @app.exception_handler(Exception)
    async def fault(request: Request, error: Exception) -> Response:  # the gate writes it to the log
        return await refused(request, FAULT)

    @app.exception_handler(UserError)
    async def user_error(request: Request, error: UserError) -> JSONResponse:
        return JSONResponse({"detail": " ".join(str(error).split())}, 422)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        return JSONResponse({"detail": f"{where or 'body'}: {first['msg']}"[:500]}, 422)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"detail": str(error.detail)}, error.status_code, headers=error.headers)
