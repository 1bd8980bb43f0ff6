"""The options of modalities: the vectors that a command gets, and the lines that it prints."""

from __future__ import annotations

import io
from argparse import ArgumentParser, Namespace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from sparring.cli import screen
from sparring.cli.inputs import add_modalities, read_modalities
from sparring.cli.parsing import add_code
from sparring.core.errors import UserError
from sparring.data.interactions import Split


def parsed(*words: str) -> Namespace:
    parser = ArgumentParser()
    parser.add_argument("--device", default="cpu")
    add_modalities(parser)
    add_code(parser)
    return parser.parse_args(words)


def test_modalities_of_a_command_line(parts: Split, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Repeated options give the modalities in their order, and a printed line each; --quiet prints none."""
    array = np.random.default_rng(0).normal(size=(parts.train.n_items, 3)).astype(np.float32)
    np.save(tmp_path / "image.npy", array)
    words = ["--modality", f"image={tmp_path / 'image.npy'}", "--modality", "behaviour=behaviour:4"]
    args = parsed(*words, "--cache", str(tmp_path / "cache"))
    modalities = read_modalities(args, parts)
    assert modalities.names == ("image", "behaviour")
    assert modalities.rows(np.array([2]))["image"].tolist() == [array[2].tolist()]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["image", "behaviour"]
    assert (tmp_path / "cache" / "behaviour").is_dir()
    args.quiet = True
    read_modalities(args, parts)
    assert capsys.readouterr().out == ""


def test_a_bar_shows_on_a_terminal(parts: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal the modality in progress has a bar with its name and the number of items done."""
    out = io.StringIO()
    args = parsed("--modality", "bought=behaviour:4", "--cache", str(tmp_path))
    monkeypatch.setattr(screen, "console", lambda: Console(file=out, force_terminal=True, width=100))
    read_modalities(args, parts)
    assert "bought" in out.getvalue()
    assert "40/40 items" in out.getvalue()


def test_no_modality_says_how_to_give_one(parts: Split) -> None:
    """Without --modality the error is one line that shows how to write it."""
    with pytest.raises(UserError, match=r"--modality NAME=SPEC") as caught:
        read_modalities(parsed(), parts)
    assert "\n" not in str(caught.value)
