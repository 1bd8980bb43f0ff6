"""A warm start copies the vectors of an earlier run by original id."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from sparring.cli import main
from sparring.core.errors import UserError
from sparring.data.interactions import Interactions, Split
from sparring.data.splits import split
from sparring.data.table import from_frame
from sparring.models.histories import HistoryTower
from sparring.models.towers import IdTower
from sparring.recipes.settings import build
from sparring.training.fitting import fit
from sparring.training.trained import load
from sparring.training.warm_start import warm_start
from support.settings import quick

QUICK = quick(dim=6, epochs=2, batch_size=32)


def days(users: range, items: range, seed: int) -> Interactions:
    rng = np.random.default_rng(seed)
    rows = [
        (f"u{user}", item, time)
        for user in users
        for time, item in enumerate(rng.choice(items, 12, replace=False).tolist())
    ]
    return from_frame(pl.DataFrame(rows, schema=["user_id", "item_id", "time"], orient="row"))


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Yesterday: users u10 to u39, items 100 to 119."""
    out = tmp_path_factory.mktemp("runs") / "yesterday"
    parts = split(days(range(10, 40), range(100, 120), 1), "random", valid=0.1, test=0.2, seed=0)
    fit(build("bpr", parts.train, {**QUICK, "item_bias": True}), parts, out, k=(5,), device="cpu")
    return out


@pytest.fixture
def today() -> Split:
    """Today: users u20 to u49, items 95 to 114."""
    return split(days(range(20, 50), range(95, 115), 2), "random", valid=0.1, test=0.2, seed=0)


@pytest.mark.parametrize("side", ["query", "item", "item_bias"])
def test_rows_go_by_their_original_ids(old: Path, today: Split, side: str) -> None:
    """Ids trained yesterday and known today have yesterday's vector bitwise; all other rows are unchanged."""
    before, model = load(old), build("bpr", today.train, {**QUICK, "item_bias": True}).model
    drawn = getattr(model, side).weight.detach().clone()
    warm = warm_start(model, today, old)
    names = (
        (before.ids.query_ids, today.train.query_ids)
        if side == "query"
        else (before.ids.item_ids, today.train.item_ids)
    )
    blank = before.eligibility.queries if side == "query" else before.eligibility.items
    there, here = ({name: row for row, name in enumerate(each.ids.to_list())} for each in names)
    copied = [name for name in here if name in there and there[name] not in blank.tolist()]
    assert 10 < len(copied) < len(here)
    weight, source = getattr(model, side).weight, getattr(before.model, side).weight
    for name, row in here.items():
        assert torch.equal(weight[row], source[there[name]] if name in copied else drawn[row])
    assert [names[1].ids[row] for row in (warm.queries if side == "query" else warm.items).tolist()] == sorted(copied)


def test_a_warm_run_says_where_it_began(old: Path, today: Split, tmp_path: Path) -> None:
    """run.json has the earlier run and the counts; initial vectors equal its vectors; its trained items are
    eligible."""
    few = dataclasses.replace(
        today.train, items=np.where(today.train.items == 5, 6, today.train.items)
    )  # nobody takes item 100 today
    parts = Split(few)
    settings = {**QUICK, "epochs": 1, "lr": 1e-12, "item_bias": True}
    fit(build("bpr", few, settings), parts, tmp_path / "today", device="cpu", warm=old)
    meta, after, before = json.loads((tmp_path / "today" / "run.json").read_text()), load(tmp_path / "today"), load(old)
    assert meta["warm"]["run"] == str(old.resolve())
    assert meta["warm"]["leaked"] == 0
    assert 10 < meta["warm"]["queries"] <= 20
    assert 10 < meta["warm"]["items"] <= 15
    (there,), (here,) = before.ids.item_ids.encode([101]), after.ids.item_ids.encode([101])
    torch.testing.assert_close(after.model.item.weight[here], before.model.item.weight[there], atol=1e-6, rtol=0)
    assert meta["untrained"]["items"] >= 1
    assert 5 not in after.eligibility.items.tolist()
    fit(build("bpr", few, settings), parts, tmp_path / "cold", device="cpu")
    assert 5 in load(tmp_path / "cold").eligibility.items.tolist()


def test_a_run_may_begin_with_the_one_that_it_replaces(old: Path, today: Split, tmp_path: Path) -> None:
    """A warm start from the overwritten folder reads the vectors before it is deleted."""
    import shutil

    out = shutil.copytree(old, tmp_path / "run")
    fit(
        build("bpr", today.train, {**QUICK, "item_bias": True}),
        today,
        out,
        k=(5,),
        device="cpu",
        overwrite=True,
        warm=out,
    )
    assert json.loads((out / "run.json").read_text())["warm"]["run"] == str(out.resolve())


