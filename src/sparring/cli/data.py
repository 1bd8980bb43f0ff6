"""sparring data: public data sets by name, and the content of a file."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import sparring.cli.inputs as inputs
from sparring.cli.parsing import Commands
from sparring.cli.screen import note, progress, show, table
from sparring.core.errors import UserError


def add_data(commands: Commands) -> None:
    parser = commands.add(
        "data", "List and download public data sets, and show the content of a file.", "sparring data list", list_data
    )
    kinds = Commands(parser, commands.named, "data ", metavar="list|get|show", required=True)
    kinds.add("list", "List the data sets that have a name.", "sparring data list", list_data)
    get = kinds.add("get", "Download a data set by name and check it.", "sparring data get demo", get_data)
    get.add_argument("name", metavar="NAME", help="name of a data set that `sparring data list` prints")
    purpose = "Show the content of a file, a folder or a named data set, as Sparring reads it."
    shown = kinds.add("show", purpose, "sparring data show demo", show_data)
    shown.add_argument("data", metavar="FILE_OR_NAME", help=inputs.DATA)
    inputs.add_columns(shown)


def list_data(args: Namespace) -> int:
    from sparring.data.public_sets import PUBLIC_SETS

    rows = [[each.name, each.summary, each.size, each.checksum, each.terms] for each in PUBLIC_SETS.values()]
    show(table([["name", "content", "queries x items, interactions", "checksum", "terms"], *rows], left=5))
    return 0


def get_data(args: Namespace) -> int:
    from sparring.data.public_sets import download_set, find_set

    source = find_set(args.name)
    show(f"{source.name}: {source.summary}; {source.home}", f"terms: {source.terms}")
    with progress("bytes") as update:
        folder = download_set(source.name, lambda done, total: update(source.name, done, total), check=True)
    show(f"in {folder}; checksum: {source.checksum}")
    return 0


def show_data(args: Namespace) -> int:
    from sparring.data.reading import describe, describe_roles
    from sparring.data.reading import show as first_rows
    from sparring.data.remote import is_remote

    given, path = inputs.columns(args), Path(args.data)
    place = args.data if is_remote(args.data) else path if path.exists() else None
    try:
        data = inputs.read_data(args.data, given)
    except UserError as error:
        if given or not (path.is_file() or is_remote(args.data)):
            raise
        show(first_rows(args.data).rpartition("\n")[0])  # the last line says that it holds no interactions
        table = ", though --items or --queries may take it" if error.argument in ("query", "item") else ""
        note(f"this does not read as interactions{table}: {inputs.message(error)}")
        return 0
    show(*([] if place is None else describe_roles(place, given)), describe(data))
    return 0
