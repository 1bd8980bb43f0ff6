"""A binary decision tree over a few features, grown level by level on any device. Rank fusion uses it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_APART = 1e-7  # closer values are not split


@dataclass(frozen=True)
class Tree:
    """Nodes as arrays: x goes below if x[feature] <= threshold, otherwise above; a leaf leads to itself."""

    feature: Tensor  # long
    threshold: Tensor  # float64
    below: Tensor  # long
    above: Tensor
    chance: Tensor  # float32: share of True among the training rows of a node


def grow(x: Tensor, target: Tensor, depth: int) -> Tree:
    """A classification tree (CART) that splits the rows of x (n, F) to separate the values of target (n,) bool.

        a split into n_l and n_r rows, t_l and t_r of them True, gains
        (t_l^2 + (n_l - t_l)^2) / n_l + (t_r^2 + (n_r - t_r)^2) / n_r

    which is the decrease of Gini impurity up to constants. Each node takes the best split, halfway between two values;
    ties go to the first feature and the smallest value. A node of one class, or of equal rows, is a leaf. All nodes of
    a level are split together: `depth` times F sorts in total.

        grow(features, relevant, depth=7)

    Breiman et al., Classification and Regression Trees, 1984.
    """
    if x.dim() != 2 or len(x) != len(target) or not len(x):
        raise ValueError(
            f"a tree needs rows (n, F) with n >= 1 and as many targets, got {tuple(x.shape)} and {tuple(target.shape)}"
        )
    size, device = 2 ** (depth + 1) - 1, x.device
    feature = torch.zeros(size, dtype=torch.long, device=device)
    threshold = torch.zeros(size, dtype=torch.float64, device=device)
    below, above = torch.arange(size, device=device), torch.arange(size, device=device)
    node = torch.zeros(len(x), dtype=torch.long, device=device)
    hit = target.double()
    sorted_by = [torch.sort(x[:, f], stable=True).indices for f in range(x.shape[1])]
    for level in range(depth):
        splits = [_best_splits(x[:, f].double(), hit, node, order, size) for f, order in enumerate(sorted_by)]
        gain, middle = (torch.stack(part) for part in zip(*splits, strict=True))
        best = gain.argmax(0)
        split = torch.isfinite(gain.max(0).values)
        first = 2**level - 1
        nodes = torch.arange(first, 2 ** (level + 1) - 1, device=device)
        nodes = nodes[split[nodes]]
        feature[nodes], threshold[nodes] = best[nodes], middle[best[nodes], nodes]
        below[nodes], above[nodes] = 2 * nodes + 1, 2 * nodes + 2
        value = x.gather(1, feature[node].unsqueeze(1)).squeeze(1).double()
        node = torch.where(value <= threshold[node], below[node], above[node])
    rows, hits = _totals(node, hit, size)
    return Tree(feature, threshold, below, above, (hits / rows.clamp(min=1)).float())


def _best_splits(value: Tensor, hit: Tensor, node: Tensor, order: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """For each node (size,): gain of its best split by this feature (-inf if there is none), and its threshold."""
    order = order[torch.sort(node[order], stable=True).indices]  # by node, and within it by value
    of, v, h = node[order], value[order], hit[order]
    rows, hits = _totals(of, h, size)
    start = torch.cumsum(rows, 0) - rows
    before = torch.cumsum(hits, 0) - hits  # True in all nodes before
    n_l = torch.arange(1, len(v) + 1, device=v.device, dtype=torch.float64) - start[of]
    t_l = torch.cumsum(h, 0) - before[of]
    n_r, t_r = rows[of] - n_l, hits[of] - t_l
    follower = torch.cat([v[1:], v[-1:]])
    gain = (t_l**2 + (n_l - t_l) ** 2) / n_l + (t_r**2 + (n_r - t_r) ** 2) / n_r.clamp(min=1)
    mixed = (hits[of] > 0) & (hits[of] < rows[of])
    gain = torch.where((n_r > 0) & (follower > v + _APART) & mixed, gain, -torch.inf)
    best = torch.full((size,), -torch.inf, dtype=gain.dtype, device=v.device).scatter_reduce(0, of, gain, "amax")
    place = torch.arange(len(v), device=v.device)
    first = torch.full((size,), len(v), device=v.device)
    first = first.scatter_reduce(0, of, torch.where(gain == best[of], place, len(v)), "amin").clamp(max=len(v) - 1)
    return best, v[first] + (follower[first] - v[first]) / 2


def _totals(node: Tensor, hit: Tensor, size: int) -> tuple[Tensor, Tensor]:
    zeros = torch.zeros(size, dtype=torch.float64, device=node.device)
    return zeros.index_add(0, node, torch.ones_like(hit)), zeros.index_add(0, node, hit)
