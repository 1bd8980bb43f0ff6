"""Negatives by the positive's cluster (ESANS): OtherClusters, from nearby clusters; SameCluster, from its own."""

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
from sparring.negatives.base import UNKNOWN, Negatives, check_choice, drawable

Distance = Literal["cosine", "literal"]
CellExcludeKind = Literal["cell", "cluster", "known", "positive", "none"]
CountCorrection = Literal["none", "counts"]
NEAREST = 1e-3  # the smallest distance between clusters, so that near duplicates do not get all draws


class ClusterDraws(NamedTuple):
    """The draws of all rows of a batch, over all ranks; -1 if there was nothing to draw."""

    ids: Tensor  # (B, C)
    real: Tensor  # (B, C) the ids to encode, with 0 for -1
    log_w: Tensor  # (B, C) 0, or -inf if nothing was drawn
    cells: Tensor | None  # (B, C) the cell of each item, if already known
    cell: Tensor  # (B,) of the positive
    primary: Tensor  # (B,) of the positive


@dataclass(frozen=True)
class ExcludeCells(Exclude):
    """One excluded cell or cluster per query; it knows those of the candidates it was drawn with."""

    drawn: tuple[Tensor, Tensor] | None = None  # ids and their cells or clusters
    what: str = "cell"

    @property
    def name(self) -> str:
        return super().name.replace("cell", self.what)

    def _keys(self, ids: Tensor) -> Tensor:
        return self.drawn[1] if self.drawn is not None and ids is self.drawn[0] else super()._keys(ids)


