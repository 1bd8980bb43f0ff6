"""sparring demo: a tour on real data. Two recipes that differ only in their negatives, compared and put to use."""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from sparring.cli.inputs import read_recorded, split_recorded
from sparring.cli.parsing import Commands, count
from sparring.cli.screen import heading, show, table
from sparring.core.errors import UserError

HOUSEHOLD = 1042
HOUSEHOLDS = (HOUSEHOLD, 2013)  # whose lists the tour shows with and without novelty
EPOCHS = 8
# Small enough for a minute each on a laptop; the temperature is what `default` chooses when it has the time.
SHARED = "--setup default --set dim=128 --set tau=0.2"
# Candidates are the other items of the batch, which are popular ones, or 2,048 of the catalogue. A model that is
# contrasted with popular items alone learns to avoid the staples.
RECIPES = {"ssl": f"{SHARED} --epochs {{epochs}}", "default": f"{SHARED} --set n=2048 --epochs {{epochs}}"}
# Solved in seconds, without negatives: what any training must beat.
BASELINES = {"popularity": "", "ease": ""}


def add_demo(commands: Commands, execute: Callable[[list[str]], int]) -> None:
    """`execute` runs a command by its words."""
    parser = commands.add(
        "demo",
        "Train two recipes on real grocery purchases, compare them, and show their recommendations.",
        "sparring demo --out runs/demo",
        partial(demo, execute=execute),
    )
    text = "folder of the runs (default: runs/demo)"
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="FOLDER", help=text)
    text = f"epochs of each recipe (default: {EPOCHS})"
    parser.add_argument("--epochs", type=count, default=EPOCHS, metavar="N", help=text)


def demo(args: Namespace, execute: Callable[[list[str]], int]) -> int:
    """Each step is a command that is printed before it runs, so that a reader can run it again."""
    from sparring.core.files import read_json

    if Path("demo").exists() or args.out.resolve() == Path("demo").resolve():
        raise UserError("a file or folder `demo` is read instead of the data set demo: choose another --out or place")

    def run(line: str) -> None:
        words = shlex.split(line)
        show("", heading(f"$ {shlex.join(['sparring', *words])}"))
        execute(words)

    show("Real grocery purchases of about 2,450 households, two baselines, and two recipes that differ in negatives.")
    run("data show demo")
    recipes = {**BASELINES, **RECIPES}
    folders = {name: args.out / name for name in recipes}
    for name, folder in folders.items():
        options = (
            f"{recipes[name].format(epochs=args.epochs)} --out {shlex.quote(str(folder))} --overwrite --no-baselines"
        )
        run(f"train --data demo --recipe {name} {options}")
    results = {name: read_json(folder / "result.json") for name, folder in folders.items()}
    metrics = ("recall@20", "ndcg@20", "recall@50", "coverage@20")
    cells = [
        [name, *(f"{result['test']['metrics'][metric]:.4f}" for metric in metrics), f"{result['train_seconds']:.1f}"]
        for name, result in results.items()
    ]
    show("", table([["recipe", *metrics, "seconds of training"], *cells]))

    def quality(name: str) -> float:
        return float(results[name]["test"]["metrics"]["ndcg@20"])

    show("", f"The best baseline, without negatives: {max(BASELINES, key=quality)}.")
    best = folders[max(RECIPES, key=quality)]
    run(f"evaluate {shlex.quote(str(best))} --k 5,10,100")
    strongest, page = folders[max(recipes, key=quality)], args.out / "novelty"
    values = "0.1,0.2,0.3,0.4,0.5,0.6,0.7"
    run(f"evaluate {shlex.quote(str(strongest))} --novelty {values} --report {shlex.quote(str(page))}")
    _show_novelty(strongest, page)
    run(f"recommend {shlex.quote(str(best))} --query {HOUSEHOLD} -k 10")
    _show_hits(best)
    show("", f"Each run folder has its settings, metrics, curve and model card: see {best / 'README.md'}")
    return 0


