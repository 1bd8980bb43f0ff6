"""The tables of ESANS: gains and p-values by brute force, codes learned once, one split, a reason for missing rows."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import safetensors.numpy
import scipy.stats
import torch

from sparring.cli import main
from sparring.core.errors import UserError
from sparring.core.manifest import write_manifest
from sparring.data.interactions import Split
from sparring.data.synthetic_world import SyntheticWorld, make_world
from sparring.evaluation.statistics import equal_variance_t, summary
from sparring.experiments.papers import ItemModalities, PaperDataset, Reproduction, find, paper, reproduce
from sparring.experiments.papers.esans import (
    FIGURE_4,
    FIVE_RUNS,
    TABLE_2,
    TABLE_4,
    TABLE_5,
    candidates,
    five_runs,
    scaled_primary,
)
from sparring.experiments.papers.paper_tables import published_gain, relative_rows
from sparring.experiments.papers.printed import PublishedFigure, published_counts
from sparring.experiments.search_space import space
from sparring.recipes import settings
from sparring.recipes.setup import flat
from sparring.training.step import training_step
from support.papers import metrics_of, run_here, run_json, table

THREE = {"image": "image.npy", "text": "text.npy", "behaviour": "behaviour"}


@pytest.fixture(scope="module")
def world() -> SyntheticWorld:
    return make_world(60, 60, exposure=0.5, relevant=0.4, seed=4)


def given(
    world: SyntheticWorld, folder: Path, specs: dict[str, str] | None = None, category: bool = True
) -> PaperDataset:
    data = world.interactions
    items = pl.DataFrame({"item": range(60), "category": [f"c{at % 5}" for at in range(60)]})
    data = dataclasses.replace(data, item_table=items if category else None)
    modalities = ItemModalities(folder / "tiny" / "codes", THREE if specs is None else specs)
    return PaperDataset("tiny", data, modalities=modalities)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, world: SyntheticWorld) -> Path:
    """A world as files: pairs, items with categories, two modalities."""
    folder, data, random = tmp_path_factory.mktemp("esans"), world.interactions, np.random.default_rng(0)
    pl.DataFrame({"user_id": data.queries, "item_id": data.items}).write_parquet(folder / "tiny.parquet")
    pl.DataFrame({"item_id": range(60), "category": [f"c{at % 5}" for at in range(60)]}).write_parquet(
        folder / "items.parquet"
    )
    for name in ("image", "text"):
        np.save(folder / f"{name}.npy", random.normal(size=(60, 6)).astype(np.float32))
    return folder


def words(files: Path, name: str, out: str, *more: str) -> list[str]:
    quick = [
        f"--set={each}" for each in ("batch_size=64", "dim=4", "lr=0.05", "msac.steps=4", "msac.warmup=2", "msac.dim=4")
    ]
    data = shlex.split(f"--data {files / 'tiny.parquet'} --items {files / 'items.parquet'} --cache {files / 'cache'}")
    modalities = [
        f"--modality={spec}" for spec in (f"image={files}/image.npy", f"text={files}/text.npy", "behaviour=behaviour:8")
    ]
    return [
        "reproduce",
        name,
        *data,
        *modalities,
        *quick,
        "--epochs",
        "1",
        "--device",
        "cpu",
        "--out",
        str(files / out),
        *more,
    ]


@pytest.fixture(scope="module")
def done(files: Path) -> Path:
    """esans-main by the command line with two trials and two seeds."""
    with pytest.MonkeyPatch.context() as patch:
        run_here(patch)
        assert main(words(files, "esans-main", "main", "--seeds", "2", "--tune", "2")) == 0
    return files / "main"


def test_published_figures_agree_with_the_papers_text() -> None:
    """Gains over UNS are as printed, up to rounding; tables 4 and 5 and figure 4 repeat table 2 at the defaults."""
    said = {
        "Recall@50": (30.74, 23.20, 13.70, 25.06, 8.21, 8.43, 15.32),
        "Recall@200": (9.66, 20.11, 13.65, 20.58, 3.92, 5.29, 10.73),
    }
    for metric, gains in said.items():
        for data, gain in zip(published_counts("esans"), gains, strict=False):
            assert 100 * (
                TABLE_2[data, metric, "ESANS"].value / TABLE_2[data, metric, "UNS"].value - 1
            ) == pytest.approx(gain, abs=0.03)
        found = published_gain(TABLE_2, metric, "ESANS", "UNS")
        assert found is not None
        assert 100 * found.value == pytest.approx(gains[-1], abs=0.03)
        assert (100 * found.low, 100 * found.high) == pytest.approx((min(gains), max(gains[:6])), abs=0.03)
        for cells, name in ((TABLE_4, "ESANS"), (TABLE_5, "m_c=2, m_o=5")):
            assert cells["#A2", metric, name] == TABLE_2["#A2", metric, "ESANS"]
    assert (len(TABLE_2), len(FIVE_RUNS), len(TABLE_4), len(TABLE_5), len(FIGURE_4)) == (84, 36, 20, 10, 60)
    for data in ("#A1", "#A2", "#A3", "#A4"):
        best = TABLE_2[data, "Recall@200", "ESANS"]
        assert FIGURE_4[data, "Recall@200", "K_p=300"] == FIGURE_4[data, "Recall@200", "K_s=15"] == best
        assert best in (FIGURE_4[data, "Recall@200", "lambda=0.1"], FIGURE_4[data, "Recall@200", "lambda=-0.1"])


def test_a_printed_gain_is_that_of_the_means_over_sets() -> None:
    """(0.3 + 0.5) / (0.2 + 0.4) - 1 with range +25 % to +50 %; one known set alone; None if a figure is missing."""
    values = {"a": (0.3, 0.2), "b": (0.5, 0.4), "c": (0.9, None)}
    cells = {(data, "m", "x"): PublishedFigure(mine) for data, (mine, _) in values.items()}
    cells |= {(data, "m", "y"): PublishedFigure(base) for data, (_, base) in values.items() if base is not None}
    found = published_gain(cells, "m", "x", "y")
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((0.8 / 0.6 - 1, 0.25, 0.5))
    one = published_gain(cells, "m", "x", "y", "b")
    assert one is not None
    assert (one.value, one.low, one.high) == (pytest.approx(0.25), None, None)
    assert published_gain(cells, "m", "x", "z") is None
    assert published_gain(cells, "other", "x", "y") is None


def test_the_authors_test_is_students_with_equal_variances() -> None:
    """p equals SciPy's, of values and printed figures; all are below 0.01, except two if deviations divide by n."""
    random = np.random.default_rng(1)
    for n, m in ((5, 5), (3, 8)):
        a, b = random.normal(0.3, 0.01, n), random.normal(0.31, 0.02, m)
        assert equal_variance_t(summary(a), summary(b)).p == pytest.approx(scipy.stats.ttest_ind(a, b).pvalue, rel=1e-9)
    rows = [row for row in five_runs().rows if row["method"] != "ESANS"]
    assert len(rows) == 24
    large: dict[str, list[tuple[Any, ...]]] = {"p": [], "p_by_n": []}
    for row in rows:
        ours, theirs = (FIVE_RUNS[str(row["data"]), str(row["metric"]), who] for who in ("ESANS", str(row["method"])))
        assert ours.std is not None
        assert theirs.std is not None
        assert row["gain"] == pytest.approx(ours.value / theirs.value - 1)
        for name, wider in (("p", 1.0), ("p_by_n", math.sqrt(5 / 4))):
            expected = scipy.stats.ttest_ind_from_stats(
                ours.value, wider * ours.std, 5, theirs.value, wider * theirs.std, 5
            ).pvalue
            assert row[name] == pytest.approx(expected, rel=1e-9)
            large[name] += [(row["data"], row["metric"], row["method"])] if expected >= 0.01 else []
    assert large["p"] == []
    assert large["p_by_n"] == [("PixelRec", "Recall@200", "FairNeg"), ("Amazon", "Recall@200", "Ada-tau")]
    with pytest.raises(ValueError, match="at least 2 values"):
        equal_variance_t(summary([0.1]), summary([0.1, 0.2]))


