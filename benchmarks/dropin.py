"""NegativesLoss beside MultipleNegativesRankingLoss in SentenceTransformerTrainer: same data, steps and seeds.

    python benchmarks/dropin.py --data OEWN-Hyper3 --data OEWN-Related --model minilm --device cuda
    python benchmarks/dropin.py --data OEWN-Hyper3 --model static --steps 100 --seeds 3

The first table pairs both losses over seeds: the mean of P@1, nDCG@10 and R@100 on test texts (labels that the data's
filters exclude do not count), the difference to MultipleNegativesRankingLoss and its 95 % interval (t over seeds). The
second trains a few steps of each in a process of its own: seconds of a step after the first, and the peak of memory
above that of the loaded model (of the GPU, or of the process). `static` is a StaticEmbedding that starts from the
package wordllama, `minilm` all-MiniLM-L6-v2 from its package; a folder is any other model.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparring.data.interactions import Interactions
from sparring.data.reading import read
from sparring.data.splits import split
from sparring.data.texts.encoder import text_folder
from sparring.data.texts.texts import text_of
from sparring.data.texts.tokenizers import package_folder
from sparring.evaluation.ranking import top_k
from sparring.evaluation.statistics import t_quantile
from sparring.losses import Symmetric
from sparring.negatives import NearestItems, Sampled, Uniform, Union
from sparring.training.sentence_transformers import NegativesLoss, in_batch
from sparring.training.text_trainer import TextIds, refreshing

LR = {"static": 0.01, "minilm": 1e-4}


@dataclass(frozen=True)
class Texts:
    """Training pairs as texts, and a test part."""

    rows: dict[str, list[str]]
    labels: list[str]
    tests: list[str]
    truth: Interactions
    hidden: Any  # labels that never count, of every test query

    @staticmethod
    def of(folder: str, most: int) -> Texts:
        parts = split(read(folder))
        assert parts.test is not None
        queries, labels = (text_of(parts.train, side).to_list() for side in ("query", "item"))
        rows = {
            "anchor": [queries[at] for at in parts.train.queries],
            "positive": [labels[at] for at in parts.train.items],
        }
        chosen = np.unique(parts.test.queries)[:most]
        return Texts(rows, labels, [queries[at] for at in chosen], parts.test, (parts.seen_for("test"), chosen))


def opened(name: str, device: str, max_len: int) -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer

    if name != "static":
        model = SentenceTransformer(str(text_folder(name)), device=device)
        model.max_seq_length = max_len
        return model
    import safetensors.torch

    package = package_folder("wordllama")
    if package is None:
        sys.exit("--model static starts from the package wordllama: pip install wordllama")
    file = package / "weights" / "l2_supercat_256.safetensors"
    weights = safetensors.torch.load_file(file)["embedding.weight"].float()
    tokenizer = Tokenizer.from_file(str(package / "tokenizers" / "l2_supercat_tokenizer_config.json"))
    tokenizer.enable_truncation(max_len)
    return SentenceTransformer(modules=[StaticEmbedding(tokenizer, weights * (0.1 / weights.std()))], device=device)


def losses(model: Any, dataset: Any, tau: float, chunk: int | None) -> dict[str, Any]:
    """The losses that are compared, theirs first."""
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    def ours(negatives: Any = in_batch, **settings: Any) -> Any:
        return lambda: NegativesLoss(model, dataset, negatives, tau=tau, chunk=chunk, **settings)

    return {
        "MultipleNegativesRankingLoss": lambda: MultipleNegativesRankingLoss(model, scale=1 / tau),
        "corrected, known masked": ours(),
        "and in both directions": ours(loss=Symmetric()),
        "and 1,024 uniform": ours(lambda data: Union(in_batch(data), Sampled(Uniform(data.n_items), 1024))),
        "and 1 of 100 nearest": ours(
            lambda data: Union(in_batch(data), NearestItems(data.n_queries, 1, min(100, data.n_items), every=1))
        ),
    }


def trained(
    model: Any, dataset: Any, loss: Any, args: argparse.Namespace, seed: int, steps: int, batch: int
) -> list[float]:
    """Train; returns the times at which steps ended."""
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from transformers import PrinterCallback, TrainerCallback

    ended: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            ended.append(time.perf_counter() if args.device.type == "cuda" else time.process_time())

    with tempfile.TemporaryDirectory() as folder:
        settings = SentenceTransformerTrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=batch,
            learning_rate=args.lr or LR.get(args.model, 2e-5),
            warmup_steps=max(steps // 10, 1),
            seed=seed,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=args.device == "cpu",
            bf16=args.device != "cpu",
            dataloader_drop_last=True,
        )
        own = isinstance(loss, NegativesLoss)
        trainer = SentenceTransformerTrainer(
            model=model,
            args=settings,
            train_dataset=dataset,
            loss=loss,
            data_collator=TextIds(loss, settings) if own else None,
            callbacks=[Clock(), *([refreshing(loss)] if own else [])],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return ended


@torch.no_grad()
def measured(model: Any, texts: Texts) -> dict[str, float]:
    queries, labels = (
        model.encode(part, convert_to_tensor=True, normalize_embeddings=True, batch_size=256).float().cpu()
        for part in (texts.tests, texts.labels)
    )
    hidden, chosen = texts.hidden
    best = top_k(queries, labels, 100, hidden, torch.from_numpy(chosen).long())[1].numpy()
    known = texts.truth.positives()
    found = {"P@1": [], "nDCG@10": [], "R@100": []}  # type: ignore[var-annotated]
    gains = 1 / np.log2(np.arange(2, 12))
    for row, query in zip(best, chosen, strict=True):
        truth = set(known.items[known.start[query] : known.start[query + 1]].tolist())
        hits = np.array([item in truth for item in row])
        found["P@1"].append(hits[0])
        found["nDCG@10"].append((hits[:10] * gains).sum() / gains[: len(truth)].sum())
        found["R@100"].append(hits.sum() / len(truth))
    return {name: float(np.mean(values)) for name, values in found.items()}


def quality(data: str, args: argparse.Namespace) -> None:
    import datasets

    texts = Texts.of(data, args.tests)
    dataset = datasets.Dataset.from_dict(texts.rows)
    results: dict[str, list[dict[str, float]]] = {}
    for seed in range(args.seeds):
        for name in args.loss or losses(None, None, 1.0, None):
            torch.manual_seed(seed)
            model = opened(args.model, args.device, args.max_len)
            loss = losses(model, dataset, args.tau, args.chunk)[name]()
            ended = trained(model, dataset, loss, args, seed, args.steps, args.batch_size)
            figures = measured(model, texts)
            figures["step"] = (ended[-1] - ended[0]) / (len(ended) - 1)
            results.setdefault(name, []).append(figures)
            print(f"# {data} seed {seed} {name}: {figures}", file=sys.stderr, flush=True)
    first = next(iter(results))
    where = f"{Path(data).name}: {args.model}, {args.steps} steps of {args.batch_size}, {args.seeds} seeds"
    print(f"\n{where}, {len(texts.tests):,} test texts, {args.device}\n")
    print("| loss | P@1 | nDCG@10 | R@100 | difference in P@1 | in nDCG@10 | in R@100 | step, s |\n|---|" + "---|" * 7)
    for name, runs in results.items():
        means = [f"{np.mean([run[m] for run in runs]):.4f}" for m in ("P@1", "nDCG@10", "R@100")]
        gains = [_gain(runs, results[first], m) if name != first else "" for m in ("P@1", "nDCG@10", "R@100")]
        print(f"| {name} | {' | '.join(means + gains)} | {np.median([run['step'] for run in runs]):.3f} |")


def _gain(runs: list[dict[str, float]], base: list[dict[str, float]], metric: str) -> str:
    gains = np.array([run[metric] - other[metric] for run, other in zip(runs, base, strict=True)])
    if len(gains) < 2:
        return f"{gains.mean():+.4f}"
    half = t_quantile(0.95, len(gains) - 1) * gains.std(ddof=1) / np.sqrt(len(gains))
    return f"{gains.mean():+.4f} +- {half:.4f}"


STATIC_CHUNK = 4096  # texts that a static model encodes at a time: each chunk has a gradient of the whole table
CASES = {
    "theirs": ("MultipleNegativesRankingLoss", 1024, None),
    "ours": ("NegativesLoss", 1024, None),
    "theirs, cached": ("CachedMultipleNegativesRankingLoss", 16_384, 64),
    "ours, cached": ("NegativesLoss", 16_384, 64),
}


def _chunk(args: argparse.Namespace, chunk: int | None) -> int | None:
    return STATIC_CHUNK if args.model == "static" and chunk else chunk


def _memory(device: str, peak: bool) -> int:
    """Bytes in use now, from where the peak then counts, or their peak; of a process on Linux, or of the GPU."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    if not peak:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    name = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def child(args: argparse.Namespace) -> None:
    """Some steps of one case; prints seconds of a step and bytes."""
    import datasets
    from sentence_transformers.sentence_transformer import losses as theirs

    name, batch, chunk = CASES[args.case]
    rows = Texts.of(args.data[0], 1).rows
    need = batch * (args.speed_steps + 1)
    rows = {column: (values * (1 + need // len(values)))[:need] for column, values in rows.items()}
    dataset = datasets.Dataset.from_dict(rows)
    model = opened(args.model, args.device, args.max_len)
    if name == "NegativesLoss":
        loss = NegativesLoss(model, dataset, tau=args.tau, chunk=_chunk(args, chunk))
    else:
        settings = {} if chunk is None else {"mini_batch_size": chunk}
        loss = getattr(theirs, name)(model, scale=1 / args.tau, **settings)
    before = _memory(args.device, peak=False)
    ended = trained(model, dataset, loss, args, 0, args.speed_steps, batch)
    after = _memory(args.device, peak=True)
    print(json.dumps({"step": float(np.median(np.diff(ended))) if len(ended) > 1 else None, "bytes": after - before}))


def speed(args: argparse.Namespace) -> None:
    print(f"\n{args.model}, {args.device}, a step and the peak of memory above the loaded model\n")
    print("| loss | batch | step, s | memory, MB |\n|---|---|---|---|")
    found: dict[str, dict[str, Any]] = {}
    for case, (name, batch, chunk) in CASES.items():
        if args.only and case not in args.only:
            continue
        if args.model == "static" and case == "theirs, cached":
            print(f"| {name} | {batch:,} | refuses static embeddings | |")
            continue
        command = [sys.executable, __file__, "--case", case, *sys.argv[1:]]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
        if done.returncode:
            print(f"| {name} | {batch:,} | failed: {done.stderr.strip().splitlines()[-1][:80]} | |")
            continue
        found[case] = json.loads(done.stdout.strip().splitlines()[-1])
        cached = f", {_chunk(args, chunk):,} at a time" if chunk else ""
        step = "" if found[case]["step"] is None else f"{found[case]['step']:.3f}"
        print(f"| {name}{cached} | {batch:,} | {step} | {found[case]['bytes'] / 1e6:,.0f} |")
    if {"theirs", "ours"} <= found.keys() and found["ours"]["step"] is not None:
        ratio = found["ours"]["step"] / found["theirs"]["step"]
        fast = "yes" if ratio <= 1 else "NO"
        print(f"\nat batch 1,024 ours takes {ratio:.2f} of the time of theirs: at least as fast: {fast}")
    if {"theirs", "ours, cached"} <= found.keys():
        less = found["ours, cached"]["bytes"] <= found["theirs"]["bytes"]
        print(f"batch 16,384 in the memory that theirs needs for 1,024: {'yes' if less else 'NO'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", action="append", required=True, help="a folder of texts; may be given several times")
    parser.add_argument("--model", default="minilm", help="minilm, static or a folder")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=600, help="steps of the first table; 0 skips it")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument(
        "--loss", action="append", choices=list(losses(None, None, 1.0, None)), help="of the first table"
    )
    parser.add_argument("--chunk", type=int, help="texts encoded at a time by ours; none encodes a batch at once")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tests", type=int, default=5000, help="most test texts")
    parser.add_argument("--tau", type=float, default=0.05)
    parser.add_argument("--lr", type=float, help="learning rate of both losses")
    parser.add_argument("--max-len", type=int, default=32)
    parser.add_argument("--speed-steps", type=int, default=8, help="steps of the second table; 0 skips it")
    parser.add_argument("--only", action="append", choices=list(CASES), help="cases of the second table")
    parser.add_argument("--case", choices=list(CASES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        return child(args)
    if args.steps:
        for data in args.data:
            quality(data, args)
    if args.speed_steps:
        speed(args)


if __name__ == "__main__":
    main()
