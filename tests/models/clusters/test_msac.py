"""MSAC end to end on items with known groups."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from sparring.core.errors import UserError
from sparring.data.interactions import Vocabulary
from sparring.data.modalities.modalities import Modalities
from sparring.models.clusters import LITERAL, MSAC, ROBUST, Codes, learning
from sparring.models.clusters.quantizer import Quantizer
from sparring.models.clusters.stream import Stream

SMALL = replace(
    ROBUST, k_primary=12, k_secondary=4, dim=16, batch_size=128, warmup=40, steps=120, revive_every=40, lr=1e-3
)


def groups(
    n: int = 900, k: int = 12, width: int = 24, seed: int = 0, shift: float = 0.0
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Three noisy linear views of points in k groups; `shift` moves the groups. All seeds share the views."""
    fixed, rng = np.random.default_rng(99), np.random.default_rng(seed)
    centres = 1.5 * fixed.normal(size=(k, 8)) + shift * fixed.normal(size=(k, 8))
    views = {name: fixed.normal(size=(8, width)) for name in ("image", "text", "graph")}
    group = rng.integers(0, k, n)
    latent = centres[group] + 0.4 * rng.normal(size=(n, 8))
    return {
        name: (latent @ view + 0.5 * rng.normal(size=(n, width))).astype(np.float32) for name, view in views.items()
    }, group


def purity(codes: Codes, group: np.ndarray) -> float:
    """The share of items that belong to the commonest group of their cluster, by a loop."""
    return sum(
        np.bincount(group[codes.items(p).numpy()]).max() for p in range(codes.k_primary) if len(codes.items(p))
    ) / len(codes)


@pytest.fixture(scope="module")
def learned() -> tuple[MSAC, Codes, Modalities, np.ndarray]:
    arrays, group = groups()
    modalities = Modalities.from_arrays(arrays)
    msac = MSAC(modalities.widths, SMALL)
    return msac, msac.fit(modalities, Vocabulary(range(900))), modalities, group


def test_clusters_find_the_groups(learned: tuple[MSAC, Codes, Modalities, np.ndarray]) -> None:
    """Clusters are nearly pure in the true groups, where shuffled ones are not; alignment falls."""
    msac, codes, _, group = learned
    assert purity(codes, group) > 0.85
    assert purity(codes.shuffled(), group) < 0.35
    assert msac.history[-1]["align"] < 0.6 * msac.history[0]["align"]
    assert msac.history[-1]["phase"] == "learning"


def test_assignment_is_an_argmin_over_a_loop(learned: tuple[MSAC, Codes, Modalities, np.ndarray]) -> None:
    """The saved code of an item is the nearest codeword to its vectors, computed one by one from the arrays."""
    msac, codes, modalities, _ = learned
    model, rows = msac.model, modalities.rows(np.arange(900))
    z_p, z_s = (book.detach().double().numpy() for book in (model.primary, model.secondary))
    for i in range(0, 900, 37):
        m, start = [], 0
        for linear, name, scale in zip(model.project, modalities.names, model.scale, strict=True):
            row = rows[name][i].double() - model.centre[start : start + 24].double()
            start += 24
            made = (linear.weight.double() @ (row * scale.double()) + linear.bias.double()).detach().numpy()
            m.append(made / np.linalg.norm(made))
        r_p = np.mean(m, axis=0)
        p = int(np.argmin([np.sum((r_p - z) ** 2) for z in z_p]))
        r_s = np.concatenate([one - z_p[p] for one in m])
        assert (int(codes.primary[i]), int(codes.secondary[i])) == (
            p,
            int(np.argmin([np.sum((r_s - z) ** 2) for z in z_s])),
        )


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("k", [12, 30, 50])
def test_no_cluster_is_too_small(k: int, seed: int) -> None:
    """With `robust`, at least 95 % of the codewords are used, each with at least min_size items.

    Also for many more codewords than groups, and for groups of very different sizes.
    """
    arrays, group = groups(seed=seed)
    skewed = np.flatnonzero((group < 2) | (np.random.default_rng(seed).random(900) < 0.5))
    modalities = Modalities.from_arrays({name: array[skewed] for name, array in arrays.items()})
    codes = MSAC(modalities.widths, replace(SMALL, k_primary=k, seed=seed, steps=60)).fit(modalities)
    used = codes.sizes > 0
    assert int(used.sum()) >= 0.95 * codes.k_primary
    assert int(codes.sizes[used].min()) >= 5