def two_way_p(d: np.ndarray) -> float:
    """The paired test over seeds and queries, written out: the larger of the two-way p and the p over seeds."""
    s, q = d.shape
    mean = sum(d[i, j] for i in range(s) for j in range(q)) / (s * q)
    rows, cols = [sum(d[i]) / q for i in range(s)], [sum(d[:, j]) / s for j in range(q)]
    ms_rows = q * sum((r - mean) ** 2 for r in rows) / (s - 1)
    ms_cols = s * sum((c - mean) ** 2 for c in cols) / (q - 1)
    ms_rest = sum((d[i, j] - rows[i] - cols[j] + mean) ** 2 for i in range(s) for j in range(q)) / ((s - 1) * (q - 1))
    extra = max(ms_cols - ms_rest, 0.0)
    total = ms_rows + extra
    spread = ms_rows**2 / (s - 1) + (ms_cols**2 / (q - 1) + ms_rest**2 / ((s - 1) * (q - 1)) if extra else 0.0)
    both = 2 * scipy.stats.t.sf(abs(mean) / math.sqrt(total / (s * q)), max(total**2 / spread, min(s, q) - 1))
    return max(both, scipy.stats.ttest_1samp(rows, 0).pvalue)


def test_rows_equal_the_folders(tmp_path: Path, world: SyntheticWorld) -> None:
    """Means, differences, p-values and verdicts equal those computed here from run folders written by hand."""
    one = given(world, tmp_path)
    plan = Reproduction(find("esans-ablation"), tmp_path, (one,), (10, 20, 30))
    random = np.random.default_rng(5)
    shift = {"ESANS": 0.0, "w/o MSAC": -0.1, "w/o EDIS": 0.002, "w/o secondary codebook": 0.1, "w/o text": -0.02}
    each: dict[str, np.ndarray] = {}
    for name, by in shift.items():
        method = next(method for method in plan.methods["tiny"] if method.name == name)
        each[name] = (0.5 + by + random.normal(0, 0.03, (3, 40)) + random.normal(0, 0.004, (3, 1))).astype(np.float32)
        for seed, values in zip(plan.seeds, each[name], strict=True):
            folder = plan.study.folder("tiny", method, seed)
            folder.mkdir(parents=True)
            pl.DataFrame({"query": range(40), "recall@50": values}).write_parquet(folder / "per_query.parquet")
            (folder / "result.json").write_text(json.dumps({"test": {"metrics": {"recall@50": float(values.mean())}}}))
            (folder / "measured.json").write_text("{}")
            write_manifest(folder)
    rows = {row["method"]: row for row in relative_rows(plan, one, "Recall@50", TABLE_4)}
    base = each["ESANS"].astype(np.float64)
    expected = {}
    for name in list(shift)[1:]:
        values = each[name].astype(np.float64)
        expected[name] = two_way_p(values - base)
        row = rows[name]
        assert row["mean"] == pytest.approx(values.mean())
        assert row["std"] == pytest.approx(values.mean(1).std(ddof=1))
        assert row["over"] == pytest.approx(values.mean() / base.mean() - 1)
        assert row["over_low"] < row["over"] < row["over_high"]
        assert row["p"] == pytest.approx(expected[name], rel=1e-6)
        assert row["p_equal_variance"] == pytest.approx(
            scipy.stats.ttest_ind(values.mean(1), base.mean(1)).pvalue, rel=1e-6
        )
        assert row["published"] == pytest.approx(TABLE_4["#A2", "Recall@50", name].value / 0.3887 - 1)
    worst = 0.0
    for at, name in enumerate(sorted(expected, key=lambda name: expected[name])):
        worst = max(worst, min(1.0, (len(expected) - at) * expected[name]))
        assert rows[name]["p_holm"] == pytest.approx(worst, rel=1e-6)
        sign = "better" if each[name].mean() > each["ESANS"].mean() else "worse"
        assert rows[name]["verdict"] == (sign if worst < 0.05 else "no difference shown")
    assert {rows[name]["verdict"] for name in shift} == {"the reference", "worse", "no difference shown", "better"}
    assert rows["w/o image"]["mean"] is rows["w/o image"]["p"] is None
    assert rows["w/o image"]["verdict"] == "not run: no run has finished"


