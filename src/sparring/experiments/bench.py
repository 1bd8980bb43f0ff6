"""Speed of the weighted log-sum-exp on this machine: ours, PyTorch's own forms, and the products that all of them need.

for row in measure(torch.device("cuda"), [8192, 65536]): print(row)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from sparring import kernels
from sparring.core.errors import UserError
from sparring.core.figure_style import COLOURS, INK, blank, by_decades, legend, style, tidy
from sparring.core.types import Exclude
from sparring.kernels import chunked

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Precision = Literal["float32", "tf32", "bf16"]
LossForm = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

PLAIN, EXPECTED, DRAWN = "in-batch softmax", "BIR, closed form", "BIR, drawn"
FLOOR = "three products"


@dataclass(frozen=True)
class Timing:
    """Forward and backward of one form over B queries and B candidates."""

    size: int
    method: str
    form: str
    ms: float | None  # of the best round; None if it did not fit
    mib: float | None  # beyond inputs and gradients; None on a CPU, where it is not measured
    floor_ms: float  # of three products of B x B x D in the same precision

    @property
    def ratio(self) -> float | None:
        return None if self.ms is None else self.ms / self.floor_ms


def eager(q: Tensor, emb: Tensor, log_w: Tensor, ids: Tensor) -> Tensor:
    """The usual PyTorch code: the complete matrix of scores, masked, then logsumexp."""
    return torch.logsumexp((q @ emb.T + log_w).masked_fill(ids.unsqueeze(1) == ids, -math.inf), 1)


def eager_expected(q: Tensor, emb: Tensor, log_w: Tensor, ids: Tensor) -> Tensor:
    scores = q @ emb.T
    with torch.no_grad():
        weights = torch.log_softmax((scores + log_w).masked_fill(ids.unsqueeze(1) == ids, -math.inf), 1) + math.log(
            len(emb)
        )
    return torch.logsumexp(scores + weights, 1)


def eager_drawn(q: Tensor, emb: Tensor, log_w: Tensor, ids: Tensor) -> Tensor:
    """As many draws as candidates for each query, gathered, as published."""
    scores = q @ emb.T
    with torch.no_grad():
        chance = torch.softmax((scores + log_w).masked_fill(ids.unsqueeze(1) == ids, -math.inf), 1)
        drawn = torch.multinomial(chance.float(), len(emb), replacement=True)
    return torch.logsumexp(scores.gather(1, drawn), 1)


def ours(draws: bool, seed: Tensor | None = None) -> LossForm:
    def form(q: Tensor, emb: Tensor, log_w: Tensor, ids: Tensor) -> Tensor:
        places = Exclude(ids).places(ids)
        return kernels.weighted_logsumexp(q, emb, log_w, places, float(len(emb)) if draws else None, seed=seed)

    return form


def without_triton(q: Tensor, emb: Tensor, log_w: Tensor, ids: Tensor) -> Tensor:
    return chunked.weighted_logsumexp(q, emb, log_w, Exclude(ids).places(ids))


def forms(device: torch.device, compiled: bool) -> Iterator[tuple[str, str, LossForm]]:
    """(method, form, function) of everything that this device can run."""
    yield PLAIN, "ours", ours(False)
    if device.type == "cuda":
        yield PLAIN, "ours, without Triton", without_triton
    yield PLAIN, "eager", eager
    if compiled:
        yield PLAIN, "torch.compile", torch.compile(eager, dynamic=False)
    yield EXPECTED, "ours", ours(True)
    yield EXPECTED, "eager", eager_expected
    if device.type == "cuda":
        yield DRAWN, "ours", ours(True, torch.tensor([7, 0], device=device))
    yield DRAWN, "eager", eager_drawn


def measure(
    device: torch.device,
    sizes: Sequence[int],
    dim: int = 128,
    precision: Precision = "tf32",
    rounds: int = 5,
    compiled: bool = False,
    most_gib: float = 100.0,
) -> Iterator[Timing]:
    """Forward and backward of every form at each size, B = C, unit vectors at tau = 0.1; no time if it does not fit.

    The floor is three products of B x B x D in the same precision, some rows at a time: the scores, and the gradients
    of both sides.
    """
    if device.type == "cpu" and precision != "float32":
        raise UserError(f"precision {precision} is for a GPU: use float32 on a CPU")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if precision == "float32" else "high")
    try:
        for size in sizes:
            q, emb, log_w, ids = problem(size, dim, torch.bfloat16 if precision == "bf16" else torch.float32, device)
            floor, _ = timed(lambda q=q, emb=emb: products(q.detach(), emb.detach()), device, rounds)  # type: ignore[misc]
            yield Timing(size, FLOOR, "", floor, None, floor)
            for method, name, form in forms(device, compiled):
                fits = "ours" in name or size**2 * 4 * (3 if name == "torch.compile" else 8) < most_gib * 2**30
                ms, mib = run(form, q, emb, log_w, ids, rounds) if fits else (None, None)
                yield Timing(size, method, name, ms, mib, floor)
    finally:
        torch.set_float32_matmul_precision(before)


def problem(size: int, dim: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries and candidates with gradient, log weights, and ids, some of them repeated."""
    g = torch.Generator(device).manual_seed(0)
    emb = torch.nn.functional.normalize(torch.randn(size, dim, device=device, generator=g))
    q = 10 * torch.nn.functional.normalize(torch.randn(size, dim, device=device, generator=g) + emb)
    log_w, ids = (
        torch.randn(size, device=device, generator=g),
        torch.randint(4 * size, (size,), device=device, generator=g),
    )
    return q.to(dtype).requires_grad_(), emb.to(dtype).requires_grad_(), log_w, ids


