"""Exports of a run: vectors and lists as files, towers as ONNX, items to Milvus or to PostgreSQL with pgvector.

Everything here reads a trained run. Serving it over HTTP and building indexes are elsewhere.
"""

from __future__ import annotations

from sparring.serving.export.lists import write_lists
from sparring.serving.export.milvus import MilvusItems
from sparring.serving.export.onnx import write_onnx
from sparring.serving.export.pgvector import PostgresItems
from sparring.serving.export.vectors import send, write_neighbours, write_vectors

__all__ = ["MilvusItems", "PostgresItems", "send", "write_lists", "write_neighbours", "write_onnx", "write_vectors"]
