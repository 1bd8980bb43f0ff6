"""Approximate indexes by FAISS: how each is built, its size in memory, and its search parameters.

    hnsw     a graph of neighbours over the full vectors
    cagra    the same; a GPU builds its lowest level, by CAGRA, and a CPU the few nodes above
    ivf      k-means cells with full vectors: a search visits the nearest cells
    ivfsq    the same with one byte per dimension
    ivfpq    the same with product quantisation, the smallest

All kinds compare vectors by inner product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparring.core.choices import INDEX_KINDS as KINDS
from sparring.core.errors import UserError, first_line
from sparring.core.extras import optional

GRAPHS = ("hnsw", "cagra")
_LINKS = 32  # neighbours of a graph node; twice as many on the lowest level
_BUILD = 100  # candidates per node during construction
_POINTS = 64  # training vectors of k-means per cell
_CODES = 40  # training vectors of product quantisation per code word


@dataclass(frozen=True)
class Effort:
    """Search effort: `width` cells to visit, or graph candidates; then `refine` x k results are rescored exactly.

    With refine 1 the scores of the index are final; they are exact for hnsw, cagra and ivf.
    """

    width: int = 1
    refine: float = 1.0


def require_faiss() -> Any:
    """The module faiss; UserError names the missing extra."""
    return optional("faiss", "serve", "an approximate index")


def cagra_problem() -> str | None:
    """The reason why FAISS cannot build a graph on a GPU here, with advice; None if it can."""
    faiss = require_faiss()
    if not hasattr(faiss, "GpuIndexCagra"):
        install = 'pip uninstall faiss-cpu, then pip install "sparring[gpu-index]"'
        return f"kind cagra needs a FAISS with cuVS: {install}, or use --kind hnsw"
    if not faiss.get_num_gpus():
        return "kind cagra needs a GPU, and FAISS finds none: use --kind hnsw"
    return None


def n_cells(n: int) -> int:
    """Number of cells for n vectors: a power of two near 4 sqrt(n)."""
    return 1 << max(2, min(16, round(math.log2(4 * math.sqrt(max(n, 1))))))


def code_sizes(dim: int) -> tuple[int, ...]:
    """Possible bytes per product code, largest first: two, four or eight dimensions per byte."""
    return tuple(dict.fromkeys(-(-dim // per) for per in (2, 4, 8)))


def estimated_bytes(kind: str, n: int, dim: int, code: int = 0) -> int:
    """Estimated memory of an index in bytes."""
    if kind == "exact":
        return 4 * n * dim
    if kind in GRAPHS:
        return n * (4 * dim + 4 * (2 * _LINKS) + 4 * _LINKS // (_LINKS - 1) + 12)
    per = {"ivf": 4 * dim, "ivfsq": dim, "ivfpq": code}[kind]
    return n * (per + 8) + 4 * n_cells(n) * dim + (256 * 4 * dim if kind == "ivfpq" else 0)


def cells(vectors: np.ndarray, seed: int) -> Any:
    """The coarse quantiser that all IVF kinds share."""
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
    """A FAISS index of vectors (N, D) float32 with ids 0..N-1. IVF kinds need the coarse quantiser of `cells`.

    make("ivfsq", vectors, cells(vectors, seed=0))
    """
    faiss = require_faiss()
    n, dim = vectors.shape
    inner = faiss.METRIC_INNER_PRODUCT
    if kind == "cagra":
        return cagra(vectors, seed)
    if kind == "hnsw":
        made = faiss.IndexHNSWFlat(dim, _LINKS, inner)
        made.hnsw.efConstruction = _BUILD
        made.hnsw.rng = faiss.RandomGenerator(seed)
    elif kind == "ivf":
        made = faiss.IndexIVFFlat(quantizer, dim, quantizer.ntotal, inner)
    elif kind == "ivfsq":
        made = faiss.IndexIVFScalarQuantizer(quantizer, dim, quantizer.ntotal, faiss.ScalarQuantizer.QT_8bit, inner)
    elif kind == "ivfpq":
        wide = -(-dim // code) * code  # product quantisation splits a vector into equal parts: pad it with zeros
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


def cagra(vectors: np.ndarray, seed: int = 0) -> Any:
    """An IndexHNSWCagra of vectors (N, D): a GPU computes its lowest level, and any CPU can search it.

    FAISS can leave out the levels above, a thirtieth of the nodes. Before 1.15.1 it then starts at random, and equal
    searches find different items.
    """
    faiss = require_faiss()
    n, dim = vectors.shape
    inner = faiss.METRIC_INNER_PRODUCT
    if problem := cagra_problem():
        raise UserError(problem)
    if n <= 4 * _LINKS:
        raise UserError(f"kind cagra needs more than {4 * _LINKS} items, not {n}: use --kind exact")
    config = faiss.GpuIndexCagraConfig()
    config.graph_degree, config.intermediate_graph_degree = 2 * _LINKS, 4 * _LINKS
    config.guarantee_connectivity = True  # few items are near many in inner product, and the others must be found too
    made = faiss.IndexHNSWCagra(dim, _LINKS, inner)  # not (): the copy does not set the direction of its scores
    made.hnsw.efConstruction, made.hnsw.rng = _BUILD, faiss.RandomGenerator(seed)
    kept = np.ascontiguousarray(vectors, dtype=np.float32)  # FAISS keeps its address until the copy
    try:
        built = faiss.GpuIndexCagra(faiss.StandardGpuResources(), dim, inner, config)
        built.train(kept)
        built.copyTo(made)
    except RuntimeError as error:  # the memory of the GPU, among others
        told = RuntimeError(str(error).rpartition("Error: ")[2])  # FAISS puts a signature and a path before it
        raise UserError(f"the GPU cannot build a graph of {n:,} items: {first_line(told)}") from error
    return made


def widened(vectors: np.ndarray, wide: int) -> np.ndarray:
    """Contiguous vectors padded with zeros to `wide` dimensions; inner products stay the same."""
    if vectors.shape[1] == wide:
        return np.ascontiguousarray(vectors)
    out = np.zeros((len(vectors), wide), dtype=np.float32)
    out[:, : vectors.shape[1]] = vectors
    return out


def parameters(kind: str, effort: Effort, fetch: int, selector: Any = None) -> Any:
    """FAISS parameters of a search for `fetch` results: the effort, and the ids that may be found."""
    faiss = require_faiss()
    if kind in GRAPHS:
        return faiss.SearchParametersHNSW(sel=selector, efSearch=max(effort.width, fetch))
    return faiss.SearchParametersIVF(sel=selector, nprobe=effort.width)


def only_these(rows: np.ndarray, n: int) -> Any:
    """A FAISS selector of these ids out of 0..n-1."""
    faiss = require_faiss()
    chosen = np.zeros(n, dtype=bool)
    chosen[rows] = True
    return faiss.IDSelectorBitmap(np.packbits(chosen, bitorder="little"))


def all_but(rows: np.ndarray, n: int) -> Any:
    """A FAISS selector of all ids 0..n-1 except these."""
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
