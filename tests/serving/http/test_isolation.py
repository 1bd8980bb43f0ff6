"""A request that fails, or asks for much, harms no other: batches, filters, caches, time limits."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import polars as pl
import pytest
from fastapi.testclient import TestClient

from sparring.core.errors import UserError
from sparring.serving.http import answers, catalogue, conditions
from sparring.serving.http.catalogue import Catalogue
from sparring.serving.http.schema import Limits, RequestError
from sparring.serving.http.searcher import Searcher, SearchJob
from sparring.serving.http.served_run import ServedRun
from sparring.serving.http.threads import in_thread
from support.made_run import MadeRun

GOOD = {"users": ["user-01", "user-02"], "k": 10}
BAD: list[tuple[str, dict[str, Any]]] = [
    ("/v1/recommend", {"users": ["user-01", 1180591620717411303424], "k": 10}),
    ("/v1/recommend", {"history": [1000, 2**64], "k": 10}),
    ("/v1/recommend", {"user": "user-01", "k": 10, "where": [{"column": "colour", "op": "=", "value": 1}]}),
    ("/v1/recommend", {"user": "user-01", "k": 10, "fields": ["colour"]}),
    ("/v1/similar", {"items": [1000, -(2**70)], "k": 10}),
    ("/v1/recommend", {"user": "nobody", "k": 10}),
]


@pytest.mark.parametrize("bad_clients", [1, 8])
def test_bad_clients_beside_a_good_one(client: TestClient, bad_clients: int) -> None:
    """Beside clients whose every request fails, each valid request gets the answer that it gets alone."""
    expected, stop, statuses = client.post("/v1/recommend", json=GOOD).json(), threading.Event(), set[int]()

    def disturb(number: int) -> None:
        turn = number
        while not stop.is_set():
            path, body = BAD[turn % len(BAD)]
            statuses.add(client.post(path, json=body).status_code)
            turn += 1

    with ThreadPoolExecutor(bad_clients + 2) as pool:
        for number in range(bad_clients):
            pool.submit(disturb, number)
        try:
            for given in pool.map(lambda _: client.post("/v1/recommend", json=GOOD), range(60)):
                assert (given.status_code, given.json()) == (200, expected)
        finally:
            stop.set()
    assert statuses == {404, 422}


class Panic(BaseException):
    """Like the panics of polars, which are no Exceptions."""


@pytest.mark.parametrize("failure", [OverflowError("64 bits"), Panic("panicked")])
@pytest.mark.parametrize("stage", ["search", "write"])
def test_one_job_fails_alone(client: TestClient, stage: str, failure: BaseException) -> None:
    """In a batch with two bad jobs, by a NaN vector or by their response, every other job gets its answer."""
    served, bad, sizes = client.service.registry.served(), {3, 17}, list[int]()  # type: ignore[attr-defined]
    vectors = served.user_vectors(np.arange(40))
    if stage == "search":
        vectors[sorted(bad)] = np.nan

    def write(jobs: Any, scores: np.ndarray, items: np.ndarray) -> list[bytes]:
        sizes.append(len(jobs))
        if stage == "write" and any(job.queries[0] in bad for job in jobs):
            raise failure
        return [str((job.queries[0], items[row].tolist())).encode() for row, job in enumerate(jobs)]

    async def asked() -> list[Any]:
        jobs = [SearchJob(served, [user], None, vectors[[user]], 5, [np.empty(0, np.int64)]) for user in range(40)]
        return await asyncio.gather(*map(searcher.submit, jobs), return_exceptions=True)

    searcher = Searcher(write)
    try:
        found = asyncio.run(asked())
        assert searcher.alive
    finally:
        searcher.close()
    for user, answer in enumerate(found):
        if user in bad:
            assert isinstance(answer, UserError if stage == "search" else OverflowError | RuntimeError)
        else:
            items = np.argsort(-(served.index.vectors @ vectors[user]), kind="stable")[:5].tolist()
            assert answer.decode() == str((user, items))
    assert len(sizes) < 20, "a batch is halved, not dissolved"


def test_a_filter_of_many_values_is_one_membership_test(truth: MadeRun, client: TestClient) -> None:
    """16 conditions of 10,000 numbers each list the right items, in a small part of the time limit."""
    far = [10_000 + number for number in range(9_998)]
    where: list[dict[str, Any]] = [{"column": "year", "op": "in", "value": [*far, 2007, 2011.0]}] * 12
    where += [{"column": "price", "op": "not in", "value": [-float(number) for number in range(1, 10_001)]}] * 4
    began = time.process_time()
    answer = client.post("/v1/recommend", json={"user": "user-01", "k": 60, "exclude_seen": False, "where": where})
    assert time.process_time() - began < 3.0
    listed = {item["id"] for item in answer.json()["results"][0]["items"]}
    assert listed == {truth.item_ids[7], truth.item_ids[11]}


def test_equal_looking_values_are_different_filters(client: TestClient) -> None:
    """true, 1, 1.0 and "1" are equal or alike in Python; a cached filter answers only its own value."""
    statuses = [
        client.post(
            "/v1/recommend", json={"user": "user-01", "where": [{"column": "stock", "op": "=", "value": value}]}
        )
        for value in (True, 1, 1.0, "1", True)
    ]
    assert [answer.status_code for answer in statuses] == [200, 422, 422, 422, 200]


def test_filter_results_are_cached_up_to_their_bytes(
    truth: MadeRun, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many filters come, the cache stays within its bytes, and every result is right, cached or not."""
    monkeypatch.setattr(catalogue, "_CACHE", 20_000)
    items: Catalogue = client.service.registry.served().catalogue  # type: ignore[attr-defined]
    years = np.arange(2000, 2060)
    for turn in range(300):
        bound = 2000 + turn % 61
        if turn % 50 == 0:
            items.put(truth.item_ids[5], {"year": 1990 + turn})
            years[5] = 1990 + turn
        passing = np.unpackbits(items.passing([("year", "<", bound), ("price", ">", -float(turn))]), count=60)
        assert passing.tolist() == (years < bound).tolist()
        again = np.unpackbits(items.passing([("year", "<", bound), ("price", ">", -float(turn))]), count=60)
        assert again.tolist() == passing.tolist()
        held = sum(512 + base.nbytes + every.nbytes * (every is not base) for base, _, every in items._passing.values())
        assert held == items._cached <= 20_000
    assert 10 < len(items._passing) < 40


