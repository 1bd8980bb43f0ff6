"""What may be written on the command line: commands, options, their types, and an example of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparring.cli.launch import add_launch
from sparring.cli.parser import Parser
from sparring.cli.values import constants, count, cutoffs, device, ids, names, number, setting, share, whole

SPLITS = ("auto", "file", "random", "temporal", "leave-last-out")
DIALECTS = ("standard", "trec", "rectools", "lenskit", "xir-release", "xc")
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

    def command(group: Any, name: str, text: str, key: str | None = None) -> Parser:
        key = key or name
        named[key] = group.add_parser(name, help=text[0].lower() + text[1:].rstrip("."), description=text, example=EXAMPLES.get(key))
        named[key].set_defaults(key=key)
        return named[key]

    _prepare(command(commands, "prepare", "Interactions of any size into a folder that `sparring train --data FOLDER` reads from disk."))
    _train(command(commands, "train", "Train a retriever on interactions, validate it every epoch, and rank its test part."))
    _evaluate(command(commands, "evaluate", "Rank the whole catalogue for every test query of a run, and measure."))
    _compare(command(commands, "compare", "Train recipes over several seeds on the same data, and tell which differences are real."))
    _reproduce(command(commands, "reproduce", "A table or figure of a paper, trained on your data and shown beside the published figures."))
    _diagnose(command(commands, "diagnose", "Measure how well a run's negatives, and others, stand for the full softmax; and advise."))
    _cluster(command(commands, "cluster", "Cluster the items by all their modalities, for negatives that know what is alike."))
    _recommend(command(commands, "recommend", "The best items of a run for some queries, or for a list of items."))
    _index(command(commands, "index", "Build the index of a run: the fastest that reaches a recall within a memory limit."))
    _serve(command(commands, "serve", "Answer over HTTP, with a page: recommendations, similar items, changes of items while it runs."))
    _export(command(commands, "export", "A run's vectors as Parquet, its towers as ONNX, its items in Milvus or PostgreSQL."))
    listed = command(commands, "recipes", "Every recipe with its paper, its arguments and their defaults.")
    listed.add_argument("name", nargs="?", metavar="NAME", help="one recipe, with all its settings")
    listed.add_argument("--json", action="store_true", help="print JSON instead of text")
    data = command(commands, "data", "Public data sets by name, and what a file holds.")
    named["data"].epilog = "examples:\n" + "\n".join(f"  {EXAMPLES[key]}" for key in ("data list", "data get", "data show"))
    kinds = data.add_subparsers(dest="kind", metavar="list|get|show", parser_class=Parser, required=True)
    command(kinds, "list", "Data sets that have a name.", "data list")
    get = command(kinds, "get", "Fetch a data set by name and check it.", "data get")
    get.add_argument("name", metavar="NAME", help="a name that `sparring data list` prints")
    show = command(kinds, "show", "What a file, a folder or a named set holds, as Sparring reads it.", "data show")
    show.add_argument("data", metavar="FILE", help="a Parquet or CSV file, a folder of Parquet parts, or the name of a set")
    _columns(show)
    _bench(command(commands, "bench", "Time the loss on this machine: ours, PyTorch's own forms, and the floor; as a table and a picture."))
    demo = command(commands, "demo", "Train two recipes on real grocery purchases, compare them, and show what they recommend.")
    demo.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for the runs (default: runs/demo)")
    demo.add_argument("--epochs", type=count, default=None, help="epochs of each recipe")
    return root, named


def _prepare(parser: Parser) -> None:
    parser.add_argument("data", metavar="DATA", help="a Parquet file, a folder of Parquet parts, a glob in quotes, or a CSV file")
    _columns(parser)
    _split(parser)
    parser.add_argument("--seed", type=whole, default=0, metavar="N", help="seed of the split (default: 0)")
    group = parser.add_argument_group("how it is run")
    group.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where it goes; it appears there as a whole at the end")
    group.add_argument("--overwrite", action="store_true", help="replace what was prepared in FOLDER before")
    group.add_argument(
        "--engine", choices=("polars", "spark"), default="polars", help="spark: on a cluster, for the same files (default: polars)"
    )
    group.add_argument("--quiet", action="store_true", help="print nothing but the last line and errors")


def _train(parser: Parser) -> None:
    parser.add_argument(
        "--data",
        metavar="FILE_OR_NAME",
        help="Parquet or CSV file, folder of parts or of prepared data, or the name of a set; not needed with --resume",
    )
    _columns(parser)
    _split(parser)
    group = parser.add_argument_group("training")
    group.add_argument("--recipe", metavar="NAME", help="how to train (default: default); `sparring recipes` lists them")
    group.add_argument(
        "--set", type=setting, action="append", default=[], dest="settings", metavar="NAME=VALUE", help="change one setting; repeatable"
    )
    group.add_argument(
        "--setup", metavar="RECIPE", help="take towers, optimiser and schedule from this recipe, so that only the negatives differ"
    )
    group.add_argument("--epochs", type=count, metavar="N", help="the same as --set epochs=N")
    group.add_argument("--seed", type=whole, metavar="N", help="the same as --set seed=N; also seeds the split")
    group.add_argument("--device", type=device, default="auto", help="auto, cpu or cuda (default: auto)")
    group.add_argument("--k", type=cutoffs, default=None, metavar="K,K", help="cutoffs of the metrics (default: 10,20,50)")
    group = parser.add_argument_group("the run folder")
    group.add_argument("--out", type=Path, metavar="FOLDER", help="where the run goes (default: runs/RECIPE)")
    group.add_argument("--resume", action="store_true", help="continue a run that was stopped, exactly as if it never had been")
    group.add_argument("--overwrite", action="store_true", help="delete the run that is in FOLDER first")
    group.add_argument("--tensorboard", action="store_true", help="also write curves for TensorBoard into FOLDER/tensorboard")
    group.add_argument("--quiet", action="store_true", help="print nothing but the last line and errors")
    add_launch(parser)


def _evaluate(parser: Parser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a folder written by `sparring train`")
    parser.add_argument(
        "--data",
        metavar="FILE_OR_NAME",
        help="other interactions to rank: all their pairs that were not trained on, or their own test part (default: the run's test part)",
    )
    _columns(parser)
    parser.add_argument("--part", choices=("test", "valid"), default="test", help="the part of the run's own data to rank (default: test)")
    parser.add_argument("-k", "--k", type=cutoffs, default=None, metavar="K,K", help="cutoffs (default: 10,20,50)")
    parser.add_argument(
        "--dialect", choices=DIALECTS, default="standard", help="whose definition of the metrics (default: standard, which is LightGCN's)"
    )
    parser.add_argument("--propensity", type=constants, metavar="A,B", help="constants of psp and psndcg (default: the data's)")
    parser.add_argument("--device", type=device, default="auto", help="auto, cpu or cuda (default: auto)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _compare(parser: Parser) -> None:
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="FILE_OR_NAME",
        help="a file, a folder of parts, the name of a set, or world:QUERIESxITEMS, whose truth is known; repeatable",
    )
    _columns(parser)
    _split(parser)
    parser.add_argument("--split-seed", type=whole, default=0, metavar="N", help="seed of the split, the same for every run (default: 0)")
    group = parser.add_argument_group("what is compared")
    group.add_argument("--recipes", type=names, required=True, metavar="NAME,NAME", help="`sparring recipes` lists them")
    group.add_argument("--seeds", type=count, default=5, metavar="N", help="each recipe is trained with the seeds 0..N-1 (default: 5)")
    group.add_argument("--setup", metavar="RECIPE", help="take towers, optimiser and schedule of every run from this recipe")
    group.add_argument("--tune", type=count, default=0, metavar="N", help="first tune each recipe with N trials on validation")
    group.add_argument("--baseline", metavar="NAME", help="what the others are compared with (default: uns, else the first)")
    group.add_argument(
        "--metrics", type=names, default=("recall@20", "ndcg@20"), metavar="NAME@K,NAME@K", help="(default: recall@20,ndcg@20)"
    )
    group.add_argument(
        "--set", type=setting, action="append", default=[], dest="settings", metavar="NAME=VALUE", help="for every recipe that knows it"
    )
    group.add_argument("--epochs", type=count, metavar="N", help="the same as --set epochs=N")
    group = parser.add_argument_group("how it is run")
    group.add_argument("--jobs", type=count, default=1, metavar="N", help="trainings at once, with one thread each if several (default: 1)")
    group.add_argument("--device", type=device, default="auto", help="auto, cpu or cuda (default: auto)")
    group.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="for all runs and tables; the same command again does what is missing"
    )
    group.add_argument("--quiet", action="store_true", help="print nothing but failures and the last line")


def _reproduce(parser: Parser) -> None:
    from sparring.cli.modalities import add_modalities

    parser.add_argument("name", nargs="?", metavar="NAME", help="which table or figure; without a name all are listed")
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="FILE_OR_NAME",
        help="a file, a folder of parts, the name of a set, or world:QUERIESxITEMS; repeatable",
    )
    _columns(parser)
    add_modalities(parser)
    parser.add_argument("--category", default="category", metavar="COLUMN", help="column of the items with categories (default: category)")
    parser.add_argument("--codes", type=Path, metavar="FOLDER", help="clusters for several tables; what is missing is learned there")
    group = parser.add_argument_group("how it is run")
    group.add_argument("--seeds", type=count, default=5, metavar="N", help="10, 20, ...; for XIR each is a split too (default: 5)")
    group.add_argument("--tune", type=count, default=0, metavar="N", help="esans-...: first tune with N trials on the validation part")
    group.add_argument("--epochs", type=count, metavar="N", help="the same as --set epochs=N (default: as in the paper)")
    group.add_argument("--batch-size", type=count, metavar="N", help="the same as --set batch_size=N")
    group.add_argument("--encoder", metavar="NAME", help="ngame-dexa: the same as --set encoder=NAME: minilm, bag, a folder, ...")
    group.add_argument(
        "--set", type=setting, action="append", default=[], dest="settings", metavar="NAME=VALUE", help="for every recipe that knows it"
    )
    group.add_argument("--jobs", type=count, default=1, metavar="N", help="trainings at once, with one thread each if several (default: 1)")
    group.add_argument("--device", type=device, default="auto", help="auto, cpu or cuda (default: auto)")
    group.add_argument("--out", type=Path, metavar="FOLDER", help="for all runs and tables; the same command again does what is missing")
    group.add_argument("--quiet", action="store_true", help="print nothing but failures and the last line")


def _diagnose(parser: Parser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a folder written by `sparring train`, finished or not")
    parser.add_argument(
        "--samplers",
        type=names,
        default=("own", "uns", "ssl_pop", "mns", "bir"),
        metavar="NAME,NAME",
        help="own (the run's negatives) and any recipes (default: own,uns,ssl_pop,mns,bir)",
    )
    parser.add_argument("--queries", type=count, default=256, metavar="N", help="training pairs to measure on (default: 256)")
    parser.add_argument("--draws", type=count, default=20, metavar="N", help="batches that each of them is put into (default: 20)")
    parser.add_argument("--data", metavar="FILE_OR_NAME", help="where the data of the run is now, if it has moved")
    parser.add_argument("--seed", type=whole, default=0, metavar="N", help="seed of the sample and of the draws (default: 0)")
    parser.add_argument("--device", type=device, default="auto", help="auto, cpu or cuda (default: auto)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="also write a page, report.html, its figures and the tables there")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def _cluster(parser: Parser) -> None:
    from sparring.cli.modalities import add_modalities

    parser.add_argument("--data", metavar="FILE_OR_NAME", help="a file, a folder of parts, or the name of a set")
    _columns(parser)
    _split(parser)
    add_modalities(parser)
    group = parser.add_argument_group("clusters")
    group.add_argument("--preset", choices=("robust", "literal"), help="literal: the paper's equations as they stand (default: robust)")
    group.add_argument("--k-primary", type=count, metavar="K", help="primary clusters (default: 300)")
    group.add_argument("--k-secondary", type=count, metavar="K", help="secondary clusters (default: 15)")
    group.add_argument(
        "--steps", type=whole, metavar="N", help="steps of learning (default: 1500; with --update 500, and 0 only codes new items)"
    )
    group.add_argument(
        "--set", type=setting, action="append", default=[], dest="settings", metavar="NAME=VALUE", help="change another setting; repeatable"
    )
    group.add_argument("--update", type=Path, metavar="OLD", help="go on from these codes: clusters keep their numbers")
    group.add_argument(
        "--refit", action="append", default=[], metavar="NAME", help="with --update: a modality whose encoder is another now, or made anew"
    )
    group.add_argument("--category", metavar="COLUMN", help="column of the items with known categories, to measure purity")
    group = parser.add_argument_group("how it is run")
    group.add_argument("--seed", type=whole, default=0, metavar="N", help="seed of the learning and of the split (default: 0)")
    group.add_argument("--device", type=device, default="auto", help="auto, cpu or cuda (default: auto)")
    group.add_argument("--out", type=Path, required=True, metavar="FILE", help="for the codes: a name that ends in .safetensors")
    group.add_argument("--report", type=Path, metavar="FOLDER", help="for the page, figures and tables (default: FILE without its ending)")
    group.add_argument("--quiet", action="store_true", help="print nothing but the last line and errors")


def _recommend(parser: Parser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a folder written by `sparring train`")
    parser.add_argument("--query", action="append", default=[], metavar="ID", help="a query (user) of the data; repeatable")
    parser.add_argument("--history", type=ids, metavar="ID,ID", help="items instead of a query: what goes with them")
    parser.add_argument("--text", action="append", default=[], metavar="TEXT", help="a new query by its text, for text towers; repeatable")
    parser.add_argument("--all", action="store_true", help="every query of the run, into the file --out")
    parser.add_argument("--out", type=Path, metavar="FILE", help="with --all: a Parquet file, written as the lists are found")
    parser.add_argument("--index", action="store_true", help="with --all: through the index that `sparring index` built, not exactly")
    parser.add_argument("-k", "--k", type=count, default=None, metavar="K", help="how many items (default: 10; with --all 100)")
    parser.add_argument("--with-seen", action="store_true", help="do not leave out what the query already has")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line instead of a table")


def _index(parser: Parser) -> None:
    from sparring.cli.index import KINDS, size, target

    parser.add_argument("run", type=Path, metavar="RUN", help="a folder written by `sparring train`")
    parser.add_argument("--recall", type=target, default=0.99, metavar="R", help="least share of the exact best k (default: 0.99)")
    parser.add_argument("--memory", type=size, metavar="SIZE", help="most that searches may keep in memory, such as 500MB (default: any)")
    parser.add_argument("--kind", choices=KINDS, default="auto", help="auto tries all that fit (default: auto)")
    parser.add_argument("-k", "--k", type=count, default=100, metavar="K", help="length of the lists that it is tuned for (default: 100)")
    parser.add_argument("--queries", type=count, default=1000, metavar="N", help="queries of the run to measure on (default: 1000)")
    parser.add_argument("--seed", type=whole, default=0, metavar="N", help="seed of the sample and of the clusters (default: 0)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--quiet", action="store_true", help="print nothing but the last line and errors")


def _serve(parser: Parser) -> None:
    from sparring.cli.serve import options

    options(parser)


def _bench(parser: Parser) -> None:
    from sparring.cli.bench import options

    options(parser)


def _export(parser: Parser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a folder written by `sparring train`")
    parser.add_argument("--to", choices=("parquet", "onnx", "milvus", "pgvector"), required=True, help="files, or a database")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="parquet, onnx: where the files go (default: RUN/parquet, RUN/onnx)")
    group = parser.add_argument_group("databases")
    group.add_argument(
        "--address",
        metavar="WHERE",
        help="milvus: a file FILE.db (Milvus Lite) or http://HOST:19530, its token in MILVUS_TOKEN; "
        "pgvector: postgresql://USER@HOST/DATABASE, the password in PGPASSWORD",
    )
    group.add_argument("--table", default="items", metavar="NAME", help="collection or table; made where it is missing (default: items)")
    group.add_argument("--delete", type=ids, metavar="ID,ID", help="delete these items from the database, and do nothing else")
    parser.add_argument("--quiet", action="store_true", help="print nothing but the last line and errors")


def _columns(parser: Parser) -> None:
    group = parser.add_argument_group("columns (guessed from common names where not given)")
    group.add_argument("--items", type=Path, metavar="FILE", help="table of items: an id column, title, category, any other")
    group.add_argument("--queries", type=Path, metavar="FILE", help="table of queries")
    for name, text in (
        ("query", "who: user, customer, query"),
        ("item", "what: item, product, document"),
        ("time", "when, for temporal and leave-last-out splits"),
        ("weight", "weight of a pair"),
        ("rating", "rating, for --min-rating"),
        ("label", "1 where taken, 0 where shown and not taken"),
        ("split", "train, valid or test"),
    ):
        group.add_argument(f"--{name}-column", metavar="NAME", help=text)
    group.add_argument("--min-rating", type=number, metavar="X", help="keep pairs rated at least X")


def _split(parser: Parser) -> None:
    group = parser.add_argument_group("split")
    group.add_argument("--split", choices=SPLITS, default="auto", help="auto: the file's own if it has one, else random (default: auto)")
    group.add_argument("--valid", type=share, default=0.1, metavar="SHARE", help="share of the training part for validation (default: 0.1)")
    group.add_argument("--test", type=share, default=0.2, metavar="SHARE", help="share of the pairs for the test (default: 0.2)")
