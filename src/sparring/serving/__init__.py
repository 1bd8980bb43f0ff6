"""A trained run in use: an index of its items, lists and vectors for other systems, and the HTTP service.

Serving reads run folders and never trains.
"""

from sparring.serving.checking import check
from sparring.serving.export import (
    item_rows,
    open_store,
    query_rows,
    send,
    write_lists,
    write_neighbours,
    write_onnx,
    write_vectors,
)
from sparring.serving.index import Index
from sparring.serving.index.run_index import build_index, build_lists, open_index

__all__ = [
    "Index",
    "build_index",
    "build_lists",
    "check",
    "item_rows",
    "open_index",
    "open_store",
    "query_rows",
    "send",
    "write_lists",
    "write_neighbours",
    "write_onnx",
    "write_vectors",
]
