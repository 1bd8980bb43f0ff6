"""Negatives by the cluster of the positive: OtherClusters, easy ones from clusters nearby; SameCluster, hard ones from its own (ESANS)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sparring.core.types import Bag, Candidates, Exclude, Provenance, Step
from sparring.kernels import fuses_draws
from sparring.models.clusters.codes import Codes
from sparring.negatives.base import Negatives, check_choice

Distance = Literal["cosine", "literal"]
CellExcludeKind = Literal["cell", "cluster", "known", "positive", "none"]
CountCorrection = Literal["none", "counts"]
NEAREST = 1e-3  # the least distance between two clusters, so that twins do not take all draws


class ClusterDraws(NamedTuple):
    """What the rows of a batch drew, of all ranks; -1 where there was nothing to draw."""

    ids: Tensor  # (B, C)
    real: Tensor  # (B, C) to be encoded: 0 in place of -1
    log_w: Tensor  # (B, C) 0, or -inf where nothing was drawn
    cells: Tensor | None  # (B, C) the cell of each, where it is known already
    cell: Tensor  # (B,) of the positive
    primary: Tensor  # (B,) of the positive


@dataclass(frozen=True)
class ExcludeCells(Exclude):
    """A cell or cluster for each query, which knows those of the candidates that were drawn with it."""

    drawn: tuple[Tensor, Tensor] | None = None  # ids and their cells or clusters
    what: str = "cell"

    @property
    def name(self) -> str:
        return super().name.replace("cell", self.what)

    def _keys(self, ids: Tensor) -> Tensor:
        return self.drawn[1] if self.drawn is not None and ids is self.drawn[0] else super()._keys(ids)


class ByCluster(Negatives):
    """What both samplers share: the codes as buffers, the masks, and items drawn from one stretch of the sorted catalogue.

    An item of the positive's own cell (same primary and same secondary cluster) is taken for a false negative. By construction no query
    draws one for itself; where candidates are shared, the draws of other queries are masked; exclude="cluster" masks all of its primary
    cluster. Everything has a fixed shape and nothing waits for the device, unless exclude="known".

    correction="counts" weighs each candidate by 1 / E[how often its item is among the candidates], so that the sum over them has the
    expectation of the sum over the items they stand for; shared draws need the training pairs of each item (counts) for it.
    """

    cell: Tensor
    cluster: Tensor
    popularity: Tensor
    often: Tensor
    order: Tensor
    start: Tensor
    cell_start: Tensor
    name: str

    def __init__(
        self, codes: Codes, shared: bool, exclude: CellExcludeKind, correction: CountCorrection, counts: Tensor | None
    ):
        super().__init__()
        check_choice("exclude", exclude, CellExcludeKind)
        check_choice("correction", correction, CountCorrection)
        self.shared, self.exclude = shared, exclude
        self.correction: CountCorrection = correction
        self.k_primary, self.k_secondary = codes.k_primary, codes.k_secondary
        if correction == "counts" and shared:
            if counts is None or counts.shape != (len(codes),):
                found = None if counts is None else tuple(counts.shape)
                raise ValueError(
                    f'correction="counts" of shared draws needs the training pairs of each of {len(codes)} items; got {found}'
                )
            self.register_buffer("popularity", (counts.double() / counts.sum().clamp(min=1)).float())

    def register(self, codes: Codes) -> None:
        for name, tensor in self.tables(codes).items():
            self.register_buffer(name, tensor.clone())

    def tables(self, codes: Codes) -> dict[str, Tensor]:
        """The buffers that follow from the codes."""
        found = {"cell": codes.cell_of, "order": codes.order, "start": codes.start, "cell_start": codes.cell_start}
        return found | ({"cluster": codes.primary.long()} if self.exclude == "cluster" else {})

    @torch.no_grad()
    def set_codes(self, codes: Codes) -> None:
        """Go on with other codes of the same items, in place: clusters may follow the catalogue while training runs."""
        found, own = (
            (len(codes), codes.k_primary, codes.k_secondary),
            (len(self.cell), self.k_primary, self.k_secondary),
        )
        if found != own:
            raise ValueError(f"codes of (items, primary, secondary) {own} cannot become {found}: begin a new run")
        for name, tensor in self.tables(codes).items():
            self.get_buffer(name).copy_(tensor)

    def primary(self, items: Tensor) -> Tensor:
        """The primary cluster of items; -1 for the id -1."""
        return torch.where(items >= 0, self.cell[items.clamp(min=0)] // self.k_secondary, -1)

    def drawn(self, ids: Tensor, cell: Tensor) -> ClusterDraws:
        """With all that follows from the ids (B, ...) drawn for positives in these cells (B,)."""
        ids = ids.flatten(1)
        return ClusterDraws(
            ids, ids.clamp(min=0), torch.where(ids >= 0, 0.0, -math.inf), None, cell, cell // self.k_secondary
        )

    def excluded(self, step: Step, own: Tensor, drawn: tuple[Tensor, Tensor] | None) -> Exclude | None:
        """What never counts; a query's own draws hold neither its positive nor its cell."""
        also = None
        if self.exclude == "known":
            also = step.known()
        if self.exclude == "none" or not self.shared:
            return also
        if self.exclude == "cluster":
            if drawn is not None:
                drawn = drawn[0], torch.where(drawn[1] >= 0, drawn[1] // self.k_secondary, -1)
            return ExcludeCells(own // self.k_secondary, code=self.cluster, drawn=drawn, what="cluster")
        return (
            Exclude(step.item_ids)
            if self.exclude == "positive"
            else ExcludeCells(own, code=self.cell, also=also, drawn=drawn)
        )

    def offer(self, step: Step, drawn: ClusterDraws) -> Candidates:
        """What all rows of the batch drew as one block."""
        log_w = drawn.log_w if self.correction == "none" else drawn.log_w - self.log_counts(drawn)
        ids, real, log_w = (x.flatten() if self.shared else step.batch.own(x) for x in (drawn.ids, drawn.real, log_w))
        cells = None if drawn.cells is None or not self.shared else (ids, drawn.cells.flatten())
        exclude = self.excluded(step, step.batch.own(drawn.cell), cells)
        return Candidates(ids, step.encode(real), log_w, exclude, provenance=Provenance(self.name, sampler=self))

    def log_counts(self, drawn: ClusterDraws) -> Tensor:
        """(B, C) or (B, 1): log E[how often the item is among the candidates] of what was drawn."""
        return self.often[drawn.real] + math.log(len(drawn.ids))  # shared: a count for one row is a table over items


class OtherClusters(ByCluster):
    """For each positive m_o items of each of m_c other primary clusters, near ones more often (the simple negatives of ESANS).

        P(cluster k | positive in c) = d(z_c, z_k)^-gamma / sum over the others,   d(a, b) = (1 - cos(a, b)) / 2 in [0.001, 1]

    Clusters are drawn without replacement, items in a cluster too where it has m_o; an empty cluster is never drawn. gamma = 0 draws
    clusters alike. distance="literal" is equation 9 to the letter, d = the inner product of codewords scaled to [0, 1], which prefers
    clusters far away. The B m_c m_o items serve all queries (shared), those of a query's own cell masked, or only the query they were
    drawn for. Where too few clusters hold items the rest counts nothing. The paper weighs all alike; correction="counts" is ours:

        E[count of j] = B sum_c p(c) P(cluster of j among the m_c | c) m_o / |cluster of j|,   p(c) = share of training pairs in cluster c

    where they are shared, and what the positive's own c says where they are not.

        OtherClusters(codes, m_c=2, m_o=5)

    Xing et al., ESANS, WWW 2025, equations 9 and 10.
    """

    chance: Tensor

    def __init__(
        self,
        codes: Codes,
        m_c: int = 2,
        m_o: int = 5,
        gamma: float = 1.0,
        distance: Distance = "cosine",
        shared: bool = True,
        exclude: CellExcludeKind = "cell",
        correction: CountCorrection = "none",
        counts: Tensor | None = None,
    ):
        check_choice("distance", distance, Distance)
        if not 1 <= m_c < codes.k_primary or m_o < 1 or not gamma >= 0:
            raise ValueError(
                f"OtherClusters needs 1 <= m_c < {codes.k_primary} clusters, m_o >= 1, gamma >= 0; got {m_c}, {m_o}, {gamma}"
            )
        super().__init__(codes, shared, exclude, correction, counts)
        self.m_c, self.m_o, self.gamma = m_c, m_o, gamma
        self.distance: Distance = distance
        self.name = f"{m_o} of each of {m_c} other clusters"
        self.register(codes)

    def tables(self, codes: Codes) -> dict[str, Tensor]:
        tables = super().tables(codes) | {
            "chance": cluster_chances(codes.codewords, codes.sizes, self.gamma, self.distance)
        }
        if self.correction == "none":
            return tables
        count = (
            inclusion(tables["chance"], self.m_c) * self.m_o / codes.sizes.clamp(min=1)
        )  # (K, K): of an item of k, by a positive in c
        if self.shared:
            primary = codes.primary.long()
            share = torch.zeros(self.k_primary, dtype=torch.float64).index_add_(
                0, primary, self.popularity.cpu().double()
            )
            count = (share @ count)[primary]
        return tables | {"often": torch.where(count > 0, count, 1.0).log().float()}

    def log_counts(self, drawn: ClusterDraws) -> Tensor:
        if self.shared:
            return super().log_counts(drawn)
        return self.often[drawn.primary.unsqueeze(1), self.cell[drawn.real] // self.k_secondary]

    def forward(self, step: Step) -> Bag:
        return Bag((self.offer(step, self.draw(step)[0]),))

    def draw(self, step: Step) -> tuple[ClusterDraws, Tensor]:
        """What was drawn, and from which clusters (B, m_c), -1 where there are too few."""
        items = step.batch.item_ids
        if fuses_draws(items, self.k_primary):
            from sparring.kernels import cluster_draws

            seed = torch.randint(1 << 62, (2,), generator=step.generator, device=items.device)
            tables = self.cell, self.order, self.start, self.chance
            (*found, own), clusters = cluster_draws.others(items, *tables, self.k_secondary, self.m_c, self.m_o, seed)
            return ClusterDraws(*found, *own), clusters
        cell = self.cell[items]
        own = cell // self.k_secondary
        # a race of exponential clocks: the first m_c are a draw without replacement in proportion to their rates
        clock = torch.rand(len(own), self.k_primary, generator=step.generator, device=own.device).log_().neg_()
        first = (clock / self.chance[own]).topk(self.m_c, dim=1, largest=False)
        begin = self.start[first.indices]
        within = distinct(self.start[first.indices + 1] - begin, self.m_o, step.generator)
        at = (begin.unsqueeze(-1) + within).clamp(max=len(self.order) - 1)
        some = torch.isfinite(first.values)
        return self.drawn(torch.where(some.unsqueeze(-1), self.order[at], -1), cell), torch.where(
            some, first.indices, -1
        )


class SameCluster(ByCluster):
    """For each positive m_h items of its primary cluster but of another secondary one (the hard negatives of ESANS).

        r uniform in [0, |cluster| - |cell|),   item = r-th of the cluster with the cell cut out

    No draw is ever rejected; without replacement where that many are left. Where the cell is all there is of the cluster, the items come
    from the nearest other primary cluster. Per query; shared=True offers every query the draws of all, its own cell masked. With
    correction="counts" (ours) those of a query stand for the rest of its cluster, (|cluster| - |cell|) / m_h each, and for nothing where
    there is no rest; shared ones for all items that the positives of a batch could draw.

        SameCluster(codes, m_h=5)

    Xing et al., ESANS, WWW 2025, section 3.3.3.
    """

    pool: Tensor

    def __init__(
        self,
        codes: Codes,
        m_h: int = 5,
        shared: bool = False,
        exclude: CellExcludeKind = "cell",
        correction: CountCorrection = "none",
        counts: Tensor | None = None,
    ):
        if m_h < 1:
            raise ValueError(f"SameCluster needs m_h >= 1, got {m_h}")
        super().__init__(codes, shared, exclude, correction, counts)
        self.m_h = m_h
        self.name = f"{m_h} of the same cluster"
        self.register(codes)

    def tables(self, codes: Codes) -> dict[str, Tensor]:
        """`pool` has for each cell where its draws begin in the sorted catalogue, among how many, and the hole in them with its width."""
        tables = super().tables(codes)
        start, hole = tables["start"], tables["cell_start"][:-1]
        own = torch.arange(len(hole)) // codes.k_secondary
        begin, width = start[own], tables["cell_start"].diff()
        left = start[own + 1] - begin - width
        chance = cluster_chances(codes.codewords, codes.sizes, 1.0, "cosine")[own]
        there = chance.argmax(1)
        size = torch.where(chance.amax(1) > 0, start[there + 1] - start[there], 0)
        own_cluster = torch.stack([begin, left, hole, width], 1)
        next_cluster = torch.stack([start[there], size, torch.full_like(hole, len(codes)), torch.zeros_like(width)], 1)
        tables |= {"pool": torch.where((left > 0).unsqueeze(1), own_cluster, next_cluster)}
        if self.correction == "none":
            return tables
        if not self.shared:
            return tables | {"often": math.log(self.m_h) - left.float().log()}
        cell = tables["cell"]
        share = torch.zeros(len(hole), dtype=torch.float64).index_add_(0, cell, self.popularity.cpu().double())
        each = self.m_h * share / tables["pool"][:, 1].clamp(min=1)  # of an item of its pool, by positives of the cell
        inside = torch.where(left > 0, each, 0.0)
        by_cluster = torch.zeros(self.k_primary, dtype=torch.float64).index_add_(
            0, torch.where(left > 0, own, there), each
        )
        count = (by_cluster[own] - inside)[cell]
        return tables | {"often": torch.where(count > 0, count, 1.0).log().float()}

    def log_counts(self, drawn: ClusterDraws) -> Tensor:
        return super().log_counts(drawn) if self.shared else self.often[drawn.cell].unsqueeze(1)

    def forward(self, step: Step) -> Bag:
        return Bag((self.offer(step, self.draw(step)),))

    def draw(self, step: Step) -> ClusterDraws:
        items = step.batch.item_ids
        if fuses_draws(items, 1):
            from sparring.kernels import cluster_draws

            seed = torch.randint(1 << 62, (1,), generator=step.generator, device=items.device)
            *found, own = cluster_draws.same(items, self.cell, self.order, self.pool, self.k_secondary, self.m_h, seed)
            return ClusterDraws(*found, *own)
        cell = self.cell[items]
        begin, size, hole, width = self.pool[cell].unsqueeze(1).unbind(-1)
        at = begin + distinct(size.squeeze(1), self.m_h, step.generator)
        at = at + torch.where(at >= hole, width, 0)
        return self.drawn(torch.where(size > 0, self.order[at.clamp(max=len(self.order) - 1)], -1), cell)


def cluster_chances(codewords: Tensor, sizes: Tensor, gamma: float, distance: Distance) -> Tensor:
    """(K, K): the chance to draw cluster k first for a positive in cluster c; 0 for its own and for empty ones (equation 9)."""
    possible = (sizes > 0).unsqueeze(0) & ~torch.eye(len(sizes), dtype=torch.bool)
    if distance == "cosine":
        unit = F.normalize(codewords.double(), dim=1)
        d = (1 - unit @ unit.T) / 2
    else:
        inner = codewords.double() @ codewords.double().T
        low = inner.masked_fill(~possible, math.inf).amin(1, keepdim=True)
        reach = inner.masked_fill(~possible, -math.inf).amax(1, keepdim=True) - low
        d = torch.where(reach > 0, (inner - low) / reach, 1.0)
    rate = torch.where(possible, d.clamp(NEAREST, 1) ** -gamma, 0.0)
    return (rate / rate.sum(1, keepdim=True).clamp(min=1e-300)).float()


def distinct(size: Tensor, m: int, generator: torch.Generator) -> Tensor:
    """(..., m) whole numbers below size (...), every set of m as likely as any other; with repetition where size < m; 0 where it is 0."""
    u = torch.rand(*size.shape, m, dtype=torch.float64, generator=generator, device=size.device)
    # Floyd's algorithm: the k-th draw is below size - m + k + 1, and the last of those where it was drawn before
    size = size.unsqueeze(-1)
    enough = size >= m
    last = torch.where(enough, size - m + torch.arange(m, device=size.device), size - 1).clamp_(min=0)
    pick = torch.minimum((u * (last + 1)).long(), last)
    earlier = torch.ones(m, m, dtype=torch.bool, device=size.device).tril_(-1)
    again = ((pick.unsqueeze(-1) == pick.unsqueeze(-2)) & earlier).any(-1)
    # a draw also meets the last of an earlier one that was itself drawn before: chains of that are at most m - 1 long
    met = (pick.unsqueeze(-1) == last.unsqueeze(-2)) & earlier
    for _ in range(m - 2):
        again = again | (met & again.unsqueeze(-2)).any(-1)
    return torch.where(again & enough, last, pick)


def inclusion(chance: Tensor, m: int) -> Tensor:
    """(R, K): the chance that k is among m draws without replacement by the chances (R, K) of a first draw; a row sums to m.

        m = 1: p_k,   m = 2: p_k (1 + sum over l != k of p_l / (1 - p_l)),   else  int of p_k e^(-p_k t) P(fewer than m others by t) dt

    Where a row has m possible draws or fewer, each of them is certain. The integral is of the race of exponential clocks that the draw is;
    with log t as its variable the trapezoidal rule is exact to 1e-9.

        inclusion(torch.tensor([[0.5, 0.3, 0.2]]), 2)  # 0.8393, 0.6750, 0.4857
    """
    p = chance.double()
    if m == 1:
        return p
    if m == 2:
        odds = torch.where(p > 0, p / (1 - p).clamp(min=1e-300), 0.0)
        found = p * (1 + odds.sum(1, keepdim=True) - odds)
    else:
        found = torch.cat([_raced(rows, m) for rows in p.split(16)])
    certain = (p > 0) & ((p > 0).sum(1, keepdim=True) <= m)
    return torch.where(certain, 1.0, found)


def _raced(p: Tensor, m: int, step: float = 0.25) -> Tensor:
    least = float(torch.where(p > 0, p, 1.0).min())
    t = torch.arange(math.log(1e-10), math.log(50 / least) + step, step, dtype=p.dtype).exp()
    late = torch.exp(-p.unsqueeze(-1) * t)  # (R, K, T): not yet come at t

    def counted(order: range) -> list[Tensor]:
        """For each k the chances that 0..m-1 of those before it in this order have come, (m, R, T)."""
        some = torch.zeros(m, len(p), len(t), dtype=p.dtype)
        some[0] = 1
        found = {}
        for k in order:
            found[k] = some
            came = torch.zeros_like(some)
            came[1:] = some[:-1]
            some = torch.lerp(came, some, late[:, k])
        return [found[k] for k in range(len(order))]

    n = p.shape[1]
    before, after = counted(range(n)), counted(range(n - 1, -1, -1))
    # i of those before k and at most m - 1 - i of those after it
    fewer = [(a * b.cumsum(0).flip(0)).sum(0) for a, b in zip(before, after, strict=True)]
    return step * (p.unsqueeze(-1) * t * late * torch.stack(fewer, 1)).sum(-1)
