"""Exports of a run: vectors and lists as files, towers as ONNX, rows to vector stores or as their own files.

Everything here reads a trained run. Serving it over HTTP and building indexes are elsewhere. `stores.py` has the table
of stores; each is one module.
"""

from __future__ import annotations

from sparring.serving.export.lance import LanceItems
from sparring.serving.export.lists import write_lists
from sparring.serving.export.milvus import MilvusItems
from sparring.serving.export.onnx import write_onnx
from sparring.serving.export.opensearch import ElasticsearchItems, OpenSearchItems, write_opensearch
from sparring.serving.export.pgvector import PostgresItems
from sparring.serving.export.qdrant import QdrantItems
from sparring.serving.export.rows import Rows, item_rows, query_rows
from sparring.serving.export.store import Store
from sparring.serving.export.stores import agreement, open_store, send
from sparring.serving.export.vectors import write_neighbours, write_vectors
from sparring.serving.export.vespa import write_vespa

__all__ = [
    "ElasticsearchItems",
    "LanceItems",
    "MilvusItems",
    "OpenSearchItems",
    "PostgresItems",
    "QdrantItems",
    "Rows",
    "Store",
    "agreement",
    "item_rows",
    "open_store",
    "query_rows",
    "send",
    "write_lists",
    "write_neighbours",
    "write_onnx",
    "write_opensearch",
    "write_vectors",
    "write_vespa",
]
