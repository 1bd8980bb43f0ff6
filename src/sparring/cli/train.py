"""sparring train: one run, in one process or several, that can be resumed."""

from __future__ import annotations

import json
import logging
import os
import signal
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sparring.cli.auto as auto
import sparring.cli.inputs as inputs
from sparring.cli.config import add_config
from sparring.cli.parsing import (
    Commands,
    Parser,
    add_baselines,
    add_device,
    add_quiet,
    add_set,
    add_trust,
    count,
    cutoffs,
    number,
    run_place,
    whole,
)
from sparring.cli.screen import (
    behind,
    beside_table,
    detail,
    evaluation_tables,
    note,
    show,
    stages_table,
    training_progress,
)
from sparring.core.choices import RANKINGS, TRACKERS
from sparring.core.errors import UserError
from sparring.core.processes import Terminated, end_with_parent

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from sparring.data.interactions import Interactions, Split
    from sparring.evaluation.ranking import Evaluation
    from sparring.recipes.run import Run
    from sparring.recipes.setup import Setup
    from sparring.training.fitting import Fitted

NEEDED = f"--data is needed: {inputs.DATA}"
# Options of the launcher, which the processes do not get, and the number of values that follow each.
LAUNCHER = {"--nproc": 1, "--restarts": 1, "--overwrite": 0, "--resume": 0}
LAUNCHER_PID = "SPARRING_LAUNCHER"  # environment variable of the processes
USER_ERROR = 2  # exit code
SHUTDOWN_SECONDS = 5  # for the other processes to end after one has failed


def add_train(commands: Commands) -> None:
    parser = commands.add(
        "train",
        "Train a retriever on interactions, validate it after every epoch, and evaluate it on the test part.",
        "sparring train --data demo --recipe ssl_pop --epochs 3 --out runs/first",
        train,
    )
    text = f"{inputs.DATA}; or a folder of prepared data; optional with --resume"
    add_config(parser)
    inputs.add_data(parser, text)
    inputs.add_split(parser)
    group = parser.add_argument_group("training")
    text = "recipe to train, or FILE.py:FUNCTION, or auto; `sparring recipes` lists them (default: default)"
    group.add_argument("--recipe", metavar="NAME", help=text)
    text = "model to train, or FILE.py:FUNCTION; `sparring models` lists them (default: the towers that settings name)"
    group.add_argument("--model", metavar="NAME", help=text)
    add_set(group)
    text = "take the model, optimiser and schedule from this recipe, so that only the method differs"
    group.add_argument("--setup", metavar="RECIPE", help=text)
    text = "warm start: copy the vectors of the queries and items that this run knows"
    group.add_argument("--warm", type=run_place, metavar="RUN", help=text)
    group.add_argument("--epochs", type=count, metavar="N", help="the same as --set epochs=N")
    text = "ranking that commands then use, of a recipe with classifiers (default: the best on the validation part)"
    group.add_argument("--ranking", choices=RANKINGS, help=text)
    text = "the same as --set seed=N; it also seeds the split"
    group.add_argument("--seed", type=whole, metavar="N", help=text)
    group.add_argument("--split-seed", type=whole, metavar="N", help="seed of the split (default: that of --seed)")
    text = "then train again on the training and validation parts, for the epochs that validation chose, and test that"
    group.add_argument("--refit", action="store_true", help=text)
    add_device(group)
    text = "cutoffs of the metrics (default: 10,20,50)"
    group.add_argument("--k", type=cutoffs, default=None, metavar="K,K", help=text)
    add_baselines(group)
    group = parser.add_argument_group("run folder")
    group.add_argument("--out", type=Path, metavar="FOLDER", help="run folder (default: runs/RECIPE[-MODEL])")
    text = "continue an interrupted run, to the same result as an uninterrupted one; no setting can change"
    group.add_argument("--resume", action="store_true", help=text)
    add_trust(group)
    text = "delete the run in FOLDER and its index first; the changes in FOLDER/serve are kept"
    group.add_argument("--overwrite", action="store_true", help=text)
    text = "also send settings, epochs and test metrics to this tracker; repeatable"
    group.add_argument("--track", action="append", default=[], choices=TRACKERS, help=text)
    add_quiet(group)
    _add_auto(parser)
    _add_processes(parser)


