"""The ESANS recipe: its loss is equation 14 computed by hand, its arguments take effect, and its clusters have the
requested source."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import nn

from sparring.cli import main
from sparring.core import files
from sparring.core.errors import UserError
from sparring.data.interactions import Interactions, Split, Vocabulary
from sparring.data.synthetic_world import SyntheticWorld, make_world
from sparring.experiments.diagnose.profile import profile
from sparring.experiments.search_space import space
from sparring.models.clusters import Codes, default_clusters
from sparring.negatives import Interpolated, OtherClusters, SameCluster, TowardsPositive
from sparring.recipes.esans import behaviour_codes, esans, item_codes, set_codes
from sparring.recipes.run import Run
from sparring.recipes.settings import build
from sparring.training.fitting import fit
from sparring.training.loop import TrainingProgress
from sparring.training.step import describe_batch, training_step
from support.by_hand import TINY, B, Hand

SMALL = {**TINY, "k_primary": 4, "k_secondary": 3}


def parts_of(run: Run) -> dict[type, nn.Module]:
    return {type(module): module for module in run.terms[0].negatives.modules()}


@pytest.mark.parametrize("lam", [0.1, -0.1, "adaptive", "learned"])
def test_it_learns(parts: Split, lam: float | str) -> None:
    """Three epochs on the small world lower the loss; a numeric lam stays fixed, an adaptive or learned lam moves."""
    run = build("esans", parts.train, {"epochs": 3, "batch_size": 64, "dim": 8, "lr": 0.05, "lam": lam})
    found = fit(run, parts, k=(10,), device="cpu")
    assert found.history[-1]["loss"] < found.history[0]["loss"]
    assert found.test is not None
    assert 0 < found.test.metrics["recall@10"] <= 1
    hard = parts_of(run)[TowardsPositive]
    moved = not torch.allclose(hard.lam, torch.full_like(hard.lam, lam if isinstance(lam, float) else 0.1))  # type: ignore[arg-type]
    assert moved == isinstance(lam, str)


@pytest.mark.parametrize("lam", [0.1, "learned"])
def test_killed_and_resumed_it_ends_where_an_undisturbed_run_ends(
    parts: Split, tmp_path: Path, lam: float | str
) -> None:
    """A run killed in its second epoch and resumed is bitwise identical to an uninterrupted run."""

    class Killed(BaseException):
        pass

    def kill(epoch: int, done: int, loss: Callable[[], float]) -> None:
        if (epoch, done) == (1, 2):
            raise Killed

    def train(folder: str, progress: TrainingProgress | None = None, resume: bool = False) -> dict[str, Any]:
        run = build(
            "esans", parts.train, {"epochs": 3, "batch_size": 64, "dim": 8, "lr": 0.05, "lam": lam, "patience": None}
        )
        fit(run, parts, tmp_path / folder, k=(10,), device="cpu", progress=progress, resume=resume, save_seconds=0.0)
        lines = [json.loads(line) for line in (tmp_path / folder / "metrics.jsonl").read_text().splitlines()]
        found = [{name: value for name, value in line.items() if "seconds" not in name} for line in lines]
        tensors = files.read_tensors(tmp_path / folder / "model.safetensors")[0]
        result = json.loads((tmp_path / folder / "result.json").read_text())["test"]["metrics"]
        return {"metrics": found, "test": result, "model": {name: tensor.tolist() for name, tensor in tensors.items()}}

    whole = train("whole")
    with pytest.raises(Killed):
        train("killed", TrainingProgress(step=kill))
    assert not (tmp_path / "killed" / "result.json").exists()
    assert train("killed", resume=True) == whole
    assert len(whole["metrics"]) == 3


def test_the_loss_by_hand(parts: Split) -> None:
    """The loss is equation 14 over the drawn items, real and mixed, with cell and cluster masked."""
    run = build("esans", parts.train, {**SMALL, "lam": 0.2, "m_h": 2, "m_o": 3})
    hand = Hand(parts.train, run)
    losses, _, outcome = hand.contrast()
    simple, hard = outcome.bags[0].blocks
    other = parts_of(run)[OtherClusters]
    cell = other.cell.tolist()  # type: ignore[union-attr, operator]
    assert simple.mix is not None
    for row in range(B):
        own = int(hand.items[row])
        total = [float(hand.positive[row])]
        for group in range(2 * B):
            members = simple.ids[3 * group : 3 * group + 3].tolist()
            total += [float(hand.s[row, j]) for j in members if cell[j] != cell[own]]
            if cell[members[0]] // 3 != cell[own] // 3:
                for share in simple.mix.weights[group].tolist():
                    total.append(sum(a * float(hand.s[row, j]) for a, j in zip(share, members, strict=True)))
        for j in hard.ids[row, :2].tolist():
            total += [float(hand.s[row, j]), 0.2 * total[0] + 0.8 * float(hand.s[row, j])]
        top = max(total)
        want = top + math.log(sum(math.exp(x - top) for x in total)) - total[0]
        assert float(losses[row].detach()) == pytest.approx(want, rel=1e-4, abs=1e-4)


def test_no_bias_in_equation_11(parts: Split) -> None:
    """With item_bias=true the shares are d(anchor, i)^0.6 of cosines alone, though every logit has its item's bias."""
    run = build("esans", parts.train, {**SMALL, "m_o": 4, "item_bias": True})
    assert run.model.item_bias is not None
    with torch.no_grad():
        run.model.item_bias.weight.normal_(0, 3, generator=torch.Generator().manual_seed(2))  # type: ignore[union-attr, operator]
    queries, items = (column[:B].long() for column in parts.train.pairs())
    _, _, outcome = training_step(run, queries, items, torch.Generator().manual_seed(5))
    block = outcome.bags[0].blocks[0]
    assert block.mix is not None
    unit = torch.nn.functional.normalize(run.model.item.weight.detach().double(), dim=1)  # type: ignore[arg-type, operator]
    for group in range(2 * B):
        members = block.ids[4 * group : 4 * group + 4].tolist()
        near = [[float(unit[a] @ unit[i]) for i in members] for a in members]
        low, high = min(map(min, near)), max(map(max, near))
        for share in block.mix.weights[group].double():
            chosen = [i for i in range(4) if share[i] > 0]
            wanted = []
            for anchor in chosen:
                mass = [max((near[anchor][i] - low) / (high - low + 1e-6), 1e-6) ** 0.6 for i in chosen]
                wanted.append([m / sum(mass) for m in mass])
            off = [max(abs(float(share[i]) - w) for i, w in zip(chosen, row, strict=True)) for row in wanted]
            assert min(off) < 1e-3
    total = (run.model.encode_queries(queries).detach() @ block.emb.detach().T).double()
    bias = run.model.item_bias(block.ids).detach().double().squeeze(1)
    user = torch.nn.functional.normalize(run.model.query.weight.detach().double()[queries], dim=1)  # type: ignore[index, operator]
    torch.testing.assert_close(total, user @ unit[block.ids].T + bias, rtol=1e-4, atol=1e-4)


