"""A tour on real data: two recipes that differ in nothing but their negatives, compared, evaluated, and put to use."""

from __future__ import annotations

import shlex
from argparse import ArgumentParser, Namespace
from pathlib import Path

from sparring.cli import inputs, screen
from sparring.cli.values import count
from sparring.core.errors import UserError

HOUSEHOLD = 1042
_EPOCHS = 8
# Small enough for two minutes on a laptop. What shares a batch is popular; contrasted with that alone, a model learns to avoid the staples.
_SHARED = "--setup default --set dim=32 --set batch_size=1024"
_RECIPES = {
    "ssl": "",
    "default": "--set n=1024",
}  # 1,024 candidates per query each: the others of its batch, or any of the catalogue


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for the runs (default: runs/demo)")
    parser.add_argument("--epochs", type=count, default=None, help="epochs of each recipe")


def demo(args: Namespace) -> int:
    """Each step is a command that is printed before it runs, so that it can be run again by hand."""
    out, epochs = args.out, args.epochs
    names = list(_RECIPES)
    show = screen.console()
    show.print(
        "Real grocery purchases of about 2,450 households. Two recipes, alike but for who each household is contrasted with.\n"
    )
    _command("data show demo")
    for name, own in _RECIPES.items():
        folder = shlex.quote(str(out / name))
        _command(
            f"train --data demo --recipe {name} {own} {_SHARED} --epochs {epochs or _EPOCHS} --out {folder} --overwrite"
        )
    _compare(out, names)
    best = max(names, key=lambda name: _test(out / name)["metrics"]["ndcg@20"])
    _command(f"evaluate {shlex.quote(str(out / best))} --k 5,10,100")
    _command(f"recommend {shlex.quote(str(out / best))} --query {HOUSEHOLD} -k 10")
    _beside(out / best)
    show.print(
        f"\nEach run's folder holds its settings, metrics, curve and model card: see {out / best / 'README.md'}",
        markup=False,
    )
    return 0


def _command(line: str) -> None:
    from sparring.cli import execute

    screen.console().print(f"\n$ sparring {line}", style="bold", markup=False, soft_wrap=True)
    execute(shlex.split(line))


def _test(folder: Path) -> dict[str, dict[str, float]]:
    from sparring.core.files import read_json

    result = read_json(folder / "result.json")
    return dict(result["test"])


def _compare(out: Path, names: list[str]) -> None:
    from sparring.core.files import read_json

    metrics = ("recall@20", "ndcg@20", "recall@50", "coverage@20")
    rows: list[list[object]] = [["the same but for the negatives", *metrics, "seconds of training"]]
    popular = _popular(out / names[0])
    rows.append(["most popular products, no training", *(f"{popular[metric]:.4f}" for metric in metrics), "0"])
    for name in names:
        seconds = read_json(out / name / "result.json")["train_seconds"]
        rows.append([name, *(f"{_test(out / name)['metrics'][metric]:.4f}" for metric in metrics), f"{seconds:.0f}"])
    show = screen.console()
    show.print()
    show.print(screen.table(rows))


def _popular(folder: Path) -> dict[str, float]:
    """What listing the most popular products is worth on the test part of a run: the bar that any training has to pass."""
    import torch

    from sparring.data.splits import split
    from sparring.evaluation.ranking import evaluate
    from sparring.training.folder import read_meta

    meta = read_meta(folder)
    parts = split(inputs.read_recorded(meta, folder, None, {}), **meta["source"]["split"])
    counts = torch.from_numpy(parts.train.counts()).float().unsqueeze(1)

    class Popular:
        def encode_queries(self, ids: torch.Tensor, /) -> torch.Tensor:
            return torch.ones(len(ids), 1)

        def item_vectors(self) -> torch.Tensor:
            return counts

    assert parts.test is not None
    return evaluate(Popular(), parts.test, parts.seen_for("test"), (20, 50), ("recall", "ndcg", "coverage")).metrics


def _beside(folder: Path) -> None:
    """What the household bought, what was held out, and which recommendations are among the latter."""
    from sparring.training import trained as runs

    trained = runs.load(folder)
    data = inputs.read_recorded(trained.meta, folder, None, {})
    parts, titles = inputs.split_as(data, trained.meta, folder), data.titles()
    household = int(data.query_ids.encode([HOUSEHOLD])[0])
    if household < 0 or titles is None or parts.test is None:
        raise UserError(f"the demo data has no household {HOUSEHOLD}: it is not the set this tour was made for")
    counts = data.counts()
    bought = parts.train.items[parts.train.queries == household]
    bought = bought[counts[bought].argsort(kind="stable")]  # the rarest purchases say most about a household
    held = set(parts.test.items[parts.test.queries == household].tolist())
    best = trained.ids.item_ids.encode(trained.recommend([HOUSEHOLD], k=10)["item"])
    rows: list[list[object]] = [["bought in training (its least common)", "recommended", "held out and bought?"]]
    rows += [[titles[b], titles[r], "yes" if int(r) in held else ""] for b, r in zip(bought, best, strict=False)]
    show = screen.console()
    show.print(
        f"\nHousehold {HOUSEHOLD} bought {len(bought):,} products in the training part; {len(held):,} more were held out:\n"
    )
    show.print(screen.table(rows, left=3))