def _add_auto(parser: Parser) -> None:
    group = parser.add_argument_group("--recipe auto: try contenders on the validation part, keep or fuse the best")
    text = f"time for search, training and test, such as 90s, 10m or 1h; or a number of trials (default: {auto.BUDGET})"
    group.add_argument("--budget", metavar="TIME_OR_TRIALS", help=text)
    text = "trainings at once, on one device or spread over all GPUs (default: 1)"
    group.add_argument("--jobs", type=count, default=1, metavar="N", help=text)


def _add_processes(parser: Parser) -> None:
    group = parser.add_argument_group("several processes (with torchrun on several machines, see docs/guide/scale.md)")
    text = "train in N processes on this machine, with one GPU each if it has any"
    group.add_argument("--nproc", type=count, metavar="N", help=text)
    text = "the same as --set tables=sharded: each process holds a part of the rows"
    group.add_argument("--shard-tables", action="store_true", help=text)
    text = "seconds between checkpoints (default: 600 within an epoch, 10 after it)"
    group.add_argument("--save-seconds", type=number, metavar="S", help=text)
    text = "with --nproc: resume from the last checkpoint up to N times when a process dies (default: 0)"
    group.add_argument("--restarts", type=whole, default=0, metavar="N", help=text)


def train(args: Namespace) -> int:
    from sparring.core.devices import pick_device
    from sparring.core.ranks import join, leave
    from sparring.recipes.finding import named, short
    from sparring.training.folder import begun_run, is_refit

    if auto.asked(args):
        return auto.train_auto(args)
    name = named(args.recipe or "default")
    folder = args.out or _default_folder(args, name)
    if args.nproc is not None:
        return _launch(args, name, folder)
    if args.restarts:
        raise UserError("--restarts needs --nproc, which starts the processes")
    if os.environ.get("TORCHELASTIC_RUN_ID"):
        end_with_parent(int(os.environ.get(LAUNCHER_PID, os.getppid())))
    ranks = join(pick_device(args.device))
    begun = ranks.share(begun_run(folder) if args.resume else None)
    if begun is not None:
        run, parts, source, warm = _resumed(args, begun)
    else:
        if ranks.rank == 0:
            _check_folder(folder, args)
        run, parts, source = _fresh(args, name, folder)
        warm = args.warm
    fitted = _fit(args, run, parts, folder, source, warm, args.refit or (begun is not None and is_refit(folder)))
    leave()
    if ranks.rank:
        return 0
    if fitted.test is not None:
        for table in evaluation_tables(_ranked(fitted)):
            detail(args, "", table)
    if fitted.stages:
        detail(args, "", stages_table(fitted.stages))
    if fitted.rankings:
        figures = ", ".join(f"{name} {value:.4f}" for name, value in fitted.rankings.items())
        detail(args, "", f"ranking: {fitted.ranking}; {run.setup.validation.select} of the validation part: {figures}")
    if fitted.test is not None and fitted.baselines:
        detail(args, "", beside_table(short(run.recipe), _ranked(fitted), fitted.baselines))
    detail(args, "", *_advice(fitted))
    show(_closing(fitted, folder))
    return 0


