"""What each command does."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparring.cli import inputs, screen
from sparring.errors import UserError

if TYPE_CHECKING:
    from sparring.composition import Run, Setup
    from sparring.data.interactions import Interactions, Split
    from sparring.runs import Trained
    from sparring.train import Fitted


def train(args: Namespace) -> int:
    from sparring import settings

    name = settings.find(args.recipe or "default").__name__
    folder = args.out or Path("runs") / name
    resume = args.resume and (folder / "run.json").is_file()
    if resume:
        run, parts, source = _continued(args, folder)
    else:
        if args.data is None:
            needed = "--data is needed: a file, or the name of a set"
            raise UserError(f"nothing to resume in {folder}: it has no run.json; to begin, {needed}" if args.resume else needed)
        asked = _settings(args)
        settings.resolve(settings.find(name), asked, _base(args))  # wrong settings are told before a long read
        _check_free(folder, args.overwrite, args.resume)
        run, parts, source = _fresh(args, name, asked)
        if args.overwrite and folder.exists():
            shutil.rmtree(folder)
    cutoffs = source["k"]
    fitted = fit_shown(
        run, parts, folder, cutoffs, source=source, resume=resume, device=args.device, quiet=args.quiet, tensorboard=args.tensorboard
    )
    show = screen.console()
    if fitted.test is not None and not args.quiet:
        show.print()
        for table in screen.evaluation_tables(fitted.test):
            show.print(table)
            show.print()
    if fitted.stages and not args.quiet:
        show.print(screen.stages_table(fitted.stages))
        show.print()
    show.print(_closing(fitted, folder), markup=False, soft_wrap=True)
    return 0


def fit_shown(
    run: Run,
    parts: Split,
    folder: Path,
    k: list[int],
    *,
    source: dict[str, Any],
    resume: bool = False,
    device: str = "auto",
    quiet: bool = False,
    tensorboard: bool = False,
) -> Fitted:
    """Train with the progress on the screen."""
    from sparring.contrast import describe_batch
    from sparring.stages import fit_stages
    from sparring.tensorboard import epoch_writer

    show = screen.console()
    named = {"train": parts.train, "valid": parts.valid, "test": parts.test}
    sizes = [f"{name} {len(part):,}" for name, part in named.items() if part is not None]
    intro = [
        f"{run.recipe}: {parts.train.n_queries:,} queries x {parts.train.n_items:,} items; {', '.join(sizes)} interactions",
        *(f"  {line}" for line in ([] if quiet else describe_batch(run, parts).splitlines())),
    ]
    with screen.listening(show, quiet, intro) as progress:
        if tensorboard:
            progress.epoch = screen.both(progress.epoch, epoch_writer(folder / "tensorboard"))
        return fit_stages(run, parts, folder, resume=resume, device=device, k=k, progress=progress, source=source)


def _fresh(args: Namespace, name: str, asked: dict[str, object]) -> tuple[Run, Split, dict[str, Any]]:
    from sparring import settings
    from sparring.data.splits import split

    data = inputs.read_data(args.data, inputs.columns(args))
    args.k = cutoffs_for(args.k, data.n_items)
    seed = args.seed or 0
    parts = split(data, args.split, args.valid, args.test, seed)
    if args.setup is None and not asked.keys() & {"encoder", "query_tower", "item_tower"} and _only_texts_help(parts):
        asked = {**asked, "encoder": "auto"}
        if not args.quiet:
            screen.console().print("no query of the test part is trained on: its text is read (--set encoder=auto)", markup=False)
    run = settings.build(name, parts.train, asked, _base(args))
    _check_select(run.setup.select, data)
    return run, parts, inputs.source(args, data, seed)


def _only_texts_help(parts: Split) -> bool:
    """Whether both sides have texts and no test query is among those trained on, so that ids say nothing of it."""
    import numpy as np

    tables = (parts.train.query_table, parts.train.item_table)
    if parts.test is None or not all(table is not None and "text" in table.columns for table in tables):
        return False
    return not np.isin(parts.test.queries, parts.train.queries).any()


def _continued(args: Namespace, folder: Path) -> tuple[Run, Split, dict[str, Any]]:
    """The run of a folder as run.json has it; what was asked for on the command line must agree."""
    from sparring import runs, settings

    for option in ("overwrite", "setup"):
        if getattr(args, option):
            raise UserError(f"--resume and --{option} cannot go together")
    meta = runs.read_meta(folder)
    if args.recipe is not None and settings.find(args.recipe).__name__ != meta["recipe"]:
        raise UserError(f"{folder} was trained with the recipe {meta['recipe']!r}, not {args.recipe!r}: --resume cannot change it")
    setup, arguments = settings.resolve(settings.find(meta["recipe"]), _settings(args), settings.parse_setup(meta["setup"]))
    before = {**meta["setup"], **meta["arguments"]}
    for name in _settings(args):
        now = arguments[name] if name in arguments else getattr(setup, name)
        if json.dumps(now) != json.dumps(before[name]):
            raise UserError(f"{folder} was trained with {name}={before[name]}, not {now}: --resume cannot change it")
    data = inputs.read_recorded(meta, folder, args.data, inputs.columns(args))
    parts = inputs.split_as(data, meta, folder)
    run = settings.build(meta["recipe"], parts.train, meta["arguments"], setup)
    return run, parts, inputs.recorded(meta, folder)


def _base(args: Namespace) -> Setup | None:
    from sparring import settings

    return None if args.setup is None else settings.own_setup(settings.find(args.setup))


def _settings(args: Namespace) -> dict[str, object]:
    asked: dict[str, object] = dict(args.settings)
    for name in ("epochs", "seed"):
        value = getattr(args, name)
        if value is not None and name in asked:
            raise UserError(f"{name} is set twice: by --{name} and by --set {name}={asked[name]}")
        if value is not None:
            asked[name] = value
    return asked


def _check_free(folder: Path, overwrite: bool, resume: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder} is a file, not a folder")
    if resume or not folder.exists() or not any(folder.iterdir()):
        return
    if not overwrite:
        raise UserError(f"--out {folder} is not empty: choose another folder, or use --resume to go on or --overwrite to start again")
    if not (folder / "run.json").is_file():
        raise UserError(f"--out {folder} is not a run folder (no run.json): --overwrite will not delete it")


def cutoffs_for(asked: tuple[int, ...] | None, n_items: int) -> list[int]:
    """The cutoffs asked for, or the usual ones that the catalogue allows."""
    if asked is None:
        return [k for k in (10, 20, 50) if k <= n_items] or [n_items]
    if asked[-1] > n_items:
        raise UserError(f"cutoff {asked[-1]} in --k is larger than the catalogue of {n_items:,} items")
    return list(asked)


def _check_select(select: str, data: Interactions) -> None:
    cutoff = select.partition("@")[2]
    if cutoff.isdigit() and int(cutoff) > data.n_items:
        raise UserError(f"the cutoff of select={select} is larger than the catalogue of {data.n_items:,} items: --set select=ndcg@K")


def _closing(fitted: Fitted, folder: Path) -> str:
    line = f"{folder}: best epoch {fitted.best_epoch} of {len(fitted.history)}, {fitted.seconds:.1f} s"
    if fitted.test is not None:
        k = sorted({int(name.split("@")[1]) for name in fitted.test.metrics})
        k_middle = k[len(k) // 2]
        figures = [f"{name}@{k_middle} {fitted.test.metrics[f'{name}@{k_middle}']:.4f}" for name in ("recall", "ndcg")]
        line += f"; test {', '.join(figures)}"
    return line


def evaluate(args: Namespace) -> int:
    from sparring import runs
    from sparring.metrics import LIST_METRICS, METRICS, PROPENSITY_METRICS, parse
    from sparring.train import pick_device
    from sparring.types import Positives

    device = pick_device(args.device)
    trained = runs.load(args.run)
    cutoffs = cutoffs_for(args.k, len(trained.ids.item_ids))
    data = inputs.read_recorded(trained.meta, args.run, args.data, inputs.columns(args))
    test, seen, counts, note = _to_rank(trained, data, args)
    propensity = _propensity(data, args.propensity)
    names = []
    for name in METRICS + (PROPENSITY_METRICS if propensity is not None else ()) + LIST_METRICS:
        try:
            names.append(parse(name, args.dialect).name)
        except UserError:  # a dialect that does not have this metric
            continue
    from sparring.evaluation import evaluate as measure

    model = trained.model.to(device)
    masked = Positives(seen.start.to(device), seen.items.to(device))
    result = measure(model, test, masked, cutoffs, names, args.dialect, counts, propensity=propensity)
    if args.json:
        print(json.dumps({"run": str(args.run), "ranked": note, "dialect": args.dialect, **result.to_dict()}))
        return 0
    show = screen.console()
    show.print(f"{args.run} on {note}: {len(result.query_ids):,} queries ranked in {result.seconds:.1f} s", markup=False, soft_wrap=True)
    for table in screen.evaluation_tables(result):
        show.print()
        show.print(table)
    return 0


def _propensity(data: Interactions, constants: tuple[float, float] | None) -> Any:
    """Inverse propensities of the items: the data's own, or with other constants, from all pairs that are not its test part."""
    import numpy as np

    from sparring.data.interactions import TEST
    from sparring.metrics import inverse_propensities

    if constants is None:
        return data.propensity
    rows = slice(None) if data.split is None else data.split != TEST
    counts = np.bincount(data.items[rows], minlength=data.n_items)
    return inverse_propensities(counts, len(np.unique(data.queries[rows])), *constants)