def test_literal_shrinks_and_robust_does_not() -> None:
    """The literal loss falls by shrinking all projections, and starves codewords; normalised ones keep length 1."""
    arrays, group = groups(k=20, n=1200)
    modalities = Modalities.from_arrays({name: array / array.std() for name, array in arrays.items()})
    same = {"k_primary": 20, "k_secondary": 4, "dim": 16, "batch_size": 256, "steps": 400, "lr": 2e-3}
    literal, robust = (
        MSAC(modalities.widths, replace(LITERAL, **same)),
        MSAC(modalities.widths, replace(ROBUST, warmup=50, **same)),
    )
    paper, ours = literal.fit(modalities), robust.fit(modalities)
    assert literal.history[-1]["norm"] < 0.5 * literal.history[0]["norm"]
    assert robust.history[-1]["norm"] == pytest.approx(1.0, abs=1e-4)
    assert purity(ours, group) > purity(paper, group)
    assert int(paper.sizes.min()) < 5 <= int(ours.sizes.min())
    floor = np.log(1 + 239 / np.e)  # of exp(cos) without a temperature, at perfect alignment of batches of 240
    assert literal.history[-1]["align"] > 0.97 * floor
    assert robust.history[-1]["align"] < 0.5 * floor


def test_revival_halves_the_largest_cluster() -> None:
    """Codewords far from all items move into large clusters and take a part of them; the others stay in place."""
    arrays, _ = groups()
    modalities = Modalities.from_arrays(arrays)
    model = Quantizer(modalities.widths, SMALL)
    stream = Stream(modalities)
    learning.scale_inputs(model, stream)
    learning.start_codebooks(model, stream)
    with torch.no_grad():
        model.primary[[3, 7]] += 100.0
    before, old = learning.encode(model, stream), model.primary.detach().clone()
    sizes = torch.bincount(before.primary, minlength=12)
    largest = int(sizes.argmax())
    assert learning.revive(model, stream, seed=0) == 2
    after = torch.bincount(learning.encode(model, stream).primary, minlength=12)
    assert int(after[[3, 7]].min()) >= 20
    assert int(after[largest]) < int(sizes[largest])
    moved = {word for word in range(12) if not torch.equal(old[word], model.primary[word])}
    assert {3, 7, largest} <= moved
    assert len(moved) <= 4
    assert learning.revive(model, stream, seed=1) == 0


def test_items_that_are_all_alike_do_not_hang() -> None:
    """With fewer distinct vectors than codewords, some codewords stay unused and every item still has a code."""
    arrays, _ = groups(n=5)
    modalities = Modalities.from_arrays({name: np.repeat(array, 40, axis=0) for name, array in arrays.items()})
    codes = MSAC(modalities.widths, replace(SMALL, steps=20, warmup=10)).fit(modalities)
    used = codes.sizes[codes.sizes > 0]
    assert int(used.sum()) == 200
    assert 1 <= len(used) <= 5
    assert int(used.min()) >= 40


def test_missing_modalities_do_not_matter_much(learned: tuple[MSAC, Codes, Modalities, np.ndarray]) -> None:
    """An item that lacks one modality nearly always keeps its cluster; one that has none has a code too."""
    msac, codes, modalities, _ = learned
    arrays = {name: modalities.rows(slice(None))[name].numpy().copy() for name in modalities.names}
    arrays["text"][::3] = 0
    for array in arrays.values():
        array[1] = 0
    part = Modalities.from_arrays(arrays)
    found = msac.assign(part)
    assert float((found.primary[::3] == codes.primary[::3]).double().mean()) > 0.8
    again = MSAC(part.widths, SMALL).fit(part)
    assert len(again) == 900
    assert int(again.sizes[again.sizes > 0].min()) >= 5


def test_a_memory_map_equals_memory(tmp_path: Path) -> None:
    """Memory maps and a pool smaller than the catalogue give every item once per epoch, and equal codes."""
    arrays, _ = groups()
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    mapped = Modalities.from_arrays({name: np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in arrays})
    inside = Modalities.from_arrays(arrays)
    a, b = (MSAC(each.widths, replace(SMALL, steps=30)).fit(each) for each in (mapped, inside))
    assert torch.equal(a.primary, b.primary)
    assert torch.equal(a.secondary, b.secondary)
    assert torch.equal(a.codewords, b.codewords)
    stream = Stream(mapped, seed=1, held=1)
    assert stream.blocks_held == 1
    taken = list(islice(stream.batches(128), 7))
    assert sorted(np.concatenate([batch.items for batch in taken]).tolist()) == list(range(900))
    for batch in taken:
        for rows, name in zip(batch.rows, arrays, strict=True):
            np.testing.assert_array_equal(rows.numpy(), arrays[name][batch.items])
    assert not np.array_equal(taken[0].items, np.sort(taken[0].items))


