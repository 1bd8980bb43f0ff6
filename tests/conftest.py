"""Fixtures shared by several test files: a small world with known truth, its parts, and the real data folder."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported

from sparring.core import files
from sparring.data.interactions import Split
from sparring.data.splits import split
from sparring.data.synthetic_world import SyntheticWorld, make_world
from sparring.testing import NegativesContract
from sparring.training import curve
from support.settings import effort

# Fixed examples and no deadline, so that a failure is never caused by the machine. For random examples: `pytest
# --hypothesis-profile default`.
hypothesis.settings.register_profile("sparring", derandomize=True, deadline=None)
hypothesis.settings.load_profile("sparring")

# The wrong samplers of tests/negatives/test_contract_rejects.py fail with 10,000 draws and 100 trials.
NegativesContract.draws = effort(30_000, NegativesContract.draws)
NegativesContract.trials = effort(200, NegativesContract.trials)

# A curve takes four times as long as a small training, so only tests that use the fixture `curves` draw any.
drawn_curve = curve.training_curve
curve.training_curve = lambda history, path, *_: files.write(path, lambda file: file.write_bytes(b"no curve"))

HERE = Path(__file__).parent

# Tests that kill processes, open browsers, start databases or Spark, or train on several ranks: `make test-slow`.
SLOW = (
    "cli/test_endings.py",
    "cli/test_prepare.py::test_killed",
    "data/test_prepared_spark.py",
    "data/test_remote.py",
    "experiments/test_auto_kills.py",
    "several_ranks/",
    "serving/http/test_faults.py",
    "serving/http/test_openapi.py",
    "serving/http/test_page.py",
    "serving/http/test_workers.py",
    "serving/test_bit_rot.py::test_one_flipped_bit",
    "serving/test_export_databases.py",
    "test_notebooks.py::test_the_cells_run",
    "test_wheel.py",
    "training/test_lock.py",
    "training/test_matrix.py",
    "training/test_resume.py::test_killed",
    "training/test_text_trainer.py::test_two_ranks",
)
# Contracts, losses, reference kernels, data, statistics: `make test-fast`.
FAST = (
    "core/",
    "data/",
    "evaluation/",
    "kernels/test_mixtures_chunked.py",
    "kernels/test_reference_and_chunked.py",
    "losses/",
    "negatives/",
    "recipes/test_settings.py",
    "test_public_names.py",
)
# Of these folders, but they start processes, read encoders, train, or take ten seconds or more.
MEDIUM = (
    "core/test_elsewhere.py",
    "core/test_files.py::test_a_lock_excludes_other_processes",
    "core/test_processes.py",
    "core/test_rooms.py::test_nothing_that_ships_needs_pytest",
    "core/test_workers.py",
    "data/test_encoders.py",
    "data/test_modalities.py",
    "data/test_modality_sources.py",
    "data/test_prepared.py",
    "data/test_public_sets.py",
    "data/test_texts.py::test_hashed_words_are_the_same_in_every_process",
    "losses/test_distillation.py::test_as_a_term",
    "negatives/test_cluster_counts.py",
    "negatives/test_contract_rejects.py",
)

# Tests of these files share what a fixture trains or starts, so one process runs a file's tests.
TOGETHER = (
    "cli/test_novelty.py",
    "cli/test_texts.py",
    "data/test_prepared_spark.py",
    "data/test_remote.py",
    "experiments/test_auto.py",
    "experiments/test_book.py",
    "experiments/test_comparison.py",
    "experiments/test_diagnosis_report.py",
    "experiments/test_mining.py",
    "experiments/test_papers",
    "experiments/test_report.py",
    "serving/http/test_fused.py",
    "serving/http/test_page.py",
    "serving/http/test_workers.py",
    "serving/test_export",
    "several_ranks/test_equality.py",
    "training/test_fusing.py",
    "training/test_novelty.py",
    "training/test_stages.py",
)
# Single tests of many seconds, which start first so that no process is left alone with one.
LONG = ("several_ranks/test_launch.py::test_faults", "test_examples.py", "recipes/test_own_recipes.py", "kernels/")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import the files of other tiers for `-m fast` and `-m slow`."""
    tier = {"fast": FAST, "slow": SLOW}.get(config.option.markexpr)
    if tier is None or collection_path.suffix != ".py":
        return None
    place = collection_path.relative_to(HERE).as_posix()
    wanted = place.startswith(tuple(path.split("::")[0] for path in tier))
    return None if wanted and not (tier is FAST and place.startswith(MEDIUM)) else True


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give single tests to the processes of pytest-xdist, and the files TOGETHER whole; pytest 9 breaks xdist_group."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            together = nodeid.removeprefix("tests/").startswith(TOGETHER)
            return str(nodeid.split("::")[0]) if together else nodeid

    return Scheduling(config, log)