def _to_rank(trained: Trained, data: Interactions, args: Namespace) -> tuple[Any, Any, Any, str]:
    """What is ranked (pairs), what is masked, training counts where known, and all that in words.

    The run's own data: the part that its training held out. Other data: its test part where it has one, else every pair that was not
    trained on, in the ids of the run.
    """
    found = trained.meta.get("source") or {}
    if found and inputs.fingerprint(data) == found["fingerprint"] and data.item_ids.ids.equals(trained.ids.item_ids.ids):
        parts = inputs.split_as(data, trained.meta, args.run)
        part = parts.test if args.part == "test" else parts.valid
        if part is None:
            raise UserError(f"the data of {args.run} has no {args.part} part: the split left none")
        return part, parts.seen_for(args.part), parts.train.counts(), f"its own {args.part} part"
    if args.part == "valid":
        raise UserError(f"--part valid is for the run's own data, and {args.data} is not what {args.run} was trained on")
    return (*_other(trained, data, args.data), None, f"the pairs of {args.data} that it was not trained on")


def _other(trained: Trained, data: Interactions, where: str) -> tuple[Any, Any]:
    import numpy as np

    from sparring.data.interactions import TEST, Interactions, pair_keys

    rows = np.ones(len(data), dtype=bool) if data.split is None else data.split == TEST
    queries = trained.ids.query_ids.encode(data.query_ids.ids)[data.queries[rows]]
    items = trained.ids.item_ids.encode(data.item_ids.ids)[data.items[rows]]
    n_items = len(trained.ids.item_ids)
    start = trained.seen.start.numpy()
    owner = np.repeat(np.arange(len(start) - 1), np.diff(start))
    known = (queries >= 0) & (items >= 0)
    new = known & ~np.isin(pair_keys(queries, items, n_items), pair_keys(owner, trained.seen.items.numpy(), n_items))
    if not new.any():
        raise UserError(f"{where} has no new pair of a query and an item that {trained.folder} knows: there is nothing to rank")
    pairs = Interactions(queries[new].astype(np.int32), items[new].astype(np.int32), trained.ids.query_ids, trained.ids.item_ids)
    return pairs, trained.seen