def _fit(
    args: Namespace, run: Run, parts: Split, folder: Path, source: dict[str, Any], warm: Path | None, refit: bool
) -> Fitted:
    """Train with the progress on the screen."""
    from sparring.core.ranks import rank
    from sparring.models.build import text_sides
    from sparring.recipes.finding import short
    from sparring.training.eligibility import untrained, untrained_line
    from sparring.training.fitting import fit
    from sparring.training.tracking import track

    named = {"train": parts.train, "valid": parts.valid, "test": parts.test}
    sizes = ", ".join(f"{name} {len(part):,}" for name, part in named.items() if part is not None)
    shape = f"{parts.train.n_queries:,} queries x {parts.train.n_items:,} items"
    texts = [
        f"{side} texts: {' and '.join(getattr(run.setup.text, f'{side}_text'))}" for side in text_sides(run.setup.model)
    ]
    notes = [*parts.train.notes, *filter(None, [untrained_line(untrained(parts))]), *texts]
    with training_progress(args.quiet or rank() > 0) as progress:
        if rank() == 0:
            detail(args, f"{short(run.recipe)}: {shape}; {sizes} interactions", *(f"  {line}" for line in notes))
        trackers = [track(name, folder) for name in dict.fromkeys(args.track)] if rank() == 0 else []
        try:
            return fit(
                run,
                parts,
                folder,
                k=source["k"],
                progress=progress,
                callbacks=trackers,
                source=source,
                resume=args.resume,
                overwrite=args.overwrite,
                device=args.device,
                save_seconds=args.save_seconds,
                warm=warm,
                refit=refit,
                baselines=args.baselines,
            )
        except KeyboardInterrupt as stop:
            raise type(stop)(_hint(folder)) from None


def _hint(folder: Path) -> str:
    """How to continue a training that was stopped."""
    saved = any(folder.rglob("checkpoint*.safetensors"))
    after = "continues from the last checkpoint" if saved else "starts again: no checkpoint was saved yet"
    return f"the same command with --resume {after}"


def _fresh(args: Namespace, name: str, folder: Path) -> tuple[Run, Split, dict[str, Any]]:
    """A new run, its data and the record of their source."""
    from sparring.core.ranks import rank
    from sparring.data.splits import split
    from sparring.training.folder import read_meta

    if args.data is None:
        raise UserError(f"nothing to resume: {folder} has no run.json, and {NEEDED}" if args.resume else NEEDED)
    asked, base = _settings(args), inputs.base_setup(args)
    inputs.check_settings([(name, asked)], base)
    if args.warm is not None:
        read_meta(args.warm)
    data = inputs.read_data(args.data, inputs.columns(args))
    k, how = inputs.cutoffs_for(args.k, data.n_items), inputs.split_arguments(args, args.seed or 0)
    parts = split(data, **how)
    if parts.test is None and args.test and data.split is None and rank() == 0:
        hint = "a column `split` (train, valid, test) holds out complete queries"
        note(f"there is no test part, since no query has enough items to hold one out; {hint}")
    if base is None and "model" not in asked and inputs.only_texts_help(asked, parts):
        asked = {**asked, "encoder": "auto"}
        if rank() == 0:
            detail(args, inputs.TEXTS_READ)
    run = inputs.build(name, parts.train, asked, base=base)
    _check_select(run.setup.validation.select, data)
    return run, parts, inputs.source(data, args.data, inputs.columns(args), how, k)


