"""How fast the weighted log-sum-exp is on this machine: ours, PyTorch's own forms, and the matrix products that no form can do without.

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
from sparring.core.types import Exclude
from sparring.kernels import chunked

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Precision = Literal["float32", "tf32", "bf16"]
Form = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

PLAIN, EXPECTED, DRAWN = "in-batch softmax", "BIR, closed form", "BIR, drawn"
FLOOR = "three products"


@dataclass(frozen=True)
class Row:
    """Forward and backward of one form over B queries and B candidates."""

    size: int
    method: str
    form: str
    ms: float | None  # of the best round; None: it did not fit
    mib: float | None  # beyond inputs and gradients; None where it is not measured (on a CPU)
    floor_ms: float  # of three products of B x B x D in the same precision

    @property
    def ratio(self) -> float | None:
        return None if self.ms is None else self.ms / self.floor_ms


def eager(q: Tensor, emb: Tensor, log_w: Tensor, ids: Tensor) -> Tensor:
    """What PyTorch code writes: the whole matrix of scores, masked, then logsumexp."""
    return torch.logsumexp((q @ emb.T + log_w).masked_fill(ids.unsqueeze(1) == ids, -math.inf), 1)


def eager_expected(q: Tensor, emb: Tensor, log_w: Tensor, ids: Tensor) -> Tensor:
    scores = q @ emb.T
    with torch.no_grad():
        weights = torch.log_softmax((scores + log_w).masked_fill(ids.unsqueeze(1) == ids, -math.inf), 1) + math.log(
            len(emb)
        )
    return torch.logsumexp(scores + weights, 1)


def eager_drawn(q: Tensor, emb: Tensor, log_w: Tensor, ids: Tensor) -> Tensor:
    """As many draws as candidates for each query, gathered: the published form."""
    scores = q @ emb.T
    with torch.no_grad():
        chance = torch.softmax((scores + log_w).masked_fill(ids.unsqueeze(1) == ids, -math.inf), 1)
        drawn = torch.multinomial(chance.float(), len(emb), replacement=True)
    return torch.logsumexp(scores.gather(1, drawn), 1)


def ours(draws: bool, seed: Tensor | None = None) -> Form:
    def form(q: Tensor, emb: Tensor, log_w: Tensor, ids: Tensor) -> Tensor:
        places = Exclude(ids).places(ids)
        return kernels.weighted_logsumexp(q, emb, log_w, places, float(len(emb)) if draws else None, seed=seed)

    return form


def without_triton(q: Tensor, emb: Tensor, log_w: Tensor, ids: Tensor) -> Tensor:
    return chunked.weighted_logsumexp(q, emb, log_w, Exclude(ids).places(ids))


def forms(device: torch.device, compiled: bool) -> Iterator[tuple[str, str, Form]]:
    """(method, form, function) of everything that can be measured here."""
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
) -> Iterator[Row]:
    """Forward and backward of every form at each size, B = C, unit vectors at tau = 0.1; forms that would not fit are told without a time.

    The floor is three products of B x B x D in the same precision, some rows at a time: the scores, and the gradients of both sides.
    """
    if device.type == "cpu" and precision != "float32":
        raise UserError(f"precision {precision} is for a GPU: use float32 on a CPU")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if precision == "float32" else "high")
    try:
        for size in sizes:
            q, emb, log_w, ids = problem(size, dim, torch.bfloat16 if precision == "bf16" else torch.float32, device)
            floor, _ = timed(lambda q=q, emb=emb: products(q.detach(), emb.detach()), device, rounds)  # type: ignore[misc]
            yield Row(size, FLOOR, "", floor, None, floor)
            for method, name, form in forms(device, compiled):
                fits = "ours" in name or size**2 * 4 * (3 if name == "torch.compile" else 8) < most_gib * 2**30
                ms, mib = run(form, q, emb, log_w, ids, rounds) if fits else (None, None)
                yield Row(size, method, name, ms, mib, floor)
    finally:
        torch.set_float32_matmul_precision(before)


def problem(size: int, dim: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries and candidates with gradient, log weights, and ids of which some repeat."""
    g = torch.Generator(device).manual_seed(0)
    emb = torch.nn.functional.normalize(torch.randn(size, dim, device=device, generator=g))
    q = 10 * torch.nn.functional.normalize(torch.randn(size, dim, device=device, generator=g) + emb)
    log_w, ids = (
        torch.randn(size, device=device, generator=g),
        torch.randint(4 * size, (size,), device=device, generator=g),
    )
    return q.to(dtype).requires_grad_(), emb.to(dtype).requires_grad_(), log_w, ids


