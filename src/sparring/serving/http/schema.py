"""Types of requests and responses, from which the OpenAPI description is generated; limits; the error of a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    model_validator,
)

MAX_K = 1000  # items in one list
MAX_QUERIES = 256  # users, texts or items in one request
MAX_IDS = 10_000  # ids in a history, an allow list or a deny list
MAX_ITEMS = 1000  # items put or deleted by one request
MAX_CONDITIONS = 16  # in one filter
MAX_FIELDS = 32  # item columns in one response
MAX_VALUES = 1 << 20  # values in one response: queries x k x columns
MAX_TEXT = 10_000  # characters of a text, a title or a value
MAX_ID = 1024  # characters of an id
MAX_DIM = 65_536  # numbers in a vector
# Parsing JSON stops all other requests, so its parts are counted before. Texts may contain some of their characters.
MAX_LISTS = 20_000  # lists and objects in one request
MAX_KEYS = 2_000  # keys of objects in one query
MAX_ITEM_KEYS = 40_000  # keys of objects in one change of items
MAX_QUERY_VALUES = 250_000  # values in one query


@dataclass(frozen=True)
class Limits:
    """Limits set by the operator. A client is an IPv4 address, or the first 64 bits of an IPv6 address."""

    seconds: float = 10.0  # for an answer
    slow_seconds: float = 300.0  # for /v1/reload and /v1/items
    head_seconds: float = 10.0  # for the head of a request, and for the first one of a new connection
    body_seconds: float = 30.0  # for the body of a request
    send_seconds: float = 30.0  # for the client to read a response
    idle_seconds: float = 75.0  # between two requests
    head: int = 32 * 2**10  # bytes of a request line and its headers
    headers: int = 100
    body: int = 8 * 2**20  # bytes
    buffered: int = 64 * 2**20  # bytes of all large bodies together
    waiting: int = 4096  # queries waiting to be searched
    connections: int = 4096  # at most the descriptors of the process less 128
    client_connections: int | None = None
    client_requests: int | None = None  # answered at once
    client_rate: float | None = None  # requests per second


class RequestError(Exception):
    """A request that fails with this HTTP status and a one-line message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message

    def __reduce__(self) -> tuple[Any, ...]:  # workers and their parent exchange errors
        return RequestError, (self.status, self.message)


Text = Annotated[StrictStr, Field(max_length=MAX_TEXT)]
Name = Annotated[StrictStr, Field(max_length=MAX_ID)]
Int = Annotated[StrictInt, Field(ge=-(2**63), le=2**63 - 1)]  # a response cannot hold larger ones
Id = Int | Name
RequestIds = Annotated[list[Id], Field(max_length=MAX_IDS, fail_fast=True)]
Queries = Annotated[list[Id], Field(min_length=1, max_length=MAX_QUERIES, fail_fast=True)]
Float = Annotated[StrictFloat, Field(allow_inf_nan=False)]
# the frequent types first: a filter may have 160,000 values; an integer beyond 64 bits is a float
Scalar = Annotated[Int | Text | Float | StrictBool, Field(union_mode="left_to_right")]
Vector = Annotated[list[float], Field(min_length=1, max_length=MAX_DIM, fail_fast=True)]
Op = Literal["=", "!=", "<", "<=", ">", ">=", "in", "not in", "contains"]