def test_methods_have_equal_candidates_and_the_control_as_many_logits(world: SyntheticWorld, tmp_path: Path) -> None:
    """All but MixGCF share 5,120 real candidates per batch of 512; the control has as many logits as ESANS' bags."""
    one = given(world, tmp_path)
    methods = {method.name: method for method in find("esans-main").methods(one, {})}
    named = ("UNS", "PNS", "debiased MNS", "FairNeg", "Ada-tau", "BMNS")
    assert {methods[name].settings["n"] for name in named} == {5120}
    assert methods["MixGCF"].settings == {"n": 64, "per_query": True, "exclude": "known"}  # so that k is tuned
    assert "k" in space("mixgcf", methods["MixGCF"].settings)
    assert methods["UNS, as many logits"].settings["n"] == candidates({})[1] == 19_466
    assert find("esans-main").methods(one, {"batch_size": "16"})[1].settings["n"] == 160
    run = settings.build("esans", world.interactions, {"batch_size": 16, "dim": 4, "codes": "random", "k_primary": 6})
    queries, items = (column[:16].long() for column in world.interactions.pairs())
    _, _, outcome = training_step(run, queries, items, torch.Generator().manual_seed(0))
    logits = real = 0
    for block in (block for bag in outcome.bags for block in bag.blocks):
        real += block.ids.shape[-1] if block.ids.dim() == 1 else 0
        logits += block.ids.shape[-1] + (
            0 if block.mix is None else block.mix.weights.shape[-3] * block.mix.weights.shape[-2]
        )
    assert (real, logits) == candidates({"batch_size": 16})