def test_hard_negatives_shared_by_the_batch(parts: Split) -> None:
    """hard_shared gives each query the 3 hard negatives of all 24 rows and as many mixtures; it trains; counts do not
    go with it."""
    run = build("esans", parts.train, {**SMALL, "m_h": 3, "hard_shared": True})
    assert parts_of(run)[SameCluster].shared
    _, _, outcome = Hand(parts.train, run).contrast()
    _, hard, made = outcome.bags[0].blocks
    assert (hard.ids.shape, made.ids.shape) == ((3 * B,), (3 * B,))
    assert not parts_of(build("esans", parts.train, SMALL))[SameCluster].shared
    learning = {"epochs": 3, "batch_size": 64, "dim": 8, "lr": 0.05, "hard_shared": True, "k_primary": 4}
    history = fit(build("esans", parts.train, learning), parts, k=(10,), device="cpu").history
    assert history[-1]["loss"] < history[0]["loss"]
    with pytest.raises(UserError, match="hard_shared=false"):
        build("esans", parts.train, {**SMALL, "hard_shared": True, "correction": "counts"})


def test_clusters_scale_with_the_catalogue() -> None:
    """One primary cluster for 295 items: 2 at least, and the paper's 300 for its 88,408 items and all beyond."""
    for n, want in ((40, 2), (590, 2), (3_706, 13), (12_101, 41), (20_033, 68), (88_408, 300), (4_268_324, 300)):
        assert default_clusters(n) == want
    world = make_world(60, 1200, seed=3).interactions
    for name in ("behaviour", "random", "modalities"):
        assert item_codes(world, name).k_primary == 4
        assert item_codes(world, name, 9).k_primary == 9