class Exact(BaseModel):
    """A request with these fields and no others. One unknown field is reported: pydantic would describe all of them."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"additionalProperties": False})

    @model_validator(mode="after")
    def _no_others(self) -> Self:
        if self.__pydantic_extra__:
            raise ValueError(f"unknown field {next(iter(self.__pydantic_extra__))[:100]!r}")
        return self


class Condition(Exact):
    """A condition on an item column: {"column": "price", "op": "<", "value": 10}."""

    column: Name
    op: Op
    value: Scalar | Annotated[list[Scalar], Field(max_length=MAX_IDS, fail_fast=True)]


class Query(Exact):
    """Fields that every query has: the length of the list, filters, and the item columns to return."""

    k: Annotated[StrictInt, Field(ge=1, le=MAX_K)] = 10
    allow: RequestIds | None = Field(None, description="list only these items")
    deny: RequestIds | None = Field(None, description="never list these items")
    # null by default rather than []: pydantic would copy a list for every request
    where: Annotated[list[Condition], Field(max_length=MAX_CONDITIONS)] | None = Field(
        None, description="conditions on item columns; all must hold"
    )
    fields: Annotated[list[Name], Field(max_length=MAX_FIELDS)] | None = Field(
        None, description="item columns to return in addition to the title"
    )
    run: Name | None = Field(None, description="name of the run to query; the first one by default")


class Recommend(Query):
    """The best items for known users, for a history of items, or for texts. Give exactly one of these."""

    user: Id | None = Field(None, validation_alias=AliasChoices("user", "query"))
    users: Queries | None = Field(None, validation_alias=AliasChoices("users", "queries"))
    history: Annotated[list[Id], Field(min_length=1, max_length=MAX_IDS, fail_fast=True)] | None = Field(
        None, description="item ids, oldest first"
    )
    text: Text | None = None
    texts: Annotated[list[Text], Field(min_length=1, max_length=MAX_QUERIES, fail_fast=True)] | None = None
    exclude_seen: StrictBool | None = Field(
        None,
        description="leave out the items the user has interacted with, or the items in the history; "
        "by default true, unless the run keeps repeats",
    )


class Similar(Query):
    """The nearest neighbours of one or more items, each searched separately."""

    item: Id | None = None
    items: Queries | None = None


class Listed(BaseModel):
    """An item in a list, with the columns requested in `fields`."""

    model_config = ConfigDict(extra="allow")
    id: int | str
    title: str | None
    score: float


class Answer(BaseModel):
    query: Any = Field(description="the user, text, item or history of the request")
    items: list[Listed]
    unknown: list[int | str] = Field(
        [], description="ids unknown to the run: items ignored in a history, or the query itself"
    )


class SourceShare(BaseModel):
    """The part of one source of a fused run in an answer."""

    name: str
    share: float = Field(description="share of the listed items that this source has among its own k best")
    ms: float = Field(description="milliseconds of its search, for all requests that were searched together")


class Answers(BaseModel):
    results: list[Answer]
    run: str
    generation: int
    sources: list[SourceShare] = Field([], description="of a fused run; absent otherwise")


class Item(BaseModel):
    """An item to add or change. Any column of the item table may be given; columns left out keep their values."""

    model_config = ConfigDict(extra="allow")
    id: Id
    title: Text | None = None
    text: Text | None = Field(None, description="encoded by the item tower, if it reads texts")
    vector: Vector | None = Field(None, description="in the vector space of the default run's items")
    like: Annotated[list[Id], Field(min_length=1, max_length=MAX_IDS, fail_fast=True)] | None = Field(
        None, description="place the item at the mean of these items"
    )
    __pydantic_extra__: dict[str, Scalar | None]


class PutItems(Exact):
    items: Annotated[list[Item], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]


class DeleteItems(Exact):
    ids: Annotated[list[Id], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]


class Written(BaseModel):
    """Changes that were durable before this response was sent."""

    count: int
    sequence: int = Field(description="sequence number of the last change in the store")
    waiting: dict[str, list[int | str]] = Field(
        description="run -> items that it cannot place; they are stored but not listed by that run"
    )


class Reload(Exact):
    run: Text | None = Field(None, description="run folder to load; the current one by default")
    name: Name | None = Field(None, description="name of the served run to replace; the first one by default")


class Reloaded(BaseModel):
    run: str
    folder: str
    generation: int
    items: int
    seconds: float
    waiting: list[int | str]


class RunInfo(BaseModel):
    name: str
    folder: str
    recipe: str
    items: int
    queries: int
    dim: int
    score: str
    ranking: str = Field(description="towers, classifiers, or both fused; fused too for a run that is fused of others")
    index: str = Field(description="exact, hnsw, cagra, ivf, ..., lists or fused")
    recall: float | None = Field(description="recall of the lists, as measured by `sparring index`")
    answers: list[str] = Field(description="supported queries: user, history, text, similar")
    sources: dict[str, float] | None = Field(description="weights of the runs of a fused run; null otherwise")
    history_by: str | None = Field(
        description='"tower", or "mean" of the item vectors if the query tower does not read histories'
    )
    places_by: list[str] = Field(description="ways to place a new item: vector, like, text, features")
    generation: int
    notes: list[str]
    waiting: int


class ColumnInfo(BaseModel):
    name: str
    type: Literal["text", "number", "boolean", "time", "list"]
    dtype: str


class Info(BaseModel):
    """The default run, all runs, and the columns that filters may use."""

    version: str
    run: RunInfo
    runs: list[RunInfo]
    columns: list[ColumnInfo]
    changed: int = Field(description="items added or changed since the run was trained")
    deleted: int
    limits: dict[str, float]


class ItemInfo(BaseModel):
    id: int | str
    title: str | None
    columns: dict[str, Any]
    source: Literal["run", "changed", "added"]
    placed: bool = Field(description="whether this run can list the item")


class HistoryItem(BaseModel):
    id: int | str
    title: str | None


class UserInfo(BaseModel):
    id: int | str
    history: list[HistoryItem]
    total: int
    ordered: bool = Field(description="whether the history is in time order")
    columns: dict[str, Any]
