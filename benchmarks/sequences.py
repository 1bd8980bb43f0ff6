"""Sequence models: quality by leave-one-out, CPU seconds beside RecTools' SASRec, seconds beside a plain loop on a GPU.

    python benchmarks/sequences.py quality --data amazon_beauty --model ligr --recipe uns --seeds 3 --device cuda
    python benchmarks/sequences.py cpu --rectools-python peer/bin/python
    python benchmarks/sequences.py loop --device cuda

quality: a user's last item is test and the one before valid, in time order (ML-1M: the file's order of equal times);
the complete catalogue is ranked, without the items of the history; the epoch is chosen by NDCG@10 on the validation
part, and the test lists know the validation item. Settings are those of the recipe and the model unless --set changes
them; windows are as long as the published ones. Published by eSASRec's benchmark, R@10 / N@10: Beauty .0928 / .0523
(eSASRec), .0921 / .0531 (SASRec); ML-1M .3164 / .1813 (FuXi-alpha), .3133 / .1772 (eSASRec).

cpu and loop: one SASRec over ML-1M, 2 blocks, 64 dimensions, the last 200 items, 256 uniform negatives, batches of 128
users, dropout 0.1, Adam. The peer of `cpu` runs in its own process and interpreter (`pip install "rectools[torch]"`).
RecTools draws 256 negatives for each position, ours serve the whole batch; its default, a softmax over the catalogue,
draws none and stands beside it. The peer of `loop` is an eager loop over padded windows on the device, with the same
blocks and with shared negatives; the two alternate.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from _shared import DATA, Clock, table
from sparring import Split, build, fit, read, split
from sparring.data.interactions import Interactions
from sparring.models.attention import SasRecBlock
from sparring.training.loop import TrainingProgress

HERE = Path(__file__).resolve().parent
LENGTH, USERS, DIM, BLOCKS, DRAWN, DROPOUT = 200, 128, 64, 2, 256, 0.1
WINDOW = {"amazon_beauty": 50, "ml1m_mm": LENGTH}  # items of a history in the published figures


def quality(given: argparse.Namespace) -> None:
    """The test figures of each seed, and their mean."""
    parts = leave_one_out(given.data)
    own = dict(each.split("=", 1) for each in given.set)
    usual: dict[str, object] = {"history": WINDOW.get(given.data, 50), "select": "ndcg@10"}
    figures = []
    for seed in range(given.seeds):
        run = build(given.recipe, parts.train, {**usual, **own, "seed": seed}, model=given.model)
        began = time.perf_counter()
        fitted = fit(run, parts, k=(10,), device=given.device)
        assert fitted.test is not None
        figures.append([fitted.test.metrics[name] for name in ("recall@10", "ndcg@10")])
        valid = max(record["ndcg@10"] for record in fitted.history if "ndcg@10" in record)
        print(
            f"seed {seed}: test R@10 {figures[-1][0]:.4f}, N@10 {figures[-1][1]:.4f}; validation N@10 {valid:.4f}, "
            f"{len(fitted.history)} epochs in {time.perf_counter() - began:.0f} s",
            flush=True,
        )
    recall, ndcg = (mean(column) for column in zip(*figures, strict=True))
    print(f"{given.data}, {given.model}, {given.recipe}, {own}: {recall:.4f} / {ndcg:.4f}, mean of {given.seeds} seeds")


def cpu(given: argparse.Namespace) -> None:
    """CPU seconds of an epoch, ours and RecTools' in turn."""
    torch.set_num_threads(given.threads)
    train = leave_one_out(given.data).train
    spent: dict[str, list[float]] = {"ours": []}
    for _ in range(given.rounds):
        spent["ours"] += [seconds[0] for seconds in ours(train, "cpu", "float32", given.epochs)]
        for loss in given.losses.split(","):
            found = rectools(train, given.rectools_python, loss, given.threads, given.epochs)
            spent.setdefault(f"RecTools, {loss}", []).extend(seconds[0] for seconds in found)
    rows = [[name, f"{min(found):.1f}", f"{mean(found):.1f}"] for name, found in spent.items() if found]
    print(table(["ML-1M, an epoch of SASRec", "CPU s, best", "CPU s, mean"], rows))
    peers = [min(found) for name, found in spent.items() if name != "ours" and found]
    if peers:
        ratio = min(peers) / min(spent["ours"])
        print(f"\nfaster than RecTools: {'yes' if ratio > 1 else 'NO'} ({ratio:.1f} times its fastest)")


