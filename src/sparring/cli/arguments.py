"""What may be written on the command line: the commands, each with an example. The options of a command stand in its own module."""

from __future__ import annotations

from typing import Any

from sparring.cli import (
    bench,
    cluster,
    compare,
    demo,
    diagnose,
    evaluate,
    export,
    index,
    inputs,
    prepare,
    recommend,
    reproduce,
    serve,
    train,
)
from sparring.cli.parser import Parser

EXAMPLES = {
    "prepare": "sparring prepare parts/ --split leave-last-out --out prepared",
    "train": "sparring train --data demo --recipe ssl_pop --epochs 3 --out runs/first",
    "evaluate": "sparring evaluate runs/first --k 10,20,50",
    "compare": "sparring compare --data demo --recipes uns,ssl_pop,bir --seeds 5 --setup default --out compare/first",
    "reproduce": "sparring reproduce xir-table2 --data interactions.parquet --out reproduce/table2",
    "diagnose": "sparring diagnose runs/first --samplers own,uns,ssl_pop,bir",
    "cluster": "sparring cluster --data demo --modality text=text:title --modality behaviour=behaviour --out clusters/demo.safetensors",
    "recommend": "sparring recommend runs/first --query 1042 -k 10",
    "index": "sparring index runs/first --recall 0.99 --memory 500MB",
    "serve": "sparring serve runs/first --port 8000",
    "export": "sparring export runs/first --to parquet --out vectors",
    "recipes": "sparring recipes xir",
    "data list": "sparring data list",
    "data get": "sparring data get demo",
    "data show": "sparring data show demo",
    "demo": "sparring demo --out runs/demo",
    "bench": "sparring bench --sizes 1024,2048 --out bench",
}


def parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser of `sparring`, and those of its commands by name ("train", "data show", ...)."""
    root = Parser(
        prog="sparring",
        description="Train and evaluate retrievers against well-chosen negatives.",
        example=EXAMPLES["train"],
    )
    root.add_argument("--version", action="store_true", help="print the version and stop")
    commands = root.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    named: dict[str, Parser] = {}

    def command(name: str, text: str, group: Any = commands) -> Parser:
        key = name if group is commands else f"data {name}"
        named[key] = group.add_parser(
            name, help=text[0].lower() + text[1:].rstrip("."), description=text, example=EXAMPLES.get(key)
        )
        named[key].set_defaults(key=key)
        return named[key]

    prepare.options(
        command(
            "prepare", "Interactions of any size into a folder that `sparring train --data FOLDER` reads from disk."
        )
    )
    train.options(
        command("train", "Train a retriever on interactions, validate it every epoch, and rank its test part.")
    )
    evaluate.options(command("evaluate", "Rank the whole catalogue for every test query of a run, and measure."))
    compare.options(
        command("compare", "Train recipes over several seeds on the same data, and tell which differences are real.")
    )
    reproduce.options(
        command(
            "reproduce", "A table or figure of a paper, trained on your data and shown beside the published figures."
        )
    )
    diagnose.options(
        command("diagnose", "Measure how well a run's negatives, and others, stand for the full softmax; and advise.")
    )
    cluster.options(
        command("cluster", "Cluster the items by all their modalities, for negatives that know what is alike.")
    )
    recommend.options(command("recommend", "The best items of a run for some queries, or for a list of items."))
    index.options(
        command("index", "Build the index of a run: the fastest that reaches a recall within a memory limit.")
    )
    serve.options(
        command(
            "serve", "Answer over HTTP, with a page: recommendations, similar items, changes of items while it runs."
        )
    )
    export.options(
        command("export", "A run's vectors as Parquet, its towers as ONNX, its items in Milvus or PostgreSQL.")
    )
    listed = command("recipes", "Every recipe with its paper, its arguments and their defaults.")
    listed.add_argument("name", nargs="?", metavar="NAME", help="one recipe, with all its settings")
    listed.add_argument("--json", action="store_true", help="print JSON instead of text")
    data = command("data", "Public data sets by name, and what a file holds.")
    named["data"].epilog = "examples:\n" + "\n".join(
        f"  {EXAMPLES[key]}" for key in ("data list", "data get", "data show")
    )
    kinds = data.add_subparsers(dest="kind", metavar="list|get|show", parser_class=Parser, required=True)
    command("list", "Data sets that have a name.", kinds)
    get = command("get", "Fetch a data set by name and check it.", kinds)
    get.add_argument("name", metavar="NAME", help="a name that `sparring data list` prints")
    show = command("show", "What a file, a folder or a named set holds, as Sparring reads it.", kinds)
    show.add_argument(
        "data", metavar="FILE", help="a Parquet or CSV file, a folder of Parquet parts, or the name of a set"
    )
    inputs.add_columns(show)
    bench.options(
        command(
            "bench",
            "Time the loss on this machine: ours, PyTorch's own forms, and the floor; as a table and a picture.",
        )
    )
    demo.options(
        command("demo", "Train two recipes on real grocery purchases, compare them, and show what they recommend.")
    )
    return root, named