def products(q: Tensor, emb: Tensor) -> None:
    """Three products of the size of the scores, a part of the rows at a time so that they fit."""
    step = max(1, (1 << 32 if q.is_cuda else 1 << 22) // len(emb))
    for low in range(0, len(q), step):
        part = q[low : low + step]
        scores = part @ emb.T
        scores @ emb
        scores.T @ part


def run(
    form: Form, q: Tensor, emb: Tensor, log_w: Tensor, ids: Tensor, rounds: int
) -> tuple[float | None, float | None]:
    """Milliseconds and MiB of a form; (None, None) where it does not fit."""
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
    """Milliseconds of the best round after one that is not counted, and on a GPU the most memory beyond what was held before, in MiB."""
    work()
    if device.type != "cuda":
        times = []
        for _ in range(rounds):
            began = time.perf_counter()
            work()
            times.append(time.perf_counter() - began)
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


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """The rows as a table of text, header first."""
    table = [["B = C", "method", "form", "ms", "of three products", "MiB beyond inputs and gradients"]]
    for row in rows:
        ms = "does not fit" if row.ms is None else f"{row.ms:,.3f}"
        ratio, mib = "" if row.ratio is None else f"{row.ratio:.2f}", "" if row.mib is None else f"{row.mib:,.0f}"
        table.append([f"{row.size:,}", row.method, row.form, ms, ratio, mib])
    return table


def record(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows as plain values, for JSON."""
    return [asdict(row) | {"ratio": row.ratio} for row in rows]


def figure(rows: Sequence[Row]) -> Figure:
    """Time and, where it was measured, memory against B, both axes logarithmic; the floor is the dotted line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with_memory = any(row.mib is not None for row in rows)
    drawn = Figure(figsize=(11.5 if with_memory else 7.0, 4.0), layout="constrained")
    FigureCanvasAgg(drawn)
    axes = drawn.subplots(1, 2 if with_memory else 1, squeeze=False)[0]
    names = list(dict.fromkeys((row.method, row.form) for row in rows))
    colours = {PLAIN: "#0072b2", EXPECTED: "#009e73", DRAWN: "#d55e00", FLOOR: "#20242b"}
    styles = {
        "ours": ("-", "o"),
        "ours, without Triton": ("-.", "v"),
        "eager": ("--", "s"),
        "torch.compile": (":", "^"),
        "": (":", None),
    }
    for method, form in names:
        line, marker = styles[form]
        for at, value in zip(axes, ("ms", "mib"), strict=False):
            points = [
                (row.size, getattr(row, value))
                for row in rows
                if (row.method, row.form) == (method, form) and getattr(row, value)
            ]
            if points:
                label = f"{method}: {form}" if form else method
                at.plot(
                    *zip(*points, strict=True),
                    color=colours[method],
                    linestyle=line,
                    marker=marker,
                    markersize=4,
                    label=label,
                )
    for at, label in zip(axes, ("ms, forward and backward", "MiB beyond inputs and gradients"), strict=False):
        at.set(xscale="log", yscale="log", xlabel="queries = candidates", ylabel=label)
        sizes = sorted({row.size for row in rows})
        at.set_xticks(sizes, [f"{size:,}" for size in sizes])
        at.minorticks_off()
        at.grid(alpha=0.3, which="major")
    drawn.legend(*axes[0].get_legend_handles_labels(), fontsize=8, frameon=False, loc="outside right upper")
    return drawn
