"""Hard negatives with and without filters: the false ones that are dropped, and the quality after training.

    python benchmarks/filters.py world           # worlds whose truth is known, id towers
    python benchmarks/filters.py oewn            # OEWN-Hyper3, a bag tower; half of the labels of each text are hidden

In a world a false negative is an item that the query would like (probability above one half) and that is no training
pair of it. On OEWN the label graph is the truth: half of the labels of each training text, but at least one, are kept,
and a hidden one is a false negative. Precision is the share of false negatives among the dropped candidates, recall
the share of the offered false negatives that is dropped; both over one epoch of batches drawn after training, of
candidates that are no known positive. `base` is the share of false negatives among the offered: the precision of
dropping at random. The quality is that on the held-out part. Guides: the model itself; another encoder (in a world the
true vectors with noise, on OEWN the vectors of `--guide`); on OEWN also the graph of the labels that are not hidden.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from _shared import DATA, table
from sparring.data import Interactions, split
from sparring.data.formats.xc import read_xc
from sparring.data.interactions import Split
from sparring.data.synthetic_world import make_world
from sparring.data.texts.texts import text_of
from sparring.evaluation.ranking import evaluate
from sparring.models.scorers import text_vectors
from sparring.negatives import Guide, InBatch, NearestItems, RelatedItems, Union, Unless, VectorScores
from sparring.recipes import dpr
from sparring.recipes.extreme import SOFTMAX
from sparring.recipes.in_batch import with_pairs
from sparring.recipes.run import Run, Term, compose
from sparring.recipes.settings import resolve
from sparring.recipes.setup import Setup
from sparring.training.fitting import fit
from sparring.training.step import sample_steps


@dataclass(frozen=True)
class Case:
    """One data set with its truth."""

    parts: Split
    setup: Setup
    false: Callable[[Tensor, Tensor], Tensor]  # query ids (B,), item ids (B, C) -> (B, C) bool
    guides: dict[str, Guide]
    shown: tuple[str, ...]  # metrics
    k: tuple[int, ...]
    metrics: tuple[str, ...]


def world_case(seed: int, given: argparse.Namespace) -> Case:
    world = make_world(
        given.queries, given.items, categories=20, dim=16, exposure=0.1, relevant=0.05, sharpness=12, seed=seed
    )
    parts = split(world.interactions, "random", valid=0.1, test=0.2, seed=seed)
    known = {(q, i) for q, i in zip(parts.train.queries.tolist(), parts.train.items.tolist(), strict=True)}
    taken = torch.zeros(world.n_queries, world.n_items, dtype=torch.bool)
    taken[tuple(torch.tensor(sorted(known)).T)] = True
    wrong = world.relevant(torch.arange(world.n_queries)) & ~taken
    generator = torch.Generator().manual_seed(seed)

    def noisy(vectors: Tensor) -> Tensor:
        noise = torch.randn(vectors.shape, generator=generator) / vectors.shape[1] ** 0.5
        return torch.nn.functional.normalize(vectors.float() + 0.4 * noise, dim=1)

    guides: dict[str, Guide] = {"noisy truth": VectorScores(noisy(world.query_vectors), noisy(world.item_vectors))}
    epochs, batch = given.epochs or 200, given.batch or 256
    setup = SOFTMAX.replaced(dim=32, epochs=epochs, batch_size=batch, warmup=20, lr=0.02, eval_every=epochs, seed=seed)
    return Case(
        parts,
        setup,
        lambda queries, items: wrong[queries.unsqueeze(1), items],
        guides,
        ("ndcg@10", "recall@50"),
        (10, 50),
        ("ndcg", "recall"),
    )


def oewn_case(seed: int, given: argparse.Namespace) -> Case:
    data = read_xc(DATA / "xc" / "oewn" / given.data)
    parts = split(data)
    random = np.random.default_rng(seed)
    train = parts.train
    queries = random.permutation(np.unique(train.queries))[: given.texts]
    rows = np.flatnonzero(np.isin(train.queries, queries))
    rows = rows[np.argsort(random.random(len(rows)))]  # the first half of a query's rows, in random order, is kept
    rows = rows[np.argsort(train.queries[rows], kind="stable")]
    _, first, count = np.unique(train.queries[rows], return_index=True, return_counts=True)
    place = np.arange(len(rows)) - np.repeat(first, count)
    kept = place < np.repeat((count + 1) // 2, count)
    hidden = torch.from_numpy(
        np.unique(train.queries[rows[~kept]].astype(np.int64) * data.n_items + train.items[rows[~kept]])
    )
    train = train.subset(np.sort(rows[kept]))
    assert parts.test is not None
    tested = random.permutation(np.unique(parts.test.queries))[: given.tests]
    test = parts.test.subset(np.flatnonzero(np.isin(parts.test.queries, tested)))

    def false(of: Tensor, items: Tensor) -> Tensor:
        keys = of.unsqueeze(1) * data.n_items + items
        return hidden[torch.searchsorted(hidden, keys).clamp(max=len(hidden) - 1)] == keys

    encode = text_vectors(given.guide, "cpu")
    guides: dict[str, Guide] = {
        given.guide: VectorScores(
            encode(text_of(data, "query").to_list(), "query"), encode(text_of(data, "item").to_list(), "item")
        ),
        "label graph": label_graph(train),
    }
    epochs, batch = given.epochs or 6, given.batch or 1024
    chosen, _ = resolve(dpr, {"encoder": "bag", "dim": given.dim, "epochs": epochs, "batch_size": batch, "seed": seed})
    setup = chosen.replaced(eval_every=epochs, warmup=20)
    shown = ("precision@1", "recall@100")
    return Case(Split(train, None, test), setup, false, guides, shown, (1, 100), ("precision", "recall"))


def label_graph(train: Interactions) -> RelatedItems:
    """Two labels are related where one is the synset of a training text and the other a label of it that is kept."""
    assert train.hidden is not None  # (text, the label that is the text itself)
    itself = np.full(train.n_queries, -1)
    itself[train.hidden[0]] = train.hidden[1]
    ends = itself[train.queries]
    return RelatedItems(torch.from_numpy(ends[ends >= 0]), torch.from_numpy(train.items[ends >= 0].astype(np.int64)))


def methods(case: Case, names: list[str]) -> dict[str, Callable[[], Run]]:
    train, guides = case.parts.train, case.guides

    def mined() -> NearestItems:
        return NearestItems(
            train.n_queries,
            4,
            100,
            every=max(1, case.setup.training.epochs // 4),
            start=1,
            per_query=True,
            among=with_pairs(train),
        )

    def run(*negatives: object) -> Callable[[], Run]:
        def built() -> Run:
            torch.manual_seed(case.setup.seed)
            parts = [make() for make in negatives]  # type: ignore[operator]
            return compose(train, case.setup, Term(1.0, parts[0] if len(parts) == 1 else Union(*parts)))

        return built

    def batch() -> InBatch:
        return InBatch(exclude="known")

    every = {
        "in-batch": run(batch),
        "in-batch, own, margin 0": run(lambda: Unless(batch(), margin=0.0)),
        **{
            f"in-batch, {name}, margin 0": run(lambda g=guide: Unless(batch(), g, margin=0.0))
            for name, guide in guides.items()
        },
        "mined": run(batch, mined),
        "mined, own, relative 0.95": run(batch, lambda: Unless(mined(), relative=0.95)),
        "mined, own, relative 0.8": run(batch, lambda: Unless(mined(), relative=0.8)),
        "mined, own, margin 0.05": run(batch, lambda: Unless(mined(), margin=0.05)),
        **{
            f"mined, {name}, relative 0.95": run(batch, lambda g=guide: Unless(mined(), g, relative=0.95))
            for name, guide in guides.items()
        },
    }
    return {name: every[name] for name in (names or every)}


@torch.no_grad()
def dropped(run: Run, case: Case) -> tuple[float, float, float, float]:
    """The share dropped, precision, recall, and the share of false negatives among the offered, over one epoch."""
    unless = next((part for part in run.modules().modules() if isinstance(part, Unless)), None)
    sums = np.zeros(4)  # offered, dropped, false, both
    for _, step, outcome in sample_steps(run, case.parts, seed=7):
        for block in outcome.bags[0].blocks:
            if unless is not None and block.provenance.filtered is None:
                continue
            if unless is None and len(outcome.bags[0].blocks) > 1 and block.shared:
                continue  # of mined and in-batch together, the mined ones
            ids = block.ids.expand(len(step.q), -1)
            near = torch.zeros_like(ids, dtype=torch.bool)
            if unless is not None:
                near = unless.near(step, block.ids, block.emb)
            offered = (ids >= 0) & (~torch.isneginf(block.log_w) | near)
            assert block.exclude is not None
            offered[block.exclude.hits(block.ids)] = False
            wrong = case.false(step.query_ids, ids.clamp(min=0)) & offered
            near &= offered
            sums += [float(mask.sum()) for mask in (offered, near, wrong, near & wrong)]
    offered_, near_, wrong_, both = sums
    return near_ / offered_, both / max(near_, 1), both / max(wrong_, 1), wrong_ / offered_


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=("world", "oewn"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=0, help="0: 200 in worlds, 6 on OEWN")
    parser.add_argument("--batch", type=int, default=0, help="0: 256 in worlds, 1,024 on OEWN")
    parser.add_argument("--queries", type=int, default=1500)
    parser.add_argument("--items", type=int, default=1000)
    parser.add_argument("--data", default="OEWN-Hyper3")
    parser.add_argument("--texts", type=int, default=20_000, help="training texts of OEWN")
    parser.add_argument("--tests", type=int, default=4_000, help="test texts of OEWN")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--guide", default="wordllama", help="encoder that judges OEWN: wordllama, minilm, a folder")
    parser.add_argument("--method", action="append", default=[], help="only these, by name")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    found: dict[str, list[list[float]]] = {}
    shown: tuple[str, ...] = ()
    for seed in range(given.seeds):
        case = (world_case if given.case == "world" else oewn_case)(seed, given)
        shown = case.shown
        for name, make in methods(case, given.method).items():
            began = time.process_time()
            run = make()
            fit(run, replace(case.parts, valid=None), k=case.k, metrics=case.metrics, device="cpu")
            assert case.parts.test is not None
            ranked = evaluate(run.model, case.parts.test, case.parts.seen_for("test"), case.k, case.metrics).metrics
            spent = time.process_time() - began
            found.setdefault(name, []).append([*(ranked[key] for key in shown), *dropped(run, case), spent])
            print(f"seed {seed}: {name}: " + " ".join(f"{value:.4f}" for value in found[name][-1]), flush=True)
    rows = []
    for name, values in found.items():
        mean, std = np.mean(values, 0), np.std(values, 0, ddof=1) if len(values) > 1 else np.zeros(len(values[0]))
        n = len(shown)
        quality = [f"{100 * mean[i]:.2f} ± {100 * std[i]:.2f}" for i in range(n)]
        share, precision, recall, base, spent = mean[n:]
        filtered = [f"{share:.2%}", f"{precision:.1%}", f"{recall:.1%}"] if share > 0 else ["", "", ""]
        rows.append([name, *quality, *filtered, f"{base:.2%}", f"{spent:.0f} s"])
    print(table(["negatives", *shown, "dropped", "precision", "recall", "base", "CPU"], rows))


if __name__ == "__main__":
    main()
