"""Towers, classifiers and both fused over HTTP: lists, similar items, and items that come after the training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient

import sparring
from sparring.core.errors import UserError
from sparring.serving.index.run_index import build_index
from support.texts import text_parts

TEXTS = ["warm wool coat", "a small old lamp"]


@pytest.fixture(scope="module", params=["ngame", "dexa"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> sparring.Trained:
    folder = tmp_path_factory.mktemp("runs") / request.param
    parts = text_parts()
    settings = {"encoder": "bag", "dim": 8, "epochs": 2, "batch_size": 16, "clf_epochs": 4, "clf_batch_size": 16}
    settings |= {"clf_lr": 0.05, "size": 4} | ({"auxiliary": 4, "private": 3} if request.param == "dexa" else {})
    sparring.fit(sparring.build(request.param, parts.train, settings), parts, folder, k=(10,), device="cpu")
    return sparring.load(folder)


def items_of(response: Any) -> list[list[int]]:
    assert response.status_code == 200, response.text
    return [[item["id"] for item in result["items"]] for result in response.json()["results"]]


@pytest.mark.parametrize("how", ["towers", "classifiers", "fused"])
def test_served_lists_are_those_of_the_ranking(
    run: sparring.Trained, how: Any, serving: Callable[..., TestClient], tmp_path: Path
) -> None:
    """Users, texts and histories get the lists of `recommend`; similar items are by the towers for every ranking."""
    client = serving(run.folder, store=tmp_path / "items.sqlite", ranking=how)
    info = client.get("/v1/info").json()["run"]
    assert (info["ranking"], info["recall"], info["dim"]) == (how, 1.0, 8)
    users = list(range(0, 60, 7))
    found = items_of(client.post("/v1/recommend", json={"users": users, "k": 6}))
    assert found == [run.recommend([user], 6, ranking=how)["item"].to_list() for user in users]
    found = items_of(client.post("/v1/recommend", json={"texts": TEXTS, "k": 6}))
    assert found == [run.recommend_text([text], 6, ranking=how)["item"].to_list() for text in TEXTS]
    found = items_of(client.post("/v1/recommend", json={"history": [3, 8], "k": 6}))
    assert found == [run.recommend_history([3, 8], 6, ranking=how)["item"].to_list()]
    found = items_of(client.post("/v1/similar", json={"item": 5, "k": 6}))
    assert found == [run.similar_items([5], 6)["similar"].to_list()]


def test_a_new_item_is_ranked_without_a_classifier_of_its_own(
    run: sparring.Trained, serving: Callable[..., TestClient], tmp_path: Path
) -> None:
    """Its vector by the towers is its classifier too; deleted it is gone."""
    client = serving(run.folder, store=tmp_path / "items.sqlite", ranking="fused")
    text = "a small old lamp"
    v = run.item_vectors()[4] + 0.3 * run.item_vectors()[9]
    v = v / v.norm()
    assert client.put("/v1/items", json={"items": [{"id": 777, "vector": v.tolist()}]}).status_code == 200
    answer = client.post("/v1/recommend", json={"text": text, "k": 41}).json()["results"][0]["items"]
    scores = {item["id"]: item["score"] for item in answer}
    q, fused = run.encode_texts([text], "query")[0], run.fused
    assert fused is not None
    near = q @ v
    chance = float(fused.probability(torch.stack([near, near, fused.propensity.max()])))
    assert scores[777] == pytest.approx(float(near + fused.beta * (near + chance)), abs=1e-5)
    known = run.recommend_text([text], 40, ranking="fused")
    expected = dict(zip(known["item"], known["score"], strict=True))
    assert {item: score for item, score in scores.items() if item != 777} == pytest.approx(expected, abs=1e-5)
    assert list(scores.values()) == sorted(scores.values(), reverse=True)
    assert client.request("DELETE", "/v1/items", json={"ids": [777]}).status_code == 200
    assert 777 not in items_of(client.post("/v1/recommend", json={"text": text, "k": 41}))[0]


def test_an_index_decides_the_ranking_that_is_served(
    run: sparring.Trained, serving: Callable[..., TestClient], tmp_path: Path
) -> None:
    """Without --ranking the index's is served, another one is refused; a graph's lists have the measured recall."""
    pytest.importorskip("faiss")
    tuned = build_index(run, k=5, recall=0.5, kind="hnsw", queries=60, ranking="fused")
    client = serving(run.folder, store=tmp_path / "items.sqlite")
    info = client.get("/v1/info").json()["run"]
    assert (info["ranking"], info["index"], info["recall"]) == ("fused", "hnsw", pytest.approx(tuned.recall, abs=1e-6))
    held = np.random.default_rng(0).permutation(60)[30:].tolist()
    found = items_of(client.post("/v1/recommend", json={"users": held, "k": 5}))
    exact = [run.recommend([user], 5, ranking="fused")["item"].to_list() for user in held]
    same = sum(len({*a} & {*b}) for a, b in zip(found, exact, strict=True)) / sum(map(len, exact))
    assert same == pytest.approx(tuned.recall)
    with pytest.raises(UserError, match="was built for the fused ranking, not classifiers: build it again"):
        serving(run.folder, store=tmp_path / "other.sqlite", ranking="classifiers")
