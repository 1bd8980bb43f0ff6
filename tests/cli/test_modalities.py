"""The options that name modalities: what a command gets from them and prints."""

from __future__ import annotations

import io
from argparse import ArgumentParser, Namespace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from sparring.cli.modalities import add_modalities, read_modalities
from sparring.core.errors import UserError
from sparring.data.interactions import Split


def parsed(*words: str) -> Namespace:
    parser = ArgumentParser()
    parser.add_argument("--device", default="cpu")
    add_modalities(parser)
    return parser.parse_args(words)


def test_modalities_of_a_command_line(parts: Split, tmp_path: Path) -> None:
    """Repeated options give the modalities in their order, one printed line each, and nothing but lines where there is no terminal."""
    array = np.random.default_rng(0).normal(size=(parts.train.n_items, 3)).astype(np.float32)
    np.save(tmp_path / "image.npy", array)
    words = ["--modality", f"image={tmp_path / 'image.npy'}", "--modality", "behaviour=behaviour:4"]
    args = parsed(*words, "--cache", str(tmp_path / "cache"))
    out = io.StringIO()
    found = read_modalities(args, parts, Console(file=out, width=400))
    assert found.names == ("image", "behaviour")
    assert found.rows(np.array([2]))["image"].tolist() == [array[2].tolist()]
    lines = out.getvalue().strip().splitlines()
    assert [line.split(":")[0] for line in lines] == ["image", "behaviour"]
    assert (tmp_path / "cache" / "behaviour").is_dir()
    silent = io.StringIO()
    read_modalities(args, parts, Console(file=silent), quiet=True)
    assert silent.getvalue() == ""


def test_a_bar_shows_on_a_terminal(parts: Split, tmp_path: Path) -> None:
    """On a terminal the modality that is being computed has a bar with its name and how many items are done."""
    out = io.StringIO()
    args = parsed("--modality", "bought=behaviour:4", "--cache", str(tmp_path))
    read_modalities(args, parts, Console(file=out, force_terminal=True, width=100), quiet=True)
    assert "bought" in out.getvalue()
    assert "40/40 items" in out.getvalue()


def test_no_modality_says_how_to_give_one(parts: Split) -> None:
    """Without --modality the error is one line that shows how to write it."""
    with pytest.raises(UserError, match=r"add --modality NAME=SPEC, where SPEC is FILE\.npy") as caught:
        read_modalities(parsed(), parts, Console(file=io.StringIO()))
    assert "\n" not in str(caught.value)
