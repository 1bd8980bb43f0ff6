"""Sharded tables have the values, gradients and updates of one table, wherever the shards are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sparring import build, load
from sparring.core.errors import UserError
from sparring.data.interactions import Split
from sparring.models.sharded_tables import ShardedTable, dealt
from sparring.models.towers import IdTower
from sparring.training.fitting import fit
from sparring.training.optimizers import optimizers


def pair(n: int, shards: int) -> tuple[IdTower, ShardedTable]:
    torch.manual_seed(0)
    one = IdTower(n, 3)
    torch.manual_seed(0)
    return one, ShardedTable(n, 3, shards)


@pytest.mark.parametrize(("n", "shards"), [(10, 1), (10, 3), (7, 7), (1000, 8)])
def test_a_start_and_any_ids_are_those_of_one_table(n: int, shards: int) -> None:
    """Shards hold the rows of one table, for ids of any shape, repeated or empty; sizes differ by at most 1."""
    one, many = pair(n, shards)
    draw = torch.Generator().manual_seed(1)
    few = torch.zeros(3, dtype=torch.int32), torch.zeros(0).long()
    for ids in (torch.randint(n, (4, 5), generator=draw), torch.arange(n).flip(0), *few):
        assert torch.equal(many(ids), one(ids))
    sizes = [len(part.weight) for part in many.parts]  # type: ignore[arg-type]
    assert sum(sizes) == n
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("rule", ["row-adam", "row-adagrad"])
def test_updates_are_those_of_one_table(rule: Any) -> None:
    """After ten steps every row equals that of a single table up to the last bits."""
    one, many = pair(20, 3)
    steps = [torch.randint(20, (12,), generator=torch.Generator().manual_seed(at)) for at in range(10)]
    for table in (one, many):
        rules = optimizers(torch.nn.ModuleDict({"table": table}), rule, lr=0.1)
        for ids in steps:
            (table(ids) ** 3).sum().backward()
            for each in rules:
                each.step()
                each.zero_grad()
    assert torch.equal(many(torch.arange(20)), one.weight.detach())


@pytest.mark.parametrize(("shards", "count", "expected"), [(4, 2, [1, 0, 1, 0]), (3, 8, [1, 2, 3]), (2, 1, [0, 0])])
def test_shards_are_dealt_over_all_gpus(
    monkeypatch: pytest.MonkeyPatch, shards: int, count: int, expected: list[int]
) -> None:
    """Shards are assigned round-robin, starting at the requested GPU; on a CPU all stay."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    found = dealt(shards, torch.device("cuda", min(1, count - 1)))
    assert [device.index for device in found] == expected
    assert dealt(shards, torch.device("cpu")) == [torch.device("cpu")] * shards


def test_parts_go_where_they_are_dealt(monkeypatch: pytest.MonkeyPatch) -> None:
    """`to` moves each shard to its own device, here the CPU and the meta device."""
    monkeypatch.setattr(
        "sparring.models.sharded_tables.dealt", lambda shards, device: [torch.device("cpu"), torch.device("meta")]
    )
    table = ShardedTable(6, 2, 2).to("cpu")
    assert [part.weight.device.type for part in table.parts] == ["cpu", "meta"]  # type: ignore[union-attr]


def test_classifiers_in_shards(parts: Split, tmp_path: Path) -> None:
    """The classifier stage of NGAME ends at the same metrics with one table and with three, and the run loads."""
    settings = {
        "dim": 8,
        "epochs": 2,
        "batch_size": 16,
        "warmup": 2,
        "clf_epochs": 3,
        "clf_batch_size": 16,
        "clf_lr": 0.05,
        "size": 4,
    }
    found = {}
    for shards in (1, 3):
        run = build("ngame", parts.train, {**settings, "clf_shards": shards})
        fitted = fit(run, parts, tmp_path / str(shards), device="cpu", k=(5,))
        found[shards] = {name: test.metrics for name, test in fitted.stages.items()}
        assert isinstance(
            load(tmp_path / str(shards) / "classifiers").model.item, ShardedTable if shards > 1 else IdTower
        )
    assert found[1] == found[3]


def test_nonsense_is_refused(parts: Split) -> None:
    """A one-line error names the value."""
    with pytest.raises(ValueError, match="5 rows"):
        ShardedTable(5, 2, 6)
    with pytest.raises(UserError, match="clf_shards must be at least 1, got 0"):
        build("ngame", parts.train, {"clf_shards": 0})
