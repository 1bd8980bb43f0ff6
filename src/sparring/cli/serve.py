"""sparring serve: runs answered over HTTP, until it is stopped."""

from __future__ import annotations

import gc
import os
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from dataclasses import Field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparring.cli.inputs import read_recorded, split_recorded
from sparring.cli.parsing import (
    Commands,
    add_code,
    add_novelty,
    add_ranking,
    add_unfinished,
    count,
    run_place,
    seconds,
    setting,
    size,
    whole,
)
from sparring.core.errors import UserError, did_you_mean
from sparring.core.extras import optional

if TYPE_CHECKING:
    from sparring.data.interactions import Split
    from sparring.training.trained import Trained

# An environment variable: every user of the machine could read a token on the command line.
TOKEN = "SPARRING_TOKEN"  # noqa: S105
SIZES = ("head", "body", "buffered")  # limits in bytes


def add_serve(commands: Commands) -> None:
    parser = commands.add(
        "serve",
        "Serve runs over HTTP, with a page: recommendations, similar items, and changes of items at run time.",
        "sparring serve runs/first --port 8000",
        serve,
    )
    text = "run folders written by `sparring train`; the first is the default"
    parser.add_argument("runs", type=run_place, nargs="+", metavar="RUN", help=text)
    add_code(parser)
    group = parser.add_argument_group("network")
    text = "address to listen on; others than this machine's own need a token (default: 127.0.0.1, this machine only)"
    group.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help=text)
    text = "port, 0 for any free one (default: 8000)"
    group.add_argument("--port", type=whole, default=8000, metavar="N", help=text)
    text = f"file with the token that requests must send; or set {TOKEN}"
    group.add_argument("--token-file", type=Path, metavar="FILE", help=text)
    text = "time limit of an answer (default: 10)"
    group.add_argument("--timeout", type=seconds, default=10.0, metavar="SECONDS", help=text)
    text = "largest request (default: 8MiB)"
    group.add_argument("--max-body", type=size, default=8 * 2**20, metavar="SIZE", help=text)
    text = "another limit, such as connections=500; repeatable; the guide on security lists them"
    group.add_argument("--limit", type=setting, action="append", default=[], metavar="NAME=VALUE", help=text)
    text = "name under which a proxy publishes the service; repeatable"
    group.add_argument("--allow-host", action="append", default=[], metavar="NAME", help=text)
    group = parser.add_argument_group("runs and items")
    text = "database of the changes of items (default: RUN/serve/items.sqlite)"
    group.add_argument("--store", type=Path, metavar="FILE", help=text)
    text = "folder from which runs may be reloaded; repeatable (default: the parent of RUN)"
    group.add_argument("--root", type=Path, action="append", default=[], metavar="FOLDER", help=text)
    text = "serve RUN even if a reload replaced it"
    group.add_argument("--as-given", action="store_true", help=text)
    add_ranking(group, "that of the index, else the best on the validation part")
    add_novelty(group)
    add_unfinished(group)
    text = "check this often whether a run or its index has changed, and reload it"
    group.add_argument("--watch", type=seconds, metavar="SECONDS", help=text)
    text = "processes that answer, for more than one core (default: 1)"
    group.add_argument("--workers", type=count, default=1, metavar="N", help=text)
    text = "search threads of each process (default: one per core, shared among the workers)"
    group.add_argument("--threads", type=count, metavar="N", help=text)
    group.add_argument("--quiet", action="store_true", help="do not log requests that succeeded")


def serve(args: Namespace) -> int:
    for module in ("fastapi", "orjson", "prometheus_client", "httptools"):
        optional(module, "serve", "`sparring serve`")
    from sparring.core.devices import usable_cores
    from sparring.core.files import check_folder
    from sparring.serving.http import EventLog, Limits, RunRegistry, Store, run
    from sparring.serving.http.server import host_names
    from sparring.serving.http.worker import Job
    from sparring.serving.http.workers import run_workers

    if args.port >= 65536:
        raise UserError(f"--port {args.port} is not a port: give one from 0 to 65535")
    for folder in args.runs:
        if not folder.is_dir():
            raise UserError(f"no such run folder: {folder}")
        check_folder(folder)  # before the store in it is opened
    limits = Limits(**{"body": args.max_body, "seconds": args.timeout, **_limits(args.limit, fields(Limits))})
    token, log = _token(args.token_file), EventLog(os.fdopen(os.dup(2), "wb"), requests=not args.quiet)
    names = host_names(args.host, args.allow_host, token)  # before the runs are loaded
    threads = args.threads or max(1, usable_cores() // args.workers)
    store = args.store or args.runs[0] / "serve" / "items.sqlite"
    build = partial(
        RunRegistry,
        args.runs,
        roots=args.root,
        as_given=args.as_given,
        recipe=args.recipe,
        trust=args.trust,
        unfinished=args.unfinished,
        model=args.model,
        novelty=args.novelty,
        ranking=args.ranking,
    )
    if args.workers > 1:
        job = Job(build, store, limits, token, names, not args.quiet, _parts, threads)
        run_workers(job, args.workers, args.runs, args.host, args.port, log, args.watch)
        return 0
    gc.freeze()  # modules live as long as the service: a collection while requests wait need not look at them
    registry = build(store=Store(store), log=log)
    run(registry, args.host, args.port, limits, token, args.allow_host, log, args.watch, _parts, threads)
    return 0


def _limits(given: list[tuple[str, str]], known: Sequence[Field[Any]]) -> dict[str, Any]:
    """Values of --limit by name: sizes, counts or seconds, by the type of the field."""
    kinds = {
        field.name: size if field.name in SIZES else seconds if "float" in field.type else count for field in known
    }
    values = {}
    for name, text in given:
        if name not in kinds:
            raise UserError(
                f"--limit {name}: no such limit{did_you_mean(name, kinds)}; the limits are {', '.join(kinds)}"
            )
        try:
            values[name] = kinds[name](text)
        except ArgumentTypeError as error:
            raise UserError(f"--limit {name}: {error}") from error
    return values


def _parts(trained: Trained) -> Split:
    """The data of a run, read and split as in its training: the page shows the negatives of an item."""
    data = read_recorded(trained.meta, trained.folder, None, {})
    return split_recorded(data, trained.meta, trained.folder)


def _token(path: Path | None) -> str | None:
    """The token of the file or of the environment, if any."""
    if path is None:
        token = os.environ.get(TOKEN)
        if token is not None and not token.strip():
            raise UserError(f"{TOKEN} is empty: unset it, or give a token")
        return token and token.strip()
    try:
        token = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise UserError(f"cannot read the token of --token-file {path}: {reason}") from error
    if not token.strip():
        raise UserError(f"--token-file {path} is empty: write a token into it")
    return token.strip()
