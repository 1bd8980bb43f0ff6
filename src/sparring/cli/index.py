"""sparring index: the index of a run, tuned for a recall and a memory limit, with a report."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from sparring.cli.parsing import (
    Commands,
    add_json,
    add_novelty,
    add_quiet,
    add_ranking,
    add_run,
    add_unfinished,
    count,
    size,
    target,
    whole,
)
from sparring.cli.screen import detail, result, table
from sparring.core.choices import INDEX_KINDS
from sparring.core.errors import UserError
from sparring.core.locks import LOCK, writing

if TYPE_CHECKING:
    from sparring.training.trained import Trained


def add_index(commands: Commands) -> None:
    parser = commands.add(
        "index",
        "Build the index of a run: the fastest kind that reaches a recall within a memory limit.",
        "sparring index runs/first --recall 0.99 --memory 500MB",
        index,
    )
    add_run(parser)
    group = parser.add_argument_group("target")
    text = "least share of the exact top k (default: 0.99)"
    group.add_argument("--recall", type=target, default=0.99, metavar="R", help=text)
    text = "most memory of the searches, such as 500MB (default: no limit)"
    group.add_argument("--memory", type=size, metavar="SIZE", help=text)
    text = "kind of index; auto tries all that fit, cagra where a GPU can build it (default: auto)"
    group.add_argument("--kind", choices=("auto", *INDEX_KINDS), default="auto", help=text)
    text = "length of the lists that the index is tuned for (default: 100)"
    group.add_argument("-k", "--k", type=count, default=100, metavar="K", help=text)
    text = "first dimensions of the vectors to keep; train with --set matryoshka=DIM (default: all)"
    group.add_argument("--dim", type=count, metavar="DIM", help=text)
    text = "for ease and item_knn: neighbours kept of each item, the strongest (default: 200)"
    group.add_argument("--neighbours", type=count, metavar="M", help=text)
    add_ranking(group)
    add_novelty(group)
    group = parser.add_argument_group("measurement")
    text = "queries of the run to measure on (default: 1000)"
    group.add_argument("--queries", type=count, default=1000, metavar="N", help=text)
    text = "seed of the sampled queries and of the clusters (default: 0)"
    group.add_argument("--seed", type=whole, default=0, metavar="N", help=text)
    add_unfinished(group)
    add_json(group)
    add_quiet(group)


def index(args: Namespace) -> int:
    from sparring.core.devices import hardware, pick_device
    from sparring.serving.index import report
    from sparring.serving.index.faiss_backends import cagra_problem, require_faiss
    from sparring.serving.index.recall_tuning import SMALL
    from sparring.serving.index.run_index import FOLDER, build_index
    from sparring.training import trained as runs

    if args.kind not in ("auto", "exact"):
        require_faiss()
    if args.kind == "cagra" and (problem := cagra_problem()):
        raise UserError(problem)
    trained = runs.load(
        args.run, args.model, recipe=args.recipe, trust=args.trust, unfinished=args.unfinished, novelty=args.novelty
    )
    if trained.model.scores_items:
        trained.how(args.ranking)  # refuses one that the run does not have
        return _lists(args, trained)
    if args.neighbours is not None:
        raise UserError("--neighbours is for runs with an item-item matrix (ease, item_knn): this run has vectors")
    if "parts" in trained.meta:
        each = args.run / "parts" / trained.meta["parts"][0]["name"]
        raise UserError(f"{args.run} is fused of several runs: index each of them, such as {each}")
    n_items = len(trained.ids.item_ids)
    if args.kind == "auto" and n_items > SMALL:
        require_faiss()
    if args.queries < 2 or len(trained.ids.query_ids) < 2:
        raise UserError("recall is measured on at least 2 queries, half of them held out")

    def log(line: str) -> None:
        detail(args, line)

    k, folder = min(args.k, n_items), args.run / FOLDER
    with writing(folder, folder / LOCK):
        tuned = build_index(
            trained, args.k, args.recall, args.memory, args.kind, args.queries, args.seed, log, args.dim, args.ranking
        )
        shape = f"{len(tuned.index.ids):,} x {tuned.index.dim}"
        how = tuned.index.meta["ranking"]
        facts = {"run": str(args.run), "ranking": how, "items": shape, "hardware": hardware(pick_device("cpu"))}
        path = report.write(tuned, args.recall, args.memory, k, folder / "report", facts)
    best = report.table(tuned, args.recall, best_only=True)
    detail(args, "", table(best.cells(), left=2), *(f"not tried: {line}" for line in tuned.left_out), "")
    chosen = {"kind": tuned.chosen.kind, "width": tuned.chosen.effort.width, "refine": tuned.chosen.effort.refine}
    points = report.table(tuned, args.recall).rows
    record = {"run": str(args.run), "chosen": chosen, "ranking": how, "recall": tuned.recall, "k": k, "points": points}
    of = {"towers": "", "classifiers": " of the lists by classifiers", "fused": " of the exact fused lists"}[how]
    line = f"{folder}: {report.describe(tuned.chosen)}, recall@{k} {tuned.recall:.4f}{of} on held-out queries; {path}"
    return result(args, [record], line)


def _lists(args: Namespace, trained: Trained) -> int:
    """The index of an item-item matrix: the strongest neighbours of each item."""
    from sparring.serving.index.run_index import FOLDER, build_lists

    if args.dim is not None:
        raise UserError(f"--dim cuts vectors, and {args.run} has an item-item matrix: omit it")
    if args.kind != "auto":
        raise UserError(f"--kind {args.kind} indexes vectors, and {args.run} has an item-item matrix: omit it")
    folder = args.run / FOLDER
    with writing(folder, folder / LOCK):
        found = build_lists(trained, args.neighbours or 200, args.k, args.queries, args.seed)
    size = f"{found['neighbours']:,} neighbours per item, {found['memory'] / 1e6:,.1f} MB"
    line = f"{folder}: {size}, recall@{found['k']} {found['recall']:.4f}"
    return result(args, [{"run": str(args.run), "kind": "lists", **found}], line)
