"""A training step as a CUDA graph: captured once, then launched in one call.

A step over a few thousand rows has a hundred or more small kernels, and the GPU finishes each one before the host has
launched the next. As a graph they are launched together: a step of 3 to 5 ms then takes 0.3 to 0.8 ms.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from sparring.core.errors import first_line

EAGER_STEPS = (
    3  # before the capture: they allocate optimiser state, load kernels, and show whether the step synchronises
)


class CudaGraphStep:
    """`work(*tensors)`, replayed as a graph after its first calls; eager if a shape differs or capture fails.

    A graph repeats the captured launches on the same memory. The work must therefore keep all state in tensors that it
    changes in place, and must draw from `generator` alone; after a module replaces a tensor, call `forget()`. Work that
    waits for the device (its shapes depend on values) cannot be captured; the eager steps detect it, and `why` says so.

        step = CudaGraphStep(work, generator);  step(rows)
    """

    def __init__(self, work: Callable[..., None], generator: torch.Generator):
        self.work, self.generator = work, generator
        self.stream = torch.cuda.Stream(generator.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: tuple[Tensor, ...] | None = None  # of the graph
        self.eager = 0  # eager steps so far
        self.why: str | None = None  # why it is not captured

    def forget(self) -> None:
        """Capture again at the next call."""
        self.graph = None

    def __call__(self, *tensors: Tensor) -> None:
        shapes = [tensor.shape for tensor in tensors]
        if self.why is not None or (self.inputs is not None and shapes != [tensor.shape for tensor in self.inputs]):
            self.work(*tensors)
        elif self.eager < EAGER_STEPS:
            self._run_eagerly(tensors)
        else:
            if self.graph is None and not self._capture():
                self.work(*tensors)
                return
            assert self.graph is not None
            assert self.inputs is not None
            for kept, tensor in zip(self.inputs, tensors, strict=True):
                kept.copy_(tensor)
            self.graph.replay()

    def _run_eagerly(self, tensors: tuple[Tensor, ...]) -> None:
        if self.inputs is None:
            self.inputs = tuple(tensor.clone() for tensor in tensors)
        self.eager += 1
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            before = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("warn" if self.eager == EAGER_STEPS else before)
            try:
                self.work(*tensors)
            finally:
                torch.cuda.set_sync_debug_mode(before)
        torch.cuda.current_stream().wait_stream(self.stream)
        for warning in caught:
            if "synchronizing CUDA operation" in str(warning.message):
                self.why = f"it waits for the device at {warning.filename}:{warning.lineno}"
            elif "Synchronization debug mode" not in str(warning.message):
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)

    def _capture(self) -> bool:
        assert self.inputs is not None
        graph = torch.cuda.CUDAGraph()
        shared = torch.cuda.default_generators[self.stream.device.index]  # used by dropout
        before, shared_before = self.generator.clone_state(), shared.clone_state()
        try:
            graph.register_generator_state(self.generator)
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                self.work(*self.inputs)
        except RuntimeError as error:  # nothing has run: the step is done eagerly
            self.why = first_line(error)
            torch.cuda.synchronize()
            self.generator.graphsafe_set_state(before)  # the failed capture still holds the current one
            shared.graphsafe_set_state(shared_before)
            return False
        self.graph = graph
        return True
