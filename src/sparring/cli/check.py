"""sparring check: every file of a run, an index, prepared data or a store, compared with its hash."""

from __future__ import annotations

from argparse import Namespace

from sparring.cli.parsing import Commands, add_json, add_quiet, run_place
from sparring.cli.screen import progress, result


def add_check(commands: Commands) -> None:
    parser = commands.add(
        "check",
        "Compare every file of a run, an index, prepared data or a store with its hash.",
        "sparring check runs/first",
        check,
    )
    text = "run folder, index folder, prepared data, or the .sqlite file of a service"
    parser.add_argument("folder", type=run_place, metavar="FOLDER", help=text)
    add_json(parser)
    add_quiet(parser)


def check(args: Namespace) -> int:
    """Print one line per damaged, missing or additional file; 1 if there is any."""
    from sparring.serving import checking

    with progress("bytes", args.quiet) as update:
        found = checking.check(args.folder, lambda done, total: update("checking", done, total))
    problems = [{"path": str(each.path), "kind": each.kind, "detail": each.detail} for each in found.problems]
    record = {"path": str(args.folder), "kind": found.kind, "files": found.files, "bytes": found.bytes}
    outcome = f"{len(problems)} with problems" if problems else "all as they were written"
    line = f"{args.folder}: {found.kind}, {found.files:,} files, {found.bytes / 1e6:,.1f} MB, {outcome}"
    result(args, [{**record, "problems": problems}], *map(str, found.problems), line)
    return 1 if problems else 0
