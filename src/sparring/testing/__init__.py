"""Test a sampler or a tower: a small world with known truth, a brute-force reading of a bag, and two contracts.

class TestMine(NegativesContract):
    make = lambda self, world: MySampler(world.n_items)
    resized = lambda self, world, n: MySampler(world.n_items, n)

class TestMyTower(TowersContract):
    make = lambda self: MyTower(n=12, dim=4)
"""

from sparring.testing.bag_reading import chi_square, dense, observe, plain_loss, weights
from sparring.testing.contract import NegativesContract, unproved
from sparring.testing.towers import TowersContract
from sparring.testing.world import World, excluded

__all__ = [
    "NegativesContract",
    "TowersContract",
    "World",
    "chi_square",
    "dense",
    "excluded",
    "observe",
    "plain_loss",
    "unproved",
    "weights",
]
