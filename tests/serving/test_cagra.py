"""Graphs that a GPU builds: refused where nothing builds them, tried by `auto` where it can, served like others."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sparring.cli import main
from sparring.core.errors import UserError
from sparring.serving.index import Index, faiss_backends, tune
from sparring.serving.index.run_index import open_index
from support.cagra import Graph, pretend_gpu
from support.made_run import make_run

faiss = pytest.importorskip("faiss")

N, D = 2500, 12
rng = np.random.default_rng(4)
CENTRES = rng.standard_normal((50, D))
ITEMS = (CENTRES[rng.integers(0, 50, N)] + 0.6 * rng.standard_normal((N, D))).astype(np.float32)
QUERIES = (CENTRES[rng.integers(0, 50, 40)] + 0.6 * rng.standard_normal((40, D))).astype(np.float32)


def test_without_cuvs_or_a_gpu_one_line_says_so(
    tmp_path: Path, refused: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--kind cagra names the extra where FAISS has no CAGRA, and hnsw where there is no GPU."""
    run = make_run(tmp_path / "run").folder
    monkeypatch.delattr(faiss, "GpuIndexCagra", raising=False)
    refused(["index", run, "--kind", "cagra"], 'pip install "sparring[gpu-index]"', "--kind hnsw")
    with pytest.raises(UserError, match="gpu-index"):
        faiss_backends.make("cagra", ITEMS)
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 0)
    refused(["index", run, "--kind", "cagra"], "GPU", "--kind hnsw")
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 1)
    refused(["index", run, "--kind", "cagra"], "128", "--kind exact")  # the run has 60 items
    assert not (run / "index" / "index.json").exists()


def test_auto_tries_it_where_a_gpu_can_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU `auto` neither builds nor names it; with one it is measured; a full GPU is a reason, not an end."""
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 0)
    alone = tune(ITEMS, QUERIES, k=10, recall=0.8)
    assert "cagra" not in {point.kind for point in alone.points}
    assert not any("cagra" in line for line in alone.left_out)
    pretend_gpu(monkeypatch)
    assert "cagra" in {point.kind for point in tune(ITEMS, QUERIES, k=10, recall=0.8).points}

    def full(self: Graph, vectors: np.ndarray) -> None:
        raise RuntimeError("out of memory\nat line 3")

    monkeypatch.setattr(Graph, "train", full)
    tuned = tune(ITEMS, QUERIES, k=10, recall=0.8)
    assert "cagra" not in {point.kind for point in tuned.points}
    assert any("out of memory" in line for line in tuned.left_out)
    with pytest.raises(UserError, match="out of memory"):
        tune(ITEMS, QUERIES, k=10, recall=0.8, kind="cagra")


def test_a_saved_graph_needs_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded where FAISS has no CAGRA, it gives the same lists with exact scores, and follows changes."""
    with pytest.MonkeyPatch.context() as there:
        pretend_gpu(there)
        tuned = tune(ITEMS, QUERIES, k=10, recall=0.95, kind="cagra")
    tuned.index.save(tmp_path / "index")
    monkeypatch.delattr(faiss, "GpuIndexCagra", raising=False)
    index = Index.load(tmp_path / "index")
    assert isinstance(index.ann, faiss.IndexHNSW)
    scores, found = index.search(QUERIES, 10)
    assert (found == tuned.index.search(QUERIES, 10)[1]).all()
    products = QUERIES.astype(np.float64) @ ITEMS.T.astype(np.float64)
    assert scores == pytest.approx(np.take_along_axis(products, found, 1), abs=1e-4)
    truth = np.argsort(-products, axis=1)[:, :10]
    assert np.mean([len(set(a) & set(b)) / 10 for a, b in zip(found, truth, strict=True)]) >= 0.95
    index.remove(found[0, :3])
    index.add([N + 5], 3 * QUERIES[:1])
    after = index.search(QUERIES[:1], 10)[1][0].tolist()
    assert after[0] == N + 5
    assert not set(after) & set(found[0, :3].tolist())


def test_a_service_over_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sparring index --kind cagra` on a GPU, then a service without one: its lists, filters and new items are those of
    brute force, up to the recall."""
    pytest.importorskip("fastapi")
    from fastapi.testclient import TestClient

    from sparring.serving.http.app import Service
    from sparring.serving.http.runs import RunRegistry
    from sparring.serving.http.store import Store

    truth = make_run(tmp_path / "run", items=400)
    with pytest.MonkeyPatch.context() as there:
        pretend_gpu(there)
        words = ["--kind", "cagra", "--recall", "0.9", "--k", "10", "--quiet"]
        assert main(["index", str(truth.folder), *words]) == 0
    monkeypatch.delattr(faiss, "GpuIndexCagra", raising=False)
    assert open_index(truth.folder).kind == "cagra"
    assert main(["check", str(truth.folder / "index"), "--quiet"]) == 0
    service = Service(RunRegistry([truth.folder], Store(tmp_path / "items.sqlite")))
    try:
        client = TestClient(service.gate)
        assert client.get("/v1/info").json()["runs"][0]["index"] == "cagra"
        shares = []
        for row in range(len(truth.users)):
            items = client.post("/v1/recommend", json={"user": truth.user(row), "k": 10}).json()["results"][0]["items"]
            seen = truth.seen[row].tolist()
            best = dict(truth.best(truth.users[row], 400, seen))
            assert [item["score"] for item in items] == pytest.approx([best[item["id"]] for item in items], abs=1e-4)
            shares.append(len({item["id"] for item in items} & set(list(best)[:10])) / 10)
        assert np.mean(shares) >= 0.9
        put = {"items": [{"id": "fresh", "vector": (3 * truth.users[3]).tolist()}]}
        assert client.put("/v1/items", json=put).status_code == 200
        asked = client.post("/v1/recommend", json={"user": truth.user(3), "k": 1}).json()
        assert asked["results"][0]["items"][0]["id"] == "fresh"
    finally:
        service.close()


@pytest.mark.skipif(not hasattr(faiss, "GpuIndexCagra"), reason="FAISS has no cuVS: the extra `gpu-index`")
def test_the_calls_are_those_of_faiss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration has the attributes that are set, the copy takes an index, and without a device the construction
    gets as far as the device."""
    config = faiss.GpuIndexCagraConfig()
    for name in ("graph_degree", "intermediate_graph_degree", "guarantee_connectivity"):
        assert hasattr(config, name)
    assert list(inspect.signature(faiss.GpuIndexCagra.copyTo).parameters) == ["self", "index"]
    if faiss.get_num_gpus():
        built = faiss_backends.make("cagra", ITEMS)
        assert (built.ntotal, built.base_level_only) == (N, False)
    else:
        monkeypatch.setattr(faiss_backends, "cagra_problem", lambda: None)
        with pytest.raises(UserError, match="Invalid GPU device"):
            faiss_backends.make("cagra", ITEMS)