def test_default_clusters_are_aligned_with_the_item_columns() -> None:
    """By default clusters follow the item columns too: their items share a category, which behaviour hardly knows.
    Without columns they are those of behaviour."""
    random = torch.Generator().manual_seed(0)
    pairs = torch.stack([torch.randint(80, (900,), generator=random), torch.randint(200, (900,), generator=random)])
    queries, items = pairs.unique(dim=1).int().numpy()
    kinds = [("red shoe", "blue hat", "old book", "new pen")[j % 4] for j in range(200)]
    ids = Vocabulary(np.arange(80)), Vocabulary(np.arange(200))
    data = Interactions(queries, items, *ids, item_table=pl.DataFrame({"title": kinds, "price": range(200)}))
    assert parts_of(build("esans", data, {"k_primary": 4}))[OtherClusters].k_primary == 4
    chosen = item_codes(data, "modalities", 4, 3)
    for codes, least, most in ((chosen, 0.7, 1.0), (item_codes(data, "behaviour", 4, 3), 0.0, 0.5)):
        pure = 0
        for cluster in range(4):
            titles = [kinds[j] for j in codes.items(cluster).tolist()]
            pure += max(titles.count(kind) for kind in set(kinds))
        assert least <= pure / 200 <= most
    found = parts_of(build("esans", data, {"k_primary": 4, "k_secondary": 3}))[OtherClusters]
    assert torch.equal(found.cell, chosen.cell_of)  # type: ignore[arg-type]
    bare = dataclasses.replace(data, item_table=None)
    assert torch.equal(item_codes(bare, "modalities", 4, 3).cell_of, item_codes(bare, "behaviour", 4, 3).cell_of)


def test_settings_of_the_paper(parts: Split) -> None:
    """The defaults are the paper's: B = 512, d = 64, tau 0.05, lr 2e-4, m_c = 2, m_o = 5, eta 0.6, lam 0.1."""
    run = build("esans", parts.train, {"k_primary": 4})
    assert (run.setup.batches.batch_size, run.setup.model.dim, run.setup.temperature.tau, run.setup.training.lr) == (
        512,
        64,
        0.05,
        2e-4,
    )
    assert run.setup.model.init_std == 0.01
    found = parts_of(run)
    other, mixed, hard = found[OtherClusters], found[Interpolated], found[TowardsPositive]
    assert (other.m_c, other.m_o, mixed.eta, float(hard.lam)) == (2, 5, 0.6, pytest.approx(0.1))  # type: ignore[arg-type]
    assert (other.distance, other.exclude, mixed.normalisation) == ("cosine", "cell", "minmax_block")


def test_the_correction_reaches_every_part(parts: Split) -> None:
    """The correction is off by default and never tuned. If on, it reaches simple and hard negatives, and the shared
    ones exclude the positive's cluster as long as there are hard ones."""
    plain = parts_of(build("esans", parts.train, SMALL))
    assert (plain[OtherClusters].correction, plain[SameCluster].correction) == ("none", "none")
    found = parts_of(build("esans", parts.train, {**SMALL, "correction": "counts"}))
    assert (found[OtherClusters].correction, found[SameCluster].correction) == ("counts", "counts")
    assert (found[OtherClusters].exclude, found[SameCluster].exclude) == ("cluster", "cell")
    want = torch.from_numpy(parts.train.counts()).float() / len(parts.train)
    torch.testing.assert_close(found[OtherClusters].popularity, want)  # type: ignore[arg-type]
    alone = parts_of(build("esans", parts.train, {**SMALL, "correction": "counts", "m_h": 0}))
    assert alone[OtherClusters].exclude == "cell"
    assert "correction" not in space("esans")
    run = build("esans", parts.train, {"epochs": 3, "batch_size": 64, "dim": 8, "lr": 0.05, "correction": "counts"})
    history = fit(run, parts, k=(10,), device="cpu").history
    assert history[-1]["loss"] < history[0]["loss"]


