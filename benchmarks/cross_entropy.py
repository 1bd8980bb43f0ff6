"""Claim: on the plain softmax the fused log-sum-exp is faster than Cut Cross-Entropy and Liger's kernel (one GPU).

    pip install cut-cross-entropy liger-kernel
    python benchmarks/cross_entropy.py --device cuda [--sizes 8192,65536]

The mean over B queries of -log softmax of the query's own candidate among B, forward and backward, bf16, d = 128; no
weights and no exclusions, since the others have neither. The best of several rounds. By default Cut Cross-Entropy
skips blocks of the gradient that are small everywhere; "exact" does not. Liger takes the scores in parts as large as
the inputs; "larger parts" are 64 times that. Errors are of the gradients by queries and by candidates against
float64, at the smallest size.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import torch
from torch import Tensor

from _shared import table
from sparring import kernels
from sparring.experiments import bench

Form = Callable[
    [Tensor, Tensor, Tensor], Tensor
]  # queries, candidates, index of each query's own candidate -> mean loss
OURS, CUT, EXACT, LIGER, WIDE = "ours", "Cut Cross-Entropy", "Cut Cross-Entropy, exact", "Liger", "Liger, larger parts"


def ours(q: Tensor, emb: Tensor, own: Tensor) -> Tensor:
    return (
        kernels.weighted_logsumexp(q, emb, q.new_zeros((), dtype=torch.float32)) - (q.float() * emb.float()).sum(1)
    ).mean()


def forms() -> Iterator[tuple[str, Form]]:
    """Ours, and the peers that are installed."""
    yield OURS, ours
    if find_spec("cut_cross_entropy"):
        from cut_cross_entropy import linear_cross_entropy  # type: ignore[import-not-found]

        yield CUT, lambda q, emb, own: linear_cross_entropy(q, emb, own)
        yield EXACT, lambda q, emb, own: linear_cross_entropy(q, emb, own, filter_eps=None)
    if find_spec("liger_kernel"):
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction  # type: ignore[import-not-found]

        yield LIGER, lambda q, emb, own: LigerFusedLinearCrossEntropyFunction.apply(q, emb, own)[0]
        # by position: the last argument bounds the scores held at once, as a multiple of the inputs
        few = (None, None, -100, 0.0, 0.0, "mean", None, False, None, False, False, False, None, None, 64)
        yield WIDE, lambda q, emb, own: LigerFusedLinearCrossEntropyFunction.apply(q, emb, own, *few)[0]


def truth(q: Tensor, emb: Tensor) -> tuple[Tensor, Tensor]:
    """Both gradients in float64, a block of rows at a time."""
    q, emb = q.detach().double(), emb.detach().double()
    grad_q, grad_emb = torch.empty_like(q), torch.zeros_like(emb)
    for low in range(0, len(q), 2048):
        part = q[low : low + 2048]
        share = torch.softmax(part @ emb.T, 1)
        share[torch.arange(len(part)), low + torch.arange(len(part))] -= 1
        grad_q[low : low + 2048] = share @ emb / len(q)
        grad_emb += share.T @ part / len(q)
    return grad_q, grad_emb


def measured(
    size: int, dim: int, rounds: int, device: torch.device, check: bool
) -> dict[str, tuple[float, float | None, str]]:
    """Milliseconds, MiB beyond inputs and gradients, and errors of each form."""
    q, emb, _, _ = bench.problem(size, dim, torch.bfloat16, device)
    own, found, exact = torch.arange(size, device=device), {}, truth(q, emb) if check else None
    for name, form in forms():

        def work(form: Form = form) -> None:
            q.grad = emb.grad = None
            form(q, emb, own).backward()

        try:
            ms, mib = bench.timed(work, device, rounds)
        except Exception as error:  # a fault of the other library: report it and continue
            print(
                f"{name} at {size:,} did not run: {type(error).__name__}: {str(error).strip().splitlines()[-1][:200]}",
                flush=True,
            )
            continue
        assert q.grad is not None
        assert emb.grad is not None
        errors = [
            f"{float((x.grad.double() - right).norm() / right.norm()):.1e}"
            for x, right in zip((q, emb), exact or (), strict=False)
        ]
        found[name] = (
            ms,
            None if mib is None else max(0.0, mib - 2 * (q.numel() + emb.numel()) / 2**20),
            ", ".join(errors),
        )
        q.grad = emb.grad = None
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sizes", default="8192,16384,65536")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("skipped: this benchmark needs a GPU")
    device, sizes = torch.device(given.device), [int(size) for size in given.sizes.split(",")]
    rows = []
    for size in sizes:
        found = measured(size, given.dim, given.rounds, device, size == min(sizes))
        rows += [
            [f"{size:,}", name, f"{ms:.3f}", f"{ms / found[OURS][0]:.2f}", "" if mib is None else f"{mib:,.0f}", errors]
            for name, (ms, mib, errors) in found.items()
        ]
    print(f"\nsoftmax cross-entropy, forward and backward, B = C, d = {given.dim}, bf16\n")
    print(
        table(["B = C", "form", "ms", "times ours", "MiB beyond inputs and gradients", "errors of the gradients"], rows)
    )
    for name, (ms, _, _) in found.items():
        if name != OURS:
            ratio = ms / found[OURS][0]
            print(f"{name} takes {ratio:.2f} times as long, above 1: {'yes' if ratio > 1 else 'NO'}")
    if len(found) == 1:
        print("no peer installed: pip install cut-cross-entropy liger-kernel")


if __name__ == "__main__":
    main()
