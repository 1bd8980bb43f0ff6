"""A run for other programs: vectors and lists as Parquet, towers as ONNX, items in Milvus or in PostgreSQL with pgvector."""

from __future__ import annotations

from sparring.serving.export.lists import write_lists
from sparring.serving.export.milvus import MilvusItems
from sparring.serving.export.onnx import write_onnx
from sparring.serving.export.pgvector import PostgresItems
from sparring.serving.export.vectors import send, write_vectors

__all__ = ["MilvusItems", "PostgresItems", "send", "write_lists", "write_onnx", "write_vectors"]