def test_the_ablation_has_a_row_for_each_part_and_modality(world: SyntheticWorld, tmp_path: Path) -> None:
    """Every row of table 4 is there, by the names of the modalities, or has the reason why it cannot be run."""
    ablation = find("esans-ablation")
    methods = {method.name: method for method in ablation.methods(given(world, tmp_path), {})}
    assert {name.replace("image", "visual") for name in methods} == {name for _, _, name in TABLE_4}
    assert (
        methods["w/o MSAC"].settings["codes"] == f"shuffled:{tmp_path}/tiny/codes/image+text+behaviour-2x15.safetensors"
    )
    assert (methods["w/o EDIS"].settings["simple_mixtures"], methods["w/o EDIS"].settings["hard_mixtures"]) == (
        False,
        False,
    )
    modalities = {
        name: method.clustering.modalities for name, method in methods.items() if method.clustering is not None
    }
    assert modalities["w/o multimodal aligning"] == ("behaviour",)
    assert modalities["w/o image"] == ("text", "behaviour")
    assert modalities["w/o behaviour"] == ("image", "text")
    last = methods["w/o secondary codebook"]
    assert last.settings["m_h"] == 0
    assert last.clustering is not None
    assert not last.clustering.secondary
    for specs, expected in (
        (
            {"text": "t.npy", "behaviour": "behaviour"},
            {"w/o text": "see w/o multimodal aligning", "w/o visual": "no visual modality"},
        ),
        ({"behaviour": "behaviour"}, {"w/o multimodal aligning": "ESANS itself", "w/o behaviour": "the only modality"}),
        (
            {"image": "i.npy", "text": "t.npy"},
            {"w/o multimodal aligning": "no modality is behaviour", "w/o behaviour": "no behaviour"},
        ),
    ):
        plan = Reproduction(ablation, tmp_path, (given(world, tmp_path, specs),), (10,))
        rows = {row["method"]: row for row in ablation.results(plan).table.rows}
        for name, why in expected.items():
            assert str(rows[name]["verdict"]).startswith("not run: ")
            assert why in str(rows[name]["verdict"])
            assert rows[name]["mean"] is None
        assert rows["w/o text"]["published"] == pytest.approx(0.3848 / 0.3887 - 1)


