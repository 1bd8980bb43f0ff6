"""Synthetic worlds: interactions drawn from a known latent model, so that false negatives can be counted exactly."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import polars as pl
import torch
from torch import Tensor

from sparring.core.errors import UserError
from sparring.data.interactions import Interactions, Vocabulary

_KINDS = [
    "apple",
    "bread",
    "candle",
    "drill",
    "easel",
    "flute",
    "glove",
    "hammer",
    "inkwell",
    "jacket",
    "kettle",
    "lamp",
]
_LOOKS = ["amber", "blue", "coral", "dark", "early", "faded", "green", "heavy", "ivory", "jade", "light", "small"]
_BLOCK = 1 << 22  # pairs per block while drawing: bounds memory at large worlds


@dataclass(frozen=True, eq=False)
class SyntheticWorld:
    """Queries and items with known relevance, and the interactions observed from it.

    A query i likes an item j with p_ij = sigmoid(sharpness * cos(u_i, v_j) - shift), known exactly for all pairs.
    Whether it likes the item is drawn once; whether it ever saw the item depends on the item's popularity alone: e_j =
    min(1, exposure * N * pop_j), pop_j proportional to rank_j^-zipf. A pair seen and liked is an interaction, a pair
    seen and not liked is in `shown`, and an unseen pair is unknown: with a high p_ij, it is a false negative when
    sampled.

        world = make_world(queries=40, items=50, seed=0);  world.interactions;  world.relevance(torch.tensor([0, 3]))
    """

    interactions: Interactions  # with the item table (title, category) and, in `shown`, seen and not liked
    query_vectors: Tensor  # (queries, D) unit length
    item_vectors: Tensor  # (N, D) unit length
    category: Tensor  # (N,) int64
    popularity: Tensor  # (N,) sums to 1
    exposure: Tensor  # (N,) probability that a query saw the item
    text_vectors: Tensor  # (N, text_dim) noisy linear view of the latent vectors
    image_vectors: Tensor  # (N, image_dim) another
    sharpness: float
    shift: float

    @property
    def n_queries(self) -> int:
        return self.interactions.n_queries

    @property
    def n_items(self) -> int:
        return self.interactions.n_items

    @property
    def shown(self) -> tuple[Tensor, Tensor]:
        """(queries, items) seen and not liked: explicit negatives."""
        assert self.interactions.shown is not None
        return torch.from_numpy(self.interactions.shown[0]).long(), torch.from_numpy(self.interactions.shown[1]).long()

    def relevance(self, query_ids: Tensor) -> Tensor:
        """(B, N) float64: the true probability that each query likes each item."""
        return _likes(self.query_vectors[query_ids.long()], self.item_vectors, self.sharpness, self.shift)

    def relevant(self, query_ids: Tensor, threshold: float = 0.5) -> Tensor:
        """(B, N) bool: pairs with a relevance above the threshold."""
        return self.relevance(query_ids) > threshold

    def observed(self, query_ids: Tensor) -> Tensor:
        """(B, N) bool: pairs that are interactions."""
        known = torch.zeros(len(query_ids), self.n_items, dtype=torch.bool)
        pairs = self.interactions.positives().of(query_ids.long())
        assert pairs.rows is not None
        known[pairs.rows, pairs.ids] = True
        return known

    def false_negatives(self, query_ids: Tensor, candidates: Tensor, threshold: float = 0.5) -> Tensor:
        """(B, C) bool: candidates, shared (C,) or per query (B, C), relevant but not observed; never ids below 0."""
        wrong = self.relevant(query_ids, threshold) & ~self.observed(query_ids)
        ids = candidates.long().expand(len(query_ids), -1)
        return wrong.gather(1, ids.clamp(min=0)) & (ids >= 0)


def make_world(
    queries: int = 40,
    items: int = 50,
    *,
    categories: int = 5,
    dim: int = 8,
    zipf: float = 1.0,
    exposure: float = 0.3,
    sharpness: float = 6.0,
    relevant: float = 0.2,
    spread: float = 0.6,
    text_dim: int = 12,
    image_dim: int = 16,
    noise: float = 0.3,
    seed: int = 0,
) -> SyntheticWorld:
    """Draw a world.

    `zipf` is the popularity exponent (0: all items equally popular), `exposure` the mean share of the catalogue that a
    query sees, `sharpness` the steepness of tastes, `relevant` the mean relevance over all pairs (the shift is solved
    for it), `spread` the distance of items and queries from the centre of their category, `noise` the noise of text and
    image views relative to their signal. Every query and every item has at least one interaction.
    """
    for name, value in (("queries", queries), ("items", items)):
        if value < 2:
            raise UserError(f"{name} is {value}; a world needs at least 2")
    if not 1 <= categories <= items:
        raise UserError(f"categories is {categories}; it must be between 1 and the number of items, {items}")
    for name, share in (("exposure", exposure), ("relevant", relevant)):
        if not 0 < share < 1:
            raise UserError(f"{name} is {share}; it must be above 0 and below 1")
    random = np.random.default_rng(seed)
    centres = random.normal(size=(categories, dim))
    category = random.permutation(np.arange(items) % categories)
    item_vectors = _unit(_unit(centres)[category] + spread * random.normal(size=(items, dim)) / np.sqrt(dim))
    home = random.integers(0, categories, queries)
    query_vectors = _unit(_unit(centres)[home] + spread * random.normal(size=(queries, dim)) / np.sqrt(dim))
    popularity = (1.0 + random.permutation(items)) ** -zipf
    popularity /= popularity.sum()
    seen = _exposure(popularity, exposure)
    u, v = torch.from_numpy(query_vectors), torch.from_numpy(item_vectors)
    shift = _shift(u, v, sharpness, relevant, random)
    liked, shown = _draw(u, v, seen, sharpness, shift, random)
    added = _matches(liked, u, v)
    pairs = np.sort(np.concatenate([liked, added]))
    shown = shown[~np.isin(shown, added)]
    kinds = np.array([_kind(c) for c in range(categories)])[category]
    looks = np.array(_LOOKS)[np.arange(items) // categories % len(_LOOKS)]
    table = pl.DataFrame({"look": looks, "category": kinds, "n": np.arange(items)})
    table = table.select(pl.format("{} {} {}", "look", "category", "n").alias("title"), "category")
    interactions = Interactions(
        queries=(pairs // items).astype(np.int32),
        items=(pairs % items).astype(np.int32),
        query_ids=Vocabulary(np.arange(queries)),
        item_ids=Vocabulary(np.arange(items)),
        time=random.integers(0, 1_000_000, len(pairs)),
        shown=((shown // items).astype(np.int32), (shown % items).astype(np.int32)),
        shown_time=random.integers(0, 1_000_000, len(shown)),
        item_table=table,
    )
    text_vectors, image_vectors = (_view(item_vectors, width, noise, random) for width in (text_dim, image_dim))
    return SyntheticWorld(
        interactions=interactions,
        query_vectors=u,
        item_vectors=v,
        category=torch.from_numpy(category),
        popularity=torch.from_numpy(popularity),
        exposure=torch.from_numpy(seen),
        text_vectors=text_vectors,
        image_vectors=image_vectors,
        sharpness=sharpness,
        shift=shift,
    )


def named_world(name: str) -> SyntheticWorld:
    """The world that a name describes: world:QUERIESxITEMS or world:QUERIESxITEMS:SEED.

    named_world("world:2000x1000").interactions
    """
    match = re.fullmatch(r"world:(\d+)x(\d+)(?::(\d+))?", name)
    if match is None:
        example = "world:QUERIESxITEMS, such as world:2000x1000, or world:2000x1000:SEED"
        raise UserError(f"{name!r} is not a world: write {example}")
    return make_world(int(match[1]), int(match[2]), seed=int(match[3] or 0))


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def _kind(category: int) -> str:
    name = _KINDS[category % len(_KINDS)]
    return name if category < len(_KINDS) else f"{name}-{category // len(_KINDS)}"


def _likes(u: Tensor, v: Tensor, sharpness: float, shift: float) -> Tensor:
    return torch.sigmoid(sharpness * (u @ v.T) - shift)


def _exposure(popularity: np.ndarray, mean: float) -> np.ndarray:
    """min(1, scale * popularity), with the scale that gives the requested mean."""
    low, high = 0.0, 1.0 / popularity.min()
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(1, middle * popularity).mean() < mean else (low, middle)
    return np.minimum(1, high * popularity)


def _shift(u: Tensor, v: Tensor, sharpness: float, mean: float, random: np.random.Generator) -> float:
    """The shift that gives the requested mean relevance, by bisection on at most 256 x 512 pairs."""
    rows, columns = random.permutation(len(u))[:256], random.permutation(len(v))[:512]
    score = sharpness * (u[rows] @ v[columns].T)
    low, high = -2 * sharpness - 20, 2 * sharpness + 20
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if float(torch.sigmoid(score - middle).mean()) > mean else (low, middle)
    return high


def _draw(
    u: Tensor, v: Tensor, seen: np.ndarray, sharpness: float, shift: float, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Pair numbers query * N + item, sorted: liked and seen, and seen but not liked."""
    liked, shown = [], []
    rows = max(_BLOCK // len(v), 1)
    for begin in range(0, len(u), rows):
        score = (sharpness * (u[begin : begin + rows] @ v.T) - shift).numpy()
        sees = np.flatnonzero(random.random(score.shape, dtype=np.float32) < seen)
        # A draw below sigmoid(score) is a logistic draw below the score.
        likes = random.logistic(size=len(sees)) < score.ravel()[sees]
        liked.append(sees[likes] + begin * len(v))
        shown.append(sees[~likes] + begin * len(v))
    return np.concatenate(liked), np.concatenate(shown)


def _matches(liked: np.ndarray, u: Tensor, v: Tensor) -> np.ndarray:
    """The best match of each query, then of each item, without an interaction."""
    n = len(v)
    lonely = np.flatnonzero(np.bincount(liked // n, minlength=len(u)) == 0)
    best = (u[lonely] @ v.T).argmax(1).numpy() if len(lonely) else np.empty(0, dtype=np.int64)
    added = lonely * n + best
    missing = np.flatnonzero(np.bincount(np.concatenate([liked, added]) % n, minlength=n) == 0)
    match = (v[missing] @ u.T).argmax(1).numpy() if len(missing) else np.empty(0, dtype=np.int64)
    return np.concatenate([added, match * n + missing])


def _view(vectors: np.ndarray, width: int, noise: float, random: np.random.Generator) -> Tensor:
    signal = vectors @ random.normal(size=(vectors.shape[1], width))
    return torch.from_numpy((signal + noise * signal.std() * random.normal(size=signal.shape)).astype(np.float32))
