"""sparring push: a finished run on the Hugging Face hub."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from sparring.cli.parsing import Commands, add_quiet
from sparring.cli.screen import console, note, show


def add_push(commands: Commands) -> None:
    parser = commands.add(
        "push",
        "Upload a finished run to the Hugging Face hub, without the histories of its queries.",
        "sparring push runs/first OWNER/NAME",
        push,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder written by `sparring train`")
    parser.add_argument("name", metavar="OWNER/NAME", help="repository, created if missing; the token is in HF_TOKEN")
    text = "also upload the items that each query has taken"
    parser.add_argument("--with-histories", action="store_true", help=text)
    text = "let everybody read a new repository (default: a new one is private)"
    parser.add_argument("--public", action="store_true", help=text)
    add_quiet(parser)


def push(args: Namespace) -> int:
    from sparring.training.hub import push as push_run

    with console().status("uploading"):
        commit = push_run(args.run, args.name, with_histories=args.with_histories, public=args.public)
    if not args.with_histories:
        note("histories were left out, so lists from there may hold items that a query has taken (--with-histories)")
    show(f"{args.run}: pushed to hf://{args.name} ({commit})")
    return 0
