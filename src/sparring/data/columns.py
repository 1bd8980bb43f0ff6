"""Which column of a table is the query, the item, the time: guessed from common names, or named by the user."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import polars as pl

from sparring.core.errors import UserError

# For each role, tiers of names in lower case without punctuation: an earlier tier beats a later one; two in one tier are ambiguous.
_NAMES: dict[str, tuple[str, ...]] = {
    "query": (
        "userid uid queryid qid customerid custid householdid memberid visitorid reviewerid accountid personid buyerid shopperid",
        "user query customer household member visitor reviewer account person buyer shopper",
        "sessionid session",
    ),
    "item": (
        "itemid iid productid movieid sku asin articleid trackid songid bookid isbn videoid newsid docid documentid businessid "
        "stockcode locationid poiid artistid adid gameid recipeid labelid",
        "item product movie article track song book video news doc document business location poi artist game recipe parentasin",
    ),
    "time": (
        "timestamp ts time datetime unixtime unixreviewtime eventtime transactiontimestamp createdat ratedat",
        "date day eventdate orderdate transactiondate",
    ),
    "rating": ("rating ratings score stars overall",),
    "weight": ("weight",),
    "split": ("split subset",),
    "label": ("label click clicked isclick",),
}
# Columns of interactions that repeat the text of their query or item on every row.
_TEXTS = {
    "query": "querytext querytitle question questiontext",
    "item": "itemtext itemtitle itemname producttitle productname producttext movietitle booktitle doctitle doctext documenttitle "
    "documenttext passage passagetext labeltext labeltitle title text body content abstract description productdescription",
}
# Columns of a table of queries or items that say what it is, best first: a text is the first of the titles and the first of the bodies.
_HEADS = "title {0}title producttitle movietitle booktitle doctitle documenttitle labeltitle headline name {0}name productname labelname"
_BODIES = (
    "text {0}text producttext doctext documenttext passagetext questiontext labeltext body content contents passage document abstract "
    "description {0}description productdescription summary question query sentence utterance"
)
_TITLES = (
    "title itemtitle producttitle movietitle booktitle name itemname productname description productdescription text"
)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def find_column(
    role: str, columns: Sequence[str], named: str | None, source: str, required: bool = False
) -> str | None:
    """The column that plays a role: the one named, none for the empty name, else the best guess."""
    listed = f"{source} has the columns {', '.join(columns)}"
    if named == "" and not required:
        return None
    if named is not None:
        if named not in columns:
            raise UserError(f"no column {named!r} for the {role}: {listed}")
        return named
    for tier in _NAMES[role]:
        names = tier.split()
        found = [column for column in columns if _plain(column) in names]
        if len(found) > 1:
            off = "" if required else ', or "" for none'
            raise UserError(f"{' and '.join(map(repr, found))} could each be the {role}{off}: {listed}", role)
        if found:
            return found[0]
    if required:
        raise UserError(f"cannot tell which column is the {role}: {listed}", role)
    return None


def find_columns(columns: Sequence[str], named: Mapping[str, str | None], source: str, rated: bool) -> dict[str, str]:
    """Role -> column, for the roles that the table has. The rating matters only where there is a threshold."""
    found: dict[str, str] = {}
    for role in _NAMES:
        if role == "rating" and not rated and named.get(role) is None:
            continue
        required = role in ("query", "item") or (role == "rating" and rated)
        column = find_column(role, columns, named.get(role), source, required)
        if column is None:
            continue
        twice = [other for other, taken in found.items() if taken == column]
        if twice:
            listed = f"{source} has the columns {', '.join(columns)}"
            raise UserError(f"column {column!r} cannot be both the {twice[0]} and the {role}; {listed}")
        found[role] = column
    return found


def unused_ratings(columns: Sequence[str], named: str | None) -> list[str]:
    """The columns of ratings that a reading without a threshold leaves alone."""
    guessed = [column for column in columns if _plain(column) in _NAMES["rating"][0].split()]
    return guessed if named is None else [named] if named else []


def text_columns(role: str, columns: Sequence[str]) -> list[str]:
    """The columns of interactions that hold a text of the query or item."""
    return [column for column in columns if _plain(column) in _TEXTS[role].split()]


def texts_of_table(role: str, columns: Sequence[str]) -> tuple[str, ...]:
    """The columns of a table of queries or items that make its text: a title, a body, or both; empty where no name is known."""
    plain = {_plain(column): column for column in reversed(columns)}
    tiers = ([plain[name] for name in tier.format(role).split() if name in plain] for tier in (_HEADS, _BODIES))
    return tuple(tier[0] for tier in tiers if tier)


def with_title(table: pl.DataFrame) -> pl.DataFrame:
    """The table with a column `title`, where one of its columns is a title by another name."""
    if "title" in table.columns:
        return table
    plain = {_plain(column): column for column in reversed(table.columns)}
    best = next((plain[name] for name in _TITLES.split() if name in plain), None)
    return table if best is None else table.with_columns(pl.col(best).alias("title"))
