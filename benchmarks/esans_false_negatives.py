"""The share of false negatives among the negatives of ESANS, with and without the secondary codebook, in a known world.

A query likes an item with a probability that the world knows exactly. A false negative is an item that the query
would like (probability above one half) and never met. For every training pair, hard negatives are drawn from the
positive's primary cluster: any other item of it (no secondary codebook), items of other cells (ESANS), and items of
other cells where the cells were dealt at random, the control. Clusters come from MSAC over two noisy views of the
items and their behaviour vectors. The claim: cells lower the share of false negatives.

    python benchmarks/esans_false_negatives.py
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from _shared import table
from sparring.core.types import Step
from sparring.data.modalities.modalities import Modalities
from sparring.data.synthetic_world import SyntheticWorld, make_world
from sparring.models.clusters import Codes
from sparring.models.clusters.msac import MSAC
from sparring.models.clusters.quantizer import ROBUST
from sparring.models.spectral_start import spectral
from sparring.negatives import Negatives, OtherClusters, SameCluster, Sampled, Uniform
from sparring.recipes.esans import behaviour_codes


def cells(codes: Codes, secondary: Tensor) -> Codes:
    """The same primary clusters with other cells."""
    return Codes(codes.primary, secondary, codes.codewords, int(secondary.max()) + 1)


def singles(codes: Codes) -> Codes:
    """Every item its own cell: a positive's candidates are all other items of its primary cluster."""
    rank = torch.empty(len(codes), dtype=torch.long)
    rank[codes.order] = torch.arange(len(codes)) - codes.start[codes.primary.long()[codes.order]]
    return cells(codes, rank)


def dealt(codes: Codes, seed: int) -> Codes:
    """The cells of each primary cluster with their sizes kept and items dealt at random inside it."""
    deal = torch.argsort(torch.rand(len(codes), generator=torch.Generator().manual_seed(seed)))
    within = deal[torch.argsort(codes.primary[deal].long(), stable=True)]  # by cluster, at random inside
    secondary = torch.empty_like(codes.secondary)
    secondary[within] = codes.secondary[codes.order]
    return Codes(codes.primary, secondary, codes.codewords, codes.k_secondary)


def measure(world: SyntheticWorld, negatives: Negatives, rounds: int, batch: int = 512) -> tuple[float, float, float]:
    """Over all draws: share of false negatives, mean probability of being liked, mean cosine to the positive."""
    queries, items = (column.long() for column in world.interactions.pairs())
    generator, vectors = torch.Generator().manual_seed(1), world.item_vectors
    total = torch.zeros(4, dtype=torch.float64)
    for _ in range(rounds):
        at = torch.randint(len(queries), (batch,), generator=generator)
        q, i = queries[at], items[at]
        step = Step(q, i, world.query_vectors[q], vectors[i], torch.tensor(1.0), lambda ids: vectors[ids], generator)
        ids = negatives(step).blocks[0].ids
        near = (vectors[i].unsqueeze(1) * vectors[ids]).sum()
        liked = world.relevance(q).gather(1, ids).sum()
        total += torch.stack([world.false_negatives(q, ids).sum(), liked, near, torch.tensor(ids.numel())])
    shares = (total[:3] / total[3]).tolist()
    return shares[0], shares[1], shares[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--queries", type=int, default=2000)
    parser.add_argument("--items", type=int, default=2000)
    parser.add_argument("--k", type=int, nargs=2, default=(20, 15), help="primary and secondary codewords")
    parser.add_argument("--rounds", type=int, default=40, help="batches of 512 pairs")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    found: dict[str, list[tuple[float, float, float]]] = {}
    for seed in range(given.seeds):
        world = make_world(
            given.queries, given.items, categories=20, dim=16, exposure=0.05, relevant=0.05, sharpness=12, seed=seed
        )
        data = world.interactions
        positives = data.positives()
        behaviour = spectral(positives.start, positives.items, data.n_items, 32, seed=seed)[1]
        views = {"text": world.text_vectors, "image": world.image_vectors, "behaviour": behaviour.float()}
        modalities = Modalities.from_arrays({name: view.numpy() for name, view in views.items()})
        settings = replace(
            ROBUST, k_primary=given.k[0], k_secondary=given.k[1], dim=32, steps=600, warmup=200, seed=seed
        )
        codes = MSAC(modalities.widths, settings).fit(modalities, data.item_ids)
        own = behaviour_codes(data, given.k[0], given.k[1], seed)
        shuffled = codes.shuffled(seed)
        for name, negatives in {
            "uniform": Sampled(Uniform(data.n_items), 5, per_query=True),
            "simple: other clusters": OtherClusters(codes, 1, 5, shared=False),
            "hard, no secondary codebook": SameCluster(singles(codes), 5),
            "hard, cells dealt at random": SameCluster(dealt(codes, seed), 5),
            "hard, ESANS": SameCluster(codes, 5),
            "hard, behaviour alone, no secondary": SameCluster(singles(own), 5),
            "hard, behaviour alone": SameCluster(own, 5),
            "hard, all clusters dealt at random": SameCluster(shuffled, 5),
        }.items():
            found.setdefault(name, []).append(measure(world, negatives, given.rounds))
    shape = f"{given.queries:,} queries, {given.items:,} items in 20 categories, {given.k[0]} x {given.k[1]} codewords"
    print(f"{shape}, mean of {given.seeds} worlds")
    means = {name: np.mean(rows, 0) for name, rows in found.items()}
    rows = [
        [name, f"{m[0]:.2%} +- {np.std(found[name], 0)[0]:.2%}", f"{m[1]:.3f}", f"{m[2]:.3f}"]
        for name, m in means.items()
    ]
    print(table(["negatives", "false negatives", "mean chance to be liked", "mean cosine to the positive"], rows))
    with_it, without = means["hard, ESANS"][0], means["hard, no secondary codebook"][0]
    control = means["hard, cells dealt at random"][0]
    verdict = "yes" if with_it < without and with_it < control else "NO"
    print(
        f"the secondary codebook leaves {with_it / without:.2f} of the false ones, cells at random "
        f"{control / without:.2f}: {verdict}"
    )


if __name__ == "__main__":
    main()