def test_pairs_that_were_trained_on_are_counted(old: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If another split tests pairs that yesterday trained on, a warning counts them."""
    data = days(range(10, 40), range(100, 120), 1)
    first, other = (split(data, "random", valid=0.1, test=0.2, seed=seed) for seed in (0, 7))
    assert first.valid is not None
    assert other.test is not None
    seen = {
        pair
        for part in (first.train, first.valid)
        for pair in zip(part.queries.tolist(), part.items.tolist(), strict=True)
    }
    known = sum(pair in seen for pair in zip(other.test.queries.tolist(), other.test.items.tolist(), strict=True))
    warm = warm_start(build("bpr", other.train, {**QUICK, "item_bias": True}).model, other, old)
    assert warm.leaked == known > 0
    warm.report()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(known) in caplog.messages[0]


def test_histories_start_warm(today: Split, tmp_path: Path) -> None:
    """Item vectors are copied by id, the other parameters of the query tower unchanged."""
    settings = {**QUICK, "query_tower": "history", "pooling": "attention"}
    fit(build("bpr", today.train, settings), today, tmp_path / "old", k=(5,), device="cpu")
    before, model = load(tmp_path / "old").model, build("bpr", today.train, {**settings, "seed": 3}).model
    warm_start(model, today, tmp_path / "old")
    assert isinstance(model.query, HistoryTower)
    assert isinstance(before.query, HistoryTower)
    assert torch.equal(model.query.empty, before.query.empty)
    assert torch.equal(model.query.key.weight, before.query.key.weight)
    assert isinstance(model.item, IdTower)
    assert isinstance(before.item, IdTower)
    trained = np.unique(today.train.items)
    assert torch.equal(model.item.weight[trained], before.item.weight[trained])


@pytest.mark.parametrize("model", ["sets", "ligr"])
def test_sets_and_sequences_start_warm(today: Split, tmp_path: Path, model: str) -> None:
    """All parameters are copied, rows of both item tables by id; a tower of another kind is refused."""
    ordered = Split(dataclasses.replace(today.train, time=np.arange(len(today.train))))
    fit(build("ssl", ordered.train, {**QUICK, "model": model}), ordered, tmp_path / "old", device="cpu")
    before, new = load(tmp_path / "old").model, build("ssl", ordered.train, {**QUICK, "seed": 3, "model": model}).model
    warm_start(new, ordered, tmp_path / "old")
    trained = torch.from_numpy(np.unique(ordered.train.items)).long()
    for name, value in new.named_parameters():
        old = before.state_dict()[name]
        rows = trained if len(value) == ordered.train.n_items else slice(None)
        assert torch.equal(value[rows], old[rows]), name
    other = build("ssl", ordered.train, {**QUICK, "model": "sasrec" if model == "sets" else "history"}).model
    with pytest.raises(UserError, match="cannot warm-start"):
        warm_start(other, ordered, tmp_path / "old")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dim": 8, "item_bias": True}, "6 dimensions .* 8 dimensions"),
        ({"dim": 6}, "item bias"),
        ({"dim": 6, "item_bias": True, "query_tower": "history"}, "IdTower"),
    ],
)
def test_what_does_not_fit_is_one_line(old: Path, today: Split, settings: dict[str, object], said: str) -> None:
    """Other dimensions, another bias and another tower raise errors before anything is copied."""
    with pytest.raises(UserError, match=said):
        warm_start(build("bpr", today.train, {**QUICK, **settings}).model, today, old)


def test_the_command_begins_and_goes_on(
    old: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], refused: Callable[..., str]
) -> None:
    """`--warm RUN` is printed and recorded; a run stopped before its first checkpoint starts with the same vectors."""
    data = days(range(20, 50), range(95, 115), 2)
    table = {"user_id": data.query_ids.decode(data.queries), "item_id": data.item_ids.decode(data.items)}
    pl.DataFrame(table).write_parquet(tmp_path / "pairs.parquet")
    words = [
        "train",
        "--data",
        str(tmp_path / "pairs.parquet"),
        "--recipe",
        "bpr",
        "--epochs",
        "1",
        "--out",
        str(tmp_path / "today"),
    ]
    words += ["--set", "dim=6", "--set", "item_bias=true", "--k", "5"]
    assert main([*words, "--warm", str(old)]) == 0
    assert f"warm start from {old.resolve()}" in capfd.readouterr().out
    wanted = (tmp_path / "today" / "model.safetensors").read_bytes()
    for name in ("checkpoint.safetensors", "model.safetensors", "result.json"):
        (tmp_path / "today" / name).unlink()
    refused([*words, "--resume", "--warm", str(tmp_path)], f"--warm {old.resolve()}")
    assert main(["train", "--resume", "--out", str(tmp_path / "today"), "--quiet"]) == 0
    assert (tmp_path / "today" / "model.safetensors").read_bytes() == wanted
    refused([*words, "--overwrite", "--warm", str(tmp_path / "none")], "is not a run folder")
    assert (tmp_path / "today" / "result.json").is_file()