class ByCluster(Negatives):
    """The base of both samplers: codes as buffers, exclusions, and draws from a range of the sorted catalogue.

    An item in the positive's own cell (same primary and secondary cluster) is considered a false negative. A query
    never draws one for itself; among shared candidates they are masked. exclude="cluster" masks the complete primary
    cluster. All shapes are fixed and nothing synchronises, unless exclude="known".

    correction="counts" weights each candidate by 1 / E[occurrences of its item among the candidates], so that the
    expected sum over candidates is the sum over the items they represent. Shared draws need `counts`, the training
    pairs per item. With `among`, only these items are drawn, as if clusters held no others.
    """

    log_count = UNKNOWN
    among: Tensor | None
    cell: Tensor
    cluster: Tensor
    popularity: Tensor
    often: Tensor
    order: Tensor
    start: Tensor
    cell_start: Tensor
    name: str

    def __init__(
        self,
        codes: Codes,
        shared: bool,
        exclude: CellExcludeKind,
        correction: CountCorrection,
        counts: Tensor | None,
        among: Tensor | None,
    ):
        super().__init__()
        check_choice("exclude", exclude, CellExcludeKind)
        check_choice("correction", correction, CountCorrection)
        self.shared, self.exclude = shared, exclude
        self.correction: CountCorrection = correction
        self.k_primary, self.k_secondary = codes.k_primary, codes.k_secondary
        self.register_buffer("among", drawable(among, len(codes)), persistent=False)
        if correction == "counts" and shared:
            if counts is None or counts.shape != (len(codes),):
                shape = None if counts is None else tuple(counts.shape)
                raise ValueError(
                    f'correction="counts" with shared draws needs counts of {len(codes)} items; got {shape}'
                )
            self.register_buffer("popularity", (counts.double() / counts.sum().clamp(min=1)).float())

    def register(self, codes: Codes) -> None:
        for name, tensor in self.tables(codes).items():
            self.register_buffer(name, tensor.clone())

    def tables(self, codes: Codes) -> dict[str, Tensor]:
        """The buffers derived from the codes."""
        drawn = self.drawn_codes(codes)
        order = drawn.order if self.among is None else self.among.cpu()[drawn.order]
        tables = {"cell": codes.cell_of, "order": order, "start": drawn.start, "cell_start": drawn.cell_start}
        return tables | ({"cluster": codes.primary.long()} if self.exclude == "cluster" else {})

    def drawn_codes(self, codes: Codes) -> Codes:
        """The codes of the items that are drawn."""
        if self.among is None:
            return codes
        ids = self.among.cpu()
        return Codes(codes.primary[ids], codes.secondary[ids], codes.codewords, codes.k_secondary)

    @torch.no_grad()
    def set_codes(self, codes: Codes) -> None:
        """Replace the codes of the same items in place, so that clusters can follow the catalogue during training."""
        new, old = (len(codes), codes.k_primary, codes.k_secondary), (len(self.cell), self.k_primary, self.k_secondary)
        if new != old:
            raise ValueError(f"codes of (items, primary, secondary) {old} cannot become {new}: start a new run")
        for name, tensor in self.tables(codes).items():
            self.get_buffer(name).copy_(tensor)

    def primary(self, items: Tensor) -> Tensor:
        """The primary cluster of items; -1 for the id -1."""
        return torch.where(items >= 0, self.cell[items.clamp(min=0)] // self.k_secondary, -1)

    def drawn(self, ids: Tensor, cell: Tensor) -> ClusterDraws:
        """ClusterDraws from ids (B, ...) drawn for positives in these cells (B,)."""
        ids = ids.flatten(1)
        return ClusterDraws(
            ids, ids.clamp(min=0), torch.where(ids >= 0, 0.0, -math.inf), None, cell, cell // self.k_secondary
        )

    def excluded(self, step: Step, own: Tensor, drawn: tuple[Tensor, Tensor] | None) -> Exclude | None:
        """The exclusion of a block; a query's own draws contain neither its positive nor its cell."""
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
        """The draws of all rows of the batch as one block."""
        log_w = drawn.log_w if self.correction == "none" else drawn.log_w - self.log_counts(drawn)
        ids, real, log_w = (x.flatten() if self.shared else step.batch.own(x) for x in (drawn.ids, drawn.real, log_w))
        cells = None if drawn.cells is None or not self.shared else (ids, drawn.cells.flatten())
        exclude = self.excluded(step, step.batch.own(drawn.cell), cells)
        return Candidates(ids, step.encode(real), log_w, exclude, provenance=Provenance(self.name, sampler=self))

    def log_counts(self, drawn: ClusterDraws) -> Tensor:
        """(B, C) or (B, 1): log E[occurrences of the item among the candidates] of each drawn item."""
        return self.often[drawn.real] + math.log(len(drawn.ids))  # shared: `often` holds counts per row, by item


class OtherClusters(ByCluster):
    """For each positive m_o items from each of m_c other primary clusters, mostly near ones (simple ones of ESANS).

        P(cluster k | positive in c) = d(z_c, z_k)^-gamma / sum over the others
        d(a, b) = (1 - cos(a, b)) / 2 in [0.001, 1]

    Clusters are drawn without replacement, and so are items in a cluster that has m_o; an empty cluster is never drawn.
    gamma = 0 draws clusters uniformly. distance="literal" is equation 9 verbatim, d = the inner product of codewords
    scaled to [0, 1], which prefers distant clusters. The B m_c m_o items are shared by all queries, except those in the
    query's own cell, or belong to the query they were drawn for. If too few clusters have items, the rest counts
    nothing. The paper weights all items equally; correction="counts" is ours. For shared items

        E[count of j] = B sum_c p(c) P(cluster of j among the m_c | c) m_o / |cluster of j|
        p(c) = share of training pairs in cluster c

    and for items of one query the term of its positive's cluster c.

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
        among: Tensor | None = None,
    ):
        check_choice("distance", distance, Distance)
        if not 1 <= m_c < codes.k_primary or m_o < 1 or not gamma >= 0:
            raise ValueError(
                f"OtherClusters needs 1 <= m_c < {codes.k_primary} clusters, m_o >= 1, gamma >= 0; "
                f"got {m_c}, {m_o}, {gamma}"
            )
        super().__init__(codes, shared, exclude, correction, counts, among)
        self.m_c, self.m_o, self.gamma = m_c, m_o, gamma
        self.distance: Distance = distance
        self.name = f"{m_o} of each of {m_c} other clusters"
        self.register(codes)

    def tables(self, codes: Codes) -> dict[str, Tensor]:
        sizes = self.drawn_codes(codes).sizes
        tables = super().tables(codes) | {"chance": cluster_chances(codes.codewords, sizes, self.gamma, self.distance)}
        if self.correction == "none":
            return tables
        # (K, K): expected count of an item of cluster k for a positive in c
        count = inclusion(tables["chance"], self.m_c) * self.m_o / sizes.clamp(min=1)
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
        """The draws, and the clusters they come from (B, m_c), -1 if there are too few."""
        items = step.batch.item_ids
        if fuses_draws(items, self.k_primary):
            from sparring.kernels import cluster_draws

            seed = torch.randint(1 << 62, (2,), generator=step.generator, device=items.device)
            tables = self.cell, self.order, self.start, self.chance
            (*found, own), clusters = cluster_draws.others(items, *tables, self.k_secondary, self.m_c, self.m_o, seed)
            return ClusterDraws(*found, *own), clusters
        cell = self.cell[items]
        own = cell // self.k_secondary
        # exponential clocks: the first m_c to ring are drawn without replacement in proportion to their rates
        clock = torch.rand(len(own), self.k_primary, generator=step.generator, device=own.device).log_().neg_()
        first = (clock / self.chance[own]).topk(self.m_c, dim=1, largest=False)
        begin = self.start[first.indices]
        within = distinct(self.start[first.indices + 1] - begin, self.m_o, step.generator)
        place = (begin.unsqueeze(-1) + within).clamp(max=len(self.order) - 1)
        possible = torch.isfinite(first.values)
        ids = torch.where(possible.unsqueeze(-1), self.order[place], -1)
        return self.drawn(ids, cell), torch.where(possible, first.indices, -1)


class SameCluster(ByCluster):
    """For each positive m_h items of its primary cluster outside its secondary cluster (the hard negatives of ESANS).

        r uniform in [0, |cluster| - |cell|),   item = r-th of the cluster with the cell cut out

    No draw is rejected; draws are without replacement if enough items are left. If the cell is the complete cluster,
    items come from the nearest other primary cluster. Items belong to their query; shared=True offers them to all
    queries, except those in the query's own cell. With correction="counts" (ours) the items of a query represent the
    rest of its cluster, (|cluster| - |cell|) / m_h each, or nothing if there is no rest; shared items represent all
    items that the positives of the batch could draw.

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
        among: Tensor | None = None,
    ):
        if m_h < 1:
            raise ValueError(f"SameCluster needs m_h >= 1, got {m_h}")
        super().__init__(codes, shared, exclude, correction, counts, among)
        self.m_h = m_h
        self.name = f"{m_h} of the same cluster"
        self.register(codes)

    def tables(self, codes: Codes) -> dict[str, Tensor]:
        """`pool` holds for each cell the start and size of its range in the sorted catalogue, and the gap to skip."""
        tables = super().tables(codes)
        start, hole = tables["start"], tables["cell_start"][:-1]
        own = torch.arange(len(hole)) // codes.k_secondary
        begin, width = start[own], tables["cell_start"].diff()
        left = start[own + 1] - begin - width
        chance = cluster_chances(codes.codewords, start.diff(), 1.0, "cosine")[own]
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
        each = (
            self.m_h * share / tables["pool"][:, 1].clamp(min=1)
        )  # expected count of an item of the pool, by the cell
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
        place = begin + distinct(size.squeeze(1), self.m_h, step.generator)
        place = place + torch.where(place >= hole, width, 0)
        return self.drawn(torch.where(size > 0, self.order[place.clamp(max=len(self.order) - 1)], -1), cell)


