"""The approximate kinds of index, made by FAISS: how each is built, how large it becomes, and how hard a search may look.

    hnsw     a graph of neighbours over the full vectors
    ivf      cells of k-means, full vectors in them: a search looks into the nearest cells
    ivfsq    the same with one byte per dimension
    ivfpq    the same with product codes, the smallest

Vectors are compared by inner product throughout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparring.core.choices import INDEX_KINDS as KINDS
from sparring.core.errors import UserError

_LINKS = 32  # neighbours of a node of the graph; twice as many on its lowest level
_BUILD = 100  # candidates looked at while a node is linked
_POINTS = 64  # vectors per cell that k-means learns from
_CODES = 40  # vectors per code word that product codes are learned from


@dataclass(frozen=True)
class Effort:
    """How hard a search looks: into `width` cells, or with `width` candidates in the graph; `refine` x k are then ranked by exact scores.

    A refine of 1 ranks by the scores of the index, which are exact for hnsw and ivf.
    """

    width: int = 1
    refine: float = 1.0


def require_faiss() -> Any:
    """The module faiss, or an error that names the extra."""
    try:
        import faiss
    except ImportError as error:
        raise UserError('an approximate index needs FAISS: pip install "sparring[serve]"') from error
    return faiss


def n_cells(n: int) -> int:
    """Cells for n vectors: a power of two near 4 sqrt(n)."""
    return 1 << max(2, min(16, round(math.log2(4 * math.sqrt(max(n, 1))))))


def code_sizes(dim: int) -> tuple[int, ...]:
    """Bytes per vector that product codes may take, most first: two, four or eight dimensions to a byte."""
    return tuple(dict.fromkeys(-(-dim // per) for per in (2, 4, 8)))


def estimated_bytes(kind: str, n: int, dim: int, code: int = 0) -> int:
    """What an index of this kind keeps in memory, before it is built."""
    if kind == "exact":
        return 4 * n * dim
    if kind == "hnsw":
        return n * (4 * dim + 4 * (2 * _LINKS) + 4 * _LINKS // (_LINKS - 1) + 12)
    per = {"ivf": 4 * dim, "ivfsq": dim, "ivfpq": code}[kind]
    return n * (per + 8) + 4 * n_cells(n) * dim + (256 * 4 * dim if kind == "ivfpq" else 0)


def cells(vectors: np.ndarray, seed: int) -> Any:
    """The cells that all IVF kinds share: a trained coarse quantiser."""
    faiss = require_faiss()
    n, dim = vectors.shape
    count = n_cells(n)
    learner = faiss.Kmeans(
        dim,
        count,
        niter=10,
        spherical=True,
        seed=seed,
        min_points_per_centroid=1,
        max_points_per_centroid=_POINTS,
        verbose=False,
    )
    learner.train(_sample(vectors, count * _POINTS, seed))
    quantizer = faiss.IndexFlatIP(dim)
    quantizer.add(learner.centroids)
    return quantizer


def make(kind: str, vectors: np.ndarray, quantizer: Any = None, code: int = 0, seed: int = 0) -> Any:
    """A FAISS index of these vectors (N, D) float32; its ids are 0..N-1. IVF kinds take the `cells` to use.

    make("ivfsq", vectors, cells(vectors, seed=0))
    """
    faiss = require_faiss()
    n, dim = vectors.shape
    inner = faiss.METRIC_INNER_PRODUCT
    if kind == "hnsw":
        made = faiss.IndexHNSWFlat(dim, _LINKS, inner)
        made.hnsw.efConstruction = _BUILD
        made.hnsw.rng = faiss.RandomGenerator(seed)
    elif kind == "ivf":
        made = faiss.IndexIVFFlat(quantizer, dim, quantizer.ntotal, inner)
    elif kind == "ivfsq":
        made = faiss.IndexIVFScalarQuantizer(quantizer, dim, quantizer.ntotal, faiss.ScalarQuantizer.QT_8bit, inner)
    elif kind == "ivfpq":
        wide = -(-dim // code) * code  # product codes split a vector into equal parts: it is filled up with zeros
        made = faiss.IndexIVFPQ(_widened(quantizer, wide), wide, quantizer.ntotal, code, 8, inner)
        made.pq.cp.niter, made.pq.cp.min_points_per_centroid, made.pq.cp.max_points_per_centroid = 10, 1, _CODES
        made.pq.cp.seed = seed
    else:
        raise UserError(f"kind {kind!r} is not one of {', '.join(KINDS)}")
    if kind != "hnsw":
        made.train(widened(_sample(vectors, 256 * _CODES, seed), made.d))
    for begin in range(0, n, 1 << 17):
        made.add(widened(vectors[begin : begin + (1 << 17)], made.d))
    return made


def widened(vectors: np.ndarray, wide: int) -> np.ndarray:
    """Vectors with zeros added up to `wide` dimensions, which leaves every inner product as it is; contiguous."""
    if vectors.shape[1] == wide:
        return np.ascontiguousarray(vectors)
    out = np.zeros((len(vectors), wide), dtype=np.float32)
    out[:, : vectors.shape[1]] = vectors
    return out


def parameters(kind: str, effort: Effort, fetch: int, selector: Any = None) -> Any:
    """What one FAISS search of `fetch` results is told: how hard to look, and which ids may be found."""
    faiss = require_faiss()
    if kind == "hnsw":
        return faiss.SearchParametersHNSW(sel=selector, efSearch=max(effort.width, fetch))
    return faiss.SearchParametersIVF(sel=selector, nprobe=effort.width)


def only_these(rows: np.ndarray, n: int) -> Any:
    """A FAISS selector of exactly these of the ids 0..n-1."""
    faiss = require_faiss()
    chosen = np.zeros(n, dtype=bool)
    chosen[rows] = True
    return faiss.IDSelectorBitmap(np.packbits(chosen, bitorder="little"))


def all_but(rows: np.ndarray, n: int) -> Any:
    """A FAISS selector of all ids 0..n-1 but these."""
    return require_faiss().IDSelectorNot(only_these(rows, n))


def _widened(quantizer: Any, wide: int) -> Any:
    if quantizer.d == wide:
        return quantizer
    faiss = require_faiss()
    made = faiss.IndexFlatIP(wide)
    made.add(widened(quantizer.reconstruct_n(0, quantizer.ntotal), wide))
    return made


def _sample(vectors: np.ndarray, most: int, seed: int) -> np.ndarray:
    if len(vectors) <= most:
        return np.ascontiguousarray(vectors)
    rows = np.sort(np.random.default_rng(seed).choice(len(vectors), most, replace=False))
    return np.ascontiguousarray(vectors[rows])