def test_sweeps_cover_the_papers_settings(world: SyntheticWorld, tmp_path: Path) -> None:
    """Sweeps have the paper's settings, default first; impossible sizes have a reason; folders are distinct."""
    one = given(world, tmp_path)
    lams = find("esans-lambda").methods(one, {})
    assert [method.settings["lam"] for method in lams] == [0.1, 0.5, 0.3, -0.1, -0.3, "adaptive", "learned"]
    counts = find("esans-negatives").methods(one, {})
    assert [(method.settings["m_c"], method.settings["m_o"]) for method in counts] == [
        (2, 5),
        (2, 4),
        (2, 6),
        (1, 5),
        (3, 5),
    ]
    small = [method.name for method in find("esans-codebooks").methods(one, {})]
    assert small == ["K_p=2, K_s=15", "K_p=3", "K_s=5", "K_s=10", "K_s=20", "K_s=25"]
    rows = find("esans-codebooks").results(Reproduction(find("esans-codebooks"), tmp_path, (one,), (10,))).table.rows
    told = {row["method"]: row["verdict"] for row in rows if " of K_p" in str(row["method"])}
    why = "not run: 60 items are too few: their default is 2 clusters"
    assert told == dict.fromkeys([f"{k} / 300 of K_p" for k in (100, 200, 500)], why)
    big = dataclasses.replace(one, data=make_world(5, 4000, seed=1).interactions)
    named = [method.name for method in find("esans-codebooks").methods(big, {})]
    sizes = ["K_p=14, K_s=15", *(f"K_p={round(14 * k / 300)}" for k in (100, 200, 400, 500))]
    assert scaled_primary(big) == {100: 5, 200: 9, 400: 19, 500: 23}  # the paper's name -> ours
    assert named == [*sizes, "K_s=5", "K_s=10", "K_s=20", "K_s=25"]
    for name in ("esans-main", "esans-ablation", "esans-lambda", "esans-negatives", "esans-codebooks", "esans-open"):
        folders = [method.folder for method in find(name).methods(one, {})]
        assert len(set(folders)) == len(folders)


def test_the_main_table_has_every_method_with_both_gains(done: Path) -> None:
    """Rows have the means of result.json, gains over UNS and ESANS from them, and the published gains."""
    rows = {row["method"]: row for row in table(done)}
    assert len(rows) == 11
    assert {row["metric"] for row in table(done)} == {"Recall@50"}
    means = {}
    for name, row in rows.items():
        slug = name.lower().replace(", ", "-").replace(" ", "-")
        each = [metrics_of(done / "tiny" / slug / str(seed)) for seed in (10, 20)]
        means[name] = sum(one["recall@50"] for one in each) / 2
        assert row["mean"] == pytest.approx(means[name], rel=1e-5)
    for name, row in rows.items():
        if name not in ("ESANS", "UNS"):
            assert row["over"] == pytest.approx(means[name] / means["ESANS"] - 1, abs=1e-5)
            assert row["over_uns"] == pytest.approx(means[name] / means["UNS"] - 1, abs=1e-5)
    printed = [
        [TABLE_2[data, "Recall@50", who].value for data in published_counts("esans")] for who in ("PNS", "UNS", "ESANS")
    ]
    assert rows["PNS"]["published_uns"] == pytest.approx(sum(printed[0]) / sum(printed[1]) - 1)
    assert rows["PNS"]["published"] == pytest.approx(sum(printed[0]) / sum(printed[2]) - 1)
    assert rows["BMNS"]["published"] is rows["BMNS"]["published_uns"] is None
    text = (done / "README.md").read_text()
    for said in (
        "Tuned: each method with 2 trials",
        "random split of each query's items, 80/10/10",
        "ESANS over UNS",
        "batch_size=64",
    ):
        assert said in text


def test_all_seeds_have_one_split_and_one_set_of_codes(done: Path, files: Path) -> None:
    """All runs have the same 80/10/10 split of each query's items; every run of ESANS names the one file of codes."""
    frame = pl.read_parquet(files / "tiny.parquet")
    held = frame.group_by("user_id").len().sort("user_id")["len"].to_list()
    seen = []
    for method, seed in (("esans", 10), ("esans", 20), ("uns", 10)):
        folder = done / "tiny" / method / str(seed)
        stored = safetensors.numpy.load_file(folder / "seen.safetensors")
        seen.append(stored["items"].tolist())
        assert np.diff(stored["start"]).tolist() == [round(0.9 * n) for n in held]
        meta = run_json(folder)
        assert meta["source"]["split"] == {"how": "auto", "valid": 1 / 9, "test": 0.1, "seed": 0}
        valid = sum(min(round(round(0.9 * n) / 9), round(0.9 * n) - 1) for n in held)
        assert meta["data"]["valid"] == valid
    assert seen[0] == seen[1] == seen[2]
    codes = sorted(path.name for path in (done / "tiny" / "codes").glob("*.safetensors"))
    assert codes == ["image+text+behaviour-2x15.safetensors"]
    meta = run_json(done / "tiny" / "esans-random-clusters" / "10")
    assert meta["arguments"]["codes"] == f"shuffled:{done}/tiny/codes/image+text+behaviour-2x15.safetensors"
    rows = {row["modalities"]: row for row in table(done, "clusters")}
    assert rows["image + text + behaviour"]["items"] == 60
    assert rows["image + text + behaviour"]["purity"] > 0