def cluster_chances(codewords: Tensor, sizes: Tensor, gamma: float, distance: Distance) -> Tensor:
    """(K, K): the probability of drawing cluster k first for a positive in c; 0 for c and empty ones (equation 9)."""
    possible = (sizes > 0).unsqueeze(0) & ~torch.eye(len(sizes), dtype=torch.bool)
    if distance == "cosine":
        unit = F.normalize(codewords.double(), dim=1)
        d = (1 - unit @ unit.T) / 2
    else:
        inner = codewords.double() @ codewords.double().T
        low = inner.masked_fill(~possible, math.inf).amin(1, keepdim=True)
        span = inner.masked_fill(~possible, -math.inf).amax(1, keepdim=True) - low
        d = torch.where(span > 0, (inner - low) / span, 1.0)
    rate = torch.where(possible, d.clamp(NEAREST, 1) ** -gamma, 0.0)
    return (rate / rate.sum(1, keepdim=True).clamp(min=1e-300)).float()


def distinct(size: Tensor, m: int, generator: torch.Generator) -> Tensor:
    """(..., m) integers below size (...), uniform without replacement; with replacement if size < m; 0 if size is 0."""
    u = torch.rand(*size.shape, m, dtype=torch.float64, generator=generator, device=size.device)
    # Floyd's algorithm: the k-th draw is below size - m + k + 1; a duplicate is replaced by the last of that range
    size = size.unsqueeze(-1)
    enough = size >= m
    last = torch.where(enough, size - m + torch.arange(m, device=size.device), size - 1).clamp_(min=0)
    pick = torch.minimum((u * (last + 1)).long(), last)
    earlier = torch.ones(m, m, dtype=torch.bool, device=size.device).tril_(-1)
    again = ((pick.unsqueeze(-1) == pick.unsqueeze(-2)) & earlier).any(-1)
    # a draw may also equal the replacement of an earlier duplicate: such chains have at most m - 1 links
    met = (pick.unsqueeze(-1) == last.unsqueeze(-2)) & earlier
    for _ in range(m - 2):
        again = again | (met & again.unsqueeze(-2)).any(-1)
    return torch.where(again & enough, last, pick)


