"""The command line: output, files and one-line errors of its commands."""

from __future__ import annotations

import errno
import json
import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from sparring.cli.inputs import message
from sparring.cli.main import main, parser
from sparring.cli.screen import logged
from sparring.core import files
from sparring.core.choices import DIALECTS, TRACKERS
from sparring.core.errors import UserError
from sparring.recipes import RECIPES
from sparring.training import trained as runs

QUERIES, ITEMS = 60, 40
QUICK = ["--set", "dim=8", "--set", "batch_size=64", "--set", "n=16", "--device", "cpu"]
SAVING = ["--save-seconds", "0"]  # a checkpoint after every step


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small file of interactions (users 1000.., items i0..), an items table, and a trained run."""
    folder = tmp_path_factory.mktemp("cli")
    random = np.random.default_rng(0)
    group = np.arange(QUERIES) % 4
    likes = random.random((QUERIES, ITEMS)) < np.where(group[:, None] == np.arange(ITEMS) % 4, 0.7, 0.05)
    users, items = np.nonzero(likes)
    names = np.array([f"i{i}" for i in range(ITEMS)])
    frame = pl.DataFrame(
        {"user_id": users + 1000, "item_id": names[items], "timestamp": random.permutation(len(users))}
    )
    frame.with_columns(rating=pl.lit(5.0)).write_parquet(folder / "pairs.parquet")
    pl.DataFrame({"item_id": names, "title": [f"Title [{i}]" for i in range(ITEMS)]}).write_parquet(
        folder / "items.parquet"
    )
    words = [
        "train",
        "--data",
        str(folder / "pairs.parquet"),
        "--items",
        str(folder / "items.parquet"),
        "--quiet",
        *QUICK,
    ]
    assert main([*words, "--epochs", "3", "--out", str(folder / "run")]) == 0
    return folder


def test_training_leaves_a_complete_run_folder(world: Path) -> None:
    """A run folder holds the resolved run, a line per epoch, the model, the id maps, a curve and a card."""
    run = world / "run"
    meta = json.loads((run / "run.json").read_text())
    assert meta["recipe"] == "default"
    assert (meta["arguments"]["n"], meta["setup"]["model"]["dim"], meta["setup"]["training"]["epochs"]) == (16, 8, 3)
    assert [json.loads(line)["epoch"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]
    assert (run / "curve.png").is_file()
    figure = json.loads((run / "result.json").read_text())["test"]["metrics"]["recall@20"]
    assert f"{figure:.4f}" in (run / "README.md").read_text()
    assert {"model.safetensors", "checkpoint.safetensors", "item_ids.parquet", "query_ids.parquet"} <= {
        path.name for path in run.iterdir()
    }
    assert not list(run.glob("*.tmp"))


def test_train_shows_epochs_and_metrics(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Training prints a line per epoch, the content of a batch and test metrics; with --quiet only the last line."""
    words = ["train", "--data", str(world / "pairs.parquet"), "--recipe", "uns", "--epochs", "2", *QUICK]
    assert main([*words, "--out", str(tmp_path / "a")]) == 0
    shown = capsys.readouterr().out
    assert "epoch   2  loss" in shown
    assert "16 candidates shared by all queries" in shown
    assert "recall@20" in shown
    assert main([*words, "--out", str(tmp_path / "b"), "--quiet"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_evaluate_repeats_the_figures_of_the_training(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run's test part, rebuilt from run.json, gives the same metrics; --data with the same file changes nothing."""
    then = json.loads((world / "run" / "result.json").read_text())["test"]["metrics"]
    for extra in ([], ["--data", str(world / "pairs.parquet")]):
        assert main(["evaluate", str(world / "run"), "--k", "10,20", "--json", *extra]) == 0
        now = json.loads(capsys.readouterr().out)["metrics"]
        for name in ("recall@10", "ndcg@20", "mrr@20", "coverage@10"):
            assert now[name] == pytest.approx(then[name])
    assert main(["evaluate", str(world / "run")]) == 0
    assert f"{then['ndcg@10']:.4f}" in capsys.readouterr().out


def test_evaluate_on_other_data_leaves_out_training_pairs(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of another file, only pairs with known ids that training did not see are ranked; the rest is counted."""
    trained = runs.load(world / "run")
    start, items = trained.seen.start, trained.seen.items
    first = set(items[start[0] : start[1]].tolist())
    new = [i for i in range(ITEMS) if i not in first][:3]
    old = sorted(first)[:2]
    ids = [str(name) for name in trained.ids.item_ids.decode([*new, *old])]
    rows = {"user_id": [1000] * 5 + [1000, 999], "item_id": [*ids, "unknown", ids[0]]}
    pl.DataFrame(rows).write_csv(tmp_path / "other.csv")
    assert main(["evaluate", str(world / "run"), "--data", str(tmp_path / "other.csv"), "--k", "37,40", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["queries"] == 1
    assert result["metrics"]["recall@40"] == 1.0
    assert result["metrics"]["precision@40"] == pytest.approx(3 / 40)
    counts = {"pairs": 7, "trained": 2, "unknown_query_pairs": 1, "unknown_item_pairs": 1}
    assert counts.items() <= result["left_out"].items()
    words = ["evaluate", str(world / "run"), "--data", str(tmp_path / "other.csv"), "--unknown", "miss", "--k", "40"]
    assert main([*words, "--json"]) == 0
    missed = json.loads(capsys.readouterr().out)
    assert missed["metrics"]["recall@40"] == pytest.approx((3 / 4 + 0) / 2)
    assert main(words) == 0
    assert "of 7 pairs 2 were trained on, and 2 (1 of 1 unknown queries" in capsys.readouterr().out


def test_evaluate_in_another_dialect(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every dialect can be asked for, even one that does not define all metrics."""
    for dialect in DIALECTS:
        assert main(["evaluate", str(world / "run"), "--dialect", dialect, "--k", "10", "--json"]) == 0
        names = json.loads(capsys.readouterr().out)["metrics"]
        assert ("ndcg@10" if dialect == "standard" else f"ndcg_{dialect.replace('-', '_')}@10") in names


def test_data_show_names_the_role_of_each_column(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Columns are printed with their roles, and ratings as ignored; with a threshold ratings have a role too."""
    words = ["data", "show", str(world / "pairs.parquet")]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "columns: user_id is the query, item_id is the item, timestamp is the time\n" in shown
    assert "ratings (rating) are ignored" in shown
    assert main([*words, "--min-rating", "2", "--time-column", ""]) == 0
    shown = capsys.readouterr().out
    assert "columns: user_id is the query, item_id is the item, rating is the rating\n" in shown
    assert "ignored" not in shown


def test_recommend_leaves_out_seen_items_and_names_titles(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Recommendations are new to the query unless --with-seen, ordered by score, with titles, for several queries."""
    seen = runs.load(world / "run").seen
    already = {f"i{i}" for i in range(ITEMS)} & {
        str(name)
        for name in runs.load(world / "run").ids.item_ids.decode(seen.items[seen.start[3] : seen.start[4]].numpy())
    }
    assert main(["recommend", str(world / "run"), "--query", "1003", "-k", "12", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["rank"] for row in rows] == list(range(1, 13))
    assert not already & {row["item"] for row in rows}
    assert [row["score"] for row in rows] == sorted((row["score"] for row in rows), reverse=True)
    assert all(row["title"] == f"Title [{row['item'][1:]}]" for row in rows)
    assert main(["recommend", str(world / "run"), "--query", "1003", "-k", str(ITEMS), "--with-seen", "--json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == ITEMS
    assert main(["recommend", str(world / "run"), "--query", "1003", "--user", "1004", "-k", "2"]) == 0
    shown = capsys.readouterr().out
    assert "1004" in shown
    assert rows[0]["title"] in shown  # brackets are not markup


def test_recommend_for_a_history(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a history tower a list of items is a query, and its items are not recommended again."""
    words = [
        "train",
        "--data",
        str(world / "pairs.parquet"),
        "--epochs",
        "2",
        "--quiet",
        "--set",
        "query_tower=history",
        *QUICK,
    ]
    assert main([*words, "--out", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert main(["recommend", str(tmp_path / "run"), "--history", "i3,i7", "-k", "5", "--json"]) == 0
    items = [json.loads(line)["item"] for line in capsys.readouterr().out.splitlines()]
    assert len(items) == 5
    assert not {"i3", "i7"} & set(items)


def test_recipes_lists_every_recipe_with_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    """Each recipe has a summary, its paper, and every argument and setting with type, default and description."""
    assert main(["recipes", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed.keys() == RECIPES.keys()
    assert listed["xir"]["arguments"]["lam"].items() >= {"type": "a number", "default": "0.5"}.items()
    for facts in listed.values():
        described = {**facts["arguments"], **facts["setup"]}
        assert [name for name, each in described.items() if not each["description"]] == []
    assert "NeurIPS 2022" in listed["xir"]["paper"]
    assert main(["recipes"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown and facts["summary"] in shown for name, facts in listed.items())
    assert main(["recipes", "xir"]) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    for each in (*listed["xir"]["arguments"].values(), *listed["xir"]["setup"].values()):
        assert sum(line.split()[:2] == [each["path"], each["default"]] for line in lines) == 1, each


def test_data_commands(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`data list` prints names and terms, `data show` sizes, or the columns and first rows of a table of items."""
    assert main(["data", "list"]) == 0
    assert "gowalla" in capsys.readouterr().out
    pairs = len(pl.read_parquet(world / "pairs.parquet"))
    assert main(["data", "show", str(world / "pairs.parquet")]) == 0
    assert f"{QUERIES} queries x {ITEMS} items, {pairs:,} interactions" in capsys.readouterr().out
    pl.DataFrame({"item_id": [5, 6], "stock_code": ["a", "b"], "title": ["five", "six"]}).write_parquet(
        tmp_path / "items.parquet"
    )
    assert main(["data", "show", str(tmp_path / "items.parquet")]) == 0
    shown = capsys.readouterr()
    assert "item_id (Int64), stock_code (String), title (String)" in shown.out
    assert "six" in shown.out
    assert len(shown.err.splitlines()) == 1
    assert "does not read as interactions, though --items" in shown.err


def test_resume_continues_and_refuses_changes(world: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    """After an interruption --resume gives the result of an uninterrupted run; other settings are refused."""
    words = ["train", "--data", str(world / "pairs.parquet"), "--quiet", *QUICK, *SAVING]
    complete, stopped = tmp_path / "complete", tmp_path / "stopped"
    assert main([*words, "--epochs", "4", "--out", str(complete)]) == 0
    with pytest.MonkeyPatch.context() as patch:
        fail_from(patch, "checkpoint.safetensors", KeyboardInterrupt(), after=2)
        assert main([*words, "--epochs", "4", "--out", str(stopped)]) == 130
    refused(["train", "--resume", "--out", stopped, "--set", "lr=0.5"], "lr", "0.5")
    refused(["train", "--resume", "--out", stopped, "--recipe", "xir"], "'xir'", "'default'")
    refused(["train", "--resume", "--out", stopped, "--data", world / "items.parquet"], "items.parquet")
    fewer = tmp_path / "fewer.parquet"
    pl.read_parquet(world / "pairs.parquet").head(200).write_parquet(fewer)
    refused(["train", "--resume", "--out", stopped, "--data", fewer], str(fewer), str(world / "pairs.parquet"))
    assert main(["train", "--resume", "--out", str(stopped), "--quiet", "--device", "cpu"]) == 0
    models = [files.read_tensors(folder / "model.safetensors")[0] for folder in (stopped, complete)]
    assert models[0].keys() == models[1].keys()
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    results = [json.loads((folder / "result.json").read_text())["test"]["metrics"] for folder in (complete, stopped)]
    assert results[0] == results[1]


def fail_from(patch: pytest.MonkeyPatch, name: str, error: BaseException, after: int) -> None:
    """Make writing this file fail from the (after + 1)-th time on, when half of its bytes are on the disk."""
    calls, rename = 0, os.replace

    def replace(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
        nonlocal calls
        calls += Path(target).name == name
        if calls > after and Path(target).name == name:
            os.truncate(source, os.path.getsize(source) // 2)
            raise error
        rename(source, target)

    patch.setattr(os, "replace", replace)


def test_ctrl_c_says_how_to_continue(world: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """An interrupted training exits with 130 and says whether --resume continues or starts again."""
    for after, keyword in ((1, "continues"), (0, "starts again")):
        with pytest.MonkeyPatch.context() as patch:
            fail_from(patch, "checkpoint.safetensors", KeyboardInterrupt(), after=after)
            words = ["train", "--data", str(world / "pairs.parquet"), "--quiet", *QUICK, *SAVING]
            assert main([*words, "--out", str(tmp_path / str(after))]) == 130
        (line,) = capfd.readouterr().err.splitlines()
        assert line.startswith("sparring: interrupted; ")
        assert f"--resume {keyword}" in line


def test_full_disk_is_one_line_and_keeps_the_last_checkpoint(
    world: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    """A disk that fills up during a save loses no earlier checkpoint: the run can be resumed to its end."""
    out = tmp_path / "run"
    words = ["train", "--data", world / "pairs.parquet", "--epochs", "3", "--out", out, "--quiet", *QUICK, *SAVING]
    with pytest.MonkeyPatch.context() as patch:
        fail_from(patch, "checkpoint.safetensors", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(out)), after=1)
        refused(words, "no space left", "--resume", str(out))
    _, state = files.read_tensors(out / "checkpoint.safetensors")
    assert (state["epoch"], state["step"]) == (0, 1)
    assert not list(out.glob("*.tmp"))
    assert main(["train", "--resume", "--out", str(out), "--quiet"]) == 0
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 3


def test_bad_files_are_refused(world: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    """Missing, empty, unreadable or useless data is refused in one line that names the file or column."""

    def train(name: str, *extra: object) -> list[object]:
        return ["train", "--data", tmp_path / name, "--out", tmp_path / "out", *extra]

    refused(train("missing.parquet"), "missing.parquet")
    refused(["train", "--data", "gowala", "--out", tmp_path / "out"], "gowala", "gowalla")
    refused(["data", "get", "movielens-1n"], "movielens-1n", "movielens-1m")
    refused(["data", "show", tmp_path / "missing.csv"], "missing.csv")
    pairs = pl.read_parquet(world / "pairs.parquet")
    pairs.write_parquet(tmp_path / "good.parquet")
    refused(train("good.parquet", "--query-column", "customer"), "'customer'", "user_id")
    refused(train("good.parquet", "--items", tmp_path / "no_items.csv"), "no_items.csv")
    refused(train("good.parquet", "--min-rating", "9"), "9")
    refused(train("good.parquet", "--split", "file"), "split")
    (tmp_path / "empty.csv").write_bytes(b"")
    refused(train("empty.csv"), "empty.csv")
    pairs.clear().write_parquet(tmp_path / "rowless.parquet")
    refused(train("rowless.parquet"), "rowless.parquet")
    pairs.with_columns(user_id=pl.lit(None, pl.Int64)).write_parquet(tmp_path / "nulls.parquet")
    refused(train("nulls.parquet"), "null", "user_id")
    pairs.filter(pl.col("user_id") == 1001).write_parquet(tmp_path / "one.parquet")
    refused(train("one.parquet"), "one query", "1001")
    (tmp_path / "garbage.parquet").write_bytes(b"PAR1 this is not a table PAR1")
    refused(train("garbage.parquet"), "garbage.parquet")
    pairs.rename({"user_id": "left", "item_id": "right"}).write_csv(tmp_path / "unnamed.csv")
    refused(train("unnamed.csv"), "--query-column", "left")
    assert not (tmp_path / "out").exists()


def test_bad_arguments_are_refused(world: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    """Wrong names and types are refused in one line that names the value, and the closest valid name if any."""
    train: list[object] = ["train", "--data", world / "pairs.parquet", "--out", tmp_path / "out"]
    refused([*train, "--recipe", "xri"], "'xri'", "'xir'")
    refused([*train, "--set", "learning=1"], "'learning'", "sparring recipes")
    refused([*train, "--set", "batchsize=64"], "'batchsize'", "'batch_size'")
    refused([*train, "--set", "lr=fast"], "lr", "'fast'", "a number")
    refused([*train, "--set", "dim=2.5"], "dim", "2.5", "whole number")
    refused([*train, "--set", "score=angle"], "score", "'angle'", "cosine")
    refused([*train, "--set", "n=0"], "0")
    refused([*train, "--set", "lr"], "'lr'", "name=value")
    refused([*train, "--epochs", "many"], "--epochs", "'many'")
    refused([*train, "--epochs", "0"], "--epochs", "'0'")
    refused([*train, "--epochs", "2", "--set", "epochs=3"], "epochs", "twice")
    refused([*train, "--epochs", "2", "--set", "training.epochs=3"], "epochs", "twice")
    refused([*train, "--seed", "-1"], "--seed")
    refused([*train, "--test", "1.5"], "--test", "'1.5'")
    refused([*train, "--min-rating", "high"], "--min-rating", "'high'")
    refused([*train, "--split", "tempral"], "'tempral'", "temporal")
    refused([*train, "--device", "tpu"], "'tpu'")
    refused([*train, "--k", "10,x"], "--k", "'x'")
    refused([*train, "--k", "1000"], "1000", f"{ITEMS} items")
    refused([*train, "--set", "select=ndcg@1000"], "ndcg@1000", f"{ITEMS} items")
    refused([*train, "--epoch", "3"], "--epoch", "--epochs")
    refused(["trian"], "'trian'", "train")
    refused(["train"], "--data")
    refused(["train", "--resume", "--out", tmp_path / "nothing"], "nothing")
    refused(["recipes", "xri"], "'xri'", "'xir'")
    refused(["evaluate"], "RUN")
    assert not (tmp_path / "out").exists()


def test_train_says_how_weights_count(
    world: Path, tmp_path: Path, refused: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    """A skewed column called weight has to be named; then its spread is printed, and in the batch of run.json."""
    pairs = pl.read_parquet(world / "pairs.parquet")
    weight = np.ones(len(pairs))
    weight[0] = 5000
    pairs.with_columns(weight=pl.Series(weight)).write_parquet(tmp_path / "played.parquet")
    words = [
        "train",
        "--data",
        str(tmp_path / "played.parquet"),
        "--epochs",
        "1",
        "--out",
        str(tmp_path / "run"),
        *QUICK,
    ]
    refused(words, "5,000 times the median", "--weight-column 'weight' or 'none'")
    for column, said in (("weight", True), ("none", False)):
        assert main([*words, "--overwrite", "--weight-column", column]) == 0
        out = capfd.readouterr().out
        assert ("weight multiplies the loss of each pair: 1 to 5,000, median 1" in out) == said
        batch = " ".join(json.loads((tmp_path / "run" / "run.json").read_text())["batch"])
        assert ("times the weight of its pair" in batch) == said


def test_bad_runs_are_refused(world: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    """A folder without a run, a corrupt model or checkpoint, an unknown query and too large a cutoff are refused."""
    refused(["evaluate", tmp_path / "missing"], "missing")
    refused(["evaluate", tmp_path], str(tmp_path))
    refused(["evaluate", world / "run", "--k", "1000"], "1000", str(ITEMS))
    refused(["evaluate", world / "run", "--data", tmp_path / "gone.parquet"], "gone.parquet")
    refused(["evaluate", world / "run", "--dialect", "tric"], "'tric'", "trec")
    refused(["recommend", world / "run", "--query", "1003", "-k", "1000"], "1000", str(ITEMS))
    refused(["recommend", world / "run", "--query", "stranger"], "'stranger'")
    refused(["recommend", world / "run"], "--query")
    refused(["recommend", world / "run", "--history", "stranger"], "'stranger'")
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", str(world / "run"), str(copy)], check=True)
    for file in ("model.safetensors", "checkpoint.safetensors"):
        whole = (copy / file).read_bytes()
        for broken in (whole[: len(whole) // 2], b"", b"\xff" * 100):
            (copy / file).write_bytes(broken)
            words = (
                ["train", "--resume", "--out", copy]
                if file.startswith("checkpoint")
                else ["recommend", copy, "--query", "1003"]
            )
            refused(words, file, "corrupt")
        (copy / file).write_bytes(whole)
    (copy / "run.json").write_text("{")
    refused(["evaluate", copy], "run.json", "corrupt")


def test_out_folder_is_never_overwritten_unasked(world: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    """A folder that is not empty is refused; --overwrite deletes a run, and nothing else."""
    train: list[object] = [
        "train",
        "--data",
        world / "pairs.parquet",
        "--quiet",
        "--epochs",
        "1",
        *QUICK,
        "--out",
        tmp_path / "out",
    ]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("precious")
    refused(train, str(tmp_path / "out"), "overwrite")
    refused([*train, "--overwrite"], str(tmp_path / "out"), "run.json")
    assert (tmp_path / "out" / "thesis.txt").read_text() == "precious"
    (tmp_path / "out" / "thesis.txt").unlink()
    assert main([str(word) for word in train]) == 0
    refused(train, "resume")
    assert main([*map(str, train), "--overwrite"]) == 0
    refused([*train, "--overwrite", "--resume"], "overwrite")
    (tmp_path / "file").write_text("")
    refused([*train[:-1], tmp_path / "file"], str(tmp_path / "file"))


def test_help_ends_with_an_example_that_parses(capsys: pytest.CaptureFixture[str]) -> None:
    """The help of every command has one sentence, a line for every argument, and a valid command as an example."""
    root, named = parser()
    for name, command in named.items():
        assert command.description is not None
        assert command.description.count(".") == command.description.endswith(".")
        assert all(action.help for action in command._actions if action.option_strings)
        example = command.format_help().rstrip().splitlines()[-1].strip()
        assert example.startswith(f"sparring {name}")
        args, rest = root.parse_known_args(shlex.split(example)[1:])
        assert not rest
        assert args.command is not None
        with pytest.raises(SystemExit) as stop:
            main([*name.split(), "--help"])
        assert stop.value.code == 0
    assert main([]) == 0
    assert main(["--version"]) == 0


def test_help_imports_nothing_heavy() -> None:
    """`import sparring` and the help load no package that takes long to import, so they take a fraction of a second."""
    heavy = {"torch", "polars", "numpy", "matplotlib", "rich"}
    helped = "from sparring.cli.main import parser; [each.format_help() for each in parser()[1].values()]"
    for code in ("import sparring", helped):
        done = subprocess.run(
            [sys.executable, "-c", f"{code}; import sys; print(*sys.modules)"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert "sparring" in done.stdout.split()
        assert not heavy & set(done.stdout.split())


def test_errors_name_the_option_of_an_argument(world: Path, refused: Callable[..., str]) -> None:
    """An error that carries an argument of the library is printed with the option of the command line."""
    assert str(UserError("no weights", "weight", '""')) == 'no weights; set weight=""'
    assert message(UserError("no weights", "weight", '""')) == 'no weights; use --weight-column ""'
    assert message(UserError("no ratings", "min_rating")) == "no ratings; use --min-rating NAME"
    assert message(UserError("no such file")) == "no such file"
    pl.read_parquet(world / "pairs.parquet").drop("timestamp").write_parquet(world / "timeless.parquet")
    line = refused(["train", "--data", world / "timeless.parquet", "--split", "temporal"], "--time-column NAME")
    assert "time=" not in line


def test_log_of_the_library_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    """INFO goes to stdout unless quiet, warnings go to stderr with their level; a nested command prints each once."""
    log = logging.getLogger("sparring.training.fitting")
    for quiet in (False, True):
        with logged(quiet=False), logged(quiet=quiet):
            log.info("  indented %s", "line")
            log.warning("odd\n  data")
        out, err = capfd.readouterr()
        assert out == ("" if quiet else "  indented line\n")
        assert err == "sparring: warning: odd data\n"
    log.info("nobody listens")
    assert capfd.readouterr() == ("", "")


def test_as_a_program(tmp_path: Path) -> None:
    """python -m sparring: an error is one line without a traceback and code 2; SPARRING_DEBUG=1 shows the traceback."""
    words = [sys.executable, "-m", "sparring", "recommend", str(tmp_path / "none"), "--query", "1"]
    plain = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "SPARRING_DEBUG": ""})
    assert plain.returncode == 2
    assert plain.stderr.startswith("sparring: error: ")
    assert plain.stderr.count("\n") == 1
    assert str(tmp_path / "none") in plain.stderr
    assert plain.stdout == ""
    debug = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "SPARRING_DEBUG": "1"})
    assert "Traceback" in debug.stderr


def test_setup_takes_all_but_the_negatives_from_another_recipe(world: Path, tmp_path: Path) -> None:
    """--setup default gives ssl_pop, whose own setup has inner products and dense Adam, cosines and row updates."""
    words = [
        "train",
        "--data",
        str(world / "pairs.parquet"),
        "--recipe",
        "ssl_pop",
        "--epochs",
        "1",
        "--set",
        "dim=8",
        "--quiet",
    ]
    assert main([*words, "--out", str(tmp_path / "own")]) == 0
    assert main([*words, "--setup", "default", "--out", str(tmp_path / "other")]) == 0
    own, other = (json.loads((tmp_path / name / "run.json").read_text()) for name in ("own", "other"))
    assert (own["recipe"], own["setup"]["model"]["score"], own["setup"]["training"]["optimizer"]) == (
        "ssl_pop",
        "dot",
        "adam",
    )
    assert (other["recipe"], other["setup"]["model"]["score"], other["setup"]["training"]["optimizer"]) == (
        "ssl_pop",
        "cosine",
        "row-adam",
    )
    assert own["setup"]["model"]["dim"] == other["setup"]["model"]["dim"] == 8


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_names_its_extra(
    name: str, world: Path, tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its client, --track is refused before training, and the line names the extra to install."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if name == "tensorboard" else name, None)
    words = ["train", "--data", world / "pairs.parquet", "--epochs", 1, *QUICK, "--out", tmp_path / "run"]
    refused([*words, "--track", name], f'pip install "sparring[{name}]"')
    assert not (tmp_path / "run" / "run.json").exists()
