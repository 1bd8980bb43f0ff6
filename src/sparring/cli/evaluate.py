"""sparring evaluate: the metrics of a run on the part that it held out, or on other data."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

import sparring.cli.inputs as inputs
from sparring.cli.parsing import (
    Commands,
    add_device,
    add_json,
    add_ranking,
    add_run,
    add_unfinished,
    constants,
    cutoffs,
)
from sparring.cli.screen import evaluation_tables, result, stages_table
from sparring.core.choices import DIALECTS
from sparring.core.errors import UserError

if TYPE_CHECKING:
    from sparring.data.interactions import Interactions
    from sparring.training.trained import Trained


def add_evaluate(commands: Commands) -> None:
    parser = commands.add(
        "evaluate",
        "Rank the complete catalogue for every test query of a run, and print the metrics.",
        "sparring evaluate runs/first --k 10,20,50",
        evaluate,
    )
    add_run(parser)
    text = (
        "other data: its test part, or all of its pairs, without those of the training (default: the run's test part)"
    )
    inputs.add_data(parser, text)
    group = parser.add_argument_group("ranking and metrics")
    text = "part of the run's own data to rank (default: test)"
    group.add_argument("--part", choices=("test", "valid"), default="test", help=text)
    group.add_argument("-k", "--k", type=cutoffs, default=None, metavar="K,K", help="cutoffs (default: 10,20,50)")
    text = "whose definition of the metrics; standard is LightGCN's (default: standard)"
    group.add_argument("--dialect", choices=DIALECTS, default="standard", help=text)
    text = "constants of psp and psndcg (default: those of the data)"
    group.add_argument("--propensity", type=constants, metavar="A,B", help=text)
    add_ranking(group)
    add_unfinished(group)
    add_device(group)
    add_json(group)


def evaluate(args: Namespace) -> int:
    from sparring.core.devices import pick_device
    from sparring.evaluation.metrics import LIST_METRICS, METRICS, PROPENSITY_METRICS, parse
    from sparring.evaluation.ranking import evaluate as rank
    from sparring.training import trained as runs

    device = pick_device(args.device)
    trained = runs.load(args.run, recipe=args.recipe, trust=args.trust, unfinished=args.unfinished)
    cutoffs = inputs.cutoffs_for(args.k, len(trained.ids.item_ids))
    data = inputs.read_recorded(trained.meta, args.run, args.data, inputs.columns(args))
    test, seen, counts, title, blank = _to_rank(trained, data, args)
    propensity = _propensity(data, args.propensity)
    names = []
    for name in METRICS + (PROPENSITY_METRICS if propensity is not None else ()) + LIST_METRICS:
        try:
            names.append(parse(name, args.dialect).name)
        except UserError:  # the dialect does not define this metric
            continue
    how, seen = trained.how(args.ranking), seen.to(device)
    results = {
        name: rank(model.to(device), test, seen, cutoffs, names, args.dialect, counts, propensity=propensity)
        for name, model in (("encoder", trained.model), ("fused", trained.fused))
        if name in ("encoder", how) and model is not None
    }
    chosen = results[how]
    facts = {"run": str(args.run), "ranked": title, "ranking": how, "dialect": args.dialect, "untrained": blank}
    record = {**facts, **chosen.to_dict()}
    line = f"{args.run} on {title}: {len(chosen.query_ids):,} queries ranked in {chosen.seconds:.1f} s"
    line += f"; {blank:,} of them have no training pair" if blank else ""
    parts = [part for table in evaluation_tables(chosen) for part in ("", table)]
    if how == "fused":
        record["encoder"] = results["encoder"].to_dict()
        line += "; by towers and classifiers fused"
        parts += ["", stages_table(results)]
    return result(args, [record], line, *parts)


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


def _to_rank(trained: Trained, data: Interactions, args: Namespace) -> tuple[Any, Any, Any, str, int | None]:
    """The pairs to rank, exclusions, training counts if known, a title, and how many queries have no training pair.

    Of the run's own data this is the part that its training held out. Of other data it is the test part, or every pair,
    without those trained on, in the ids of the run.
    """
    import numpy as np

    record = trained.meta.get("source") or {}
    same = record and inputs.fingerprint(data) == record.get("fingerprint")
    if same and data.item_ids.ids.equals(trained.ids.item_ids.ids):
        parts = inputs.split_recorded(data, trained.meta, args.run)
        part = parts.test if args.part == "test" else parts.valid
        if part is None:
            raise UserError(f"the data of {args.run} has no {args.part} part: the split left none")
        blank = len(np.setdiff1d(part.queries, parts.train.queries))
        return part, parts.seen_for(args.part), parts.train.counts(), f"its own {args.part} part", blank
    if args.part == "valid":
        raise UserError(f"--part valid needs the training data of {args.run}, and {args.data} is other data")
    title = f"the pairs of {args.data} that it was not trained on"
    return _new_pairs(trained, data, args.data), trained.seen, None, title, None


def _new_pairs(trained: Trained, data: Interactions, where: str) -> Interactions:
    """The pairs of other data that the run was not trained on, in the ids of the run."""
    import numpy as np

    from sparring.data.interactions import TEST, Interactions
    from sparring.data.pairs import pair_keys

    rows = np.ones(len(data), dtype=bool) if data.split is None else data.split == TEST
    queries = trained.ids.query_ids.encode(data.query_ids.ids)[data.queries[rows]]
    items = trained.ids.item_ids.encode(data.item_ids.ids)[data.items[rows]]
    n_items = len(trained.ids.item_ids)
    start = trained.seen.start.numpy()
    owner = np.repeat(np.arange(len(start) - 1), np.diff(start))
    known = (queries >= 0) & (items >= 0)
    new = known & ~np.isin(pair_keys(queries, items, n_items), pair_keys(owner, trained.seen.items.numpy(), n_items))
    if not new.any():
        raise UserError(f"nothing to rank: {where} has no new pair of a query and an item that {trained.folder} knows")
    return Interactions(
        queries[new].astype(np.int32), items[new].astype(np.int32), trained.ids.query_ids, trained.ids.item_ids
    )
