"""Rows of a run for Vespa: a schema and a feed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO

import polars as pl

from sparring.core import files
from sparring.core.errors import UserError
from sparring.serving.export.rows import TIME, Rows, payloads, vector_text
from sparring.serving.export.store import column_types

_KINDS = {pl.Boolean: "bool", pl.Int64: "long", pl.Float64: "double", pl.String: "string", TIME: "long"}
_BLOCK = 10_000

_SCHEMA = """schema {name} {{
    document {name} {{
        field id type {key} {{
            indexing: summary | attribute
        }}
{fields}        field vector type tensor<float>(x[{dim}]) {{
            indexing: attribute | index
            attribute {{
                distance-metric: dotproduct
            }}
        }}
    }}
    rank-profile inner_product {{
        inputs {{
            query(q) tensor<float>(x[{dim}])
        }}
        first-phase {{
            expression: sum(query(q) * attribute(vector))
        }}
    }}
}}
"""
_FIELD = """        field {name} type {kind} {{
            indexing: summary | attribute
        }}
"""


def write_vespa(rows: Rows, folder: Path, table: str) -> list[Path]:
    """Write schemas/TABLE.sd for the application package, and TABLE.jsonl for `vespa feed`.

    Times are microseconds since 1970, because Vespa orders numbers only. A missing value is left out of its document.
    """
    if not table.isidentifier() or not table.isascii():
        raise UserError(f"{table!r} is not a name of a schema in Vespa: use letters, digits and underscores")
    key = "string" if rows.schema["id"] == pl.String else "long"
    kinds = column_types(rows.schema, _KINDS, "array<{}>")
    fields = "".join(_FIELD.format(name=name, kind=kind) for name, kind in kinds.items())
    schema = _SCHEMA.format(name=table, key=key, fields=fields, dim=rows.dim)
    paths = [folder / "schemas" / f"{table}.sd", folder / f"{table}.jsonl"]
    files.write(paths[0], lambda path: path.write_text(schema))

    def feed(path: Path) -> None:
        with path.open("w", encoding="utf-8") as file:
            for begin in range(0, len(rows), _BLOCK):
                _write(rows.part(begin, begin + _BLOCK), table, file)

    files.write(paths[1], feed)
    return paths


def _write(rows: pl.DataFrame, table: str, file: IO[str]) -> None:
    numbers = rows.with_columns(pl.col(TIME).cast(pl.Int64))
    for id, vector, more in zip(rows["id"], vector_text(rows), payloads(numbers), strict=True):
        known = json.dumps({"id": id, **{name: value for name, value in more.items() if value is not None}})
        put = json.dumps(f"id:{table}:{table}::{id}")
        file.write(f'{{"put": {put}, "fields": {known[:-1]}, "vector": {vector}}}}}\n')