def test_presets_and_parts(parts: Split) -> None:
    """The preset `literal` follows the equations, arguments override it, and every part can be switched off."""
    found = parts_of(build("esans", parts.train, {**SMALL, "preset": "literal", "exclude": "cell"}))
    other, mixed = found[OtherClusters], found[Interpolated]
    assert (other.distance, other.exclude, mixed.normalisation) == ("literal", "cell", "affine")
    assert parts_of(build("esans", parts.train, {**SMALL, "exclude": "none"}))[SameCluster].exclude == "none"
    for settings, kinds in (
        ({"simple_mixtures": "false"}, {OtherClusters, SameCluster, TowardsPositive}),
        ({"hard_mixtures": "no"}, {OtherClusters, SameCluster, Interpolated}),
        ({"m_h": "0"}, {OtherClusters, Interpolated}),
        ({"m_h": 0, "m_o": 1}, {OtherClusters}),
    ):
        found = parts_of(build("esans", parts.train, {**SMALL, **settings}))
        assert {kind for kind in found if kind in (OtherClusters, SameCluster, Interpolated, TowardsPositive)} == kinds


def test_clusters_are_learned_once(parts: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    """Building the recipe again on the same data learns nothing anew; other data, seeds and sizes do."""
    made: list[tuple[Interactions, int, int, int]] = []
    real, module = behaviour_codes, import_module("sparring.recipes.esans")
    monkeypatch.setattr(module, "behaviour_codes", lambda *given: made.append(given) or real(*given))
    one, other = dataclasses.replace(parts.train), dataclasses.replace(parts.train)
    for data, seed, k in ((one, 0, 4), (one, 0, 4), (one, 1, 4), (one, 0, 2), (other, 0, 4), (one, 1, 4)):
        codes = item_codes(data, "behaviour", k, 3, seed=seed)
        assert torch.equal(codes.cell_of, real(data, k, 3, seed).cell_of)
    assert [(data is one, k, seed) for data, k, _, seed in made] == [
        (True, 4, 0), (True, 4, 1), (True, 2, 0), (False, 4, 0)
    ]  # fmt: skip


def test_clusters_by_name(parts: Split, tmp_path: Path) -> None:
    """`behaviour`, `random`, a column, a file and its shuffled form give codes of the requested shape."""
    data = parts.train
    for name in ("behaviour", "random"):
        codes = item_codes(data, name, 4, 3)
        assert (len(codes), codes.k_primary, codes.k_secondary) == (data.n_items, 4, 3)
        assert name == "behaviour" or codes.sizes.tolist() == [10, 10, 10, 10]
    again = item_codes(data, "behaviour", 4, 3)
    assert torch.equal(again.cell_of, behaviour_codes(data, 4, 3).cell_of)
    category = item_codes(data, "column:category", k_secondary=3)
    assert data.item_table is not None
    labels = data.item_table["category"].to_list()
    for i, j in ((0, 1), (3, 9), (5, 20), (7, 31)):
        assert bool(category.primary[i] == category.primary[j]) == (labels[i] == labels[j])
    again.save(tmp_path / "codes.safetensors")
    loaded = item_codes(data, str(tmp_path / "codes.safetensors"))
    assert torch.equal(loaded.cell_of, again.cell_of)
    dealt = item_codes(data, f"shuffled:{tmp_path / 'codes.safetensors'}")
    assert torch.equal(dealt.sizes, again.sizes)
    assert not torch.equal(dealt.cell_of, again.cell_of)
    assert item_codes(data, "random", 300).k_primary == 4  # of at least twice m_o = 5 items each


def test_behaviour_finds_the_categories() -> None:
    """Two items of one behaviour cluster share their category more than twice as often as two random items."""
    world = make_world(300, 100, exposure=0.5, relevant=0.4, seed=0)
    codes = item_codes(world.interactions, "behaviour", 5, 2)
    same = codes.primary.unsqueeze(0) == codes.primary.unsqueeze(1)
    alike = world.category.unsqueeze(0) == world.category.unsqueeze(1)
    off = ~torch.eye(len(same), dtype=torch.bool)
    assert float(alike[same & off].float().mean()) > 2 * float(alike[off].float().mean())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"codes": "nowhere.safetensors"}, "no such file"),
        ({"codes": "column:colour"}, "names no column"),
        ({"lam": "best"}, "lam must be"),
        ({"k_primary": 1}, "k_primary >= 2"),
        ({"layer": 1}, "item_features"),
    ],
)
def test_wrong_arguments_are_named(parts: Split, settings: dict[str, object], words: str) -> None:
    """A one-line error names the argument and the remedy."""
    with pytest.raises((UserError, ValueError), match=words):
        describe_batch(build("esans", parts.train, {**SMALL, **settings}), parts)


