"""sparring serve: runs answered over HTTP, until it is stopped."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from sparring.cli.values import count, number, size, whole
from sparring.core.errors import UserError

if TYPE_CHECKING:
    from sparring.data.interactions import Split
    from sparring.training.trained import Trained

TOKEN = "SPARRING_TOKEN"  # environment variable; a token on the command line could be read by every user of the machine
_LOOPBACK = {"127.0.0.1": "127.0.0.1", "localhost": "localhost", "::1": "[::1]"}


def options(parser: ArgumentParser) -> None:
    """What may be written after `sparring serve`."""
    parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="folders written by `sparring train`; the first is the default",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen on (default: 127.0.0.1, this machine only)",
    )
    parser.add_argument(
        "--port", type=whole, default=8000, metavar="N", help="port, 0 for any free one (default: 8000)"
    )
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help=f"file with the token that requests must give; or set {TOKEN}"
    )
    parser.add_argument(
        "--store", type=Path, metavar="FILE", help="where changes of items are kept (default: RUN/serve/items.sqlite)"
    )
    parser.add_argument(
        "--root",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="where runs may be reloaded from (default: beside RUN)",
    )
    parser.add_argument(
        "--as-given", action="store_true", help="serve RUN even where a reload had put another in its place"
    )
    parser.add_argument(
        "--watch",
        type=number,
        metavar="SECONDS",
        help="look so often whether a run or its index was written anew, and swap",
    )
    parser.add_argument("--threads", type=count, metavar="N", help="threads that search (default: one per core)")
    parser.add_argument(
        "--timeout", type=number, default=10.0, metavar="SECONDS", help="longest time for an answer (default: 10)"
    )
    parser.add_argument(
        "--max-body", type=size, default=8 * 2**20, metavar="SIZE", help="largest request (default: 8MiB)"
    )
    parser.add_argument("--quiet", action="store_true", help="no line in the log for requests that went well")


def serve(args: Namespace) -> int:
    try:
        import fastapi  # noqa: F401
        import orjson  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UserError(f'`sparring serve` needs {error.name}: pip install "sparring[serve]"') from error
    from sparring.models.fusion import FILE
    from sparring.serving.http import EventLog, Limits, RunRegistry, Store, run

    if not 0 <= args.port < 65536:
        raise UserError(f"--port {args.port} is not a port: give one from 0 to 65535")
    for name in ("timeout", "watch"):
        value = getattr(args, name)
        if value is not None and not 0 < value < 1e6:
            raise UserError(f"--{name} {value:g} must be above 0 seconds")
    for folder in args.runs:
        if not folder.is_dir():
            raise UserError(f"no such run folder: {folder}")
    token, log = _token(args.token_file), EventLog(os.fdopen(os.dup(2), "wb"), requests=not args.quiet)
    own = args.host in _LOOPBACK
    if not own and token is None:
        log("open to the network", host=args.host, advice=f"set {TOKEN} or --token-file")
    store = Store(args.store or args.runs[0] / "serve" / "items.sqlite")
    registry = RunRegistry(args.runs, store, args.root, log, args.as_given)
    for folder in args.runs:
        if (folder / FILE).is_file():
            log(
                "towers alone",
                run=str(folder),
                left_out="its classifiers, which `sparring recommend` and `evaluate` use",
            )
    limits = Limits(body=args.max_body, seconds=args.timeout)
    run(
        registry,
        args.host,
        args.port,
        limits,
        token,
        list(_LOOPBACK.values()) if own else None,
        log,
        args.watch,
        _parts,
        args.threads,
    )
    return 0


def _parts(trained: Trained) -> Split:
    """The data of a run, read and split as its training did: the page shows which negatives an item met."""
    from sparring.cli import inputs

    data = inputs.read_recorded(trained.meta, trained.folder, None, {})
    return inputs.split_as(data, trained.meta, trained.folder)


def _token(path: Path | None) -> str | None:
    """The token of a file or of the environment; None where there is neither."""
    if path is None:
        token = os.environ.get(TOKEN)
        if token is not None and not token.strip():
            raise UserError(f"{TOKEN} is empty: unset it, or give a token")
    else:
        try:
            token = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"cannot read the token of --token-file {path}: {getattr(error, 'strerror', None) or 'it is not text'}"
            ) from error
        if not token.strip():
            raise UserError(f"--token-file {path} is empty: write a token into it")
    return token.strip() if token else None
