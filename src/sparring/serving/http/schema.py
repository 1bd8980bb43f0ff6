"""What requests hold and what answers look like: the types that the OpenAPI description is made from."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr

from sparring.serving.http import limits

Text = Annotated[StrictStr, Field(max_length=limits.TEXT)]
Name = Annotated[StrictStr, Field(max_length=limits.ID)]
Id = StrictInt | Name
Ids = Annotated[list[Id], Field(max_length=limits.IDS)]
Queries = Annotated[list[Id], Field(min_length=1, max_length=limits.QUERIES)]
Scalar = StrictBool | StrictInt | StrictFloat | Text
Vector = Annotated[list[float], Field(min_length=1, max_length=limits.DIM)]
Op = Literal["=", "!=", "<", "<=", ">", ">=", "in", "not in", "contains"]


class Condition(BaseModel):
    """One condition on an item column: {"column": "price", "op": "<", "value": 10}."""

    model_config = ConfigDict(extra="forbid")
    column: Name
    op: Op
    value: Scalar | Annotated[list[Scalar], Field(max_length=limits.IDS)]


class Asked(BaseModel):
    """What every question may say: how many items, which may be listed, which of their columns to give."""

    model_config = ConfigDict(extra="forbid")
    k: Annotated[StrictInt, Field(ge=1, le=limits.K)] = 10
    allow: Ids | None = Field(None, description="only these items may be listed")
    deny: Ids | None = Field(None, description="these items may not be listed")
    # null by default, not a list: a list would be copied for every request
    where: Annotated[list[Condition], Field(max_length=limits.CONDITIONS)] | None = Field(
        None, description="conditions that must all hold"
    )
    fields: Annotated[list[Name], Field(max_length=limits.FIELDS)] | None = Field(
        None, description="item columns to give beside the title"
    )
    run: Name | None = Field(None, description="name of one of the runs served; the first one by default")


class Recommend(Asked):
    """The best items for one of: known users, a history of items, texts."""

    user: Id | None = None
    users: Queries | None = None
    history: Annotated[list[Id], Field(min_length=1, max_length=limits.IDS)] | None = Field(
        None, description="item ids, oldest first"
    )
    text: Text | None = None
    texts: Annotated[list[Text], Field(min_length=1, max_length=limits.QUERIES)] | None = None
    exclude_seen: StrictBool = Field(
        True, description="leave out what the user has already taken, or what the history holds"
    )


class Similar(Asked):
    """The items nearest to one or several items, each by itself."""

    item: Id | None = None
    items: Queries | None = None


class Listed(BaseModel):
    """An item of a list; columns that were asked for in `fields` stand beside these."""

    model_config = ConfigDict(extra="allow")
    id: int | str
    title: str | None
    score: float


class Answer(BaseModel):
    query: Any = Field(description="the user, text or item asked for, or the history")
    items: list[Listed]
    unknown: list[int | str] = Field(
        [], description="ids that the run does not know: of a history, left out of it, or the query itself"
    )


class Answers(BaseModel):
    results: list[Answer]
    run: str
    generation: int


class Item(BaseModel):
    """An item to add or change: any column of the item table may be given beside these, and what is not given stays as it is."""

    model_config = ConfigDict(extra="allow")
    id: Id
    title: Text | None = None
    text: Text | None = Field(None, description="read by the item tower, where that reads texts")
    vector: Vector | None = Field(None, description="in the space of the default run's item vectors")
    like: Annotated[list[Id], Field(min_length=1, max_length=limits.IDS)] | None = Field(
        None, description="items whose mean it gets"
    )
    __pydantic_extra__: dict[str, Scalar | None]


class PutItems(BaseModel):
    model_config = ConfigDict(extra="forbid")
    items: Annotated[list[Item], Field(min_length=1, max_length=limits.ITEMS)]


class DeleteItems(BaseModel):
    model_config = ConfigDict(extra="forbid")
    ids: Annotated[list[Id], Field(min_length=1, max_length=limits.ITEMS)]


class Written(BaseModel):
    """What was made durable before this answer was sent."""

    count: int
    sequence: int = Field(description="number of the last change in the store")
    waiting: dict[str, list[int | str]] = Field(
        description="run -> items that it cannot place: they are kept, and not listed there"
    )


class Reload(BaseModel):
    model_config = ConfigDict(extra="forbid")
    run: Text | None = Field(None, description="folder of the run to load; that of now by default")
    name: Name | None = Field(None, description="which of the runs served it replaces; the first one by default")


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
    index: str = Field(description="exact, hnsw, ivf, ...")
    recall: float | None = Field(description="of the index, as `sparring index` measured it")
    answers: list[str] = Field(description="kinds of question: user, history, text, similar")
    history_by: str | None = Field(
        description='"tower", or "mean" of the item vectors where the query tower reads no histories'
    )
    places_by: list[str] = Field(description="what a new item may be placed by: vector, like, text, features")
    generation: int
    notes: list[str]
    waiting: int


class Column(BaseModel):
    name: str
    type: Literal["text", "number", "boolean", "time", "list"]
    dtype: str


class Info(BaseModel):
    """The default run, all runs, and the columns that filters may use."""

    version: str
    run: RunInfo
    runs: list[RunInfo]
    columns: list[Column]
    changed: int = Field(description="items added or changed since the run was made")
    deleted: int
    limits: dict[str, float]


class ItemInfo(BaseModel):
    id: int | str
    title: str | None
    columns: dict[str, Any]
    source: Literal["run", "changed", "added"]
    placed: bool = Field(description="whether it can be listed by this run")


class Taken(BaseModel):
    id: int | str
    title: str | None


class UserInfo(BaseModel):
    id: int | str
    history: list[Taken]
    total: int
    ordered: bool = Field(description="whether the history is in time order")
    columns: dict[str, Any]