def _resumed(args: Namespace, folder: Path) -> tuple[Run, Split, dict[str, Any], Path | None]:
    """The run in a folder as run.json records it, with which the command line must agree; and its warm start."""
    from sparring.models import finding
    from sparring.recipes.finding import find, named
    from sparring.recipes.run import OWN
    from sparring.recipes.settings import resolve
    from sparring.recipes.setup import flat_name, parse_setup
    from sparring.training.folder import model_of, read_meta, recipe_of

    meta = read_meta(folder)

    def fixed(before: object, now: object) -> UserError:
        return UserError(f"{folder} was trained with {before}, not {now}: --resume cannot change it")

    if args.recipe is not None and named(args.recipe) != meta["recipe"]:
        raise fixed(f"the recipe {meta['recipe']!r}", repr(args.recipe))
    warm = meta.get("warm", {}).get("run")
    if args.warm is not None and str(args.warm.resolve()) != warm:
        raise fixed(f"--warm {warm}" if warm else "no warm start", f"--warm {args.warm}")
    recorded, recipe, base = (
        parse_setup(meta["setup"]),
        recipe_of(folder, meta, args.recipe, args.trust),
        inputs.base_setup(args),
    )
    before = recorded.model.name
    if args.model is not None and finding.named(args.model) != before:
        raise fixed(f"the model {before!r}", repr(args.model))
    if before != OWN:
        model_of(folder, recorded, args.model, args.trust)
    asked = _settings(args)
    if base is None:
        asked.pop("model", None)
    setup, arguments = resolve(find(recipe), asked, base, recorded if base is None else None)
    if base is not None and setup != recorded:
        raise fixed("other settings", f"those of --setup {args.setup}")
    for name in asked.keys() - {"model"}:
        known, given = ({**each.flat(), **_options(each)} for each in (recorded, setup))
        own, key = name in arguments, flat_name(name)
        before = meta["arguments"][name] if own else known[key]
        now = arguments[name] if own else given[key]
        if json.dumps(now) != json.dumps(before):
            raise fixed(f"{name}={before}", now)
    data = inputs.read_recorded(meta, folder, args.data, inputs.columns(args))
    parts = inputs.first_split(data, meta, folder, args.data)
    run = inputs.build(recipe, parts.train, meta["arguments"], setup=setup)
    return run, parts, inputs.recorded(meta, folder), None if warm is None else Path(warm)


def _options(setup: Setup) -> dict[str, object]:
    """The options of the model by the names that --set takes."""
    return {f"model.{name}": value for name, value in setup.model.options.items()}


def _default_folder(args: Namespace, recipe: str) -> Path:
    """runs/RECIPE, or runs/RECIPE-MODEL if a model is named."""
    from sparring.models import finding
    from sparring.recipes.finding import short

    model = "" if args.model is None else f"-{finding.short(finding.named(args.model))}"
    return Path("runs") / f"{short(recipe)}{model}"


def _settings(args: Namespace) -> dict[str, object]:
    asked = inputs.settings(args, "epochs", "seed", "model")
    if args.ranking is not None:
        asked["clf_ranking"] = args.ranking
    return {**asked, "tables": "sharded"} if args.shard_tables else asked


def _check_folder(folder: Path, args: Namespace) -> None:
    """Raise before a long read if training may not write to the folder."""
    from sparring.core.types import ALONE
    from sparring.training.folder import claimed

    if folder.exists():
        with claimed(folder, args.resume, args.overwrite, ALONE):
            pass


def _check_select(select: str, data: Interactions) -> None:
    cutoff = select.partition("@")[2]
    if cutoff.isdigit() and int(cutoff) > data.n_items:
        raise UserError(
            f"the cutoff of select={select} is larger than the catalogue of {data.n_items:,} items: --set select=ndcg@K"
        )


def _advice(fitted: Fitted) -> list[str]:
    """Lines for a run that more epochs may improve, and for one that does worse than a baseline."""
    epochs = fitted.run.setup.training.epochs_on()
    lines = []
    if fitted.best_is_last:
        lines.append(f"the best epoch is the last: more epochs may do better (--epochs {2 * epochs})")
    if fitted.test is not None:
        lines += behind(_ranked(fitted), fitted.baselines)
    return lines


def _closing(fitted: Fitted, folder: Path) -> str:
    chosen = fitted.selection or fitted
    line = f"{folder}: best epoch {chosen.best_epoch} of {len(chosen.history)}, {chosen.seconds:.1f} s"
    if fitted.selection is not None:
        line += f", refitted on train and valid in {fitted.seconds:.1f} s"
    if fitted.test is None:
        return line
    if fitted.ranking == "towers":
        line = f"{line}; test {_figures(fitted.test)}"
    else:
        line = f"{line}; test, {fitted.ranking}: {_figures(_ranked(fitted))}; towers alone: {_figures(fitted.test)}"
    beside = "; ".join(f"{name} {_figures(result, named=False)}" for name, result in fitted.baselines.items())
    return f"{line} ({beside})" if beside else line