def loop(given: argparse.Namespace) -> None:
    """Seconds of an epoch, ours and the plain loop's in turn; the first epoch of each turn, a warm-up, is left out."""
    train = leave_one_out(given.data).train
    torch.set_float32_matmul_precision("high")  # tf32, as in our runs
    how = given.device, given.precision, given.epochs + 1
    walls: dict[str, list[float]] = {"ours": [], "plain loop": []}
    for _ in range(given.rounds):
        walls["ours"] += [seconds[1] for seconds in ours(train, *how)][1:]
        walls["plain loop"] += list(plain_epochs(train, *how))[1:]
    rows = [[name, f"{min(found):.3f}", f"{mean(found):.3f}"] for name, found in walls.items()]
    print(table([f"ML-1M, an epoch of SASRec, {given.precision}", "s, best", "s, mean"], rows))
    ratio = mean(walls["plain loop"]) / mean(walls["ours"])
    print(f"\nat least 3 times as fast as a plain eager loop: {'yes' if ratio >= 3 else 'NO'} ({ratio:.1f} times)")


def leave_one_out(data: str) -> Split:
    return split(read(DATA / data / "interactions.parquet"), "leave-last-out")


def in_order(train: Interactions) -> tuple[np.ndarray, np.ndarray]:
    """Queries and items of the rows, query by query in time order; equal times in the order of items, as in splits."""
    assert train.time is not None
    order = np.lexsort((train.items, train.time, train.queries))
    return train.queries[order], train.items[order]


