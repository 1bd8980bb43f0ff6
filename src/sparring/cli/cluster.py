"""sparring cluster: clusters of the items of some data from their modalities, or old ones brought up to date."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, get_type_hints

from rich.progress import TimeRemainingColumn

from sparring.cli import inputs, screen
from sparring.cli.modalities import add_modalities, read_modalities
from sparring.cli.values import count, device, setting, whole
from sparring.core.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from rich.console import Console

    from sparring.data.interactions import Vocabulary
    from sparring.experiments.report.tables import Cell
    from sparring.models.clusters import MSAC, Codes, Drift, MSACSettings
    from sparring.models.clusters.learning import ClusterProgress
    from sparring.models.clusters.stream import ModalityRows

MANY = 0.3  # share of known items that would change their cell, above which something other than new items must be the cause


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--data", metavar="FILE_OR_NAME", help="a file, a folder of parts, or the name of a set")
    inputs.add_columns(parser)
    inputs.add_split(parser)
    add_modalities(parser)
    group = parser.add_argument_group("clusters")
    group.add_argument(
        "--preset", choices=("robust", "literal"), help="literal: the paper's equations as they stand (default: robust)"
    )
    group.add_argument("--k-primary", type=count, metavar="K", help="primary clusters (default: 300)")
    group.add_argument("--k-secondary", type=count, metavar="K", help="secondary clusters (default: 15)")
    group.add_argument(
        "--steps",
        type=whole,
        metavar="N",
        help="steps of learning (default: 1500; with --update 500, and 0 only codes new items)",
    )
    group.add_argument(
        "--set",
        type=setting,
        action="append",
        default=[],
        dest="settings",
        metavar="NAME=VALUE",
        help="change another setting; repeatable",
    )
    group.add_argument("--update", type=Path, metavar="OLD", help="go on from these codes: clusters keep their numbers")
    group.add_argument(
        "--refit",
        action="append",
        default=[],
        metavar="NAME",
        help="with --update: a modality whose encoder is another now, or made anew",
    )
    group.add_argument(
        "--category", metavar="COLUMN", help="column of the items with known categories, to measure purity"
    )
    group = parser.add_argument_group("how it is run")
    group.add_argument(
        "--seed", type=whole, default=0, metavar="N", help="seed of the learning and of the split (default: 0)"
    )
    group.add_argument("--device", type=device, default="auto", help="auto, cpu or cuda (default: auto)")
    group.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="for the codes: a name that ends in .safetensors"
    )
    group.add_argument(
        "--report",
        type=Path,
        metavar="FOLDER",
        help="for the page, figures and tables (default: FILE without its ending)",
    )
    group.add_argument("--quiet", action="store_true", help="print nothing but the last line and errors")


def cluster(args: Namespace) -> int:
    from sparring.core.devices import pick_device
    from sparring.data.splits import split
    from sparring.experiments.report import clusters
    from sparring.experiments.report.clusters import labels_of, summary
    from sparring.models.clusters import MSAC, Codes

    device = pick_device(args.device)
    _check(args)
    old = None if args.update is None else (MSAC.load(args.update, device), Codes.load(args.update))
    settings = _settings(args)  # wrong ones are told before a long read
    data = inputs.read_data(args.data, inputs.columns(args))
    labels = None if args.category is None else labels_of(data, args.category)
    show = screen.console()
    modalities = read_modalities(args, split(data, args.split, args.valid, args.test, args.seed), show, args.quiet)
    drift: Drift | None = None
    moved: dict[str, Cell] = {}
    with _telling(show, args.quiet) as tell:
        if old is None:
            msac = MSAC(dict(modalities.widths), settings, device)
            codes = msac.fit(modalities, data.item_ids, tell)
        else:
            msac, known = old
            codes, drift = _updated(args, msac, known, modalities, data.item_ids, tell)
            moved = _moved(known, codes)
    msac.save(args.out, codes)
    table = data.item_table
    titles = table["title"] if table is not None and "title" in table.columns else None
    command = shlex.join(["sparring", *sys.argv[1:]]) if sys.argv[1:2] == ["cluster"] else ""
    folder = args.report or args.out.with_suffix("")
    where = clusters.write(folder, msac, codes, modalities, labels, titles, drift, moved, command)
    if not args.quiet:
        for line in clusters.findings(summary(codes, labels), msac, drift, moved):
            show.print(line, markup=False, soft_wrap=True)
        if drift is not None and (drift.changed_cell or 0) > MANY:
            hint = "if a modality was made anew since then, such as behaviour, give --refit NAME"
            show.print(f"That many would not change by themselves: {hint}.", markup=False, soft_wrap=True)
    show.print(
        f"{args.out}: the codes; {where}: the whole report; {folder}: figures and tables", markup=False, soft_wrap=True
    )
    return 0


def _updated(
    args: Namespace, msac: MSAC, known: Codes, modalities: ModalityRows, ids: Vocabulary, tell: ClusterProgress
) -> tuple[Codes, Drift]:
    """Take over modalities made anew, measure, learn on, code; without steps known items keep their codes."""
    for name in args.refit:
        msac.refit(name, modalities, known, ids)
    drift = msac.drift(modalities, known, ids, tell)
    if args.steps == 0:
        return msac.assign(modalities, ids, known, tell), drift
    return msac.update(modalities, ids, args.steps or 500, tell), drift


def _moved(known: Codes, codes: Codes) -> dict[str, Cell]:
    """The share of known items that are in another cluster than before."""
    assert known.ids is not None
    assert codes.ids is not None
    at = known.ids.encode(codes.ids.ids)
    there = at >= 0
    if not there.any():
        return {}
    return {"updated_primary": float((codes.primary.numpy()[there] != known.primary.numpy()[at[there]]).mean())}


def _check(args: Namespace) -> None:
    """What can be told before anything is read."""
    if args.data is None:
        raise UserError("--data is needed: a file, or the name of a set")
    if args.out.suffix != ".safetensors":
        raise UserError(f"--out {args.out} must end in .safetensors")
    if args.out.is_dir():
        raise UserError(f"--out {args.out} is a folder, not a file")
    folder = args.report or args.out.with_suffix("")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}, the folder for the report, is a file: choose another with --report")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "report.html").is_file():
        raise UserError(f"{folder}, the folder for the report, holds other files: choose another with --report")
    if args.update is None:
        if args.refit:
            raise UserError("--refit is for --update: without it all modalities are learned anyway")
        return
    given = [
        f"--{name.replace('_', '-')}"
        for name in ("preset", "k_primary", "k_secondary")
        if getattr(args, name) is not None
    ]
    for option in [*given, *(["--set"] if args.settings else [])]:
        raise UserError(f"{option} cannot go with --update, which keeps the settings of {args.update}")


def _settings(args: Namespace) -> MSACSettings:
    """The settings of a preset with what was asked for."""
    from sparring.models.clusters import PRESETS, MSACSettings
    from sparring.recipes.setup import parse

    asked: dict[str, object] = dict(args.settings)
    for name in ("k_primary", "k_secondary", "steps", "seed"):
        value = getattr(args, name)
        if value is not None:
            asked[name] = value
    kinds = get_type_hints(MSACSettings)
    for name in asked:
        if name not in kinds:
            raise UserError(f"unknown setting {name!r}{did_you_mean(name, kinds)}")
    return dataclasses.replace(
        PRESETS[args.preset or "robust"], **{name: parse(name, value, kinds[name]) for name, value in asked.items()}
    )


@contextmanager
def _telling(show: Console, quiet: bool) -> Iterator[ClusterProgress]:
    """What learning reports to: a bar that shows only on a terminal."""
    with screen.bar_of(show, "done", TimeRemainingColumn()) as bar:
        task = bar.add_task("", total=1, note="", visible=False)

        def tell(what: str, done: int, total: int) -> None:
            if not quiet:
                bar.update(task, description=what, completed=done, total=total, visible=True)

        yield tell
