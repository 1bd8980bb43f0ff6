"""The roles of a table's columns (query, item, time, ...): guessed from common names, or named by the user."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

import polars as pl

from sparring.core.errors import UserError, did_you_mean

Repeats = Literal["merge", "keep"]


class Columns(TypedDict, total=False):
    """The columns of interactions by role, as the caller names them, and which rows become interactions.

    A role that is absent or None is guessed from common names; "" or "none" leaves an optional one out. `min_rating`
    drops the rows rated lower; without it every row is a positive. `label` is 1 for a positive and 0 for an item shown
    and not clicked. `repeats` says whether the rows of one pair become one interaction ("merge", the default) or stay
    ("keep").
    """

    query: str | None
    user: str | None  # another name of query
    item: str | None
    time: str | None
    weight: str | None
    rating: str | None
    split: str | None
    label: str | None
    min_rating: float | None
    repeats: Repeats | None


def by_role(columns: Columns) -> Columns:
    """The columns with the one called `user` under its other name, `query`."""
    if columns.get("user") is None:
        return columns
    named = either("query", columns.get("query"), columns["user"])
    return {**{name: value for name, value in columns.items() if name != "user"}, "query": named}  # type: ignore[typeddict-item]


def either(name: str, query: Any, user: Any) -> Any:
    """The value of an argument that has two names, such as query and user; None if neither is given."""
    if query is not None and user is not None:
        other = "user" if name == "query" else "users"
        raise UserError(f"{name} and {other} are two names of one argument: give one of them")
    return user if query is None else query


def keeps_repeats(columns: Columns) -> bool:
    """Whether every row stays an interaction."""
    given = columns.get("repeats") or "merge"
    if given not in ("merge", "keep"):
        raise UserError(f"repeats is {given!r}; it must be 'merge' or 'keep'")
    return given == "keep"


# Tiers of names for each role, lower case, no punctuation. An earlier tier wins; two names of one tier are ambiguous.
_NAMES: dict[str, tuple[str, ...]] = {
    "query": (
        "userid uid queryid qid customerid custid householdid memberid visitorid reviewerid accountid personid buyerid "
        "shopperid",
        "user query customer household member visitor reviewer account person buyer shopper",
        "sessionid session",
    ),
    "item": (
        "itemid iid productid movieid sku asin articleid trackid songid bookid isbn videoid newsid docid documentid "
        "businessid stockcode locationid poiid artistid adid gameid recipeid labelid",
        "item product movie article track song book video news doc document business location poi artist game recipe "
        "parentasin",
    ),
    "time": (
        "timestamp ts time datetime unixtime unixreviewtime eventtime transactiontimestamp createdat ratedat",
        "date day eventdate orderdate transactiondate",
        "position sequence sequencenumber positioninsession rankinsession",
    ),
    "rating": ("rating ratings score stars overall",),
    "weight": ("weight",),
    "split": ("split subset",),
    "label": ("label click clicked isclick",),
}
# Columns of interactions that repeat the text of their query or item on every row.
_INLINE_TEXTS = {
    "query": "querytext querytitle question questiontext",
    "item": "itemtext itemtitle itemname producttitle productname producttext movietitle booktitle doctitle doctext "
    "documenttitle documenttext passage passagetext labeltext labeltitle title text body content abstract description "
    "productdescription",
}
# Columns of a table of queries or items, best first: its text is the first of the titles and the first of the bodies.
_HEADS = (
    "title {0}title producttitle movietitle booktitle doctitle documenttitle labeltitle headline name {0}name "
    "productname labelname"
)
_BODIES = (
    "text {0}text producttext doctext documenttext passagetext questiontext labeltext body content contents passage "
    "document abstract description {0}description productdescription summary question query sentence utterance"
)
_TITLES = (
    "title itemtitle producttitle movietitle booktitle name itemname productname description productdescription text"
)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def find_column(
    role: str, columns: Sequence[str], named: str | None, source: str, required: bool = False
) -> str | None:
    """The column of a role: the named one, None for the name "" or "none", otherwise the best guess."""
    listed = f"{source} has the columns {', '.join(columns)}"
    if not required and (named == "" or (named == "none" and named not in columns)):
        return None
    if named is not None:
        if named not in columns:
            raise UserError(f"no column {named!r} for the {role}: {listed}")
        return named
    for tier in _NAMES[role]:
        matches = [column for column in columns if _plain(column) in tier.split()]
        if len(matches) > 1:
            off = "" if role in ("query", "item") else ", or none of them"
            raise UserError(f"{' and '.join(map(repr, matches))} could each be the {role}{off}: {listed}", role)
        if matches:
            return matches[0]
    if required:
        raise UserError(f"cannot tell which column is the {role}: {listed}", role)
    return None


def find_roles(names: Sequence[str], columns: Columns, source: str) -> dict[str, str]:
    """{role: column} for the roles that a table with columns `names` has. Ratings matter only with a threshold."""
    unknown = next((name for name in columns if name not in Columns.__annotations__), None)
    if unknown is not None:
        hint = did_you_mean(unknown, Columns.__annotations__)
        raise UserError(f"there is no argument {unknown!r}{hint or '; name columns by role, such as query=...'}")
    given: Mapping[str, Any] = columns
    rated = columns.get("min_rating") is not None
    roles: dict[str, str] = {}
    for role in _NAMES:
        if role == "rating" and not rated and given.get(role) is None:
            continue
        required = role in ("query", "item") or (role == "rating" and rated)
        column = find_column(role, names, given.get(role), source, required)
        if column is None:
            continue
        other = next((other for other, taken in roles.items() if taken == column), None)
        if other is not None:
            listed = f"{source} has the columns {', '.join(names)}"
            raise UserError(f"column {column!r} cannot be both the {other} and the {role}; {listed}")
        roles[role] = column
    return roles


def is_order(roles: Mapping[str, str], columns: Columns) -> bool:
    """Whether the time is a guessed position: it orders the items of one query, and gives no common cut in time."""
    return columns.get("time") is None and _plain(roles.get("time", "")) in _NAMES["time"][-1].split()


def order_notes(roles: Mapping[str, str], columns: Columns) -> list[str]:
    """A note if the time is a position."""
    return [f"{roles['time']} is the order of a query's items"] if is_order(roles, columns) else []


def unused_ratings(names: Sequence[str], named: str | None) -> list[str]:
    """The rating columns that are ignored when there is no threshold."""
    guessed = [column for column in names if _plain(column) in _NAMES["rating"][0].split()]
    return guessed if named is None else [named] if named else []


def inline_text_columns(role: str, names: Sequence[str]) -> list[str]:
    """The columns of interactions that hold a text of their query or item."""
    return [column for column in names if _plain(column) in _INLINE_TEXTS[role].split()]


def table_text_columns(role: str, names: Sequence[str]) -> tuple[str, ...]:
    """The text columns of a table of queries or items: a title, a body, or both; empty where no name is known."""
    plain = {_plain(column): column for column in reversed(names)}
    tiers = ([plain[name] for name in tier.format(role).split() if name in plain] for tier in (_HEADS, _BODIES))
    return tuple(tier[0] for tier in tiers if tier)


def with_title(table: pl.DataFrame) -> pl.DataFrame:
    """The table with a column `title`, copied from a title column with another name."""
    if "title" in table.columns:
        return table
    plain = {_plain(column): column for column in reversed(table.columns)}
    best = next((plain[name] for name in _TITLES.split() if name in plain), None)
    return table if best is None else table.with_columns(pl.col(best).alias("title"))
