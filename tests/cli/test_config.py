"""Config files: the options of a command by name; a run.json trains its run again, bit for bit."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
import polars as pl
import pytest
import torch

from sparring.cli import main
from sparring.cli.compare import _plan
from sparring.cli.config import expanded, schema
from sparring.cli.main import parser
from sparring.core import files
from sparring.data.synthetic_world import SyntheticWorld
from support.settings import quick_words

STUDY = """
data = ["first", "second"]
recipes = ["uns", "bir"]
seeds = 2
metrics = "recall@5"
min_rating = 3
baselines = false
out = "study"

[settings]
dim = 8
clip = "none"
hidden = [4, 2]

[settings.training]
lr = 0.01
"""


@pytest.fixture(scope="module")
def pairs(small_world: SyntheticWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file whose columns have to be named."""
    data = small_world.interactions
    path = tmp_path_factory.mktemp("data") / "pairs.parquet"
    pl.DataFrame({"who": data.queries, "what": data.items, "when": data.time}).write_parquet(path)
    return path


def words_of(*words: object) -> list[str]:
    return expanded([str(word) for word in words], lambda: parser()[1])


def trained(folder: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """The tensors of a run, and its epochs without times."""
    epochs = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return files.read_tensors(folder / "model.safetensors")[0], [
        {name: value for name, value in epoch.items() if "seconds" not in name} for epoch in epochs
    ]


@pytest.mark.parametrize(
    "words",
    [
        ["--recipe", "xir", "--set", "lam=0.3", "--seed", "3", *quick_words(), "--set", "weight_decay=1e-3"],
        ["--recipe", "ials", "--epochs", "2", "--set", "dim=4", "--set", "seed=2", "--refit"],
        ["--model", "sasrec", "--split", "leave-last-out", "--set", "model.blocks=1", *quick_words(tau="none")],
    ],
    ids=["xir", "ials", "sasrec"],
)
def test_the_config_of_a_run_reproduces_it(pairs: Path, tmp_path: Path, words: list[str]) -> None:
    """A run trained from flags, and one from its run.json, have equal tensors and metrics."""
    columns = ["--user-column", "who", "--item-column", "what", "--time-column", "when", "--no-baselines"]
    first, again = tmp_path / "first", tmp_path / "again"
    assert main(["train", "--data", str(pairs), *columns, *words, "--k", "5,7", "--quiet", "--out", str(first)]) == 0
    for config in (first / "run.json", first):  # the file, or its folder
        assert words_of("train", "--config", config) == words_of("train", f"--config={first / 'run.json'}")
    command = ["train", "--config", str(first / "run.json"), "--no-baselines", "--quiet", "--device", "cpu"]
    assert main([*command, "--out", str(again)]) == 0
    (tensors, epochs), (same, repeated) = trained(first), trained(again)
    assert tensors.keys() == same.keys()
    assert all(torch.equal(tensors[name], same[name]) for name in tensors)
    assert repeated == epochs
    metas = [json.loads((folder / "run.json").read_text()) for folder in (first, again)]
    assert all(metas[0][key] == metas[1][key] for key in ("recipe", "arguments", "setup", "source", "data"))


def test_a_file_gives_the_words_of_its_options(tmp_path: Path) -> None:
    """Lists are repeated or joined, flags are there or not, settings may be grouped; JSON says the same as TOML."""
    (tmp_path / "study.toml").write_text(STUDY)
    want = ["compare", "--data=first", "--data=second", "--recipes=uns,bir", "--seeds=2", "--metrics=recall@5"]
    want += ["--min-rating=3", "--no-baselines", "--out=study", "--set", "dim=8", "--set", "clip=none"]
    want += ["--set", "hidden=4,2", "--set", "training.lr=0.01"]
    assert words_of("compare", "--config", tmp_path / "study.toml") == want
    args = parser()[0].parse_args(want)
    assert (args.data, args.recipes, args.baselines) == (["first", "second"], ("uns", "bir"), False)


def test_the_command_line_wins(tmp_path: Path) -> None:
    """An option or a setting of the command line replaces that of the file, by whichever of its names."""
    file = tmp_path / "run.toml"
    file.write_text(
        'data = "a"\nmin-rating = 2\nepochs = 5\nrefit = true\n[settings]\ndim = 8\n"training.lr" = 0.1\nseed = 4'
    )
    asked = words_of("train", "--data", "b", "--config", file, "--set", "epochs=2", "--set", "lr=0.2", "--seed", "1")
    assert asked == [
        *["train", "--min-rating=2", "--refit", "--set", "dim=8"],
        *["--data", "b", "--set", "epochs=2", "--set", "lr=0.2", "--seed", "1"],
    ]


def test_a_study_from_a_file(pairs: Path, tmp_path: Path) -> None:
    """`compare --config` plans the study of a file that has the required options."""
    config = {"data": str(pairs), "user_column": "who", "item_column": "what", "recipes": "uns", "seeds": 1}
    config |= {"metrics": ["recall@5"], "baselines": False, "out": str(tmp_path / "out"), "device": "cpu"}
    config["settings"] = {"dim": 4, "epochs": 1, "select": "ndcg@5"}
    (tmp_path / "study.json").write_text(json.dumps(config))
    plan = _plan(parser()[0].parse_args(words_of("compare", "--config", tmp_path / "study.json", "--seeds", 2)))
    assert (plan.out, plan.recipes, plan.seeds, plan.metrics) == (tmp_path / "out", ("uns",), 2, ("recall@5",))
    assert plan.shared == {"dim": "4", "epochs": "1", "select": "ndcg@5"}
    assert plan.data[0].split.train.n_queries == 60


@pytest.mark.parametrize(
    ("text", "mentions"),
    [
        ("epoch = 3", ["'epoch'", "'epochs'"]),
        ("[settings]\nepoch = 3", ["'epoch'", "'epochs'"]),
        ("refit = 1", ["refit", "true or false"]),
        ("items = true", ["items", "--items"]),
        ('epochs = "many"', ["--epochs", "'many'"]),
        ("settings = 3", ["settings"]),
        ("data = ", ["TOML"]),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, refused: Callable[..., str], text: str, mentions: list[str]) -> None:
    """An unknown key is named with the nearest valid one, and so is a wrong value."""
    (tmp_path / "run.toml").write_text(text)
    refused(["train", "--config", tmp_path / "run.toml", "--data", tmp_path / "none.parquet"], *mentions)


def test_a_run_json_imports_no_code_unless_trusted(tmp_path: Path, refused: Callable[..., str]) -> None:
    """A recipe that is not ours needs --trust; a fused run and an absent file are one line each."""
    from sparring.recipes.setup import Setup
    from sparring.training.folder import FORMAT

    meta = {"format": FORMAT, "recipe": f"{tmp_path}/evil.py:run", "setup": json.loads(json.dumps(Setup().flat()))}
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (tmp_path / "run.json").write_text(json.dumps(meta))
    refused(["train", "--config", tmp_path], "evil.py", "--trust")
    assert words_of("train", "--config", tmp_path, "--recipe", "uns")[:1] == ["train"]  # a copy of one's own
    other = json.loads(json.dumps(Setup.of(model_name=f"{tmp_path}/evil.py:model").flat()))
    (tmp_path / "run.json").write_text(json.dumps({**meta, "recipe": "uns", "setup": other}))
    refused(["train", "--config", tmp_path], "model", "evil.py", "--trust")
    assert not (tmp_path / "ran").exists()
    (tmp_path / "run.json").write_text(json.dumps({**meta, "recipe": "fused", "parts": []}))
    refused(["train", "--config", tmp_path], "fused")
    refused(["train", "--config", tmp_path / "none.toml"], "none.toml")


def test_the_schema_accepts_what_the_command_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """The schema comes from the parser and the settings: it takes the file above, and refuses wrong keys and values."""
    with pytest.raises(SystemExit) as stop:
        main(["compare", "--config-schema"])
    assert stop.value.code == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == schema(parser()[1]["compare"])
    study = tomllib.loads(STUDY)
    assert jsonschema_rs.is_valid(printed, study)
    for wrong in ({"seed": 1}, {"seeds": 0}, {"split": "weekly"}, {"settings": {"dim": "wide"}}, {"refit": "yes"}):
        assert not jsonschema_rs.is_valid(printed, {**study, **wrong})


def test_the_guide_shows_a_valid_file() -> None:
    """The example of the guide is valid by the schema of `train`."""
    page = (Path(__file__).parents[2] / "docs" / "guide" / "train.md").read_text()
    example = tomllib.loads(page.partition("```toml\n")[2].partition("```")[0])
    assert example["settings"]
    assert jsonschema_rs.is_valid(schema(parser()[1]["train"]), example)


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The script names the commands and their options, both names of --user-column included."""
    pytest.importorskip("shtab", reason="shtab is not installed: no completion script was made")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(word in script for word in ("recommend", "--user-column", "--query-column", "leave-last-out"))