def ours(train: Interactions, device: str, precision: str, epochs: int) -> list[tuple[float, float]]:
    """(CPU seconds, wall seconds) of each epoch through `fit`."""
    positions = np.minimum(np.bincount(train.queries) - 1, LENGTH).clip(0).sum()
    steps = -(-train.n_queries // USERS)
    settings = {
        "n": DRAWN,
        "dim": DIM,
        "score": "dot",
        "tau": 1.0,
        "history": LENGTH,
        "model.blocks": BLOCKS,
        "model.heads": 1,
        "model.inner_dropout": DROPOUT,
        "batch_size": int(-(-positions // steps)),  # as many steps an epoch as batches of users
        "optimizer": "adam",
        "lr": 0.001,
        "precision": precision,
        "epochs": epochs,
        "patience": None,
    }
    run = build("uns", train, settings, model="sasrec")
    found: list[tuple[float, float]] = []
    clock = Clock()

    def started(epochs: int, steps: int) -> None:
        nonlocal clock
        clock = Clock()

    def ended(record: dict[str, Any]) -> None:
        nonlocal clock
        wait(device)
        found.append(clock.read())
        clock = Clock()

    fit(run, Split(train), device=device, progress=TrainingProgress(start=started, epoch=ended))
    return found


class PlainSasRec(nn.Module):
    """SASRec over padded windows, as one writes it in PyTorch; item 0 is padding."""

    def __init__(self, n_items: int) -> None:
        super().__init__()
        self.items = nn.Embedding(n_items + 1, DIM, padding_idx=0)
        self.positions = nn.Embedding(LENGTH, DIM)
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.ModuleList(SasRecBlock(DIM, 1, DROPOUT) for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(DIM)
        nn.init.normal_(self.items.weight, std=DIM**-0.5)

    def forward(self, ids: Tensor) -> Tensor:
        place = torch.arange(LENGTH, device=ids.device)
        inside = ids > 0
        allowed = (place.unsqueeze(1) >= place) & inside.unsqueeze(1) & inside.unsqueeze(2)
        x = self.dropout(self.items(ids) * DIM**0.5 + self.positions(place))
        for block in self.blocks:
            x = block(x, allowed, place.expand_as(ids), None)
        encoded: Tensor = self.norm(x)
        return encoded


def plain_epochs(train: Interactions, device: str, precision: str, epochs: int) -> Iterator[float]:
    """Wall seconds of each epoch of an eager loop; the windows (users, length + 1), padded on the left, are there."""
    queries, items = in_order(train)
    windows = np.zeros((train.n_queries, LENGTH + 1), np.int64)
    ends = np.cumsum(np.bincount(queries, minlength=train.n_queries))
    place = ends[queries] - np.arange(len(queries))  # 1 = a user's last item
    kept = place <= LENGTH + 1
    windows[queries[kept], LENGTH + 1 - place[kept]] = items[kept] + 1
    data = torch.from_numpy(windows).to(device)
    torch.manual_seed(0)
    model = PlainSasRec(train.n_items).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    for _ in range(epochs):
        wait(device)
        began = time.perf_counter()
        for users in torch.randperm(len(data), device=device).split(USERS):
            batch = data[users]
            targets = batch[:, 1:]
            drawn = torch.randint(1, train.n_items + 1, (DRAWN,), device=device)
            with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
                encoded = model(batch[:, :-1])
                positive = (encoded * model.items(targets)).sum(-1, keepdim=True)
                negative = (encoded @ model.items(drawn).T).masked_fill(targets.unsqueeze(-1) == drawn, -torch.inf)
                logits = torch.cat([positive, negative], -1)
                losses = F.cross_entropy(logits.flatten(0, 1), torch.zeros_like(targets).flatten(), reduction="none")
            counted = (targets > 0) & (batch[:, :-1] > 0)
            loss = (losses * counted.flatten()).sum() / counted.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        wait(device)
        yield time.perf_counter() - began


def rectools(train: Interactions, python: str, loss: str, threads: int, epochs: int) -> list[tuple[float, float]]:
    """(CPU seconds, wall seconds) of each epoch of RecTools' SASRec; [] with a message where it is absent."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "sequences.npz"
        queries, items = in_order(train)
        np.savez(source, queries=queries, items=items)
        ran = subprocess.run(
            [python, str(HERE / "_rectools_child.py"), str(source), loss, str(threads), str(epochs)],
            env=os.environ | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads)),
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    if ran.returncode:
        last = (ran.stderr.strip().splitlines() or ["no message"])[-1]
        print(f"RecTools: skipped ({last}); pip install 'rectools[torch]' and name it with --rectools-python PATH")
        return []
    return [(cpu, wall) for cpu, wall in json.loads(ran.stdout.splitlines()[-1])]


def wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    works: dict[str, Callable[[argparse.Namespace], None]] = {"quality": quality, "cpu": cpu, "loop": loop}
    for name, work in works.items():
        command = commands.add_parser(name, help=(work.__doc__ or "").splitlines()[0])
        command.add_argument("--data", default="ml1m_mm", help="folder of SPARRING_DATA")
        if name == "quality":
            command.add_argument("--model", default="ligr", choices=("sasrec", "ligr", "hstu"))
            command.add_argument("--recipe", default="uns")
            command.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
            command.add_argument("--seeds", type=int, default=3)
        else:
            command.add_argument("--epochs", type=int, default=1 if name == "cpu" else 5, help="measured in a turn")
            command.add_argument("--rounds", type=int, default=1 if name == "cpu" else 3, help="turns of each")
        if name == "cpu":
            command.add_argument("--threads", type=int, default=1)
            command.add_argument("--losses", default="sampled_softmax,softmax", help="of RecTools")
            command.add_argument("--rectools-python", default=os.environ.get("RECTOOLS_PYTHON", sys.executable))
        else:
            command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        if name == "loop":
            command.add_argument("--precision", default="tf32", choices=("tf32", "bf16"), help="of both")
    given = parser.parse_args()
    works[given.command](given)


if __name__ == "__main__":
    main()
