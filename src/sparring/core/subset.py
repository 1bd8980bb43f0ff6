"""A part of the catalogue, numbered from 0, so that it can be ranked or drawn from alone."""

from __future__ import annotations

import torch
from torch import Tensor

from sparring.core.exclusion import Positives


class Subset:
    """Some of the ids 0..n-1, in ascending order, with their places 0..m-1.

    part = Subset(torch.tensor([2, 5]), 6);  part.ids_at(torch.tensor([1, -1]))  # 5, -1
    """

    def __init__(self, ids: Tensor, n: int) -> None:
        self.ids = torch.unique(ids.long())
        self.place = torch.full((n,), -1, dtype=torch.long, device=ids.device)
        self.place[self.ids] = torch.arange(len(self.ids), device=ids.device)

    def to(self, device: torch.device | str) -> Subset:
        moved = Subset.__new__(Subset)
        moved.ids, moved.place = self.ids.to(device), self.place.to(device)
        return moved

    def ids_at(self, places: Tensor) -> Tensor:
        """The ids at these places; -1 stays -1."""
        return torch.where(places >= 0, self.ids[places.clamp(min=0)], -1)

    def lists(self, lists: Positives) -> Positives:
        """The lists of all queries without other ids, as places."""
        places = self.place[lists.items.long()]
        inside = places >= 0
        left = torch.cat([inside.new_zeros(1, dtype=torch.long), inside.cumsum(0)])
        return Positives(left[lists.start], places[inside].to(lists.items.dtype))


def checked(ids: Tensor, n: int) -> Tensor:
    """Distinct ids below n in ascending order; ValueError for none, and for an id outside 0..n-1."""
    ids = torch.unique(torch.as_tensor(ids).long())
    if not len(ids) or not 0 <= int(ids[0]) <= int(ids[-1]) < n:
        found = "none" if not len(ids) else f"{int(ids[0])} to {int(ids[-1])}"
        raise ValueError(f"needs at least one id, all between 0 and {n - 1}; got {found}")
    return ids