def test_the_same_seed_gives_the_same_clusters(learned: tuple[MSAC, Codes, Modalities, np.ndarray]) -> None:
    """Learning is a function of the items, the settings and the seed."""
    _, codes, modalities, _ = learned
    again = MSAC(modalities.widths, SMALL).fit(modalities)
    assert torch.equal(codes.primary, again.primary)
    assert torch.equal(codes.codewords, again.codewords)


def test_a_saved_state_goes_on_as_if_never_saved(
    learned: tuple[MSAC, Codes, Modalities, np.ndarray], tmp_path: Path
) -> None:
    """A round trip through a file does not change assignment and update."""
    _, _, modalities, _ = learned
    kept = MSAC(modalities.widths, SMALL)
    codes = kept.fit(modalities, Vocabulary(range(900)))
    kept.save(tmp_path / "codes.safetensors", codes)
    back = MSAC.load(tmp_path / "codes.safetensors")
    assert torch.equal(Codes.load(tmp_path / "codes.safetensors").cell_of, codes.cell_of)
    assert back.settings == kept.settings
    assert torch.equal(back.assign(modalities).cell_of, codes.cell_of)
    assert torch.equal(back.update(modalities, steps=20).codewords, kept.update(modalities, steps=20).codewords)
    assert back.history == kept.history


def test_new_items_are_coded_at_once(learned: tuple[MSAC, Codes, Modalities, np.ndarray]) -> None:
    """Known items keep their codes by id, at any position; new items get the code of their vectors."""
    msac, codes, modalities, group = learned
    arrays, new_group = groups(n=60, seed=5)
    grown = Modalities.from_arrays(
        {name: np.concatenate([new, modalities.rows(slice(None))[name].numpy()]) for name, new in arrays.items()}
    )
    ids = Vocabulary(range(-60, 900))  # sorted: new items come first
    found = msac.assign(grown, ids, known=codes)
    assert torch.equal(found.cell_of[60:], codes.cell_of)
    assert torch.equal(found.cell_of, msac.assign(grown, ids).cell_of)
    right = [np.bincount(group[codes.items(int(p)).numpy()]).argmax() for p in found.primary[:60]]
    assert np.mean(np.array(right) == new_group) > 0.8


def test_drift_tells_the_same_from_another_world(learned: tuple[MSAC, Codes, Modalities, np.ndarray]) -> None:
    """New items of the same kind fit as well as the old ones, items of moved groups do not; figures equal a loop."""
    msac, codes, modalities, _ = learned
    old = {name: modalities.rows(slice(None))[name].numpy() for name in modalities.names}
    ids = Vocabulary(range(1200))
    drifts = []
    for shift in (0.0, 2.0):
        more, _ = groups(n=300, seed=8, shift=shift)
        drifts.append(
            msac.drift(
                Modalities.from_arrays({name: np.concatenate([old[name], more[name]]) for name in old}), codes, ids
            )
        )
    same, moved = drifts
    assert (same.items, same.new, same.changed_cell) == (1200, 300, 0.0)
    assert same.error_known == pytest.approx(same.error_learned, rel=1e-5)
    assert same.outside_known == pytest.approx(0.05, abs=0.002)
    assert same.outside_new is not None
    assert moved.outside_new is not None
    assert same.outside_new < 0.12 < 0.3 < moved.outside_new
    assert moved.error_new is not None
    assert moved.error_new > 1.5 * same.error_learned
    noisy = {
        name: array + 1.0 * np.random.default_rng(3).normal(size=array.shape).astype(np.float32)
        for name, array in old.items()
    }
    changed = Modalities.from_arrays(noisy)
    now = msac.assign(changed)
    share = sum(int(now.primary[i]) != int(codes.primary[i]) for i in range(900)) / 900
    drift = msac.drift(changed, codes)
    assert drift.changed_primary == pytest.approx(share)
    assert drift.changed_primary > 0
    assert (drift.new, drift.error_new) == (0, None)


