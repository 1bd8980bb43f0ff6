"""sparring train: one run, told as it goes, that can be resumed."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparring.cli import inputs, screen
from sparring.cli.launch import add_launch, launch
from sparring.cli.values import count, cutoffs, device, setting, whole
from sparring.core.errors import UserError

if TYPE_CHECKING:
    from sparring.data.interactions import Interactions, Split
    from sparring.evaluation.ranking import Evaluation
    from sparring.recipes.run import Run
    from sparring.recipes.setup import Setup
    from sparring.training.fitting import Fitted


def options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        metavar="FILE_OR_NAME",
        help="Parquet or CSV file, folder of parts or of prepared data, or the name of a set; not needed with --resume",
    )
    inputs.add_columns(parser)
    inputs.add_split(parser)
    group = parser.add_argument_group("training")
    listed = "how to train (default: default); `sparring recipes` lists them; or FILE.py:FUNCTION"
    group.add_argument("--recipe", metavar="NAME", help=listed)
    group.add_argument(
        "--set",
        type=setting,
        action="append",
        default=[],
        dest="settings",
        metavar="NAME=VALUE",
        help="change one setting; repeatable",
    )
    group.add_argument(
        "--setup",
        metavar="RECIPE",
        help="take towers, optimiser and schedule from this recipe, so that only the negatives differ",
    )
    begin = "begin with the vectors of this run, for all queries and items that it knows"
    group.add_argument("--warm", type=Path, metavar="RUN", help=begin)
    group.add_argument("--epochs", type=count, metavar="N", help="the same as --set epochs=N")
    group.add_argument("--seed", type=whole, metavar="N", help="the same as --set seed=N; also seeds the split")
    group.add_argument("--device", type=device, default="auto", help="auto, cpu or cuda (default: auto)")
    group.add_argument(
        "--k", type=cutoffs, default=None, metavar="K,K", help="cutoffs of the metrics (default: 10,20,50)"
    )
    group = parser.add_argument_group("the run folder")
    group.add_argument("--out", type=Path, metavar="FOLDER", help="where the run goes (default: runs/RECIPE)")
    same = "go on with a stopped run, exactly as if it had not been; no setting can change, epochs neither"
    group.add_argument("--resume", action="store_true", help=same)
    deleted = "first delete the run that is in FOLDER and its index; changes that a service keeps in FOLDER/serve stay"
    group.add_argument("--overwrite", action="store_true", help=deleted)
    group.add_argument(
        "--tensorboard", action="store_true", help="also write curves for TensorBoard into FOLDER/tensorboard"
    )
    group.add_argument("--quiet", action="store_true", help="print nothing but the last line and errors")
    add_launch(parser)


def train(args: Namespace) -> int:
    from sparring.core.devices import pick_device
    from sparring.core.ranks import join, leave
    from sparring.recipes import finding, settings
    from sparring.training.folder import read_meta

    name = finding.named(args.recipe or "default")
    folder = args.out or Path("runs") / finding.short(name)
    if args.nproc is not None:
        return _in_processes(args, name, folder)
    if args.restarts:
        raise UserError("--restarts needs --nproc: it starts processes again that it started")
    ranks = join(pick_device(args.device))
    resume = ranks.share(args.resume and (folder / "run.json").is_file())
    if resume:
        run, parts, source = _continued(args, folder)
    else:
        if args.data is None:
            needed = "--data is needed: a file, or the name of a set"
            raise UserError(
                f"nothing to resume in {folder}: it has no run.json; to begin, {needed}" if args.resume else needed
            )
        asked = _settings(args)
        settings.resolve(finding.find(name), asked, _base(args))  # wrong settings are told before a long read
        if args.warm is not None:
            read_meta(args.warm)
        if ranks.rank == 0:
            _check_free(folder, args.resume, args.overwrite)
        run, parts, source = _fresh(args, name, asked)
    cutoffs = source["k"]
    fitted = fit_shown(
        run,
        parts,
        folder,
        cutoffs,
        source=source,
        resume=args.resume,
        overwrite=args.overwrite,
        device=args.device,
        quiet=args.quiet,
        tensorboard=args.tensorboard,
        save_seconds=args.save_seconds,
        warm=_warm(args, folder) if resume else args.warm,
    )
    leave()
    if ranks.rank:
        return 0
    show = screen.console()
    if fitted.test is not None and not args.quiet:
        show.print()
        for table in screen.evaluation_tables(fitted.stages.get("fusion", fitted.test)):
            show.print(table)
            show.print()
    if fitted.stages and not args.quiet:
        show.print(screen.stages_table(fitted.stages))
        show.print()
    show.print(_closing(fitted, folder), markup=False, soft_wrap=True)
    return 0


def _in_processes(args: Namespace, name: str, folder: Path) -> int:
    """Check what can be checked, then let torchrun start the processes, which go on with what there is in the folder."""
    from sparring.core.types import ALONE
    from sparring.recipes import finding, settings
    from sparring.training.folder import claimed, delete_run

    begun = (folder / "run.json").is_file()
    if not (args.resume and begun):
        if args.data is None:
            raise UserError("--data is needed: a file, or the name of a set")
        settings.resolve(finding.find(name), _settings(args), _base(args))
        _check_free(folder, args.resume, args.overwrite)
        if args.overwrite and args.warm is not None and args.warm.resolve() == folder.resolve():
            raise UserError(
                f"--warm {args.warm} would be deleted before the processes read it: choose another folder with --out"
            )
        if args.overwrite:  # the processes are told to go on with what there is
            with screen.listening(screen.console(), args.quiet), claimed(folder, False, True, ALONE):
                delete_run(folder)
    return launch(args.words, args.nproc, args.restarts)


def fit_shown(
    run: Run,
    parts: Split,
    folder: Path,
    k: list[int],
    *,
    source: dict[str, Any],
    resume: bool = False,
    overwrite: bool = False,
    device: str = "auto",
    quiet: bool = False,
    tensorboard: bool = False,
    save_seconds: float | None = None,
    warm: Path | None = None,
) -> Fitted:
    """Train with the progress on the screen."""
    from sparring.core.ranks import rank
    from sparring.models.build import text_sides
    from sparring.recipes.finding import short
    from sparring.training.eligibility import untrained, untrained_line
    from sparring.training.fitting import fit
    from sparring.training.tensorboard import epoch_writer

    show = screen.console()
    named = {"train": parts.train, "valid": parts.valid, "test": parts.test}
    sizes = [f"{name} {len(part):,}" for name, part in named.items() if part is not None]
    blank = untrained_line(untrained(parts))
    intro = [
        f"{short(run.recipe)}: {parts.train.n_queries:,} queries x {parts.train.n_items:,} items; {', '.join(sizes)} interactions",
        *(f"  {line}" for line in (*parts.train.notes, *([] if blank is None else [blank]))),
        *(
            f"  {side} texts: {' and '.join(getattr(run.setup.text, f'{side}_text'))}"
            for side in text_sides(run.setup.model)
        ),
    ]
    with screen.telling(), screen.listening(show, quiet or rank() > 0, intro) as progress:
        if tensorboard and rank() == 0:
            progress.epoch = screen.both(progress.epoch, epoch_writer(folder / "tensorboard"))
        asked: dict[str, Any] = {
            "resume": resume,
            "overwrite": overwrite,
            "device": device,
            "save_seconds": save_seconds,
            "warm": warm,
        }
        try:
            return fit(run, parts, folder, k=k, progress=progress, source=source, **asked)
        except KeyboardInterrupt:
            saved = any(folder.rglob("checkpoint*.safetensors"))
            what = "goes on from the last checkpoint" if saved else "begins again: no checkpoint was saved yet"
            raise KeyboardInterrupt(f"the same command with --resume {what}") from None


def _fresh(args: Namespace, name: str, asked: dict[str, object]) -> tuple[Run, Split, dict[str, Any]]:
    from sparring.core.ranks import rank
    from sparring.data.splits import split
    from sparring.recipes import settings

    data = inputs.read_data(args.data, inputs.columns(args))
    args.k = inputs.cutoffs_for(args.k, data.n_items)
    seed = args.seed or 0
    parts = split(data, args.split, args.valid, args.test, seed)
    if parts.test is None and args.test and data.split is None and rank() == 0:
        held = "a column `split` (train, valid, test) holds out whole queries"
        screen.tell(f"note: there is no test part, since no query has enough items to hold one out: {held}")
    if args.setup is None and inputs.only_texts_help(asked, parts):
        asked = {**asked, "encoder": "auto"}
        if not args.quiet and rank() == 0:
            screen.console().print(inputs.TEXTS_READ, markup=False)
    with inputs.token_bar():
        run = settings.build(name, parts.train, asked, _base(args))
    _check_select(run.setup.validation.select, data)
    return run, parts, inputs.source(args, data, seed)


def _continued(args: Namespace, folder: Path) -> tuple[Run, Split, dict[str, Any]]:
    """The run of a folder as run.json has it; what was asked for on the command line must agree."""
    from sparring.recipes import finding, settings
    from sparring.recipes.setup import flat_name, parse_setup
    from sparring.training.folder import read_meta, recipe_of

    meta = read_meta(folder)
    if args.recipe is not None and finding.named(args.recipe) != meta["recipe"]:
        raise UserError(
            f"{folder} was trained with the recipe {meta['recipe']!r}, not {args.recipe!r}: --resume cannot change it"
        )
    recorded = parse_setup(meta["setup"])
    recipe = recipe_of(folder, meta)
    base = _base(args)
    setup, arguments = settings.resolve(finding.find(recipe), _settings(args), base, recorded if base is None else None)
    if args.setup is not None and setup != recorded:
        raise UserError(
            f"{folder} was trained with other settings than those of --setup {args.setup}: --resume cannot change them"
        )
    for name in _settings(args):
        before = meta["arguments"] if name in arguments else recorded.flat()
        now, key = arguments if name in arguments else setup.flat(), name if name in arguments else flat_name(name)
        if json.dumps(now[key]) != json.dumps(before[key]):
            raise UserError(
                f"{folder} was trained with {name}={before[key]}, not {now[key]}: --resume cannot change it"
            )
    data = inputs.read_recorded(meta, folder, args.data, inputs.columns(args))
    parts = inputs.split_as(data, meta, folder, args.data)
    with inputs.token_bar():
        run = settings.build(recipe, parts.train, meta["arguments"], setup=setup)
    return run, parts, inputs.recorded(meta, folder)


def _warm(args: Namespace, folder: Path) -> Path | None:
    """The run that a stopped one began with."""
    from sparring.training.folder import read_meta

    before = read_meta(folder).get("warm", {}).get("run")
    if args.warm is not None and str(args.warm.resolve()) != before:
        raise UserError(
            f"{folder} was begun {f'with --warm {before}' if before else 'without --warm'}: --resume cannot change it"
        )
    return None if before is None else Path(before)


def _base(args: Namespace) -> Setup | None:
    from sparring.recipes import finding, settings

    return None if args.setup is None else settings.own_setup(finding.find(args.setup))


def _settings(args: Namespace) -> dict[str, object]:
    asked = inputs.settings(args, "epochs", "seed")
    if args.shard_tables:
        asked["tables"] = "sharded"
    return asked


def _check_free(folder: Path, resume: bool, overwrite: bool) -> None:
    """Raise before a long read if training may not write to the folder."""
    from sparring.core.types import ALONE
    from sparring.training.folder import claimed

    if folder.exists():
        with claimed(folder, resume, overwrite, ALONE):
            pass


def _check_select(select: str, data: Interactions) -> None:
    cutoff = select.partition("@")[2]
    if cutoff.isdigit() and int(cutoff) > data.n_items:
        raise UserError(
            f"the cutoff of select={select} is larger than the catalogue of {data.n_items:,} items: --set select=ndcg@K"
        )


def _closing(fitted: Fitted, folder: Path) -> str:
    line = f"{folder}: best epoch {fitted.best_epoch} of {len(fitted.history)}, {fitted.seconds:.1f} s"
    if fitted.test is None:
        return line
    fused = fitted.stages.get("fusion")
    if fused is None:
        return f"{line}; test {_figures(fitted.test)}"
    return f"{line}; test, fused: {_figures(fused)}; towers alone: {_figures(fitted.test)}"


def _figures(test: Evaluation) -> str:
    cutoffs = sorted({int(name.split("@")[1]) for name in test.metrics})
    k = cutoffs[len(cutoffs) // 2]
    return ", ".join(f"{name}@{k} {test.metrics[f'{name}@{k}']:.4f}" for name in ("recall", "ndcg"))
