"""A short hash of interactions, which detects changed data."""

from __future__ import annotations

import hashlib

from sparring.data.interactions import Interactions
from sparring.data.prepared.format import Prepared


def fingerprint(data: Interactions) -> str:
    """A short hash of the pairs and of the columns that split them."""
    if isinstance(data, Prepared):
        return data.checksum
    digest = hashlib.blake2b(f"{data.n_queries} {data.n_items}".encode(), digest_size=8)
    for column in (data.queries, data.items, data.time, data.split, *(data.hidden or ())):
        digest.update(b"" if column is None else column.data)
    return digest.hexdigest()
