"""sparring recommend: the best items of some queries on the screen; of all queries see lists.py."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sparring.cli import screen
from sparring.cli.values import count
from sparring.core.errors import UserError

if TYPE_CHECKING:
    import polars as pl

    from sparring.training.trained import Trained


def options(parser: ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a folder written by `sparring train`")
    parser.add_argument(
        "--query", action="append", default=[], metavar="ID", help="a query (user) of the data; repeatable"
    )
    parser.add_argument(
        "--history",
        action="append",
        default=[],
        metavar="ID,ID",
        help="items instead of a query, oldest first; repeatable, and an ID with a comma is taken whole",
    )
    parser.add_argument(
        "--text",
        action="append",
        default=[],
        metavar="TEXT",
        help="a new query by its text, for text towers; repeatable",
    )
    parser.add_argument("--all", action="store_true", help="every query of the run, into the file --out")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="with --all: a .parquet or .csv file, written as the lists are found"
    )
    parser.add_argument(
        "--index", action="store_true", help="with --all: through the index that `sparring index` built, not exactly"
    )
    parser.add_argument(
        "-k", "--k", type=count, default=None, metavar="K", help="how many items (default: 10; with --all 100)"
    )
    add_ranking(parser)
    parser.add_argument(
        "--with-seen", action="store_true", help="do not leave out what the data knows the query to have"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line instead of a table")


def add_ranking(parser: ArgumentParser) -> None:
    listed = "fused: by towers and classifiers together; encoder: by the towers alone (default: fused where the run has classifiers)"
    parser.add_argument("--ranking", choices=("fused", "encoder"), default=None, help=listed)


def recommend(args: Namespace) -> int:
    from sparring.cli.lists import recommend_all, tell_left_out
    from sparring.training import trained as runs

    if sum(map(bool, (args.query, args.history, args.text, args.all))) != 1:
        raise UserError("give one of --query ID (repeatable), --history ID,ID,..., --text TEXT (repeatable) or --all")
    if args.all or args.out or args.index:
        return recommend_all(args)
    args.k = args.k or 10
    trained = runs.load(args.run)
    if args.text:
        best = trained.recommend_text(args.text, args.k, args.ranking)
    elif args.history:
        best = _by_history(trained, args)
    else:
        with screen.telling():
            best = trained.recommend(args.query, args.k, args.with_seen, args.ranking)
    tell_left_out(trained)
    if args.json:
        print("\n".join(json.dumps(row, ensure_ascii=False) for row in best.iter_rows(named=True)))
        return 0
    several = len(args.query) + len(args.text) > 1
    names = [name for name in best.columns if several or name != "query"]
    rows = [
        [f"{cell:.4f}" if isinstance(cell, float) else _cell(cell) for cell in row] for row in best[names].iter_rows()
    ]
    screen.console().print(screen.table([names, *rows], left=len(names) - 1))
    return 0


def _by_history(trained: Trained, args: Namespace) -> pl.DataFrame:
    with screen.telling():
        best = trained.recommend_history(_items(trained, args.history), args.k, args.with_seen, args.ranking)
    if not trained.reads_histories:
        screen.tell(
            "note: the query tower of this run reads no histories: the mean of the items' vectors stands for this one"
        )
    return best


def _items(trained: Trained, words: Sequence[str]) -> list[str]:
    """The item ids of --history: a word that is an id as it stands is that one, any other is a list."""
    found: list[str] = []
    for word, whole in zip(words, trained.ids.item_ids.encode(words) >= 0, strict=True):
        listed = [word] if whole else [part.strip() for part in word.split(",") if part.strip()]
        if not listed:
            raise UserError(f"--history {word!r} holds no item ids: give them as ID,ID,...")
        found += listed
    return found


def _cell(value: object) -> str:
    return "" if value is None else str(value)
