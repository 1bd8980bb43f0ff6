"""The work of cpu.py by other libraries: pairs or queries per second, or None where a library is not installed.

pip install implicit rectools-lightfm rectools faiss-cpu
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from _shared import Pairs

Clock = Callable[[], float]
K = 20  # items of a list


def implicit_bpr(data: Pairs, threads: int, clock: Clock) -> float | None:
    """BPR of `implicit`, 64 dimensions."""
    try:
        from implicit.cpu.bpr import BayesianPersonalizedRanking
    except ImportError:
        return None
    matrix = _matrix(data)

    def train(epochs: int) -> None:
        model = BayesianPersonalizedRanking(
            factors=64, learning_rate=0.05, regularization=0.001, iterations=epochs, num_threads=threads, random_state=1
        )
        model.fit(matrix, show_progress=False)

    return _per_epoch(train, len(data), clock)


def lightfm_bpr(data: Pairs, threads: int, clock: Clock) -> float | None:
    """BPR of LightFM, 64 dimensions."""
    try:
        from lightfm import LightFM
    except ImportError:
        return None
    matrix = _matrix(data).tocoo()

    def train(epochs: int) -> None:
        LightFM(no_components=64, loss="bpr", random_state=1).fit(matrix, epochs=epochs, num_threads=threads)

    return _per_epoch(train, len(data), clock)


def implicit_ranking(q: Tensor, items: Tensor, threads: int, clock: Clock) -> float | None:
    """The search of `implicit` for its own models."""
    try:
        from implicit.cpu.topk import topk
    except ImportError:
        return None
    return _queries(lambda: topk(items.numpy(), q.numpy(), K, num_threads=threads), len(q), clock)


def rectools_ranking(q: Tensor, items: Tensor, threads: int, clock: Clock) -> float | None:
    """The ranker of RecTools for models of factors."""
    try:
        from rectools.models.rank import Distance, ImplicitRanker
    except ImportError:
        return None
    ranker = ImplicitRanker(Distance.DOT, q.numpy(), items.numpy(), num_threads=threads)
    return _queries(lambda: ranker.rank(np.arange(len(q)), k=K), len(q), clock)


def faiss_ranking(q: Tensor, items: Tensor, threads: int, clock: Clock) -> float | None:
    """The flat index of FAISS."""
    try:
        import faiss
    except ImportError:
        return None
    faiss.omp_set_num_threads(threads)
    index = faiss.IndexFlatIP(items.shape[1])
    index.add(items.numpy())
    rate = _queries(lambda: index.search(q.numpy(), K), len(q), clock)
    torch.set_num_threads(threads)  # FAISS sets the threads of the runtime that both share
    return rate


def _matrix(data: Pairs) -> Any:
    from scipy.sparse import csr_matrix

    ones = np.ones(len(data), np.float32)
    return csr_matrix((ones, (data.users, data.items)), shape=(data.n_users, data.n_items))


def _per_epoch(train: Callable[[int], None], pairs: int, clock: Clock) -> float:
    """Pairs per second of training without its set-up: the difference of two trainings."""
    took = []
    for epochs in (1, 3):
        began = clock()
        train(epochs)
        took.append(clock() - began)
    return 2 * pairs / (took[1] - took[0])


def _queries(search: Callable[[], object], queries: int, clock: Clock) -> float:
    began = clock()
    search()
    return queries / (clock() - began)
