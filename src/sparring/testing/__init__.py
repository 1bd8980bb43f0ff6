"""Test a sampler: a small world with known truth, a brute-force reading of a bag, and the contract of all samplers.

class TestMine(NegativesContract):
    make = lambda self, world: MySampler(world.n_items)
"""

from sparring.testing.bag_reading import chi_square, dense, observe, plain_loss, weights
from sparring.testing.contract import NegativesContract
from sparring.testing.world import World, excluded

__all__ = ["NegativesContract", "World", "chi_square", "dense", "excluded", "observe", "plain_loss", "weights"]
