"""Responses over HTTP equal the brute-force ranking of the catalogue, with filters applied."""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient

from sparring.serving.http.schema import Limits
from support.made_run import USERS, MadeRun, make_run


def listed(answer: httpx.Response, query: int = 0) -> list[tuple[Any, float]]:
    assert answer.status_code == 200, answer.text
    return [(item["id"], item["score"]) for item in answer.json()["results"][query]["items"]]


def same(found: list[tuple[Any, float]], expected: list[tuple[Any, float]]) -> None:
    assert [item for item, _ in found] == [item for item, _ in expected]
    np.testing.assert_allclose([score for _, score in found], [score for _, score in expected], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("score", ["dot", "cosine"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_user_gets_the_best_items_without_those_seen(
    tmp_path: Path, serving: Callable[..., TestClient], score: str, bias: bool
) -> None:
    """The list has ids, scores and titles of the k best unseen items, or of all with exclude_seen false."""
    truth = make_run(tmp_path / "run", score=score, bias=bias)
    client = serving(truth.folder)
    for row in range(0, USERS, 7):
        answer = client.post("/v1/recommend", json={"user": truth.user(row), "k": 7})
        same(listed(answer), truth.best(truth.users[row], 7, set(truth.seen[row].tolist())))
        for item in answer.json()["results"][0]["items"]:
            assert item["title"] == f"thing {truth.item_ids.index(item['id'])}"
        assert answer.json()["results"][0]["query"] == truth.user(row)
        everything = client.post("/v1/recommend", json={"user": truth.user(row), "k": 7, "exclude_seen": False})
        same(listed(everything), truth.best(truth.users[row], 7))
        for same_user in ({"query": truth.user(row)}, {"queries": [truth.user(row)]}):  # other names of user and users
            assert client.post("/v1/recommend", json={**same_user, "k": 7}).content == answer.content


def test_a_run_that_keeps_repeats_lists_seen_items(tmp_path: Path, serving: Callable[..., TestClient]) -> None:
    """With repeats kept, lists of users and histories hold seen items, unless exclude_seen is true."""
    truth = make_run(tmp_path / "run", repeats=True)
    client = serving(truth.folder)
    for row in range(0, USERS, 7):
        seen, query = set(truth.seen[row].tolist()), {"user": truth.user(row), "k": 7}
        same(listed(client.post("/v1/recommend", json=query)), truth.best(truth.users[row], 7))
        fresh = client.post("/v1/recommend", json={**query, "exclude_seen": True})
        same(listed(fresh), truth.best(truth.users[row], 7, seen))
        history = [truth.item_ids[item] for item in seen]
        again = client.post("/v1/recommend", json={"history": history, "k": len(truth.item_ids)})
        assert {item for item, _ in listed(again)} >= set(history)


def test_several_users_are_answered_in_their_order(truth: MadeRun, client: TestClient) -> None:
    """Each user gets a list, repeated users too; k = N lists all remaining items."""
    rows = [3, 0, 3, 9]
    answer = client.post("/v1/recommend", json={"users": [truth.user(row) for row in rows], "k": 100})
    for at, row in enumerate(rows):
        expected = truth.best(truth.users[row], 100, set(truth.seen[row].tolist()))
        assert len(expected) == 55
        same(listed(answer, at), expected)


def test_requests_at_the_same_time_each_get_their_own_answer(
    truth: MadeRun, serving: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 concurrent requests of several kinds and lengths share batches and get their own lists."""
    client = serving(truth.folder, limits=Limits(seconds=60))
    gate = client.service.gate  # type: ignore[attr-defined]
    index, waits = client.service.registry.served().index, iter([1.0])  # type: ignore[attr-defined]
    search = index.search
    monkeypatch.setattr(
        index, "search", lambda *given: (time.sleep(next(waits, 0.0)), search(*given))[1]
    )  # meanwhile the other requests arrive

    async def ask(at: int, http: httpx.AsyncClient) -> None:
        row, k = at % USERS, 3 + at % 4
        if at % 5 == 0:
            item = truth.item_ids[row]
            found = await http.post("/v1/similar", json={"item": item, "k": k})
            same(listed(found), truth.best(truth.items[row], k, {row}))
        elif at % 5 == 1:
            found = await http.post(
                "/v1/recommend",
                json={"user": truth.user(row), "k": k, "where": [{"column": "stock", "op": "=", "value": True}]},
            )
            same(
                listed(found),
                truth.best(
                    truth.users[row], k, set(truth.seen[row].tolist()), {each for each in range(60) if each % 4}
                ),
            )
        else:
            found = await http.post("/v1/recommend", json={"user": truth.user(row), "k": k})
            same(listed(found), truth.best(truth.users[row], k, set(truth.seen[row].tolist())))

    async def everyone() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(gate), base_url="http://test") as http:
            await asyncio.gather(*(ask(at, http) for at in range(200)))

    asyncio.run(everyone())
    searcher = client.service.searcher  # type: ignore[attr-defined]
    assert searcher.searched == 200
    assert searcher.batches < 100
    assert searcher.waiting == 0


def test_a_history_is_the_mean_of_its_items_where_no_tower_reads_histories(truth: MadeRun, client: TestClient) -> None:
    """The query is the mean vector at the mean length; its items are excluded, unknown ones ignored and named."""
    rows = [4, 11, 30]
    history = [truth.item_ids[row] for row in rows]
    mean = truth.items[rows].mean(0)
    q = mean / np.linalg.norm(mean) * np.linalg.norm(truth.items[rows], axis=1).mean()
    partly = client.post("/v1/recommend", json={"history": ["no such", *history, 7], "k": 5})
    same(listed(partly), truth.best(q, 5, set(rows)))
    assert partly.json()["results"][0]["unknown"] == ["no such", 7]
    known = client.post("/v1/recommend", json={"history": history, "k": 5, "exclude_seen": False})
    same(listed(known), truth.best(q, 5))
    assert set(known.json()["results"][0]) == {"query", "items"}


def test_similar_items_leave_the_item_itself_out(tmp_path: Path, serving: Callable[..., TestClient]) -> None:
    """Neighbours are ranked by the run's score without the bias, and exclude the item itself."""
    truth = make_run(tmp_path / "run", bias=True)
    client = serving(truth.folder)
    answer = client.post("/v1/similar", json={"items": [truth.item_ids[8], truth.item_ids[2]], "k": 4})
    for at, row in enumerate((8, 2)):
        q = np.concatenate([truth.items[row][:-1], [0.0]])
        same(listed(answer, at), truth.best(q, 4, {row}))


DAY = datetime.date(2020, 1, 1)
FILTERS: list[tuple[str, str, Any, Callable[[dict[str, Any]], bool]]] = [
    ("category", "=", "apple", lambda row: row["category"] == "apple"),
    ("category", "!=", "apple", lambda row: row["category"] != "apple"),
    ("category", "in", ["apple", "bread"], lambda row: row["category"] in ("apple", "bread")),
    ("category", "not in", ["apple"], lambda row: row["category"] != "apple"),
    ("category", "in", [], lambda row: False),
    ("category", "contains", "RE", lambda row: row["category"] == "bread"),
    ("price", "<", 5, lambda row: row["price"] < 5),
    ("price", ">=", 12.5, lambda row: row["price"] >= 12.5),
    ("year", "<=", 2010.5, lambda row: row["year"] <= 2010),
    ("year", "=", 2010, lambda row: row["year"] == 2010),
    ("year", "in", [2010, 2011.0, 2012.5, 10**40], lambda row: row["year"] in (2010, 2011)),
    ("year", "<", 10**40, lambda row: True),
    ("year", "=", 10**40, lambda row: False),
    ("since", "in", ["2020-01-05", "2020-02-01"], lambda row: str(row["since"]) in ("2020-01-05", "2020-02-01")),
    ("stock", "=", False, lambda row: not row["stock"]),
    ("since", ">", "2020-02-01", lambda row: row["since"] > datetime.date(2020, 2, 1)),
    ("tags", "contains", "new", lambda row: "new" in row["tags"]),
    ("title", "contains", "thing 1", lambda row: "thing 1" in row["title"]),
]


@pytest.mark.parametrize(
    ("column", "op", "value", "passes"), FILTERS, ids=[f"{column} {op}" for column, op, *_ in FILTERS]
)
def test_filters_hold_for_every_item_listed(
    truth: MadeRun, client: TestClient, column: str, op: str, value: Any, passes: Callable[[dict[str, Any]], bool]
) -> None:
    """For any column and operator the list has exactly the items that a loop over the rows accepts, by score."""
    only = {row for row, about in enumerate(truth.table.iter_rows(named=True)) if passes(about)}
    where = [{"column": column, "op": op, "value": value}]
    answer = client.post("/v1/recommend", json={"user": truth.user(5), "k": 60, "where": where})
    same(listed(answer), truth.best(truth.users[5], 60, set(truth.seen[5].tolist()), only))


def test_allow_deny_and_conditions_hold_together(truth: MadeRun, client: TestClient) -> None:
    """All filters combined; each item has the requested columns."""
    allow, deny = truth.item_ids[:40], truth.item_ids[10:20]
    where = [{"column": "price", "op": "<", "value": 15}, {"column": "stock", "op": "=", "value": True}]
    body = {
        "user": truth.user(1),
        "k": 60,
        "allow": [*allow, "unknown"],
        "deny": deny,
        "where": where,
        "fields": ["price", "since", "tags"],
    }
    answer = client.post("/v1/recommend", json=body)
    rows = list(truth.table.iter_rows(named=True))
    only = {row for row in (*range(10), *range(20, 40)) if rows[row]["price"] < 15 and rows[row]["stock"]}
    same(listed(answer), truth.best(truth.users[1], 60, set(truth.seen[1].tolist()), only))
    for item in answer.json()["results"][0]["items"]:
        row = rows[truth.item_ids.index(item["id"])]
        assert (item["price"], item["since"], item["tags"]) == (row["price"], str(row["since"]), row["tags"])
    for nothing in ({"allow": []}, {"allow": [], "fields": ["price"]}):
        assert listed(client.post("/v1/recommend", json={"user": truth.user(1), **nothing})) == []


BAD: list[tuple[str, dict[str, Any], int, str]] = [
    ("/v1/recommend", {"user": "nobody"}, 404, "'nobody'"),
    ("/v1/recommend", {"users": ["nobody", "no one"]}, 404, "'nobody'"),
    ("/v1/recommend", {}, 422, "give one of"),
    ("/v1/recommend", {"user": "user-01", "history": [1000]}, 422, "history"),
    ("/v1/recommend", {"history": ["unknown", 7]}, 404, "history"),
    ("/v1/recommend", {"user": "user-01", "k": 0}, 422, "k:"),
    ("/v1/recommend", {"user": "user-01", "k": 10**9}, 422, "k:"),
    ("/v1/recommend", {"user": "user-01", "k": "10"}, 422, "k:"),
    ("/v1/recommend", {"user": "user-01", "k": 2.5}, 422, "k:"),
    ("/v1/recommend", {"user": True}, 422, "user"),
    ("/v1/recommend", {"user": 1.5}, 422, "user"),
    ("/v1/recommend", {"user": ["user-01"]}, 422, "user"),
    ("/v1/recommend", {"users": []}, 422, "users"),
    ("/v1/recommend", {"users": ["user-01"] * 257}, 422, "users"),
    ("/v1/recommend", {"user": "x" * 2000}, 422, "user"),
    ("/v1/recommend", {"user": 10**30}, 422, "user:"),
    ("/v1/recommend", {"users": ["user-01", 2**63]}, 422, "users.1:"),
    ("/v1/recommend", {"history": [1000, -(2**63) - 1]}, 422, "history.1:"),
    ("/v1/recommend", {"user": "user-01", "deny": [10**30]}, 422, "deny.0:"),
    ("/v1/recommend", {"user": "user-01", "allow": list(range(10_001))}, 422, "allow"),
    (
        "/v1/recommend",
        {"users": ["user-01"] * 256, "k": 1000, "fields": ["price", "year", "tags"]},
        422,
        "1,048,576",
    ),
    ("/v1/recommend", {"user": "user-01", "limit": 3}, 422, "limit"),
    ("/v1/recommend", {"user": "user-01", "run": "other"}, 404, "'other'"),
    ("/v1/recommend", {"user": "user-01", "fields": ["colour"]}, 422, "'colour'"),
    ("/v1/recommend", {"user": "user-01", "where": [{"column": "colour", "op": "=", "value": 1}]}, 422, "'colour'"),
    ("/v1/recommend", {"user": "user-01", "where": [{"column": "price", "op": "like", "value": 1}]}, 422, "op"),
    ("/v1/recommend", {"user": "user-01", "where": [{"column": "price", "op": "<", "value": "cheap"}]}, 422, "'cheap'"),
    ("/v1/recommend", {"user": "user-01", "where": [{"column": "price", "op": "<", "value": True}]}, 422, "True"),
    ("/v1/recommend", {"user": "user-01", "where": [{"column": "price", "op": "<", "value": [1]}]}, 422, "one value"),
    ("/v1/recommend", {"user": "user-01", "where": [{"column": "price", "op": "in", "value": 1}]}, 422, "a list"),
    ("/v1/recommend", {"user": "user-01", "where": [{"column": "since", "op": "in", "value": [3]}]}, 422, "'3'"),
    (
        "/v1/recommend",
        {"user": "user-01", "where": [{"column": "since", "op": "in", "value": ["2020-01-01", "x"]}]},
        422,
        "'x'",
    ),
    ("/v1/recommend", {"user": "user-01", "where": [{"column": "since", "op": ">", "value": "soon"}]}, 422, "'soon'"),
    ("/v1/recommend", {"user": "user-01", "where": [{"column": "tags", "op": "=", "value": "red"}]}, 422, "contains"),
    ("/v1/recommend", {"user": "user-01", "where": [{"column": "price", "op": "contains", "value": "1"}]}, 422, "text"),
    ("/v1/recommend", {"text": "red"}, 422, "texts"),
    ("/v1/similar", {"item": "nothing"}, 404, "'nothing'"),
    ("/v1/similar", {}, 422, "give one of"),
    ("/v1/similar", {"item": 1000, "items": [1000]}, 422, "give one of"),
]


@pytest.mark.parametrize(
    ("path", "body", "status", "word"), BAD, ids=[f"{at}-{str(body)[:40]}" for at, (_, body, *_) in enumerate(BAD)]
)
def test_a_bad_question_is_refused_in_one_line(
    client: TestClient, path: str, body: dict[str, Any], status: int, word: str
) -> None:
    """A 4xx whose message contains the offending value or field."""
    answer = client.post(path, json=body)
    assert (answer.status_code, word in answer.json()["detail"]) == (status, True), answer.text
    assert len(answer.json()["detail"].splitlines()) == 1
    assert len(answer.json()["detail"]) < 600


def test_two_runs_answer_by_their_names(tmp_path: Path, serving: Callable[..., TestClient]) -> None:
    """The first run is the default; two folders with one name get a number."""
    one, two = make_run(tmp_path / "a" / "run", 1), make_run(tmp_path / "b" / "run", 2)
    client = serving(one.folder, two.folder)
    assert [run["name"] for run in client.get("/v1/info").json()["runs"]] == ["run", "run-2"]
    for truth, extra in ((one, {}), (one, {"run": "run"}), (two, {"run": "run-2"})):
        answer = client.post("/v1/recommend", json={"user": "user-09", "k": 5, **extra})
        same(listed(answer), truth.best(truth.users[9], 5, set(truth.seen[9].tolist())))


def test_a_run_without_a_table_answers_with_ids(tmp_path: Path, serving: Callable[..., TestClient]) -> None:
    """Titles are null, and a condition on the title matches nothing."""
    truth = make_run(tmp_path / "run", with_table=False)
    client = serving(truth.folder)
    answer = client.post("/v1/recommend", json={"user": "user-03", "k": 4})
    same(listed(answer), truth.best(truth.users[3], 4, set(truth.seen[3].tolist())))
    assert {item["title"] for item in answer.json()["results"][0]["items"]} == {None}
    assert (
        listed(
            client.post(
                "/v1/recommend",
                json={"user": "user-03", "where": [{"column": "title", "op": "contains", "value": "a"}]},
            )
        )
        == []
    )
    assert client.put("/v1/items", json={"items": [{"id": 1000, "title": "named"}]}).status_code == 200
    only = client.post(
        "/v1/recommend",
        json={"user": "user-03", "exclude_seen": False, "where": [{"column": "title", "op": "=", "value": "named"}]},
    )
    assert [item for item, _ in listed(only)] == [1000]


def test_users_and_items_are_described(truth: MadeRun, client: TestClient) -> None:
    """The description has the history with titles and all columns, with ids by path and by query."""
    user = client.get("/v1/users/user-04").json()
    assert [taken["id"] for taken in user["history"]] == [truth.item_ids[row] for row in truth.seen[4]]
    assert [taken["title"] for taken in user["history"]] == [f"thing {row}" for row in truth.seen[4]]
    assert (user["total"], user["ordered"]) == (5, False)
    assert client.get("/v1/user", params={"id": "user-04", "limit": 2}).json()["history"] == user["history"][-2:]
    item = client.get(f"/v1/items/{truth.item_ids[3]}").json()
    assert (item["title"], item["columns"]["year"], item["columns"]["since"], item["source"]) == (
        "thing 3",
        2003,
        "2020-01-04",
        "run",
    )
    assert client.get("/v1/item", params={"id": str(truth.item_ids[3])}).json() == item
    for path in ("/v1/users/nobody", "/v1/items/nothing", "/v1/item?id=no/thing", "/v1/items/1000?run=other"):
        assert client.get(path).status_code == 404, path


@pytest.mark.parametrize(
    ("path", "one", "several"), [("/v1/recommend", "user", "users"), ("/v1/similar", "item", "items")]
)
def test_one_unknown_query_does_not_refuse_the_others(
    truth: MadeRun, client: TestClient, path: str, one: str, several: str
) -> None:
    """An unknown query has an empty result and is listed; the others get their lists, as if sent alone."""
    known = ["user-01", "user-05"] if one == "user" else truth.item_ids[1:3]
    answer = client.post(path, json={several: ["nobody", known[0], "no one", known[1], "nobody"], "k": 3})
    assert answer.status_code == 200, answer.text
    alone = [client.post(path, json={one: each, "k": 3}).json()["results"][0] for each in known]
    assert all(len(each["items"]) == 3 for each in alone)
    blank = [{"query": each, "items": [], "unknown": [each]} for each in ("nobody", "no one")]
    results = answer.json()["results"]
    for item in (item for each in (*alone, *results) for item in each["items"]):
        item["score"] = round(item["score"], 3)  # batches may differ in the last digit
    assert results == [blank[0], alone[0], blank[1], alone[1], blank[0]]