def recommend(args: Namespace) -> int:
    from sparring import runs

    if sum(map(bool, (args.query, args.history, args.text, args.all))) != 1:
        raise UserError("give one of --query ID (repeatable), --history ID,ID,..., --text TEXT (repeatable) or --all")
    if args.all or args.out or args.index:
        from sparring.cli.lists import recommend_all

        return recommend_all(args)
    args.k = args.k or 10
    trained = runs.load(args.run)
    if args.text:
        best = trained.recommend_text(args.text, args.k)
    elif args.history:
        best = trained.recommend_history(args.history, args.k)
    else:
        best = trained.recommend(args.query, args.k, args.with_seen)
    if args.json:
        print("\n".join(json.dumps(row, ensure_ascii=False) for row in best.iter_rows(named=True)))
        return 0
    several = len(args.query) + len(args.text) > 1
    names = [name for name in best.columns if several or name != "query"]
    rows = [[f"{cell:.4f}" if isinstance(cell, float) else _cell(cell) for cell in row] for row in best[names].iter_rows()]
    screen.console().print(screen.table([names, *rows], left=len(names) - 1))
    return 0


def _cell(value: object) -> str:
    return "" if value is None else str(value)


def demo(args: Namespace) -> int:
    from sparring.cli.demo import demo as tour

    return tour(args.out, args.epochs)


def compare(args: Namespace) -> int:
    from sparring.cli.compare import compare as run_all

    return run_all(args)


def diagnose(args: Namespace) -> int:
    from sparring.cli.diagnose import diagnose as measure_all

    return measure_all(args)


def reproduce(args: Namespace) -> int:
    from sparring.cli.reproduce import reproduce as run_all

    return run_all(args)


def cluster(args: Namespace) -> int:
    from sparring.cli.cluster import cluster as learn

    return learn(args)


def index(args: Namespace) -> int:
    from sparring.cli.index import index as build

    return build(args)


def export(args: Namespace) -> int:
    from sparring.cli.export import export as send

    return send(args)


def _listing() -> dict[str, Callable[[Namespace], int]]:
    from sparring.cli import listing

    return {"recipes": listing.recipes, "data list": listing.data_list, "data get": listing.data_get, "data show": listing.data_show}


COMMANDS: dict[str, Callable[[Namespace], int]] = {
    "train": train,
    "evaluate": evaluate,
    "compare": compare,
    "diagnose": diagnose,
    "reproduce": reproduce,
    "cluster": cluster,
    "recommend": recommend,
    "index": index,
    "export": export,
    "demo": demo,
    **_listing(),
}