def test_codes_of_other_items_are_refused(parts: Split) -> None:
    """Codes for another number of items raise an error."""
    with pytest.raises(UserError, match="7 items"):
        esans(parts.train, codes=Codes.random(7, 3))


def test_new_codes_while_training(parts: Split) -> None:
    """Codes replaced after an epoch reach both samplers from the next step on, and the loss stays finite."""
    old, new = Codes.random(40, 4, 3, seed=0), Codes.random(40, 4, 3, seed=1)
    run = build("esans", parts.train, {**SMALL, "codes": old, "epochs": 3, "lr": 0.05})
    cells = []

    def replaced(record: dict[str, object]) -> None:
        cells.append([parts_of(run)[kind].cell.clone() for kind in (OtherClusters, SameCluster)])  # type: ignore[operator, union-attr]
        set_codes(run, new)

    fitted = fit(run, parts, k=(10,), device="cpu", progress=TrainingProgress(epoch=replaced))
    assert all(torch.equal(cell, old.cell_of) for cell in cells[0])
    assert all(torch.equal(cell, new.cell_of) for cell in cells[1])
    assert all(math.isfinite(record["loss"]) for record in fitted.history)
    assert run.arguments is not None
    assert run.arguments["codes"] == "Codes(40 items, 4 x 3)"  # a run folder records only the name of an object


def test_mixtures_inside_the_item_tower(parts: Split) -> None:
    """layer=1 mixes after the first layer of the item tower, which gives a different loss, and it trains."""
    settings = {**SMALL, "item_features": ("category",), "hidden": (8,), "lr": 0.05, "lam": 0.3}
    found = {}
    for layer in (None, 0, 1):
        run = build("esans", parts.train, {**settings, "layer": layer})
        queries, items = (column[:B].long() for column in parts.train.pairs())
        losses, step, outcome = training_step(run, queries, items, torch.Generator().manual_seed(3))
        found[layer] = losses.detach()
        if layer is not None:
            hard = outcome.bags[0].blocks[-1]
            tower = run.model.item
            inner = tower.layers[: 2 * layer]  # type: ignore[union-attr, index]
            mixed = 0.3 * inner(tower.part(items)).unsqueeze(1) + 0.7 * inner(
                tower.part(hard.ids[:, :5].flatten())
            ).view(B, 5, -1)  # type: ignore[operator]
            want = torch.nn.functional.normalize(tower.layers[2 * layer :](mixed), dim=-1)  # type: ignore[union-attr, index, operator]
            torch.testing.assert_close(hard.emb[:, 5:], want, rtol=1e-4, atol=1e-5)
            assert not torch.allclose(hard.emb[:, 5:], 0.3 * step.v.unsqueeze(1) + 0.7 * hard.emb[:, :5], rtol=1e-2)
    assert not torch.allclose(found[None], found[1], rtol=1e-3)
    assert not torch.allclose(found[0], found[1], rtol=1e-3)
    run = build("esans", parts.train, {**settings, "layer": 1, "epochs": 3, "batch_size": 64})
    history = fit(run, parts, k=(10,), device="cpu").history
    assert history[-1]["loss"] < history[0]["loss"]