def test_work_whose_request_has_ended_is_never_started() -> None:
    """Work that waits for a thread is dropped with its request; work that has started is finished."""
    began, go, pool = list[int](), threading.Event(), ThreadPoolExecutor(1)

    def work(number: int) -> None:
        began.append(number)
        go.wait(10)

    async def ask() -> None:
        requests = [asyncio.create_task(in_thread(pool, work, number)) for number in range(3)]
        await asyncio.sleep(0.05)
        requests[0].cancel()
        requests[1].cancel()
        await asyncio.sleep(0)
        go.set()
        await requests[2]

    asyncio.run(ask())
    pool.shutdown()
    assert began == [0, 2]


def test_texts_of_a_request_that_timed_out_are_not_encoded(
    truth: MadeRun, serving: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time limit ends the work on 256 texts within one part of them, and the encoder is free for the next."""
    encoded = list[int]()

    def slow(served: object, texts: list[str]) -> np.ndarray:
        encoded.append(len(texts))
        time.sleep(0.1)
        return np.ones((len(texts), 8), np.float32)

    monkeypatch.setattr(answers, "_text_vectors", slow)
    monkeypatch.setattr(ServedRun, "answers", ["text"])
    client = serving(truth.folder, limits=Limits(seconds=0.35))
    with client:  # one event loop for both requests
        assert client.post("/v1/recommend", json={"texts": ["a"] * 256}).status_code == 503
        assert client.post("/v1/recommend", json={"text": "b"}).status_code == 200
    assert sum(encoded[:-1]) < 64, encoded
    assert encoded[-1] == 1


@pytest.mark.parametrize("dtype", [pl.Int8, pl.UInt8, pl.Int64, pl.UInt64, pl.Float32, pl.Decimal(20, 2)])
@pytest.mark.parametrize("others", [[], [5.0, 6.5, 1e300]])
def test_numbers_are_chosen_as_python_does(dtype: Any, others: list[float]) -> None:
    """A column of any number type passes exactly the values that are equal to one of the choices."""
    held = [0, 5, 6, 100, 127]
    table = pl.DataFrame({"n": pl.Series([*held, None], dtype=dtype)})
    choices = [-(2**63), -1, 0, 127, 128, 255, 256, 2**63 - 1, *others]
    for op in ("in", "not in"):
        test = conditions.expression([("n", op, choices)], table.schema)
        expected = [(value in choices) == (op == "in") for value in held] + [op == "not in"]
        assert table.select(test).to_series().to_list() == expected


@pytest.mark.parametrize(
    ("choices", "dtype"), [([1, 2, "x"], pl.Int64), (["x", 1], pl.String), ([1, True], pl.Int64), ([1], pl.Boolean)]
)
def test_a_choice_of_another_type_is_named(choices: list[Any], dtype: Any) -> None:
    """The first value that cannot be compared with the column is in the error."""
    with pytest.raises(RequestError) as caught:
        conditions.expression([("n", "in", choices)], {"n": dtype()})
    assert caught.value.status == 422
    assert repr(str(choices[-1])) in caught.value.message