def products(q: Tensor, emb: Tensor) -> None:
    """Three products of the size of the scores, in parts that fit in memory."""
    step = max(1, (1 << 32 if q.is_cuda else 1 << 22) // len(emb))
    for low in range(0, len(q), step):
        part = q[low : low + step]
        scores = part @ emb.T
        scores @ emb
        scores.T @ part


def run(
    form: LossForm, q: Tensor, emb: Tensor, log_w: Tensor, ids: Tensor, rounds: int
) -> tuple[float | None, float | None]:
    """Milliseconds and MiB of a form; (None, None) if it does not fit."""
    upstream = torch.full((len(q),), 1 / len(q), device=q.device)

    def work() -> None:
        q.grad = emb.grad = None
        value = form(q, emb, log_w, ids)
        value.backward(upstream.to(value.dtype))

    try:
        ms, mib = timed(work, q.device, rounds)
    except torch.OutOfMemoryError:
        return None, None
    finally:
        q.grad = emb.grad = None
    gradients = (q.numel() + emb.numel()) * q.element_size() / 2**20
    return ms, None if mib is None else max(0.0, mib - gradients)


def timed(work: Callable[[], object], device: torch.device, rounds: int) -> tuple[float, float | None]:
    """Milliseconds of the best round after a warm-up and, on a GPU, the peak of additional memory in MiB."""
    work()
    if device.type != "cuda":
        times = []
        for _ in range(rounds):
            started = time.perf_counter()
            work()
            times.append(time.perf_counter() - started)
        return min(times) * 1e3, None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(device)
    held, best = torch.cuda.memory_allocated(device), math.inf
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end))
    return best, (torch.cuda.max_memory_allocated(device) - held) / 2**20


def cells(rows: Sequence[Timing]) -> list[list[str]]:
    """The rows as a table of text, header first."""
    table = [["B = C", "method", "form", "ms", "of three products", "MiB beyond inputs and gradients"]]
    for row in rows:
        ms = "does not fit" if row.ms is None else f"{row.ms:,.3f}"
        ratio, mib = "" if row.ratio is None else f"{row.ratio:.2f}", "" if row.mib is None else f"{row.mib:,.0f}"
        table.append([f"{row.size:,}", row.method, row.form, ms, ratio, mib])
    return table


def record(rows: Sequence[Timing]) -> list[dict[str, Any]]:
    """The rows as plain values, for JSON."""
    return [asdict(row) | {"ratio": row.ratio} for row in rows]


def figure(rows: Sequence[Timing]) -> Figure:
    """Time and, if measured, memory against B, both axes logarithmic; the dotted line is the floor."""
    with_memory = any(row.mib is not None for row in rows)
    drawn = blank(4.0, 11.5 if with_memory else 7.0)
    colours = {PLAIN: COLOURS[0], EXPECTED: COLOURS[2], DRAWN: COLOURS[1], FLOOR: INK}
    styles = {
        "ours": ("-", "o"),
        "ours, without Triton": ("-.", "v"),
        "eager": ("--", "s"),
        "torch.compile": (":", "^"),
        "": (":", None),
    }
    sizes = sorted({row.size for row in rows})
    with style():
        panels = drawn.subplots(1, 2 if with_memory else 1, squeeze=False)[0]
        labels = {"ms": "ms, forward and backward", "mib": "MiB beyond inputs and gradients"}
        for axes, (value, label) in zip(panels, labels.items(), strict=False):
            for method, form in dict.fromkeys((row.method, row.form) for row in rows):
                own = [row for row in rows if (row.method, row.form) == (method, form) and getattr(row, value)]
                if not own:
                    continue
                line, marker = styles[form]
                axes.plot(
                    [row.size for row in own],
                    [getattr(row, value) for row in own],
                    color=colours[method],
                    linestyle=line,
                    marker=marker,
                    markersize=4,
                    label=f"{method}: {form}" if form else method,
                )
            axes.set(xscale="log", yscale="log", xlabel="queries = candidates", ylabel=label)
            axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
            axes.minorticks_off()
            by_decades(axes.yaxis)
            tidy(axes, "both")
        legend(drawn, panels[0])
    return drawn
