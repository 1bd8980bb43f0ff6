"""FAISS as it is on a machine with a GPU, for a CPU: nearest neighbours by brute force instead of CAGRA's graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


class Config:
    """Attributes of faiss.GpuIndexCagraConfig, and no others."""

    __slots__ = ("graph_degree", "guarantee_connectivity", "intermediate_graph_degree")


class Graph:
    """faiss.GpuIndexCagra, as far as Sparring uses it."""

    def __init__(self, resources: Any, dim: int, metric: int, config: Config) -> None:
        self.dim, self.metric, self.degree = dim, metric, config.graph_degree

    def train(self, vectors: np.ndarray) -> None:
        self.vectors = vectors

    def copyTo(self, index: Any) -> None:
        """Fill an IndexHNSWCagra: on the lowest level a node is linked to its best others by inner product."""
        import faiss

        n = len(self.vectors)
        assert not index.base_level_only
        assert (index.d, index.metric_type, index.hnsw.nb_neighbors(0)) == (self.dim, self.metric, self.degree)
        index.keep_max_size_level0, index.init_level0 = True, False
        index.add(self.vectors)  # the levels above
        scores = self.vectors @ self.vectors.T
        np.fill_diagonal(scores, -np.inf)
        first = faiss.vector_to_array(index.hnsw.offsets)[:n].astype(np.int64)
        neighbours = faiss.rev_swig_ptr(index.hnsw.neighbors.data(), index.hnsw.neighbors.size())
        neighbours[first[:, None] + np.arange(self.degree)] = np.argsort(-scores, axis=1)[:, : self.degree]


def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the module faiss the names that a GPU build has, and one GPU."""
    faiss = pytest.importorskip("faiss")
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 1)
    for name, value in (("GpuIndexCagra", Graph), ("GpuIndexCagraConfig", Config), ("StandardGpuResources", object)):
        monkeypatch.setattr(faiss, name, value, raising=False)