def inclusion(chance: Tensor, m: int) -> Tensor:
    """(R, K): the probability that k is among m draws without replacement, from that of a first draw; rows sum to m.

        m = 1:   p_k
        m = 2:   p_k (1 + sum over l != k of p_l / (1 - p_l))
        else     int of p_k e^(-p_k t) P(fewer than m others by t) dt

    If a row has at most m possible draws, each of them is certain. The integral describes the draw as a race of
    exponential clocks; in the variable log t the trapezoidal rule is exact to 1e-9.

        inclusion(torch.tensor([[0.5, 0.3, 0.2]]), 2)  # 0.8393, 0.6750, 0.4857
    """
    p = chance.double()
    if m == 1:
        return p
    if m == 2:
        odds = torch.where(p > 0, p / (1 - p).clamp(min=1e-300), 0.0)
        chances = p * (1 + odds.sum(1, keepdim=True) - odds)
    else:
        chances = torch.cat([_raced(rows, m) for rows in p.split(16)])
    certain = (p > 0) & ((p > 0).sum(1, keepdim=True) <= m)
    return torch.where(certain, 1.0, chances)


def _raced(p: Tensor, m: int, step: float = 0.25) -> Tensor:
    least = float(torch.where(p > 0, p, 1.0).min())
    t = torch.arange(math.log(1e-10), math.log(50 / least) + step, step, dtype=p.dtype).exp()
    late = torch.exp(-p.unsqueeze(-1) * t)  # (R, K, T): probability of not having rung by t

    def counted(order: range) -> list[Tensor]:
        """For each k the probabilities that 0..m-1 of those before it in this order have rung, (m, R, T)."""
        rung = torch.zeros(m, len(p), len(t), dtype=p.dtype)
        rung[0] = 1
        before = {}
        for k in order:
            before[k] = rung
            one_more = torch.zeros_like(rung)
            one_more[1:] = rung[:-1]
            rung = torch.lerp(one_more, rung, late[:, k])
        return [before[k] for k in range(len(order))]

    n = p.shape[1]
    before, after = counted(range(n)), counted(range(n - 1, -1, -1))
    # i of those before k, and at most m - 1 - i of those after it
    fewer = [(a * b.cumsum(0).flip(0)).sum(0) for a, b in zip(before, after, strict=True)]
    return step * (p.unsqueeze(-1) * t * late * torch.stack(fewer, 1)).sum(-1)