def test_runs_have_the_tuned_settings(done: Path) -> None:
    """Each method has its own trials; its runs have the settings of the best one; requested settings are not tuned."""
    for method in ("esans", "uns", "ada-tau"):
        trials = [
            json.loads(line) for line in (done / "tiny" / method / "tune" / "trials.jsonl").read_text().splitlines()
        ]
        assert len(trials) == 2
        best = max(trials, key=lambda trial: (trial["value"], -trial["number"]))
        meta = run_json(done / "tiny" / method / "20")
        assert {"weight_decay"} | ({"tau"} if method != "ada-tau" else set()) <= best[
            "settings"
        ].keys()  # Ada-tau has its own temperature
        assert "lr" not in best["settings"]
        for name, value in best["settings"].items():
            assert {**meta["arguments"], **flat(meta["setup"])}[name] == value
    assert {row["method"] for row in table(done, "tuned")} == {row["method"] for row in table(done)}


def test_a_second_call_runs_nothing(
    done: Path, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Codes, trials and runs are reused; other trials, modalities or codes are errors."""
    ran = run_here(monkeypatch)
    again = words(files, "esans-main", "main", "--seeds", "2")
    assert main([*again, "--tune", "2"]) == 0
    assert ran == []
    capsys.readouterr()
    for more, said in (
        (["--tune", "3"], "trials=2, not 3"),
        (["--tune", "2", "--modality", "audio=behaviour:4"], "set of modalities of tiny"),
        (["--tune", "2", "--set", "codes=random"], "codes cannot be set"),
    ):
        assert main([*again, *more]) == 2
        assert said in capsys.readouterr().err
    assert main([*words(files, "esans-main", "wrong"), "--set", "msac.stebs=3"]) in (1, 2)
    assert "msac.stebs" in "".join(capsys.readouterr())
    assert (
        main(["reproduce", "xir-table2", *words(files, "x", "xir")[2:6], "--out", str(files / "xir"), "--tune", "2"])
        == 2
    )
    assert "keeps the settings of its paper" in capsys.readouterr().err


def test_tables_may_share_their_codes(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --codes the second table uses the first one's clusters; a folder of other modalities is an error."""
    ran = run_here(monkeypatch)
    shared = ["--seeds", "1", "--codes", str(files / "shared")]
    assert main(words(files, "esans-lambda", "one", *shared)) == 0
    assert sum("clusters" in name for name in ran) == 1
    ran.clear()
    assert main(words(files, "esans-negatives", "two", *shared)) == 0
    assert len(ran) == 5
    assert not any("clusters" in name for name in ran)
    meta = run_json(files / "two" / "tiny" / "m-c-2-m-o-5" / "10")
    assert meta["arguments"]["codes"] == f"{files}/shared/tiny/image+text+behaviour-2x15.safetensors"
    capsys.readouterr()
    assert main(words(files, "esans-negatives", "three", *shared, "--modality", "audio=behaviour:4")) == 2
    assert "choose another folder for --codes" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["esans-lambda", "esans-negatives", "esans-codebooks", "esans-ablation", "esans-open"])