UNPROVED = pytest.StashKey[list[tuple[str, str]]]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tiers by path, and leave out contract tests that do not apply to a sampler instead of skipping them."""
    kept, dropped, gaps = [], [], {}
    for item in items:
        place = item.nodeid.removeprefix("tests/")
        fast = place.startswith(FAST) and not place.startswith(MEDIUM)
        item.add_marker("slow" if place.startswith(SLOW) else "fast" if fast else "medium")
        contract = getattr(item, "cls", None)
        if isinstance(contract, type) and issubclass(contract, NegativesContract):
            if contract not in gaps:
                gaps[contract] = contract().gaps()
            if getattr(item, "originalname", item.name) in gaps[contract]:
                dropped.append(item)
                continue
        kept.append(item)
    items[:] = sorted(kept, key=lambda item: not item.nodeid.removeprefix("tests/").startswith(LONG))
    config.hook.pytest_deselected(items=dropped)
    config.stash[UNPROVED] = sorted((reason, one.__name__) for one, own in gaps.items() for reason in own.values())
    if hasattr(config, "workeroutput"):  # a process of pytest-xdist, whose summary the first process prints
        config.workeroutput["unproved"] = config.stash[UNPROVED]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    output = getattr(node, "workeroutput", {})  # missing if the process crashed
    node.config.stash[UNPROVED] = [tuple(pair) for pair in output.get("unproved", [])]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """List the properties of samplers that their contracts could not prove."""
    found: dict[str, list[str]] = {}
    for reason, name in config.stash.get(UNPROVED, []):
        found.setdefault(reason, []).append(name)
    if found:
        terminalreporter.section("unproved, as declared")
        for reason, names in found.items():
            terminalreporter.line(f"{reason} ({len(names)}): {', '.join(names)}")


@pytest.fixture
def curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the curves of trainings."""
    monkeypatch.setattr(curve, "training_curve", drawn_curve)


@pytest.fixture(scope="module")
def private_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of tokens and vectors for the tests of one file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARRING_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="session")
def small_world() -> SyntheticWorld:
    """60 queries, 40 items with titles and categories, about 500 interactions, shown pairs, times."""
    return make_world(60, 40, exposure=0.5, relevant=0.4, seed=3)


@pytest.fixture(scope="session")
def parts(small_world: SyntheticWorld) -> Split:
    """The small world split at random: 72 % train, 8 % valid, 20 % test."""
    return split(small_world.interactions, "random", valid=0.1, test=0.2, seed=1)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real data sets: the environment variable SPARRING_DATA, or shared/data beside the repository."""
    folder = Path(os.environ.get("SPARRING_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no real data in {folder}: set SPARRING_DATA to a folder of data sets to run this test")
    return folder


@pytest.fixture
def browse(tmp_path: Path) -> Callable[[Path], tuple[str, str]]:
    """Open a page in headless Chromium; return the document after its script ran and the console messages."""
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("chromium is not installed: the page was not opened in a browser")
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
    ]
    flags += [
        "--disable-sync",
        "--no-first-run",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--enable-logging=stderr",
        "--dump-dom",
    ]

    def opened(page: Path) -> tuple[str, str]:
        done = subprocess.run([browser, *flags, page.as_uri()], capture_output=True, text=True, timeout=120, check=True)
        return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)

    return opened


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run a command that must exit with code 2 and one line on stderr that contains all the given words."""
    from sparring.cli import main

    monkeypatch.delenv("SPARRING_DEBUG", raising=False)

    def check(words: Sequence[object], *mentions: str) -> str:
        capfd.readouterr()
        assert main([str(word) for word in words]) == 2
        lines = capfd.readouterr().err.splitlines()
        assert len(lines) == 1, lines
        assert lines[0].startswith("sparring: error: ")
        for mention in mentions:
            assert mention in lines[0], lines[0]
        return lines[0]

    return check
