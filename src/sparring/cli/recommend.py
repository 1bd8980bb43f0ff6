"""sparring recommend: the best items of some queries on the screen, or of all queries as a file."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from sparring.cli.parsing import Commands, add_novelty, add_ranking, add_run, add_unfinished, count, place
from sparring.cli.screen import console, note, note_untrained, progress, result, table
from sparring.core.errors import UserError

if TYPE_CHECKING:
    import polars as pl
    from rich.table import Table

    from sparring.training.trained import Trained

LOG_SECONDS = 10.0  # between two lines of progress where there is no terminal for a bar


def add_recommend(commands: Commands) -> None:
    parser = commands.add(
        "recommend",
        "Print the best items of a run for queries, histories or texts, or write those of every query to a file.",
        "sparring recommend runs/first --query 1042 -k 10",
        recommend,
    )
    add_run(parser)
    group = parser.add_argument_group("queries (one of these)")
    group.add_argument("--query", action="append", default=[], metavar="ID", help="query of the data; repeatable")
    text = "items of a new query, oldest first; repeat the option for ids that contain a comma"
    group.add_argument("--history", action="append", default=[], metavar="ID,ID", help=text)
    text = "text of a new query, for text towers; repeatable"
    group.add_argument("--text", action="append", default=[], metavar="TEXT", help=text)
    group.add_argument("--all", action="store_true", help="every query of the run, to the file --out")
    group = parser.add_argument_group("lists")
    text = "with --all: a .parquet or .csv file"
    group.add_argument("--out", type=place, metavar="FILE", help=text)
    text = "with --all: search the index that `sparring index` built instead of ranking exactly"
    group.add_argument("--index", action="store_true", help=text)
    text = "number of items (default: 10; with --all 100)"
    group.add_argument("-k", "--k", type=count, default=None, metavar="K", help=text)
    add_ranking(group)
    add_novelty(group)
    text = "include items that the query is known to have; a run that keeps repeats does so anyway"
    group.add_argument("--with-seen", action="store_true", default=None, help=text)
    add_unfinished(group)
    group.add_argument("--json", action="store_true", help="print one JSON object per line instead of a table")


def recommend(args: Namespace) -> int:
    from sparring.training import trained as runs

    if sum(map(bool, (args.query, args.history, args.text, args.all))) != 1:
        raise UserError("give one of --query ID (repeatable), --history ID,ID,..., --text TEXT (repeatable) or --all")
    if args.all or args.out or args.index:
        return _recommend_all(args)
    k = args.k or 10
    trained = runs.load(
        args.run, args.model, recipe=args.recipe, trust=args.trust, unfinished=args.unfinished, novelty=args.novelty
    )
    if args.text:
        best = trained.recommend_text(args.text, k, args.ranking)
    elif args.history:
        best = trained.recommend_history(_items(trained, args.history), k, args.with_seen, args.ranking)
        if not trained.reads_histories:
            note("the query tower of this run reads no histories: the mean of the items' vectors is used")
    else:
        best = trained.recommend(args.query, k, args.with_seen, args.ranking)
    note_untrained(trained)
    several = len(args.query) + len(args.text) > 1
    return result(args, list(best.iter_rows(named=True)), _table(best if several else best.drop("query")))


def _table(best: pl.DataFrame) -> Table:
    rows = [
        [f"{cell:.4f}" if isinstance(cell, float) else "" if cell is None else cell for cell in row]
        for row in best.iter_rows()
    ]
    return table([best.columns, *rows], left=len(best.columns) - 1)


def _items(trained: Trained, words: Sequence[str]) -> list[str]:
    """The item ids of --history: a word that is an id is that item, any other is a list."""
    items: list[str] = []
    for word, known in zip(words, trained.ids.item_ids.encode(words) >= 0, strict=True):
        listed = [word] if known else [part.strip() for part in word.split(",") if part.strip()]
        if not listed:
            raise UserError(f"--history {word!r} holds no item ids: give them as ID,ID,...")
        items += listed
    return items


def _recommend_all(args: Namespace) -> int:
    """Write the lists of every query to a file."""
    from sparring.serving.export.lists import check_file, write_lists
    from sparring.serving.index.run_index import (
        cut_as_indexed,
        has_index,
        open_index,
        open_lists,
        open_staged,
        ranking_of,
    )
    from sparring.serving.index.searchable import Searchable
    from sparring.training import trained as runs

    if not args.all:
        raise UserError(f"--{'out' if args.out else 'index'} needs --all: the lists of every query")
    if args.out is None:
        raise UserError("--all needs --out FILE: a .parquet or .csv file for the lists")
    check_file(args.out)
    trained = runs.load(
        args.run, args.model, recipe=args.recipe, trust=args.trust, unfinished=args.unfinished, novelty=args.novelty
    )
    index: Searchable | None = None
    if args.index and trained.model.scores_items:
        trained = replace(trained, model=open_lists(trained.model, args.run))
    elif args.index:
        trained.item_vectors()  # a fused run has none, and says so
        how = ranking_of(trained, args.ranking)
        if how == "towers" or not has_index(args.run):
            index = open_index(args.run, novelty=trained.novelty)
            trained = replace(trained, model=cut_as_indexed(trained.model, args.run))
        else:
            index = open_staged(trained, how)
    n, k = len(trained.ids.query_ids), args.k or min(100, len(trained.ids.item_ids))
    began = logged = time.perf_counter()
    with progress("queries") as draw:

        def update(done: int, total: int) -> None:
            nonlocal logged
            draw("ranking", done, total)
            if not console().is_terminal and time.perf_counter() - logged >= LOG_SECONDS and done < total:
                logged = time.perf_counter()
                note(f"{done:,} of {total:,} queries ranked after {logged - began:.0f} s")

        rows = write_lists(trained, args.out, k, args.with_seen, index, update, args.ranking)
    seconds = time.perf_counter() - began
    note_untrained(trained)
    blank = len(trained.eligibility.queries)
    if blank:
        note(f"{blank:,} queries have no training pair: their lists are not personalised")
    several = "parts" in trained.meta
    by = {
        "fused": ", several runs fused" if several else ", towers and classifiers fused",
        "classifiers": ", by the classifiers",
    }
    exact = "through the neighbours in its index" if args.index else f"exact{by.get(trained.how(args.ranking), '')}"
    through = exact if index is None else f"through the {index.kind} index{by.get(how, '')}"
    speed = f"in {seconds:.1f} s ({n / seconds:,.0f} queries/s)"
    record = {"file": str(args.out), "queries": n, "rows": rows, "seconds": round(seconds, 3)}
    return result(args, [record], f"{args.out}: {rows:,} rows, the best {k} of {n:,} queries, {through}, {speed}")
