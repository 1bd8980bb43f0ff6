"""sparring mine: hard negatives for the queries of a corpus, without the false ones, with a page of examples."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

import sparring.cli.inputs as inputs
from sparring.cli.parsing import (
    Commands,
    add_device,
    add_json,
    add_quiet,
    command_line,
    count,
    number,
    whole,
)
from sparring.cli.screen import detail, progress, quiet, result, table
from sparring.core.choices import MINED_LAYOUTS


def add_mine(commands: Commands) -> None:
    parser = commands.add(
        "mine",
        "Mine hard negatives for the training pairs of a corpus, without probable false ones.",
        "sparring mine --data scifact --source minilm --from 10 --to 100 --relative 0.95 --out mined",
        mine,
    )
    text = "a folder in the layout of BEIR, or any data with texts of queries and items"
    inputs.add_data(parser, text, required=True)
    text = "folder of the result; the same command continues a mining that was stopped"
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help=text)
    parser.add_argument("--overwrite", action="store_true", help="delete the mining in --out first")
    group = parser.add_argument_group("candidates")
    text = (
        "bm25, an encoder (bag, minilm, a folder of sentence-transformers) or a run folder; repeatable: by both ranks"
    )
    group.add_argument("--source", action="append", default=[], metavar="NAME", help=f"{text} (default: bm25)")
    text = "first rank offered, from 0: earlier ones are often relevant (default: 0)"
    group.add_argument("--from", type=whole, default=0, dest="first", metavar="RANK", help=text)
    group.add_argument(
        "--to", type=count, default=100, dest="last", metavar="RANK", help="ranks end here (default: 100)"
    )
    group.add_argument("-n", "--n", type=count, default=3, metavar="N", help="negatives of each pair (default: 3)")
    text = "the best of those left, or some at random (default: top)"
    group.add_argument("--pick", choices=("top", "random"), default="top", help=text)
    text = "search all item vectors, or a graph of them (default: exact)"
    group.add_argument("--index", choices=("exact", "hnsw"), default="exact", help=text)
    group = parser.add_argument_group("filters: a candidate is dropped where the guide scores it")
    group.add_argument(
        "--relative", type=number, metavar="R", help="at R times the positive's score or more, such as 0.95"
    )
    group.add_argument("--margin", type=number, metavar="M", help="at the positive's score less M, or more")
    group.add_argument("--most", type=number, metavar="S", help="at S or more")
    text = "another source, a cross-encoder's folder, Q.npy+I.npy, or a table of scores (default: the first source)"
    group.add_argument("--guide", metavar="NAME", help=text)
    group = parser.add_argument_group("output")
    text = "columns of the rows, as sentence-transformers names them; table: ids and all scores (default: triplet)"
    group.add_argument("--layout", choices=MINED_LAYOUTS, default="triplet", help=text)
    group.add_argument("--scores", action="store_true", help="write the guide's scores, in place of labels")
    text = "format of the files (default: parquet)"
    group.add_argument("--format", choices=("parquet", "jsonl"), default="parquet", dest="form", help=text)
    text = "queries mined at a time, and rows of one file (default: 512)"
    group.add_argument("--block", type=count, default=512, metavar="N", help=text)
    group.add_argument("--seed", type=whole, default=0, metavar="N", help="seed of --pick random (default: 0)")
    add_device(group)
    add_json(group)
    add_quiet(group)


def mine(args: Namespace) -> int:
    from sparring.experiments.mining import BM25, Mining
    from sparring.experiments.mining import mine as mined_from
    from sparring.experiments.report.mining_page import summary, write_page

    names = ("guide", "first", "last", "n", "relative", "margin", "most", "pick", "layout", "scores", "form", "index")
    given = {name: getattr(args, name) for name in (*names, "block", "seed")}
    mining = Mining(source=tuple(args.source) or (BM25,), **given)
    data = inputs.read_data(args.data, inputs.columns(args))
    for line in data.notes:
        detail(args, line)
    with progress("done", quiet(args)) as show:
        mined = mined_from(data, args.out, mining, device=args.device, progress=show, overwrite=args.overwrite)
    page = write_page(mined, mining, command_line(args), args.out / "report.html")
    counts = summary(mined, mining)
    record = {"out": str(args.out), "files": len(mined.files), "report": str(page), **asdict(mining)}
    record |= {"pairs": mined.pairs, "rows": mined.rows, "offered": mined.offered, "left": mined.left}
    record |= {"dropped": mined.dropped, "short": mined.short, "unknown": mined.unknown}
    detail(args, table(counts.cells()))
    files = f"{len(mined.files):,} file{'s' if len(mined.files) > 1 else ''}"
    return result(args, [record], f"{args.out / 'parts'}: {mined.rows:,} rows in {files}; look at {page}")
