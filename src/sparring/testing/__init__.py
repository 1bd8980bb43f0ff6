"""Test a sampler: a small world with known truth, a brute-force reading of a bag, and the contract of all samplers.

class TestMine(NegativesContract):
    make = lambda self, world: MySampler(world.n_items)
    resized = lambda self, world, n: MySampler(world.n_items, n)
"""

from sparring.testing.bag_reading import chi_square, dense, observe, plain_loss, weights
from sparring.testing.contract import NegativesContract, unproved
from sparring.testing.world import World, excluded

__all__ = [
    "NegativesContract",
    "World",
    "chi_square",
    "dense",
    "excluded",
    "observe",
    "plain_loss",
    "unproved",
    "weights",
]
