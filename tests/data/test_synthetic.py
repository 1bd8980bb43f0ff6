"""Worlds: relevance follows its formula, and observed pairs follow from relevance."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sparring.core.errors import UserError
from sparring.data.synthetic_world import make_world


def test_relevance_is_the_formula() -> None:
    """p_ij = 1 / (1 + exp(shift - sharpness cos(u_i, v_j))), pair by pair."""
    world = make_world(queries=7, items=11, seed=3)
    got = world.relevance(torch.tensor([4, 0]))
    assert got.shape == (2, 11)
    for row, query in enumerate((4, 0)):
        for item in range(11):
            cosine = sum(
                a * b
                for a, b in zip(world.query_vectors[query].tolist(), world.item_vectors[item].tolist(), strict=True)
            )
            assert got[row, item].item() == pytest.approx(
                1 / (1 + math.exp(world.shift - world.sharpness * cosine)), abs=1e-12
            )
    assert torch.allclose(world.item_vectors.norm(dim=1), torch.ones(11, dtype=torch.float64))


def test_false_negatives_are_relevant_and_unobserved() -> None:
    """A candidate is a false negative if and only if its relevance is above the threshold and it was not observed."""
    world = make_world(queries=12, items=20, seed=1)
    observed = set(zip(world.interactions.queries.tolist(), world.interactions.items.tolist(), strict=True))
    queries = torch.tensor([3, 7, 3])
    relevance = world.relevance(torch.arange(12)).tolist()
    shared = torch.tensor([5, 0, 19, -1, 5])
    own = torch.tensor([[1, 2, -1], [4, 19, 4], [0, 0, 7]])
    for candidates in (shared, own):
        got = world.false_negatives(queries, candidates, threshold=0.3)
        for row, query in enumerate(queries.tolist()):
            for column in range(candidates.shape[-1]):
                item = int(candidates[column] if candidates.dim() == 1 else candidates[row, column])
                want = item >= 0 and relevance[query][item] > 0.3 and (query, item) not in observed
                assert bool(got[row, column]) == want


def test_observation_is_liking_times_exposure() -> None:
    """The share of observed pairs is relevance times exposure, that of shown pairs (1 - relevance) times exposure."""
    world = make_world(queries=3000, items=30, exposure=0.6, relevant=0.4, seed=0)
    relevance = world.relevance(torch.arange(3000))
    observed = torch.zeros(3000, 30)
    observed[torch.from_numpy(world.interactions.queries).long(), torch.from_numpy(world.interactions.items).long()] = 1
    shown = torch.zeros(3000, 30)
    shown[world.shown] = 1
    assert not (observed * shown).any()
    # A query that observes nothing gets one pair added: allow for as many as are expected.
    lonely = (1 - relevance * world.exposure).prod(1).sum()
    allowed = lonely + 5 * lonely.sqrt()
    assert allowed < 5
    for found, chance in ((observed, relevance * world.exposure), (shown, (1 - relevance) * world.exposure)):
        error = (chance * (1 - chance)).sum(0).sqrt()
        assert ((found.sum(0) - chance.sum(0)).abs() < 5 * error + allowed).all()
    assert world.exposure.mean().item() == pytest.approx(0.6, abs=1e-6)
    assert relevance.mean().item() == pytest.approx(0.4, abs=0.02)


def test_popularity_follows_the_exponent() -> None:
    """Popularity is rank^-zipf, normalised; exponent 0 makes all items equal."""
    world = make_world(items=20, zipf=1.5)
    want = np.arange(1, 21) ** -1.5
    assert np.allclose(sorted(world.popularity.tolist(), reverse=True), want / want.sum())
    assert torch.allclose(make_world(items=20, zipf=0.0).popularity, torch.full((20,), 0.05, dtype=torch.float64))


def test_everyone_has_an_interaction_and_the_seed_decides() -> None:
    """Every query and item occurs; one seed gives one world, another seed another."""
    for seed in range(5):
        data = make_world(queries=30, items=50, seed=seed).interactions
        assert set(data.queries.tolist()) == set(range(30))
        assert set(data.items.tolist()) == set(range(50))
        assert list(zip(data.queries, data.items, strict=True)) == sorted(
            set(zip(data.queries.tolist(), data.items.tolist(), strict=True))
        )
    one, same, other = (make_world(seed=seed) for seed in (5, 5, 6))
    assert one.interactions.items.tolist() == same.interactions.items.tolist() != other.interactions.items.tolist()
    assert torch.equal(one.text_vectors, same.text_vectors)


def test_views_are_noisy_linear_images_of_the_truth() -> None:
    """A linear map from the latent vectors explains most of the text and image vectors, all of them without noise."""
    for noise, least, most in ((0.3, 0.85, 0.97), (0.0, 0.999999, 1.000001)):
        world = make_world(items=400, noise=noise, seed=2)
        for view in (world.text_vectors, world.image_vectors):
            target = view.double().numpy()
            latent = world.item_vectors.numpy()
            rest = target - latent @ np.linalg.lstsq(latent, target, rcond=None)[0]
            assert least < 1 - rest.var() / target.var() < most


def test_titles_name_their_category() -> None:
    """The item table has one row per item; a title holds its category and is unique."""
    world = make_world(items=50, categories=30)
    table = world.interactions.item_table
    assert table is not None
    assert len(table) == 50
    assert table["title"].n_unique() == 50
    assert table["category"].n_unique() == 30
    assert all(category in title for title, category in table.select("title", "category").iter_rows())
    assert len({(c, name) for c, name in zip(world.category.tolist(), table["category"], strict=True)}) == 30


def test_bad_worlds_name_the_bad_value() -> None:
    """Sizes and shares out of range are one-line errors."""
    with pytest.raises(UserError, match="queries is 1"):
        make_world(queries=1)
    with pytest.raises(UserError, match="categories is 99"):
        make_world(categories=99)
    with pytest.raises(UserError, match=r"relevant is 1\.0"):
        make_world(relevant=1.0)
