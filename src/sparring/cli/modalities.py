"""The options that name an item's modalities, and the bar that shows while they are encoded."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import TimeRemainingColumn

from sparring.cli.screen import bar_of
from sparring.core.errors import UserError

if TYPE_CHECKING:
    from sparring.data.interactions import Split
    from sparring.data.modalities.modalities import Modalities


def add_modalities(parser: ArgumentParser) -> None:
    """--modality NAME=SPEC, --text-encoder and --cache, for a command that has --device."""
    group = parser.add_argument_group("modalities")
    group.add_argument(
        "--modality",
        action="append",
        default=[],
        metavar="NAME=SPEC",
        help="vectors of the items, may be repeated; SPEC: FILE.npy, FILE.npy:IDS, FILE.parquet:COLUMN, text:COLUMN,..., "
        "images:FOLDER, images:COLUMN, behaviour (from the training interactions), behaviour:RUN (a finished run)",
    )
    group.add_argument(
        "--text-encoder",
        default="minilm",
        metavar="NAME",
        help="a folder or hub name of a sentence encoder (default: minilm)",
    )
    group.add_argument(
        "--cache",
        metavar="FOLDER",
        help="where encoded vectors are kept (default: $SPARRING_HOME, else ~/.cache/sparring)",
    )


def read_modalities(args: Namespace, split: Split, screen: Console, quiet: bool = False) -> Modalities:
    """The modalities of a command, with a bar on a terminal while they are encoded and a line for each."""
    from sparring.data.modalities.sources import SPECS, load_modalities, parse_modalities
    from sparring.training.trained import run_vectors

    specs = parse_modalities(args.modality)
    if not specs:
        raise UserError(f"no modality is given: add --modality NAME=SPEC, where SPEC is {SPECS}")
    with bar_of(screen, "items", TimeRemainingColumn()) as bar:
        tasks = {name: bar.add_task(name, total=1, note="", visible=False) for name in specs}

        def tell(name: str, done: int, total: int) -> None:
            bar.update(tasks[name], completed=done, total=total, visible=True)

        found = load_modalities(
            specs,
            split,
            text_encoder=args.text_encoder,
            cache=args.cache,
            device=args.device,
            progress=tell,
            run_vectors=run_vectors,
        )
    if not quiet:
        for note in found.notes:
            screen.print(note, markup=False, soft_wrap=True)
    return found