def test_every_other_table_runs(name: str, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each method of each table trains; sweeps are tuned by their first method alone."""
    run_here(monkeypatch)
    tuned = ["--tune", "1"] if name == "esans-lambda" else []
    assert main(words(files, name, name, "--seeds", "1", *tuned)) == 0
    rows = [row for row in table(files / name) if not str(row["verdict"]).startswith("not run")]
    assert rows
    assert all(row["mean"] is not None for row in rows)
    assert rows[0]["verdict"] == "the reference"
    assert {row["verdict"] for row in rows[1:]} == {"one seed: no verdict"}
    if tuned:
        assert [path.parent.parent.name for path in (files / name / "tiny").glob("*/tune/trials.jsonl")] == [
            "lambda-0.1"
        ]
        trial = json.loads((files / name / "tiny" / "lambda-0.1" / "tune" / "trials.jsonl").read_text())
        meta = run_json(files / name / "tiny" / "lambda-minus-0.3" / "10")
        assert (meta["setup"]["temperature"]["tau"], meta["arguments"]["lam"]) == (trial["settings"]["tau"], -0.3)


def test_the_files_own_split_is_kept(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A split column of the file is used, and the page says so."""
    run_here(monkeypatch)
    frame = pl.read_parquet(files / "tiny.parquet").with_row_index()
    part = pl.col("index").mod(10).replace_strict(dict(enumerate(["train"] * 7 + ["valid"] + ["test"] * 2)))
    folder = files / "parted"
    folder.mkdir()
    frame.select("user_id", "item_id", split=part).write_parquet(folder / "parted.parquet")
    asked = words(files, "esans-lambda", "parted-out", "--seeds", "1")
    asked[3] = str(folder / "parted.parquet")
    assert main(asked) == 0
    meta = run_json(files / "parted-out" / "parted" / "lambda-0.1" / "10")
    sizes = [sum(at % 10 in places for at in range(len(frame))) for places in (range(7), (7,), (8, 9))]
    assert [meta["data"][name] for name in ("train", "valid", "test")] == sizes
    assert "parted: the file's own split." in (files / "parted-out" / "README.md").read_text()


def test_the_cost_of_esans_is_measured(world: SyntheticWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row of ESANS in esans-cost has a time as a ratio to UNS."""
    run_here(monkeypatch)
    quick: dict[str, object] = {"epochs": 2, "batch_size": 64, "dim": 4, "n": 16}
    plan = Reproduction(find("esans-cost"), tmp_path / "cost", (given(world, tmp_path),), (10,), quick, "cpu")
    reproduce(plan)
    rows = {row["method"]: row for row in table(plan.out)}
    assert plan.failures == []
    assert rows["ESANS"]["mean"] > 0
    assert rows["ESANS"]["published"] == 1.18


def test_data_without_categories_or_modalities_has_a_reason(world: SyntheticWorld, tmp_path: Path) -> None:
    """Without categories the category control has a reason; without modalities nothing is run."""
    experiment = find("esans-main")
    plan = Reproduction(
        experiment, tmp_path, (given(world, tmp_path, {"behaviour": "behaviour"}, category=False),), (10,)
    )
    rows = {row["method"]: row for row in experiment.results(plan).table.rows}
    assert rows["ESANS, category clusters"]["verdict"] == "not run: no item column 'category'"
    bare = dataclasses.replace(plan, data=(PaperDataset("tiny", world.interactions),))
    found = experiment.results(bare)
    assert found.table.rows == []
    assert "tiny: not run: its items have no modalities (--modality NAME=SPEC)." in found.findings


def test_a_browser_opens_the_page(done: Path, browse: Callable[[Path], tuple[str, str]]) -> None:
    """Chromium shows the page without console messages, with gains, published figures, clusters and tuning."""
    dom, said = browse(done / "report.html")
    assert said == ""
    assert dom.count("<svg") == 1
    for words in (
        "p (equal-variance t)",
        "ESANS, random clusters",
        "Clusters",
        "Tuning",
        "0.2121 ± 0.0015",
        "the same split for all",
    ):
        assert words in dom


def test_the_run_of_a_modality_is_opened_with_code_of_the_caller_only(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--recipe and --trust reach the run that behaviour:RUN names; without them none of its code is allowed."""
    run_here(monkeypatch)
    asked: list[tuple[str, str | None, bool]] = []

    def opened(folder: str, split: Split, recipe: str | None = None, trust: bool = False) -> None:
        asked.append((folder, recipe, trust))
        raise UserError("it is not opened")

    monkeypatch.setattr(paper, "run_vectors", opened)
    command = words(files, "esans-main", "opened", "--seeds", "1")
    command[command.index("--modality=behaviour=behaviour:8")] = "--modality=behaviour=behaviour:runs/mine"
    for more in ([], ["--recipe", "mine.py:deep"], ["--trust"]):
        assert main([*command, *more]) == 2
        assert "it is not opened" in capsys.readouterr().err
    assert asked == [("runs/mine", None, False), ("runs/mine", "mine.py:deep", False), ("runs/mine", None, True)]
