"""sparring evaluate: the lists of a run, measured on the part that it held out or on other data."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparring.cli import inputs, screen
from sparring.cli.recommend import add_ranking
from sparring.cli.values import constants, cutoffs, device
from sparring.core.errors import UserError

if TYPE_CHECKING:
    from sparring.data.interactions import Interactions
    from sparring.training.trained import Trained


DIALECTS = ("standard", "trec", "rectools", "lenskit", "xir-release", "xc")


def options(parser: ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a folder written by `sparring train`")
    parser.add_argument(
        "--data",
        metavar="FILE_OR_NAME",
        help="other interactions to rank: all their pairs that were not trained on, or their own test part (default: the run's test part)",
    )
    inputs.add_columns(parser)
    parser.add_argument(
        "--part",
        choices=("test", "valid"),
        default="test",
        help="the part of the run's own data to rank (default: test)",
    )
    parser.add_argument("-k", "--k", type=cutoffs, default=None, metavar="K,K", help="cutoffs (default: 10,20,50)")
    parser.add_argument(
        "--dialect",
        choices=DIALECTS,
        default="standard",
        help="whose definition of the metrics (default: standard, which is LightGCN's)",
    )
    parser.add_argument(
        "--propensity", type=constants, metavar="A,B", help="constants of psp and psndcg (default: the data's)"
    )
    add_ranking(parser)
    parser.add_argument("--device", type=device, default="auto", help="auto, cpu or cuda (default: auto)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def evaluate(args: Namespace) -> int:
    from sparring.core.devices import pick_device
    from sparring.evaluation.metrics import LIST_METRICS, METRICS, PROPENSITY_METRICS, parse
    from sparring.training import trained as runs

    device = pick_device(args.device)
    trained = runs.load(args.run)
    cutoffs = inputs.cutoffs_for(args.k, len(trained.ids.item_ids))
    data = inputs.read_recorded(trained.meta, args.run, args.data, inputs.columns(args))
    test, seen, counts, note, blank = _to_rank(trained, data, args)
    propensity = _propensity(data, args.propensity)
    names = []
    for name in METRICS + (PROPENSITY_METRICS if propensity is not None else ()) + LIST_METRICS:
        try:
            names.append(parse(name, args.dialect).name)
        except UserError:  # a dialect that does not have this metric
            continue
    from sparring.evaluation.ranking import evaluate as measure

    masked = seen.to(device)
    how, found = trained.how(args.ranking), {}
    for name, model in (("encoder", trained.model), ("fused", trained.fused)):
        if name in ("encoder", how) and model is not None:
            found[name] = measure(
                model.to(device), test, masked, cutoffs, names, args.dialect, counts, propensity=propensity
            )
    result = found[how]
    if args.json:
        said = {
            "run": str(args.run),
            "ranked": note,
            "ranking": how,
            "dialect": args.dialect,
            "untrained": blank,
            **result.to_dict(),
        }
        print(json.dumps(said | ({"encoder": found["encoder"].to_dict()} if how == "fused" else {})))
        return 0
    show = screen.console()
    fused = " by towers and classifiers fused" if how == "fused" else ""
    line = f"{args.run} on {note}{fused}: {len(result.query_ids):,} queries ranked in {result.seconds:.1f} s"
    show.print(line + (f"; {blank:,} of them have no training pair" if blank else ""), markup=False, soft_wrap=True)
    for table in screen.evaluation_tables(result):
        show.print()
        show.print(table)
    if how == "fused":
        show.print()
        show.print(screen.stages_table(found))
    return 0


def _propensity(data: Interactions, constants: tuple[float, float] | None) -> Any:
    """Inverse propensities of the items: the data's own, or with other constants, from all pairs that are not its test part."""
    import numpy as np

    from sparring.data.interactions import TEST
    from sparring.data.propensity import inverse_propensities

    if constants is None:
        return data.propensity
    rows = slice(None) if data.split is None else data.split != TEST
    counts = np.bincount(data.items[rows], minlength=data.n_items)
    return inverse_propensities(counts, len(np.unique(data.queries[rows])), *constants)


def _to_rank(trained: Trained, data: Interactions, args: Namespace) -> tuple[Any, Any, Any, str, int | None]:
    """What is ranked (pairs), what is masked, training counts where known, all that in words; and how many queries have no training pair.

    The run's own data: the part that its training held out. Other data: its test part where it has one, else every pair that was not
    trained on, in the ids of the run.
    """
    import numpy as np

    found = trained.meta.get("source") or {}
    if (
        found
        and inputs.fingerprint(data) == found["fingerprint"]
        and data.item_ids.ids.equals(trained.ids.item_ids.ids)
    ):
        parts = inputs.split_as(data, trained.meta, args.run)
        part = parts.test if args.part == "test" else parts.valid
        if part is None:
            raise UserError(f"the data of {args.run} has no {args.part} part: the split left none")
        blank = len(np.setdiff1d(part.queries, parts.train.queries))
        return part, parts.seen_for(args.part), parts.train.counts(), f"its own {args.part} part", blank
    if args.part == "valid":
        raise UserError(
            f"--part valid is for the run's own data, and {args.data} is not what {args.run} was trained on"
        )
    return (*_other(trained, data, args.data), None, f"the pairs of {args.data} that it was not trained on", None)


def _other(trained: Trained, data: Interactions, where: str) -> tuple[Any, Any]:
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
        raise UserError(
            f"{where} has no new pair of a query and an item that {trained.folder} knows: there is nothing to rank"
        )
    pairs = Interactions(
        queries[new].astype(np.int32), items[new].astype(np.int32), trained.ids.query_ids, trained.ids.item_ids
    )
    return pairs, trained.seen
