"""sparring cluster: clusters of items, learned from their modalities or updated for new items."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, get_type_hints

import sparring.cli.inputs as inputs
from sparring.cli.parsing import Commands, add_code, add_device, add_quiet, add_set, command_line, count, whole
from sparring.cli.screen import detail, progress, show
from sparring.core.errors import UserError, did_you_mean
from sparring.core.locks import writing

if TYPE_CHECKING:
    from sparring.data.interactions import Vocabulary
    from sparring.experiments.report.tables import Cell
    from sparring.models.clusters import MSAC, Codes, Drift, MSACSettings
    from sparring.models.clusters.learning import ClusterProgress
    from sparring.models.clusters.stream import ModalityRows

MANY = 0.3  # share of known items in another cell above which new items alone cannot be the cause


def add_cluster(commands: Commands) -> None:
    modalities = "--modality text=text:title --modality behaviour=behaviour"
    parser = commands.add(
        "cluster",
        "Cluster the items by all their modalities, for negatives drawn by cluster.",
        f"sparring cluster --data demo {modalities} --out clusters/demo.safetensors",
        cluster,
    )
    inputs.add_data(parser, required=True)
    inputs.add_split(parser)
    inputs.add_modalities(parser)
    add_code(parser, "recipe of the run of behaviour:RUN, if it is your own: FILE.py:FUNCTION")
    group = parser.add_argument_group("clusters")
    text = "literal follows the paper's equations exactly (default: robust)"
    group.add_argument("--preset", choices=("robust", "literal"), help=text)
    group.add_argument(
        "--k-primary", type=count, metavar="K", help="primary clusters (default: one for 295 items, from 2 to 300)"
    )
    group.add_argument("--k-secondary", type=count, metavar="K", help="secondary clusters (default: 15)")
    text = "learning steps (default: 1500; with --update 500, and 0 only assigns new items)"
    group.add_argument("--steps", type=whole, metavar="N", help=text)
    add_set(group, "change another setting of the clusters: lr=0.01; repeatable")
    text = "update these codes; clusters keep their numbers"
    group.add_argument("--update", type=Path, metavar="OLD", help=text)
    text = "with --update: a modality whose vectors come from another encoder or were rebuilt; repeatable"
    group.add_argument("--refit", action="append", default=[], metavar="NAME", help=text)
    text = "column of the items with known categories, to measure purity"
    group.add_argument("--category", metavar="COLUMN", help=text)
    group = parser.add_argument_group("execution")
    text = "seed of the learning and of the split (default: 0)"
    group.add_argument("--seed", type=whole, default=0, metavar="N", help=text)
    add_device(group)
    text = "file of the codes; its name ends in .safetensors"
    group.add_argument("--out", type=Path, required=True, metavar="FILE", help=text)
    text = "folder of the report, figures and tables (default: FILE without .safetensors)"
    group.add_argument("--report", type=Path, metavar="FOLDER", help=text)
    add_quiet(group)


def cluster(args: Namespace) -> int:
    folder = args.report or args.out.with_suffix("")
    _check(args, folder)
    with writing(args.out):
        return _cluster(args, folder)


def _cluster(args: Namespace, folder: Path) -> int:
    from sparring.core.devices import pick_device
    from sparring.data.splits import split
    from sparring.experiments.report import clustering
    from sparring.experiments.report.clustering import labels_of, summary
    from sparring.models.clusters import MSAC, Codes, default_clusters

    device = pick_device(args.device)
    old = None if args.update is None else (MSAC.load(args.update, device), Codes.load(args.update))
    settings = _settings(args)  # raises before the data is read
    data = inputs.read_data(args.data, inputs.columns(args))
    labels = None if args.category is None else labels_of(data, args.category)
    modalities = inputs.read_modalities(args, split(data, **inputs.split_arguments(args, args.seed)))
    drift: Drift | None = None
    moved: dict[str, Cell] = {}
    with progress("done", args.quiet) as update:
        if old is None:
            if args.k_primary is None and "k_primary" not in dict(args.settings):
                settings = dataclasses.replace(settings, k_primary=default_clusters(data.n_items))
            msac = MSAC(dict(modalities.widths), settings, device)
            codes = msac.fit(modalities, data.item_ids, update)
        else:
            msac, known = old
            codes, drift = _updated(args, msac, known, modalities, data.item_ids, update)
            moved = _moved(known, codes)
    msac.save(args.out, codes)
    table = data.item_table
    titles = table["title"] if table is not None and "title" in table.columns else None
    page = clustering.write(folder, msac, codes, modalities, labels, titles, drift, moved, command_line(args))
    detail(args, *clustering.findings(summary(codes, labels), msac, drift, moved))
    if drift is not None and (drift.changed_cell or 0) > MANY:
        hint = "if a modality such as behaviour was rebuilt since then, give --refit NAME"
        detail(args, f"New items alone cannot move that many: {hint}.")
    show(f"{args.out}: the codes; {page}: the complete report; {folder}: figures and tables")
    return 0


def _updated(
    args: Namespace, msac: MSAC, known: Codes, modalities: ModalityRows, ids: Vocabulary, update: ClusterProgress
) -> tuple[Codes, Drift]:
    """Refit rebuilt modalities, measure the drift, learn and assign; without steps known items keep their codes."""
    for name in args.refit:
        msac.refit(name, modalities, known, ids)
    drift = msac.drift(modalities, known, ids, update)
    if args.steps == 0:
        return msac.assign(modalities, ids, known, update), drift
    return msac.update(modalities, ids, args.steps or 500, update), drift


def _moved(known: Codes, codes: Codes) -> dict[str, Cell]:
    """The share of known items whose primary cluster has changed."""
    assert known.ids is not None
    assert codes.ids is not None
    places = known.ids.encode(codes.ids.ids)
    shared = places >= 0
    if not shared.any():
        return {}
    changed = codes.primary.numpy()[shared] != known.primary.numpy()[places[shared]]
    return {"updated_primary": float(changed.mean())}


def _check(args: Namespace, folder: Path) -> None:
    """Raise for wrong options before anything is read."""
    if args.out.suffix != ".safetensors":
        raise UserError(f"--out {args.out} must end in .safetensors")
    if args.out.is_dir():
        raise UserError(f"--out {args.out} is a folder, not a file")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}, the folder of the report, is a file: choose another with --report")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "report.html").is_file():
        raise UserError(f"{folder}, the folder of the report, holds other files: choose another with --report")
    if args.update is None:
        if args.refit:
            raise UserError("--refit needs --update: without it every modality is learned anyway")
        return
    for name in ("preset", "k_primary", "k_secondary", "settings"):
        if getattr(args, name):
            option = "--set" if name == "settings" else inputs.option(name)
            raise UserError(f"{option} cannot be combined with --update, which keeps the settings of {args.update}")


def _settings(args: Namespace) -> MSACSettings:
    """The settings of the preset, with those given on the command line."""
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
    values = {name: parse(name, value, kinds[name]) for name, value in asked.items()}
    return dataclasses.replace(PRESETS[args.preset or "robust"], **values)
