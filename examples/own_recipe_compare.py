"""A custom recipe, compared with uniform negatives over two seeds. Open compare/report.html afterwards."""

from pathlib import Path

import sparring
from sparring.data import make_world
from sparring.experiments import ComparedData, Comparison, compare, quality
from sparring.losses import sampled_softmax
from sparring.negatives import Sampled, Uniform

SETUP = sparring.Setup.of(dim=16, batch_size=256)


def clipped(step, bag, most=3.0):
    """Softmax whose loss stops growing at `most`, so that mislabelled pairs pull less."""
    return most * (sampled_softmax(step, bag) / most).tanh()


def robust(data, setup=SETUP, *, n: int = 64):
    """Uniform negatives under a loss that saturates."""
    return sparring.compose(data, setup, sparring.Term(1.0, Sampled(Uniform(data.n_items), n), clipped))


if __name__ == "__main__":  # each training runs in a process that imports this file
    world = make_world(queries=400, items=200, seed=0)
    parts = sparring.split(world.interactions, "random", valid=0.1, test=0.2, seed=0)
    comparison = Comparison(
        Path("compare"),
        (ComparedData("world", parts),),
        ("uns", robust),
        seeds=2,
        base=SETUP,
        shared={"epochs": 3, "n": 64},
        device="cpu",
    )
    for failure in compare(comparison):
        print(failure)
    print(quality(comparison).markdown())