def test_an_update_follows_and_keeps_names(learned: tuple[MSAC, Codes, Modalities, np.ndarray], tmp_path: Path) -> None:
    """After the groups moved, a few steps reduce the error, and nearly all items keep the number of their cluster."""
    msac, codes, _, _ = learned
    msac.save(tmp_path / "codes.safetensors", codes)
    mine = MSAC.load(tmp_path / "codes.safetensors")
    arrays, _ = groups(shift=0.7)  # the same items, moved
    modalities = Modalities.from_arrays(arrays)
    before = mine.drift(modalities, codes)
    updated = mine.update(modalities, Vocabulary(range(900)), steps=150)
    after = mine.drift(modalities, updated)
    assert after.error_known is not None
    assert before.error_known is not None
    assert after.error_known < 0.9 * before.error_known
    assert after.changed_cell == 0.0
    assert float((updated.primary == codes.primary).double().mean()) > 0.8
    afresh = MSAC(modalities.widths, replace(SMALL, seed=1)).fit(modalities)
    assert float((afresh.primary == codes.primary).double().mean()) < 0.5


@pytest.mark.parametrize("width", [24, 31])
def test_a_modality_made_anew_is_taken_over(
    width: int, learned: tuple[MSAC, Codes, Modalities, np.ndarray], tmp_path: Path
) -> None:
    """A modality in another basis, even of another width, moves items off their codewords; a refit brings them back."""
    msac, codes, modalities, _ = learned
    msac.save(tmp_path / "codes.safetensors", codes)
    mine = MSAC.load(tmp_path / "codes.safetensors")
    arrays = {name: modalities.rows(slice(None))[name].numpy() for name in modalities.names}
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(width, width)))[0][:24]
    turned = Modalities.from_arrays({**arrays, "graph": (3 * arrays["graph"] @ turn).astype(np.float32)})
    books = mine.model.primary.detach().clone()
    before = mine.drift(turned, codes) if width == 24 else None
    mine.refit("graph", turned, codes)
    after = mine.drift(turned, codes)
    assert after.changed_primary is not None
    assert after.error_known is not None
    assert after.changed_primary < 0.02
    if before is not None:
        assert before.error_known is not None
        assert before.changed_primary is not None
        assert before.changed_primary > 2 * after.changed_primary
        assert before.error_known > 1.5 * after.error_known
    assert torch.equal(books, mine.model.primary)
    updated = mine.update(turned, steps=60)
    assert float((updated.primary == codes.primary).double().mean()) > 0.85
    mine.save(tmp_path / "again.safetensors", codes)
    assert MSAC.load(tmp_path / "again.safetensors").model.widths["graph"] == width


def test_a_single_modality_made_anew(tmp_path: Path) -> None:
    """With a single modality, items are fitted to their codewords: most keep their cluster, new items find theirs."""
    arrays, _ = groups()
    first = Modalities.from_arrays({"graph": arrays["graph"][:800]})
    msac = MSAC(first.widths, SMALL)
    codes = msac.fit(first, Vocabulary(range(800)))
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(24, 24)))[0].astype(np.float32)
    now = Modalities.from_arrays({"graph": arrays["graph"] @ turn})
    plain = msac.assign(Modalities.from_arrays({"graph": arrays["graph"]}))
    msac.refit("graph", now, codes, Vocabulary(range(900)))
    found = msac.assign(now, Vocabulary(range(900)))
    assert float((found.primary[:800] == codes.primary).double().mean()) > 0.8
    assert float((found.primary[800:] == plain.primary[800:]).double().mean()) > 0.7


def test_mistakes_are_told(learned: tuple[MSAC, Codes, Modalities, np.ndarray]) -> None:
    """Too many clusters, other modalities, codes of other codebooks and an unlearned state raise one-line errors."""
    msac, _, modalities, _ = learned
    with pytest.raises(UserError, match=r"k_primary 300 .* at most 90"):
        MSAC(modalities.widths, replace(SMALL, k_primary=300)).fit(modalities)
    with pytest.raises(UserError, match="modality 'text' is missing"):
        msac.assign(modalities.only(["image", "graph"]))
    with pytest.raises(UserError, match="modality 'image' has width 3"):
        msac.assign(Modalities.from_arrays({name: np.ones((9, 3), dtype=np.float32) for name in modalities.names}))
    with pytest.raises(UserError, match="the known codes are 4 x 1"):
        msac.drift(modalities, Codes.random(900, 4))
    with pytest.raises(UserError, match="not trained"):
        MSAC(modalities.widths, SMALL).assign(modalities)
    with pytest.raises(UserError, match="modality 'sound' is unknown"):
        msac.refit("sound", modalities, Codes.random(900, 12, 4))
