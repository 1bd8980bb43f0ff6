"""Negatives retrieved by the model itself: NearestItems (ANCE)."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread

import torch
from torch import Tensor

from sparring.core.subset import Subset
from sparring.core.topk import top_k
from sparring.core.types import Bag, Candidates, Corpus, Provenance, Step
from sparring.negatives.base import UNKNOWN, ExcludeKind, Negatives, check_choice, exclude_for

_BLOCK = 8192  # queries encoded and ranked at a time


class NearestItems(Negatives):
    """The items nearest to each query in an exact ranking of the catalogue by a recent model (ANCE).

    Every `every` epochs, from epoch `start` (counted from 0), all queries with positives are encoded and their k best
    items are listed, of `among` if given, without known positives. The first `skip` of a list are dropped: some are
    relevant but unknown. A step draws n items of its query's list with replacement. They are shared by all queries of
    the batch; with per_query=True they count only against the query of the list. Before the first lists they count
    nothing. Lists take 4 k bytes per query.

    With `delay`, lists built from the vectors at the start of epoch e are used from epoch e + delay on. Meanwhile a
    copy of the model builds them in the background: on a second GPU, or on a CPU with several cores. If nothing is free
    they are built in line. The result is the same: an epoch has the same lists either way, and a checkpoint waits for
    them.

        Union(InBatch(), NearestItems(n_queries, n=1, k=200))

    Xiong et al., Approximate Nearest Neighbor Negative Contrastive Learning for Dense Text Retrieval, ICLR 2021.
    """

    log_count = UNKNOWN
    in_place = True
    among: Tensor | None
    lists: Tensor
    coming: Tensor
    due: Tensor

    def __init__(
        self,
        n_queries: int,
        n: int = 1,
        k: int = 200,
        skip: int = 0,
        every: int = 5,
        start: int = 0,
        per_query: bool = False,
        exclude: ExcludeKind = "known",
        delay: int = 0,
        among: Tensor | None = None,
    ):
        super().__init__()
        check_choice("exclude", exclude, ExcludeKind)
        if min(n_queries, n, k, every) < 1 or min(skip, start) < 0:
            raise ValueError(
                f"NearestItems needs n, k, every >= 1 and skip, start >= 0; "
                f"got n={n}, k={k}, every={every}, skip={skip}, start={start}"
            )
        if not 0 <= delay <= every:
            raise ValueError(f"delay must be between 0 and every={every} epochs, got {delay}")
        self.n, self.skip, self.every = n, skip, every
        self.start, self.per_query, self.exclude = start, per_query, exclude
        self.delay, self.seconds = delay, 0.0
        self.register_buffer("among", None if among is None else torch.unique(among), persistent=False)
        self.register_buffer("lists", torch.full((n_queries, k), -1, dtype=torch.int32))
        if delay:
            self.register_buffer("coming", self.lists.clone())
            self.register_buffer("due", torch.tensor(-1))  # the first epoch that uses `coming`
            self.register_state_dict_pre_hook(lambda part, *_: part.wait())  # type: ignore[no-untyped-call]
        self._work: _Background | None = None

    def forward(self, step: Step) -> Bag:
        lists = self.lists[step.batch.query_ids]
        filled = (lists >= 0).sum(1, keepdim=True)  # empty places come last
        u = torch.rand(len(lists), self.n, dtype=torch.float64, generator=step.generator, device=lists.device)
        place = torch.minimum((u * filled).long(), (filled - 1).clamp(min=0))
        ids = lists.gather(1, place).long()
        ids = step.batch.own(ids) if self.per_query else ids.flatten()
        log_w = torch.where(ids >= 0, 0.0, -math.inf)
        emb = step.encode(ids.clamp(min=0))
        exclude, words = exclude_for(step, self.exclude), Provenance("nearest items of each query")
        return Bag((Candidates(ids, emb, log_w, exclude, provenance=words),))

    def refresh(self, corpus: Corpus) -> None:
        """Rebuild the lists when they are due, from the current vectors or those of `delay` epochs ago."""
        since, began = corpus.epoch - self.start, time.perf_counter()
        if self.delay and int(self.due) == corpus.epoch:
            self.wait()
            self.lists.copy_(self.coming)
            self.due.fill_(-1)
        if since >= 0 and not since % self.every:
            if not self.delay:
                self.lists.copy_(self._build(corpus))
            else:
                self._begin(corpus)
        if self.lists.is_cuda:
            torch.cuda.synchronize(self.lists.device)
        self.seconds += time.perf_counter() - began

    def _begin(self, corpus: Corpus) -> None:
        """Build the lists for `delay` epochs from now, in the background if a device is free."""
        self.wait()
        self.due.fill_(corpus.epoch + self.delay)
        spare = spare_device(self.lists.device) if corpus.copied is not None and corpus.ranks.world == 1 else None
        if spare is None or corpus.copied is None:
            self.coming.copy_(self._build(corpus))
        else:
            self._work = _Background(self._build, corpus.copied(spare))

    def wait(self) -> None:
        """Wait for lists that are being built."""
        if self._work is not None:
            work, self._work = self._work, None
            self.coming.copy_(work.result())

    def _build(self, corpus: Corpus) -> Tensor:
        """(n_queries, k): lists from the vectors of a corpus, on its device."""
        queries = torch.nonzero(corpus.positives.start.diff()).flatten()
        items, known = corpus.items.float(), corpus.positives
        part = None if self.among is None else Subset(self.among.to(items.device), len(items))
        if part is not None:
            items, known = items[part.ids], part.lists(known)
        k = min(self.lists.shape[1] + self.skip, len(items))
        lists = torch.full(self.lists.shape, -1, dtype=torch.int32, device=queries.device)
        for ids in queries.split(_BLOCK * corpus.ranks.world):
            own = corpus.ranks.own(ids)
            best = top_k(corpus.encode_queries(own).float(), items, k, known, own)[1]
            best = best if part is None else part.ids_at(best)
            kept = best[:, self.skip :].to(torch.int32)
            lists[ids, : kept.shape[1]] = corpus.ranks.gather(kept, len(ids))
        return lists

    def report(self) -> dict[str, float]:
        """Seconds spent on lists since the last report."""
        spent, self.seconds = self.seconds, 0.0
        return {"list_seconds": round(spent, 3)}


class _Background:
    """Work in a background thread; `result` waits for it and re-raises its exception."""

    def __init__(self, work: Callable[[Corpus], Tensor], corpus: Corpus) -> None:
        self._future: Future[Tensor] = Future()

        def run() -> None:
            try:
                with torch.no_grad(), torch.cuda.device_of(corpus.positives.start):  # both are per thread
                    self._future.set_result(work(corpus))
            except BaseException as error:  # raised by `result`
                self._future.set_exception(error)

        Thread(target=run, name="nearest items", daemon=True).start()

    def result(self) -> Tensor:
        return self._future.result()


def spare_device(device: torch.device) -> torch.device | None:
    """A device that is free during training: another GPU, or the CPU if it has several cores; None otherwise."""
    if device.type == "cpu":
        return device if (os.cpu_count() or 1) > 1 else None
    others = [torch.device("cuda", i) for i in range(torch.cuda.device_count()) if i != (device.index or 0)]
    return others[0] if device.type == "cuda" and others else None
