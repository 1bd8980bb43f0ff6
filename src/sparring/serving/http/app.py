"""The HTTP service: its routes, described by OpenAPI, and its parts."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi import Query as Parameter
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from sparring import __version__
from sparring.core.errors import UserError
from sparring.kernels import native
from sparring.serving.http import schema as s
from sparring.serving.http.answers import Answering, write_responses
from sparring.serving.http.gate import INTERNAL_ERROR, Gate, error_response
from sparring.serving.http.pages import ReadSplit, pages
from sparring.serving.http.runs import RunRegistry
from sparring.serving.http.schema import MAX_ID, Limits, RequestError
from sparring.serving.http.searcher import Searcher
from sparring.serving.http.telemetry import EventLog, Figures, Metrics
from sparring.serving.http.threads import in_thread

_ERROR_SCHEMA = {"type": "object", "properties": {"detail": {"type": "string"}}}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": _ERROR_SCHEMA}}}
    for status, text in {
        400: "malformed request",
        401: "missing or wrong token",
        404: "unknown id, run or column",
        413: "request body too large",
        415: "not JSON",
        422: "invalid request",
    }.items()
}


def _leads(id: str) -> dict[str, Any]:
    """OpenAPI links from a response to the requests that take the item at `id`."""
    return {
        "item": {"operationId": "item_by_query", "parameters": {"id": id}},
        "similar": {"operationId": "similar", "requestBody": {"item": id}},
        "history": {"operationId": "recommend", "requestBody": {"history": [id]}},
        "put": {"operationId": "put_items", "requestBody": {"items": [{"id": id, "title": "changed"}]}},
        "delete": {"operationId": "delete_items", "requestBody": {"ids": [id]}},
    }


_LISTED: dict[int | str, dict[str, Any]] = {200: {"links": _leads("$response.body#/results/0/items/0/id")}}
_PUT: dict[int | str, dict[str, Any]] = {200: {"links": _leads("$request.body#/items/0/id")}}
_WRITE_ERRORS = {**_ERRORS, 507: {"description": "the disk is full"}}


class Whole(Protocol):
    """The service that a worker is part of, as its parent knows it."""

    async def problems(self) -> dict[str, str]:
        """Why the watch could not reload runs; RequestError unless every worker is ready."""

    async def figures(self) -> Figures:
        """The figures of all workers together."""


class Service:
    """All parts of one service, or of one worker of the `whole`. `gate` answers requests; `close` stops the threads.

    service = Service(RunRegistry([Path("runs/first")], Store(...)))
    Server(service, socket.create_server(("127.0.0.1", 8000))).run()
    """

    def __init__(
        self,
        registry: RunRegistry,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        token: str | None = None,
        hosts: Sequence[str] | None = None,
        log: EventLog | None = None,
        read_split: ReadSplit | None = None,
        threads: int = 1,
        whole: Whole | None = None,
    ) -> None:
        native.function("threads", "")  # compiles the kernels if need be, before a request would wait for that
        self.registry, self.limits, self.whole = registry, limits, whole
        self.log = log or EventLog(requests=False)
        self.searcher = Searcher(write_responses, threads, limits.waiting)
        self.encoder = ThreadPoolExecutor(1, "encode", torch.set_num_threads, (threads,))
        self.filterer, self.writer = ThreadPoolExecutor(1, "filter"), ThreadPoolExecutor(1, "write")
        self.loader = ThreadPoolExecutor(2, "load")
        self.answering = Answering(registry, self.searcher, self.encoder, self.filterer)
        self.metrics = Metrics(registry, self.searcher)
        self.app = FastAPI(
            title="Sparring",
            version=__version__,
            docs_url=None,
            redoc_url=None,
            description="Recommendations from a trained retriever.",
            generate_unique_id_function=lambda route: route.name,
        )
        self.app.state.service = self
        _errors(self.app)
        self.app.include_router(_routes(self))
        self.app.include_router(pages(registry, read_split))
        plain = {"/v1/recommend": self.answering.plain_recommend, "/v1/similar": self.answering.plain_similar}
        follow = None if registry.peers is None else self._follow
        self.gate = Gate(self.app, plain, self.metrics, self.log, limits, token, hosts, follow)
        self.follower = ThreadPoolExecutor(1, "follow")

    def _follow(self) -> Awaitable[None] | None:
        return in_thread(self.follower, self.registry.catch_up) if self.registry.behind else None

    def close(self) -> None:
        self.searcher.close()
        for pool in (self.encoder, self.filterer, self.writer, self.loader, self.follower):
            pool.shutdown(wait=True, cancel_futures=True)
        self.registry.close()


def _routes(service: Service) -> APIRouter:
    registry, answering = service.registry, service.answering
    routes = APIRouter()

    @routes.get("/healthz", tags=["state"])
    async def health() -> dict[str, str]:
        """The process responds."""
        return {"status": "ok"}

    @routes.get("/readyz", tags=["state"], responses={503: {"description": "not ready"}})
    async def ready() -> dict[str, Any]:
        """A run is loaded and can be searched; `degraded` if the watch could not load a newer one, and why."""
        if not service.searcher.alive:
            raise RequestError(503, "the search threads have stopped")
        problems = dict(registry.problems) if service.whole is None else await service.whole.problems()
        state: dict[str, Any] = {"status": "degraded", "problems": problems} if problems else {"status": "ready"}
        return {**state, "run": registry.served().name, "generation": registry.served().generation}

    @routes.get("/metrics", tags=["state"], response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Metrics in the text format of Prometheus."""
        figures = service.metrics.figures() if service.whole is None else await service.whole.figures()
        return Response(service.metrics.text(figures), media_type="text/plain; version=0.0.4")

    @routes.get("/v1/info", tags=["state"], response_model=s.Info)
    async def info() -> s.Info:
        """The runs, the queries they support, the item columns and the limits."""
        return answering.info(service.limits)

    @routes.post("/v1/recommend", tags=["queries"], response_model=s.Answers, responses={**_ERRORS, **_LISTED})
    async def recommend(query: s.Recommend) -> Response:
        """The best items for known users, for a history of items, or for texts."""
        return Response(await answering.recommend(query), media_type="application/json")

    @routes.post("/v1/similar", tags=["queries"], response_model=s.Answers, responses={**_ERRORS, **_LISTED})
    async def similar(query: s.Similar) -> Response:
        """The nearest neighbours of items."""
        return Response(await answering.similar(query), media_type="application/json")

    @routes.put("/v1/items", tags=["items"], response_model=s.Written, responses={**_WRITE_ERRORS, **_PUT})
    async def put_items(request: s.PutItems) -> s.Written:
        """Add or change items, all or none. The change is durable and visible to searches when the response is sent."""
        items = [item.model_dump(exclude_unset=True) for item in request.items]
        sequence, waiting = await in_thread(service.writer, registry.put, items)
        return s.Written(count=len(items), sequence=sequence, waiting=waiting)

    @routes.delete("/v1/items", tags=["items"], response_model=s.Written, responses=_WRITE_ERRORS)
    async def delete_items(request: s.DeleteItems) -> s.Written:
        """Delete items, all or none."""
        sequence, waiting = await in_thread(service.writer, registry.delete, request.ids)
        return s.Written(count=len(request.ids), sequence=sequence, waiting=waiting)

    @routes.get("/v1/items/{id}", tags=["items"], response_model=s.ItemInfo, responses=_ERRORS)
    async def item(id: str, run: str | None = None) -> s.ItemInfo:
        """One item with all its columns."""
        return answering.item(id, run)

    @routes.get("/v1/item", tags=["items"], response_model=s.ItemInfo, responses=_ERRORS)
    async def item_by_query(id: str = Parameter(max_length=MAX_ID), run: str | None = None) -> s.ItemInfo:
        """The same, for ids that contain a slash."""
        return answering.item(id, run)

    @routes.get("/v1/users/{id}", tags=["users"], response_model=s.UserInfo, responses=_ERRORS)
    async def user(id: str, run: str | None = None, limit: int = Parameter(1000, ge=1, le=10_000)) -> s.UserInfo:
        """One user with the history, newest item last if the order is known."""
        return answering.user(id, run, limit)

    @routes.get("/v1/user", tags=["users"], response_model=s.UserInfo, responses=_ERRORS)
    async def user_by_query(
        id: str = Parameter(max_length=MAX_ID), run: str | None = None, limit: int = Parameter(1000, ge=1, le=10_000)
    ) -> s.UserInfo:
        """The same, for ids that contain a slash."""
        return answering.user(id, run, limit)

    @routes.post(
        "/v1/reload",
        tags=["state"],
        response_model=s.Reloaded,
        responses={
            **_ERRORS,
            403: {"description": "outside the allowed folders"},
            409: {"description": "another reload is in progress"},
        },
    )
    async def reload(request: s.Reload) -> s.Reloaded:
        """Load a run or its index again and swap it in. If anything is wrong with it, the current run stays."""
        new, seconds = await in_thread(service.loader, registry.reload, request.run, request.name)
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
    @app.exception_handler(RequestError)
    async def request_error(request: Request, error: RequestError) -> Response:
        status, headers, body, _ = error_response(error)
        return Response(body, status, {name.decode(): value.decode() for name, value in headers or ()})

    @app.exception_handler(Exception)
    async def fault(request: Request, error: Exception) -> Response:  # the gate logs it
        return await request_error(request, INTERNAL_ERROR)

    @app.exception_handler(UserError)
    async def user_error(request: Request, error: UserError) -> Response:
        return await request_error(request, RequestError(422, " ".join(str(error).split())))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        parts = [str(part) for part in first["loc"] if part != "body"]
        where = ".".join(part for part in parts if not part.startswith("constrained-"))  # a type of a union, no field
        return await request_error(request, RequestError(422, f"{where or 'body'}: {first['msg']}"[:500]))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"detail": str(error.detail)}, error.status_code, headers=error.headers)
