"""A training step as a CUDA graph: recorded once, launched as a whole.

A step over a few thousand rows is a hundred or more small kernels, and a GPU finishes each before the host has launched the next. Recorded,
they are launched together: a step that takes 3 to 5 ms launch by launch takes 0.3 to 0.8.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from sparring.core.errors import first_line

PLAIN_STEPS = (
    3  # run as they are before one is recorded: they allocate optimiser state, load kernels, and show whether any waits
)


class Recorded:
    """`work(rows)`, replayed as a graph after its first calls; with rows of another number, or where it cannot be recorded, as it is.

    A graph repeats what was launched when it was recorded, on the same memory. So the work must keep all state in tensors that it changes
    in place and must draw from `generator` alone; a module that replaces a tensor between calls needs `forget()`. Work that waits for
    the device (its shapes depend on values) cannot be recorded: that is found out while it runs as it is, and `why` then says so.

        step = Recorded(work, generator);  step(rows)
    """

    def __init__(self, work: Callable[[Tensor], None], generator: torch.Generator):
        self.work, self.generator = work, generator
        self.stream = torch.cuda.Stream(generator.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.rows: Tensor | None = None  # what the graph reads
        self.plain = 0  # steps run as they are
        self.why: str | None = None  # it is not recorded

    def forget(self) -> None:
        """Record again at the next call."""
        self.graph = None

    def __call__(self, rows: Tensor) -> None:
        if self.why is not None or (self.rows is not None and len(rows) != len(self.rows)):
            self.work(rows)
        elif self.plain < PLAIN_STEPS:
            self._run_plain(rows)
        else:
            if self.graph is None and not self._record():
                self.work(rows)
                return
            assert self.graph is not None
            assert self.rows is not None
            self.rows.copy_(rows)
            self.graph.replay()

    def _run_plain(self, rows: Tensor) -> None:
        if self.rows is None:
            self.rows = rows.clone()
        self.plain += 1
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            before = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("warn" if self.plain == PLAIN_STEPS else before)
            try:
                self.work(rows)
            finally:
                torch.cuda.set_sync_debug_mode(before)
        torch.cuda.current_stream().wait_stream(self.stream)
        for warning in caught:
            if "synchronizing CUDA operation" in str(warning.message):
                self.why = f"it waits for the device at {warning.filename}:{warning.lineno}"
            elif "Synchronization debug mode" not in str(warning.message):
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)

    def _record(self) -> bool:
        assert self.rows is not None
        graph = torch.cuda.CUDAGraph()
        shared = torch.cuda.default_generators[self.stream.device.index]  # of dropout
        before, shared_before = self.generator.clone_state(), shared.clone_state()
        try:
            graph.register_generator_state(self.generator)
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                self.work(self.rows)
        except RuntimeError as error:  # nothing has run: the step is done as it is
            self.why = first_line(error)
            torch.cuda.synchronize()
            self.generator.graphsafe_set_state(
                before
            )  # those that the failed recording holds can no longer be drawn from
            shared.graphsafe_set_state(shared_before)
            return False
        self.graph = graph
        return True
