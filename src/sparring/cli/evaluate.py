"""sparring evaluate: the metrics of a run on the part that it held out, or on other data."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sparring.cli.inputs as inputs
from sparring.cli.parsing import (
    Commands,
    add_baselines,
    add_device,
    add_json,
    add_ranking,
    add_run,
    add_unfinished,
    constants,
    count,
    cutoffs,
    novelties,
)
from sparring.cli.screen import behind, beside_table, evaluation_tables, result, stages_table, table
from sparring.core.choices import DIALECTS
from sparring.core.errors import UserError
from sparring.core.locks import LOCK, writing

if TYPE_CHECKING:
    import torch
    from rich.console import RenderableType

    from sparring.data.interactions import Interactions, Split
    from sparring.evaluation.ranking import Evaluation
    from sparring.training.baselines import Rank
    from sparring.training.trained import Trained


def add_evaluate(commands: Commands) -> None:
    parser = commands.add(
        "evaluate",
        "Rank the complete catalogue for every test query of a run, and print the metrics.",
        "sparring evaluate runs/first --k 10,20,50 --trec-out first.trec",
        evaluate,
    )
    add_run(parser)
    text = (
        "other data: its test part, or all of its pairs, without those of the training (default: the run's test part)"
    )
    inputs.add_data(parser, text)
    group = parser.add_argument_group("ranking and metrics")
    text = (
        "pairs of other data whose query or item the run does not know: left out, or counted as misses (default: drop)"
    )
    group.add_argument("--unknown", choices=("drop", "miss"), default="drop", help=text)
    text = "part of the run's own data to rank (default: test)"
    group.add_argument("--part", choices=("test", "valid"), default="test", help=text)
    group.add_argument("-k", "--k", type=cutoffs, default=None, metavar="K,K", help="cutoffs (default: 10,20,50)")
    text = "whose definition of the metrics; standard is LightGCN's (default: standard)"
    group.add_argument("--dialect", choices=DIALECTS, default="standard", help=text)
    text = "constants of psp and psndcg (default: those of the data)"
    group.add_argument("--propensity", type=constants, metavar="A,B", help=text)
    add_ranking(group)
    text = (
        "correct scores for the popularity of items, 0 (not) to 1; several values, or the word curve, "
        "show what novelty costs and brings (default: the run's setting, novelty)"
    )
    group.add_argument("--novelty", type=novelties, metavar="N,N", help=text)
    text = "with several values of --novelty: folder for a page, a figure and the table"
    group.add_argument("--report", type=Path, metavar="FOLDER", help=text)
    text = "rank by the first dimensions of the vectors (see `index --dim`; default: all)"
    group.add_argument("--dim", type=count, metavar="DIM", help=text)
    text = "also write the lists as a TREC run file, which trec_eval and others read"
    group.add_argument("--trec-out", type=Path, metavar="FILE", help=text)
    add_baselines(group)
    add_unfinished(group)
    add_device(group)
    add_json(group)


def evaluate(args: Namespace) -> int:
    from sparring.core.devices import pick_device
    from sparring.evaluation.metrics import LIST_METRICS, METRICS, PROPENSITY_METRICS, parse
    from sparring.evaluation.ranking import evaluate as rank
    from sparring.recipes.finding import short
    from sparring.training import trained as runs

    if args.run.is_file():
        return _run_file(args)
    device = pick_device(args.device)
    several = len(args.novelty or ()) > 1
    if args.dim is not None and (several or args.ranking not in (None, "towers")):
        raise UserError(f"--dim {args.dim} cuts the vectors of the towers: omit --ranking and several --novelty")
    if args.report is not None and not several:
        raise UserError("--report shows what novelty costs: give --novelty curve, or several values such as 0,0.3,0.6")
    if several and args.ranking not in (None, "towers"):
        raise UserError(f"--novelty corrects the ranking by the towers alone: omit --ranking {args.ranking}")
    trained = runs.load(
        args.run, args.model, recipe=args.recipe, trust=args.trust, unfinished=args.unfinished, novelty=0
    )
    trained.how(args.ranking)  # says why there is none, before the data is read
    cutoffs = inputs.cutoffs_for(args.k, len(trained.ids.item_ids))
    data = inputs.read_recorded(trained.meta, args.run, args.data, inputs.columns(args))
    task = _to_rank(trained, data, args)
    if several:
        return _curve(args, trained, task, cutoffs[len(cutoffs) // 2], device)
    trained = trained.with_novelty(args.novelty[0] if args.novelty else trained.own_novelty)
    trained = trained if args.dim is None else trained.cut(args.dim)
    propensity = None if task.misses is not None else _propensity(data, args.propensity)
    names = []
    for name in METRICS + (PROPENSITY_METRICS if propensity is not None else ()) + LIST_METRICS:
        try:
            names.append(parse(name, args.dialect).name)
        except UserError:  # the dialect does not define this metric
            continue
    how, seen = (
        trained.how(args.ranking if args.dim is None else "towers"),
        None if task.seen is None else task.seen.to(device),
    )
    given = {"counts": task.counts, "propensity": propensity, "misses": task.misses}

    def ranked(model: Any, listed: Any, to: Any = None) -> Evaluation:
        return rank(model.to(device), task.test, seen, cutoffs, names, args.dialect, **given, among=listed, lists_to=to)

    rankings, listed = _rankings(trained), trained.eligibility.listed(len(trained.ids.item_ids))
    sources = [name for name in rankings if name.startswith(PARTS)]
    alone = bool(sources) or args.dim is not None or trained.novelty > 0  # no other ranking can be compared
    written = nullcontext() if args.trec_out is None else _trec_file(args.trec_out, trained, args.run)
    with written as to:
        results = {
            name: ranked(model, listed, to if name == how else None)
            for name, model in rankings.items()
            if name in (how, *sources) or not alone
        }
    chosen = results[how]
    baselines = _baselines(trained, task, ranked, device) if args.baselines else {}
    facts = {"run": str(args.run), "ranked": task.title, "ranking": how, "dialect": args.dialect}
    facts |= {"repeats": "keep" if trained.repeats else "merge", "novelty": trained.novelty}
    facts |= {"untrained": task.blank} if task.left_out is None else {"untrained": None, "left_out": task.left_out}
    record = {**facts, **chosen.to_dict()}
    words = [f"{args.run} on {task.title}: {len(chosen.query_ids):,} queries ranked in {chosen.seconds:.1f} s"]
    words += [f"{task.blank:,} of them have no training pair"] if task.blank else []
    words += ["repeats are kept, so seen items are ranked too"] if trained.repeats else []
    words += [f"{args.dim} dimensions of each vector"] if args.dim else []
    words += [f"novelty {trained.novelty:g}"] if trained.novelty else []
    parts = [part for each in evaluation_tables(chosen) for part in ("", each)]
    if sources:
        record["parts"] = {name.removeprefix(PARTS): results[name].to_dict() for name in sources}
        parts += ["", stages_table(results)]
    elif len(results) > 1:
        record["rankings"] = {name: each.to_dict() for name, each in results.items()}
        words.append(_BY[how])
        parts += ["", stages_table(results)]
    if baselines:
        record["baselines"] = {name: each.to_dict() for name, each in baselines.items()}
        lines = behind(chosen, baselines)
        parts += ["", beside_table(short(trained.meta["recipe"]), chosen, baselines), *([""] if lines else []), *lines]
    left_out = [] if task.left_out is None else [_left_out_line(task.left_out)]
    parts += [] if args.trec_out is None else ["", f"the {cutoffs[-1]} best of each query: {args.trec_out}"]
    return result(args, [record], "; ".join(words), *left_out, *parts)


def _trec_file(path: Path, trained: Trained, run: Path) -> Any:
    from sparring.evaluation.trec import RunFile

    return RunFile(path, trained.ids.query_ids, trained.ids.item_ids, run.name)


def _run_file(args: Namespace) -> int:
    """The metrics of a TREC run file, of any system, on the test part of data."""
    from sparring.data.splits import split
    from sparring.evaluation.metrics import METRICS, parse
    from sparring.evaluation.ranking import evaluate_lists
    from sparring.evaluation.trec import read_run

    if args.data is None:
        raise UserError(f"{args.run} is a file of rankings: give the judged data with --data FOLDER")
    for name, given in (("--trec-out", args.trec_out), ("--novelty", args.novelty), ("--ranking", args.ranking)):
        if given is not None:
            raise UserError(f"{name} needs a run folder, and {args.run} is a file of rankings")
    data = inputs.read_data(args.data, inputs.columns(args))
    test = data if data.split is None else (split(data).test if args.part == "test" else split(data).valid)
    if test is None:
        raise UserError(f"{args.data} has no {args.part} part")
    cutoffs, notes, names = inputs.cutoffs_for(args.k, test.n_items), list[str](), []
    for name in METRICS:
        try:
            names.append(parse(name, args.dialect).name)
        except UserError:  # the dialect does not define this metric
            continue
    lists = read_run(args.run, test, cutoffs[-1], notes.append)
    found = evaluate_lists(lists, test, test.n_items, cutoffs, names, args.dialect)
    record = {"run": str(args.run), "ranked": str(args.data), "dialect": args.dialect, **found.to_dict()}
    title = f"{args.run} on {args.data}: {len(found.query_ids):,} queries"
    return result(args, [record], title, *notes, *(part for each in evaluation_tables(found) for part in ("", each)))


def _curve(args: Namespace, trained: Trained, task: _Task, k: int, device: Any) -> int:
    """The metrics at several values of novelty, at one cutoff."""
    from sparring.experiments.novelty import novelty_curve
    from sparring.experiments.report import novelty as report

    given = {"counts": task.counts, "misses": task.misses}
    curve = novelty_curve(trained, task.test, task.seen.to(device), args.novelty, k, args.dialect, device, **given)
    found = curve.table()
    title = f"{args.run} on {task.title}: {len(next(iter(curve.points.values())).query_ids):,} queries"
    parts: list[RenderableType] = [title, "", table(found.cells()), "", report.in_short(curve)]
    if args.report is not None:
        with writing(args.report, args.report / LOCK):
            path = report.write(curve, args.report, {"run": str(args.run), "ranked": task.title})
        parts.append(str(path))
    records = [{"run": str(args.run), "ranked": task.title, "k": k, **row} for row in found.rows]
    return result(args, records, *parts)


def _baselines(trained: Trained, task: _Task, rank: Rank, device: torch.device) -> dict[str, Evaluation]:
    """Popularity and the best cheap baseline on the same pairs; the one that the training chose, if it did."""
    from sparring.core.files import read_json
    from sparring.data.interactions import Split
    from sparring.recipes.setup import flat
    from sparring.training.baselines import PERSONAL, baselines, text_columns
    from sparring.training.folder import seen_interactions

    meta, path = trained.meta, trained.folder / "result.json"
    known = read_json(path) if path.is_file() else {}
    setup = {**flat(meta["setup"]), **meta["arguments"]}
    return baselines(
        task.parts or Split(seen_interactions(trained.ids, trained.seen)),
        task.test,
        rank,
        device,
        select=str(setup.get("select", "ndcg@10")),
        seed=int(setup.get("seed", 0)),
        seconds=float(known.get("train_seconds", 0.0)),
        personal=[name for name in known.get("baselines", {}) if name in PERSONAL] or tuple(PERSONAL),
        apart=(meta["recipe"],),
        texts=text_columns(setup),
    )


PARTS = "parts/"  # of a fused run
_BY = {
    "towers": "by the towers alone",
    "fused": "by towers and classifiers fused",
    "classifiers": "by the classifiers alone",
}


def _rankings(trained: Trained) -> dict[str, Any]:
    """The models of a run that rank, by name."""
    from sparring.training.sources import Sources

    if isinstance(trained.model, Sources):
        return {"fused": trained.model, **{PARTS + source.name: source.model for source in trained.model.sources}}
    fused = trained.fused
    return {"towers": trained.model} | ({} if fused is None else {"classifiers": fused.clf, "fused": fused})


def _propensity(data: Interactions, constants: tuple[float, float] | None) -> Any:
    """Inverse propensities of the items: those of the data, or with other constants, from all but the test pairs."""
    import numpy as np

    from sparring.data.interactions import TEST
    from sparring.data.propensity import inverse_propensities

    if constants is None:
        return data.propensity
    rows = slice(None) if data.split is None else data.split != TEST
    counts = np.bincount(data.items[rows], minlength=data.n_items)
    return inverse_propensities(counts, len(np.unique(data.queries[rows])), *constants)


@dataclass(frozen=True)
class _Task:
    """Pairs to rank, exclusions, and training counts where they are known."""

    test: Any
    seen: Any
    counts: Any
    title: str
    blank: int | None = None  # queries without a training pair
    left_out: dict[str, Any] | None = None  # pairs of other data that are not ranked, by reason
    misses: Any = None
    parts: Split | None = None  # of the run's own data


def _to_rank(trained: Trained, data: Interactions, args: Namespace) -> _Task:
    """The task of an evaluation.

    Of the run's own data this is the part that its training held out. Of other data it is the test part, or every pair,
    without those trained on, in the ids of the run.
    """
    import numpy as np

    from sparring.data.fingerprints import fingerprint
    from sparring.training.folder import SELECTION
    from sparring.training.trend import know

    record = trained.meta.get("source") or {}
    same = record and fingerprint(data) == record.get("fingerprint")
    if same and data.item_ids.ids.equals(trained.ids.item_ids.ids):
        parts = inputs.split_recorded(data, trained.meta, args.run)
        part = parts.test if args.part == "test" else parts.valid
        if part is None and "refit" in trained.meta:
            reason = f"{args.run} was refitted on the validation part, so it cannot be evaluated on it"
            chose = f": evaluate {args.run / SELECTION}, which chose its epochs"
            raise UserError(reason + chose * (args.run / SELECTION).is_dir())
        if part is None:
            raise UserError(f"the data of {args.run} has no {args.part} part: the split left none")
        know(trained.model, parts, args.part)  # a finished run knows the validation part
        blank = len(np.setdiff1d(part.queries, parts.train.queries))
        title = f"its own {args.part} part"
        return _Task(part, parts.seen_for(args.part), parts.train.counts(), title, blank, parts=parts)
    if args.data is None:
        raise UserError(f"{record['data']} has changed since {args.run} was trained on it: --data ranks its new pairs")
    if args.part == "valid":
        raise UserError(f"--part valid needs the training data of {args.run}, and {args.data} is other data")
    return _new_pairs(trained, data, args)


def _new_pairs(trained: Trained, data: Interactions, args: Namespace) -> _Task:
    """The pairs of other data that the run was not trained on, in the ids of the run; pairs of unknown ids counted."""
    import numpy as np

    from sparring.data.interactions import TEST, Interactions
    from sparring.data.pairs import occurrences, pair_keys
    from sparring.evaluation.ranking import Misses

    rows = np.ones(len(data), dtype=bool) if data.split is None else data.split == TEST
    queries = trained.ids.query_ids.encode(data.query_ids.ids)[data.queries[rows]]
    items = trained.ids.item_ids.encode(data.item_ids.ids)[data.items[rows]]
    n_queries, n_items = len(trained.ids.query_ids), len(trained.ids.item_ids)
    start = trained.seen.start.numpy()
    owner = np.repeat(np.arange(len(start) - 1), np.diff(start))
    known = (queries >= 0) & (items >= 0)
    trained_on = np.isin(pair_keys(queries, items, n_items), pair_keys(owner, trained.seen.items.numpy(), n_items))
    new = known if trained.repeats else known & ~trained_on
    strangers, unlisted = queries < 0, (queries >= 0) & (items < 0)
    left_out = {
        "how": args.unknown,
        "pairs": len(queries),
        "trained": int((known & ~new).sum()),
        "unknown_query_pairs": int(strangers.sum()),
        "unknown_queries": len(np.unique(data.queries[rows][strangers])),
        "unknown_item_pairs": int(unlisted.sum()),
        "unknown_items": len(np.unique(data.items[rows][unlisted])),
    }
    if not new.any():
        reason = f"{args.data} has no new pair of a query and an item that {trained.folder} knows"
        raise UserError(f"nothing to rank: {reason}; {_left_out_line(left_out)}")
    misses = None
    if args.unknown == "miss":
        without = np.setdiff1d(queries[unlisted], queries[new])  # known queries with unknown items alone
        misses = Misses(occurrences(queries[unlisted], n_queries), len(without) + left_out["unknown_queries"])
    pairs = Interactions(
        queries[new].astype(np.int32),
        items[new].astype(np.int32),
        trained.ids.query_ids,
        trained.ids.item_ids,
        grade=None if data.grade is None else data.grade[rows][new],
    )
    title = f"the pairs of {args.data}" + " that it was not trained on" * (not trained.repeats)
    seen = None if trained.repeats else trained.seen
    return _Task(pairs, seen, None, title, left_out=left_out, misses=misses)


def _left_out_line(left_out: Mapping[str, Any]) -> str:
    """The pairs of other data that are not ranked, by reason, as one line."""
    queries, items = left_out["unknown_query_pairs"], left_out["unknown_item_pairs"]
    strange = f"{queries:,} of {left_out['unknown_queries']:,} unknown queries, {items:,} of "
    strange += f"{left_out['unknown_items']:,} unknown items"
    counted = "count as misses" if left_out["how"] == "miss" else "are left out (--unknown miss counts them)"
    line = f"of {left_out['pairs']:,} pairs {left_out['trained']:,} were trained on"
    return f"{line}, and {queries + items:,} ({strange}) {counted}" if queries + items else f"{line}; no id is unknown"
