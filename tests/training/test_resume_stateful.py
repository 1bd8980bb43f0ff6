"""Any sequence of stops, kills and torn checkpoints ends in the run that was never stopped."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from sparring.data.splits import split
from sparring.data.synthetic_world import make_world
from sparring.recipes.settings import build
from sparring.training import checkpoint
from sparring.training.fitting import fit
from sparring.training.loop import TrainingProgress
from support.run_files import contents
from support.settings import effort

PARTS = split(make_world(60, 40, exposure=0.5, relevant=0.4, seed=3).interactions, "random", 0.1, 0.2, seed=1)
SETTINGS: dict[str, Any] = {"dim": 8, "epochs": 2, "batch_size": 128, "patience": None, "cache_size": 32}


class Killed(BaseException):
    """Simulates a kill: nothing may catch it."""


class Resumed(RuleBasedStateMachine):
    """A run that is stopped after some steps, with a checkpoint after some others, again and again."""

    whole: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp())
        self.run = self.home / "run"

    def train(self, folder: Path, progress: TrainingProgress, resume: bool) -> None:
        run = build("xir", PARTS.train, SETTINGS)
        fit(run, PARTS, folder, k=(10,), device="cpu", progress=progress, resume=resume)

    @rule(steps=st.integers(1, 5), saved=st.integers(1, 3))
    def stop(self, steps: int, saved: int) -> None:
        """Train for some steps with a checkpoint after every `saved` of them, then die."""
        left = steps

        def step(epoch: int, done: int, loss: Callable[[], float]) -> bool:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return left % saved == 0

        try:
            self.train(self.run, TrainingProgress(step=step), resume=self.run.exists())
        except Killed:
            return

    @precondition(lambda self: (self.run / checkpoint.PREVIOUS).is_file())
    @rule(kept=st.floats(0.0, 0.99))
    def tear(self, kept: float) -> None:
        """The disk lost the end of the last checkpoint; the previous one is there."""
        content = (self.run / checkpoint.NAME).read_bytes()
        (self.run / checkpoint.NAME).write_bytes(content[: int(len(content) * kept)])

    @rule(name=st.sampled_from(["model.safetensors.tmp", "checkpoint.safetensors.tmp", "run.json.tmp"]))
    def litter(self, name: str) -> None:
        """A killed writer left a part of a file."""
        if self.run.is_dir():
            (self.run / name).write_bytes(b"half")

    def teardown(self) -> None:
        self.train(self.run, TrainingProgress(), resume=self.run.exists())
        for path in self.run.glob("*.tmp"):
            path.unlink()
        found = contents(self.run)
        if not self.whole:
            self.train(self.home / "whole", TrainingProgress(), resume=False)
            self.whole.update(contents(self.home / "whole"))
        assert found.keys() == self.whole.keys()
        for name, value in self.whole.items():
            same = torch.equal(value, found[name]) if isinstance(value, torch.Tensor) else value == found[name]
            assert same, name
        shutil.rmtree(self.home)


Resumed.TestCase.settings = settings(max_examples=effort(4, 80), stateful_step_count=effort(4, 10))


class TestResumed(Resumed.TestCase):  # type: ignore[name-defined,misc]
    """Bitwise equal to an uninterrupted run, whatever happened before."""
