"""Prove a sampler: a tiny world whose truth is known, a plain reading of a bag, and the contract that every sampler keeps.

class TestMine(NegativesContract):
    make = lambda self, world: MySampler(world.n_items)
"""

from sparring.testing.contract import NegativesContract
from sparring.testing.reading import chi_square, dense, observe, plain_loss, weights
from sparring.testing.world import World, excluded

__all__ = ["NegativesContract", "World", "chi_square", "dense", "excluded", "observe", "plain_loss", "weights"]
