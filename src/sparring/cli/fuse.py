"""sparring fuse: one retriever out of several finished runs, as a run folder of its own."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import sparring.cli.inputs as inputs
from sparring.cli.parsing import Commands, add_code, add_device, add_json, add_quiet, count, cutoffs, run_place
from sparring.cli.screen import result, table
from sparring.core.choices import FUSIONS
from sparring.core.errors import UserError


def add_fuse(commands: Commands) -> None:
    parser = commands.add(
        "fuse",
        "Make one retriever of several runs over the same data, with weights chosen on the validation part.",
        "sparring fuse runs/ease runs/default --out runs/fused",
        fuse,
    )
    text = "finished run folders, trained on the same data with the same split and seed"
    parser.add_argument("runs", type=run_place, nargs="+", metavar="RUN", help=text)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="folder of the fused run")
    parser.add_argument("--overwrite", action="store_true", help="delete the run in --out first")
    add_code(parser)
    text = "where the data is now, if it has moved"
    inputs.add_data(parser, text)
    group = parser.add_argument_group("fusion")
    text = "standardised scores, reciprocal ranks, or the better of them on the validation part (default: auto)"
    group.add_argument("--by", choices=("auto", *FUSIONS), default="auto", help=text)
    text = "metric of the validation part that chooses (default: ndcg@20)"
    group.add_argument("--select", default="ndcg@20", metavar="METRIC", help=text)
    text = "items that each run lists (default: 200)"
    group.add_argument("--depth", type=count, default=200, metavar="N", help=text)
    text = "cutoffs of the test metrics (default: 10,20,50)"
    group.add_argument("-k", "--k", type=cutoffs, default=None, metavar="K,K", help=text)
    add_device(group)
    add_json(group)
    add_quiet(group)


def fuse(args: Namespace) -> int:
    from sparring.training.folder import read_meta
    from sparring.training.fusing import fuse as fused_run

    if not args.runs[0].is_dir():
        raise UserError(f"no such run folder: {args.runs[0]}")
    meta = read_meta(args.runs[0])
    data = inputs.read_recorded(meta, args.runs[0], args.data, inputs.columns(args))
    parts = inputs.first_split(data, meta, args.runs[0], args.data)
    fused = fused_run(
        args.runs,
        parts,
        args.out,
        by=args.by,
        select=args.select,
        depth=args.depth,
        k=inputs.cutoffs_for(args.k, data.n_items),
        device=args.device,
        overwrite=args.overwrite,
        recipe=args.recipe,
        trust=args.trust,
        model=args.model,
    )
    model, name = fused.model, f"fused by {fused.model.by}"
    weights = {
        source.name: round(float(weight), 6) for source, weight in zip(model.sources, model.weights, strict=True)
    }
    tests = {**fused.parts, **({} if fused.test is None else {"fused": fused.test})}
    shown = [each for each in ("recall@20", "ndcg@20") if fused.test is not None and each in fused.test.metrics]
    rows = [
        [
            each,
            f"{weights[each]:.2f}" if each in weights else "",
            f"{fused.valid[each if each in weights else name]:.4f}",
            *(f"{tests[each].metrics[metric]:.4f}" for metric in shown),
        ]
        for each in (*weights, "fused")
    ]
    head = ["run", "weight", f"{args.select} (valid)", *(f"{metric} (test)" for metric in shown)]
    record = {"run": str(args.out), "by": model.by, "weights": weights, "valid": fused.valid}
    record |= {"test": {each: test.metrics for each, test in tests.items()}}
    return result(args, [record], table([head, *rows]), f"{args.out}: {name}")