def test_what_reads_bags_reads_mixtures(parts: Split, small_world: SyntheticWorld) -> None:
    """The profile counts 14 mixtures per 5 simple items and one per hard item; the description names them."""
    run = build("esans", parts.train, {**SMALL, "shared": False})
    found = profile(run, parts, batches=2, world=small_world)
    assert found["synthetic"] == pytest.approx((28 + 5) / (28 + 5 + 10 + 5))
    assert 0 <= found["false_negatives"] <= 1
    text = describe_batch(build("esans", parts.train, SMALL), parts)
    hard = "5 of the same cluster, then each mixed with the positive: 10 candidates"
    for words in ("5 of each of 2 other clusters: 240 candidates shared", "672 mixtures of 5", hard):
        assert words in text


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`sparring train --set codes=FILE` trains with the file's codes; a missing item raises a one-line error."""
    random = torch.Generator().manual_seed(0)
    pairs = torch.stack(
        [torch.randint(30, (600,), generator=random), torch.randint(40, (600,), generator=random)]
    ).unique(dim=1)
    pl.DataFrame({"user": pairs[0].numpy(), "item": [f"i{j}" for j in pairs[1].tolist()]}).write_csv(tmp_path / "d.csv")
    names = [f"i{j}" for j in range(40)]
    for count, status in ((40, 0), (20, 2)):
        codes = Codes.random(count, 4, 2, ids=Vocabulary(names[:count]))
        codes.save(tmp_path / "codes.safetensors")
        words = [
            "train",
            "--data",
            str(tmp_path / "d.csv"),
            "--recipe",
            "esans",
            "--set",
            f"codes={tmp_path / 'codes.safetensors'}",
        ]
        words += ["--set", "dim=8", "--set", "batch_size=64", "--epochs", "1", "--out", str(tmp_path / f"run{count}")]
        assert main(words) == status
    assert "have no code" in "".join(capsys.readouterr())


def test_what_a_preset_masks(parts: Split) -> None:
    """`literal` masks the positive, the default its cell, and exclude=known every known positive as well. All of them
    mask the mixtures of the positive's primary cluster."""
    counts = {}
    for name, settings in (("literal", {"preset": "literal"}), ("ours", {}), ("known", {"exclude": "known"})):
        run = build(
            "esans",
            parts.train,
            {**SMALL, **settings, "codes": "random", "k_primary": 4, "k_secondary": 3, "m_h": 0, "m_o": 3},
        )
        codes = parts_of(run)[OtherClusters]
        primary, cell = codes.primary(torch.arange(parts.train.n_items)), codes.cell
        queries, items = (column[:40].long() for column in parts.train.pairs())
        _, _, outcome = training_step(run, queries, items, torch.Generator().manual_seed(1), parts.train.positives())
        (block,) = outcome.bags[0].blocks
        assert block.mix is not None
        real = torch.zeros(40, len(block.ids), dtype=torch.bool)
        real[block.exclude.hits(block.ids)] = True  # type: ignore[union-attr]
        own = block.ids == items.unsqueeze(1)
        known = torch.zeros(parts.train.n_queries, parts.train.n_items, dtype=torch.bool)
        known[parts.train.queries.tolist(), parts.train.items.tolist()] = True
        near = cell[block.ids] == cell[items].unsqueeze(1)
        want = {"literal": own, "ours": near, "known": near | known[queries][:, block.ids]}[name]
        assert torch.equal(real, want)
        made = torch.zeros(40, len(block.mix.groups), dtype=torch.bool)
        made[block.mix.places()] = True  # type: ignore[index]
        assert torch.equal(made, primary[items].unsqueeze(1) == block.mix.groups)
        assert bool(made.any())
        counts[name] = int(real.sum())
    assert 0 < counts["literal"] < counts["ours"] < counts["known"]
