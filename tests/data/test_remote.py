"""Tables of an object store (moto, a server of S3's API), of Delta and of Iceberg are read and written as files are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import polars as pl
import pytest

import sparring
from sparring.cli import main
from sparring.core.errors import UserError
from sparring.data.fingerprints import fingerprint
from sparring.data.remote import is_remote
from support.ports import free_port


@pytest.fixture(scope="module")
def rows() -> pl.DataFrame:
    """Interactions of text ids with times, and a column that nobody needs."""
    n = 400
    pairs = {
        "user_id": [f"u{i % 37}" for i in range(n)],
        "item_id": [f"i{i * i % 29}" for i in range(n)],
        "timestamp": [1_700_000_000 + i for i in range(n)],
        "unused": ["x" * 50] * n,
    }
    return pl.DataFrame(pairs)


@pytest.fixture(scope="module")
def items() -> pl.DataFrame:
    return pl.DataFrame({"item_id": [f"i{i}" for i in range(29)], "title": [f"thing {i}" for i in range(29)]})


@pytest.fixture(scope="module", params=["file", "s3"])
def bucket(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an empty folder, or of an empty bucket with credentials in the environment."""
    if request.param == "file":
        folder = tmp_path_factory.mktemp("bucket")
        for name in ("parts", "out"):
            (folder / name).mkdir()
        yield folder.as_uri()
        return
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    program = shutil.which("moto_server", path=beside)
    if program is None:
        pytest.skip('no object store to test with: pip install "moto[s3,server]"')
    port = free_port()
    where = f"http://127.0.0.1:{port}"
    with subprocess.Popen([program, "-p", str(port)], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as server:
        try:
            create_bucket(f"{where}/shop", server)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("AWS_ACCESS_KEY_ID", "me")
                patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
                patch.setenv("AWS_REGION", "us-east-1")
                patch.setenv("AWS_ENDPOINT_URL", where)
                patch.setenv("AWS_ALLOW_HTTP", "true")
                yield "s3://shop"
        finally:
            server.terminate()


def create_bucket(where: str, server: subprocess.Popen[bytes]) -> None:
    """Create a bucket as soon as its server answers; skip if it has ended."""
    signed = {"Authorization": "AWS4-HMAC-SHA256 Credential=me/20260101/us-east-1/s3/aws4_request"}
    request = urllib.request.Request(where, method="PUT", headers=signed)
    for attempt in range(300):
        try:
            return urllib.request.urlopen(request).close()
        except urllib.error.URLError:
            if server.poll() is not None:
                pytest.skip(f"moto_server does not start here: it ended with {server.returncode}")
            if attempt == 299:
                raise
            time.sleep(0.1)


def test_addresses() -> None:
    """Addresses of stores and lakes are remote; paths, also Windows', names of sets and worlds are not."""
    for place in (
        "s3://b/x.parquet",
        "gs://b/x",
        "az://c/x",
        "hf://datasets/o/n/x.parquet",
        "delta:t",
        "iceberg:x.json",
    ):
        assert is_remote(place), place
    for place in ("x.parquet", "C:\\x", "world:9x9", "demo", "ftp://b/x", "s3:", "delta:", Path("s3://b/x")):
        assert not is_remote(place), place


@pytest.mark.parametrize("name", ["rows.parquet", "rows.csv", "rows.csv.gz", "parts/", "parts/*.parquet"])
def test_a_table_reads_as_the_local_one_does(
    name: str, bucket: str, rows: pl.DataFrame, items: pl.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids, pairs, times and the items table are those of a local file; no copy is left."""
    place = f"{bucket}/{name}"
    if name.endswith(".csv"):
        rows.lazy().sink_csv(place)
    elif name.endswith(".gz"):
        rows.lazy().sink_csv(place, compression="gzip")
    elif name.startswith("parts"):
        rows[:150].write_parquet(f"{bucket}/parts/a.parquet")
        rows[150:].write_parquet(f"{bucket}/parts/b.parquet")
    else:
        rows.write_parquet(place)
    items.write_parquet(f"{bucket}/items.parquet")
    rows.write_parquet(tmp_path / "rows.parquet")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    here, there = sparring.read(tmp_path / "rows.parquet"), sparring.read(place, items=f"{bucket}/items.parquet")
    assert fingerprint(there) == fingerprint(here)
    assert there.item_ids.ids.to_list() == here.item_ids.ids.to_list()
    assert there.item_table is not None
    assert there.item_table["title"].to_list() == [f"thing {one[1:]}" for one in here.item_ids.ids]
    assert not list((tmp_path / "temporary").iterdir())


def test_only_columns_in_use_are_copied(bucket: str, rows: pl.DataFrame, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy has the columns of the roles; the rows are downloaded once."""
    from sparring.data import opening, remote

    copies = []
    monkeypatch.setattr(opening, "copied", lambda table, names: copies.append(names) or remote.copied(table, names))
    rows.write_parquet(f"{bucket}/used.parquet")
    sparring.read(f"{bucket}/used.parquet")
    assert [sorted(names) for names in copies] == [["item_id", "timestamp", "user_id"]]


def test_prepared_data_are_the_same_files(bucket: str, rows: pl.DataFrame, tmp_path: Path) -> None:
    """`prepare` of an address writes the columns that it writes of the local file."""
    rows.write_parquet(f"{bucket}/prepared.parquet")
    rows.write_parquet(tmp_path / "rows.parquet")
    words = ["prepare", "--split", "leave-last-out", "--quiet", "--out"]
    assert main([*words, str(tmp_path / "there"), f"{bucket}/prepared.parquet"]) == 0
    assert main([*words, str(tmp_path / "here"), str(tmp_path / "rows.parquet")]) == 0
    for file in (tmp_path / "here").glob("*.npy"):
        assert (tmp_path / "there" / file.name).read_bytes() == file.read_bytes()


def test_commands_read_and_write_addresses(
    bucket: str, rows: pl.DataFrame, tmp_path: Path, refused: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    """train, data show, evaluate, recommend --all and export go from a bucket to a bucket."""
    rows.write_parquet(f"{bucket}/rows.parquet")
    data, run = ["--data", f"{bucket}/rows.parquet"], str(tmp_path / "run")
    assert main(["train", *data, "--recipe", "ease", "--out", run, "--quiet"]) == 0
    assert main(["data", "show", data[1]]) == 0
    assert "user_id is the query" in capfd.readouterr().out
    assert main(["evaluate", run, *data]) == 0
    refused(["evaluate", run], "--data")  # a folder from a stranger must not choose what is read
    assert main(["recommend", run, "--all", "--k", "3", "--out", f"{bucket}/lists.parquet"]) == 0
    lists = pl.read_parquet(f"{bucket}/lists.parquet")
    expected = sparring.load(run).recommend(["u3"], k=3)
    assert lists.filter(pl.col("query") == "u3")["item"].to_list() == expected["item"].to_list()
    assert main(["export", run, "--to", "parquet", "--out", f"{bucket}/out"]) == 0
    assert pl.read_parquet(f"{bucket}/out/neighbours.parquet").columns == ["item", "neighbour", "score"]
    refused(["export", run, "--to", "vespa", "--out", f"{bucket}/out"], "item-item")
    nowhere = "s3://nobody/lists.csv" if bucket == "s3://shop" else f"{bucket}/rows.parquet/lists.csv"
    refused(["recommend", run, "--all", "--k", "1", "--out", nowhere], nowhere)
    pl.DataFrame({"a": [1]}).write_parquet(f"{bucket}/odd.parquet")
    assert main(["data", "show", f"{bucket}/odd.parquet"]) == 0
    assert "does not read as interactions" in capfd.readouterr().err


def test_refusals_are_one_line(bucket: str, refused: Callable[..., str], tmp_path: Path) -> None:
    """Missing objects, empty folders, missing buckets and unknown kinds of addresses are named."""
    out = ["--out", tmp_path / "run"]
    refused(["train", "--data", f"{bucket}/none.parquet", *out], "none.parquet")
    refused(["train", "--data", f"{bucket}/none/", *out], "none/")
    refused(["train", "--data", f"{bucket[:-2]}/x.csv", *out], f"{bucket[:-2]}/x.csv")
    refused(["train", "--data", "ftp://host/x.csv", *out], "ftp://host/x.csv", "s3://")
    pl.DataFrame({"user_id": [], "item_id": []}, schema={"user_id": pl.Int64, "item_id": pl.Int64}).write_parquet(
        f"{bucket}/empty.parquet"
    )
    refused(["train", "--data", f"{bucket}/empty.parquet", *out], "empty")


def test_delta_tables(rows: pl.DataFrame, tmp_path: Path) -> None:
    """A Delta table reads as the rows of its newest version."""
    pytest.importorskip("deltalake", reason='not installed: pip install "sparring[delta]"')
    rows[:10].write_delta(tmp_path / "table")
    rows.write_delta(tmp_path / "table", mode="overwrite")
    assert fingerprint(sparring.read(f"delta:{tmp_path / 'table'}")) == fingerprint(sparring.read(rows))
    with pytest.raises(UserError, match="delta:"):
        sparring.read(f"delta:{tmp_path / 'nothing'}")


def test_iceberg_tables(rows: pl.DataFrame, tmp_path: Path) -> None:
    """An Iceberg table reads by its metadata file."""
    pytest.importorskip("pyiceberg", reason='not installed: pip install "sparring[iceberg]"')
    catalogs = pytest.importorskip("pyiceberg.catalog.memory", reason="no catalogue to write an Iceberg table with")
    catalog = catalogs.InMemoryCatalog("here", warehouse=tmp_path.as_uri())
    catalog.create_namespace("shop")
    arrow = rows.to_arrow(compat_level=pl.CompatLevel.oldest())
    table = catalog.create_table("shop.rows", schema=arrow.schema)
    table.append(arrow)
    assert fingerprint(sparring.read(f"iceberg:{table.metadata_location}")) == fingerprint(sparring.read(rows))