def _ranked(fitted: Fitted) -> Evaluation:
    """The test metrics of the run's default ranking."""
    assert fitted.test is not None
    return fitted.stages.get(RANKINGS[fitted.ranking], fitted.test)


def _figures(test: Evaluation, named: bool = True) -> str:
    cutoffs = sorted({int(name.split("@")[1]) for name in test.metrics})
    k = cutoffs[len(cutoffs) // 2]
    names = (f"{name}@{k}" for name in ("recall", "ndcg"))
    return ", ".join(f"{name} {test.metrics[name]:.4f}" if named else f"{test.metrics[name]:.4f}" for name in names)


# Several processes: the same command in each, started by torchrun


def _launch(args: Namespace, name: str, folder: Path) -> int:
    """Check the settings, then start the processes, which resume the run in the folder if there is one."""
    from sparring.core.types import ALONE
    from sparring.training.folder import begun_run, claimed, delete_run

    if not (args.resume and begun_run(folder) is not None):
        if args.data is None:
            raise UserError(NEEDED)
        inputs.check_settings([(name, _settings(args))], inputs.base_setup(args))
        _check_folder(folder, args)
        if args.overwrite and args.warm is not None and args.warm.resolve() == folder.resolve():
            raise UserError(f"--overwrite would delete --warm {args.warm} before it is read: choose another --out")
        if args.overwrite:
            with claimed(folder, False, True, ALONE):
                delete_run(folder)
    try:
        return launch(args.words, args.nproc, args.restarts)
    except KeyboardInterrupt as stop:
        raise type(stop)(_hint(folder)) from None


def launch(words: list[str], nproc: int, restarts: int) -> int:
    """Run `sparring WORDS` in `nproc` processes; the exit code."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if "TORCHELASTIC_RUN_ID" in os.environ or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("--nproc starts processes itself: omit it under torchrun, or use torchrun --nproc-per-node")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_SECONDS))
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # a new store for each restart
    if os.environ.get("SPARRING_DEBUG", "") in ("", "0"):  # the process that failed has printed why
        for name in ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ[LAUNCHER_PID] = str(os.getpid())
    options = ["--standalone", f"--nproc-per-node={nproc}", f"--max-restarts={restarts}", "--monitor-interval=0.2"]
    try:
        run.main([*options, "-m", "sparring", *without_launcher(words), "--resume"])
    except ChildFailedError as error:
        return _report(list(error.failures.values()))
    except SignalException as stop:
        raise KeyboardInterrupt if stop.sigval == signal.SIGINT else Terminated from None
    return 0


def _report(failures: list[ProcessFailure]) -> int:
    """Name the rank that ended the training, a killed one before those that only lost it; the exit code."""
    codes = {each.exitcode for each in failures}
    if USER_ERROR in codes <= {USER_ERROR, -signal.SIGTERM}:
        return USER_ERROR  # a rank has printed its line, and the launcher has ended the others
    failure = min(failures, key=lambda each: (each.exitcode >= 0, each.timestamp))
    code, who = failure.exitcode, f"rank {failure.local_rank}"
    advice = "the same command with --resume continues from the last checkpoint"
    if code < 0:
        note(f"{who} was killed by {signal.Signals(-code).name}; {advice}", "error")
        return 128 - code
    if code != USER_ERROR:  # that rank has printed its line
        note(f"{who} ended with code {code}; {advice}", "error")
    return code


def without_launcher(words: list[str]) -> list[str]:
    """The words of the command without the options of the launcher."""
    kept, skip = [], 0
    for word in words:
        name = word.split("=")[0]
        if skip:
            skip -= 1
        elif name in LAUNCHER:
            skip = LAUNCHER[name] if "=" not in word else 0
        else:
            kept.append(word)
    return kept