def _show_novelty(folder: Path, page: Path) -> None:
    """Show the lists of two households by the model's own scores and at the largest novelty that keeps 95 % of NDCG."""
    import torch

    from sparring.core.files import read_json
    from sparring.experiments.novelty import largest
    from sparring.training import trained as runs

    point = largest(read_json(page / "novelty.json")["rows"])
    novelty = float(point["novelty"] or 0)
    if not novelty:
        return

    trained = runs.load(folder, novelty=0)
    data = read_recorded(trained.meta, folder, None, {})
    titles, everyone = data.titles(), torch.arange(data.n_queries)
    assert titles is not None
    taken = trained.eligibility.taken(everyone)
    before, after = (
        each.ranking().best(each.model.query_vectors(everyone), 10, taken)[1]
        for each in (trained, trained.with_novelty(novelty))
    )
    counts = [lists[lists >= 0].bincount(minlength=data.n_items).double() for lists in (before, after)]
    n, top = data.n_queries, int(counts[0].argmax())
    shared = [float((count * (count - 1)).sum()) / (n * (n - 1)) for count in counts]  # by two lists, in the mean
    rows: list[list[object]] = [["household", "the model's own scores", f"novelty {novelty:g} (+ new in the list)"]]
    for household, at in zip(HOUSEHOLDS, data.query_ids.encode(HOUSEHOLDS).tolist(), strict=True):
        for place, (old, new) in enumerate(zip(before[at].tolist(), after[at].tolist(), strict=True)):
            mark = "  " if new in before[at] else "+ "
            rows.append([household if not place else "", titles[old], mark + titles[new]])
    line = f"Novelty {novelty:g} costs {1 - float(point['kept'] or 0):.1%} of ndcg@20. "
    line += f"Two households share {shared[1]:.1f} of their 10 best instead of {shared[0]:.1f}; "
    line += f"{titles[top]} is in {counts[1][top] / n:.0%} of the lists instead of {counts[0][top] / n:.0%}."
    show("", line, "", table(rows, left=3))


def _show_hits(folder: Path) -> None:
    """Show the lists that the test ranks for a typical household and for a well-served one, and mark the hits.

    `recommend` leaves out every purchase, held-out ones too; the test leaves out those of the training only.
    """
    import numpy as np
    import torch

    from sparring.data.pairs import pair_keys
    from sparring.training import trained as runs

    trained = runs.load(folder)
    data = read_recorded(trained.meta, folder, None, {})
    parts, titles = split_recorded(data, trained.meta, folder), data.titles()
    if titles is None or parts.test is None:
        raise UserError("the demo data has no titles or no test part: it is not the data set of this tour")
    households = torch.from_numpy(np.unique(parts.test.queries)).long()
    seen = replace(trained.eligibility, test=None).taken(households)
    lists = trained.ranking().best(trained.model.query_vectors(households), 10, seen)[1].numpy()
    held = pair_keys(parts.test.queries, parts.test.items, data.n_items)
    hit = np.isin(pair_keys(np.repeat(households.numpy(), 10), lists.ravel(), data.n_items), held).reshape(-1, 10)
    hits = hit.sum(1)
    least = f"and at least one for {(hits > 0).mean():.0%} of the households"
    show("", f"The first ten products hold {hits.mean():.2f} held-out purchases on average, {least}. Two examples:")
    counts = data.counts()
    for share in (0.5, 0.95) if hits.any() else ():
        wanted = int(np.quantile(hits[hits > 0], share, method="nearest"))
        row = int(np.flatnonzero(hits == wanted)[0])
        bought = parts.train.items[parts.train.queries == int(households[row])]
        bought = bought[counts[bought].argsort(kind="stable")]  # the rarest purchases say most about a household
        rows: list[list[object]] = [["bought in training (the rarest)", "ranked in the test", ""]]
        for i, (item, hits_it) in enumerate(zip(lists[row], hit[row], strict=True)):
            rows.append([titles[bought[i]] if i < len(bought) else "", titles[item], "bought" if hits_it else ""])
        name = data.query_ids.decode([int(households[row])])[0]
        show("", f"Household {name}, {wanted} of 10:", "", table(rows, left=3))
