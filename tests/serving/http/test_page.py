"""The page in a browser: it shows the data of the runs, works by keyboard alone, and reports errors."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from sparring import cli
from sparring.cli.serve import _parts
from sparring.core import files
from sparring.data.synthetic_world import make_world
from sparring.experiments.report.html import Page, Section, Sheet
from sparring.experiments.report.tables import Column, Table
from sparring.recipes.settings import build
from sparring.serving.http.app import Service
from sparring.serving.http.runs import RunRegistry
from sparring.serving.http.server import Server
from sparring.serving.http.store import Store
from sparring.training import trained as runs
from sparring.training.fitting import fit
from support.run_files import change_tensors
from support.texts import text_parts

sync_api = pytest.importorskip("playwright.sync_api")

CHROMIUM = shutil.which("chromium")
NASTY = "<img src=x onerror=document.title='bad'> & lamp"
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c4944415408d763f8cfc0000003010100c9fe92ef0000000049454e44ae426082"
)
TOKEN = "open sesame"
K = 10
pytestmark = pytest.mark.usefixtures("private_home")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, runs.Trained]:
    """Two runs on the same data: 60 users, 40 items with four columns, one user without training items."""
    root = tmp_path_factory.mktemp("page")
    world = make_world(60, 40, exposure=0.5, relevant=0.4, seed=3).interactions
    part = np.where(np.arange(len(world)) % 10 == 0, "test", "train")
    users, items = world.query_ids.decode(world.queries), world.item_ids.decode(world.items)
    pairs = pl.DataFrame({"user": users.astype(str), "item": items, "split": part})
    pairs = pl.concat([pairs, pl.DataFrame({"user": ["newcomer"], "item": [int(items[0])], "split": ["test"]})])
    pairs.write_parquet(root / "pairs.parquet")
    table = pl.DataFrame(
        {"item": world.item_ids.ids, "title": world.item_table["title"], "category": world.item_table["category"]}
    )
    table = table.with_columns(price=pl.Series(np.arange(len(table)) * 1.5), image=pl.lit("pictures/one.png"))
    table = table.with_columns(title=pl.when(pl.col("item") == table["item"][7]).then(pl.lit(NASTY)).otherwise("title"))
    table.write_parquet(root / "items.parquet")
    (root / "pictures").mkdir()
    (root / "pictures" / "one.png").write_bytes(PNG)
    found = {}
    for recipe in ("ssl_pop", "uns"):
        words = [
            "train",
            "--data",
            str(root / "pairs.parquet"),
            "--items",
            str(root / "items.parquet"),
            "--recipe",
            recipe,
            "--quiet",
        ]
        words += ["--epochs", "3", "--device", "cpu", "--set", "batch_size=64", "--set", "dim=8", "--set", "lr=0.05"]
        assert cli.main([*words, "--out", str(root / "runs" / recipe)]) == 0
        tensors, _ = files.read_tensors(root / "runs" / recipe / "seen.safetensors")
        tensors["test_start"][-1] -= 1  # the newcomer, the last user, has no items
        change_tensors(root / "runs" / recipe, "seen", **{**tensors, "test_items": tensors["test_items"][:-1]})
        found[recipe] = runs.load(root / "runs" / recipe)
    columns = Column("recipe", "{recipe}", text=True), Column("recall", "{recall:.2f}")
    compared = Table(columns, [{"recipe": "uns", "recall": 0.2}, {"recipe": "bir", "recall": 0.4}])
    Page("Comparison", "two recipes", (Section("Quality", (Sheet(compared),)),)).write(root / "runs" / "report.html")
    (root / "runs" / "study.json").write_text("{}")
    return found


def running(service: Service) -> Iterator[str]:
    """The service on a free port until the end of the tests."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = Server(service, listening)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    server.should_exit = True
    thread.join(10)
    service.close()


@pytest.fixture(scope="module")
def served(trained: dict[str, runs.Trained], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    registry = RunRegistry(
        [each.folder for each in trained.values()], Store(tmp_path_factory.mktemp("store") / "items.sqlite")
    )
    yield from running(Service(registry, read_split=_parts))


@pytest.fixture(scope="module")
def guarded(trained: dict[str, runs.Trained], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A run behind a token, in a service that cannot read its data."""
    registry = RunRegistry([trained["uns"].folder], Store(tmp_path_factory.mktemp("store") / "items.sqlite"))
    yield from running(Service(registry, token=TOKEN))


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, runs.Trained, runs.Trained]]:
    """Serve a run whose towers read texts and one whose query tower reads histories."""
    root = tmp_path_factory.mktemp("reading")
    parts = text_parts()
    for name, tower in {"words": {"encoder": "bag"}, "past": {"query_tower": "history"}}.items():
        made = build("ssl_pop", parts.train, {**tower, "dim": 8, "epochs": 1, "batch_size": 64})
        fit(made, parts, root / name, device="cpu", k=(10,))
    registry = RunRegistry([root / "words", root / "past"], Store(root / "items.sqlite"))
    for base in running(Service(registry)):
        yield base, runs.load(root / "words"), runs.load(root / "past")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: the page was not opened in a browser")
    with sync_api.sync_playwright() as play:
        opened = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


Open = Callable[..., Any]


@pytest.fixture
def visit(browser: Any, served: str) -> Iterator[Open]:
    """Open a view; at the end no script has failed and only the service was contacted."""
    complaints: list[str] = []
    contexts = []

    def opened(path: str = "", base: str = served, width: int = 1200, colours: str = "light") -> Any:
        contexts.append(browser.new_context(viewport={"width": width, "height": 800}, color_scheme=colours))
        page = contexts[-1].new_page()
        page.set_default_timeout(30_000)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "console",
            lambda said: complaints.extend([said.text] * (said.type == "error" and "Failed to load" not in said.text)),
        )
        page.on(
            "request", lambda asked: None if asked.url.startswith((base, "data:")) else complaints.append(asked.url)
        )
        page.goto(f"{base}#/{path}")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []


def best(run: runs.Trained, query: np.ndarray, allowed: np.ndarray, k: int = K) -> list[int]:
    """Dense item ids by inner product, best first, by a full sort."""
    items = run.model.item_vectors().detach().numpy()
    scores = items @ query
    order = [int(at) for at in np.lexsort((np.arange(len(scores)), -scores)) if allowed[at]]
    return order[:k]


def of_user(
    run: runs.Trained, user: str, where: np.ndarray | None = None, with_seen: bool = False, k: int = K
) -> list[str]:
    """The titles that a user should be recommended."""
    at = int(run.ids.query_ids.encode([user])[0])
    allowed = np.ones(len(run.ids.item_ids), dtype=bool) if where is None else where.copy()
    if not with_seen:
        allowed[seen(run, user)] = False
    return titles(run, best(run, run.model.query_vectors(torch.tensor([at])).detach().numpy()[0], allowed, k))


def seen(run: runs.Trained, user: str) -> np.ndarray:
    at = int(run.ids.query_ids.encode([user])[0])
    parts = [part for part in (run.eligibility.seen, run.eligibility.test) if part is not None]
    return np.sort(np.concatenate([part.items[part.start[at] : part.start[at + 1]].long().numpy() for part in parts]))


def titles(run: runs.Trained, dense: Any) -> list[str]:
    return [run.ids.item_table["title"][int(at)] for at in dense]


def until(page: Any, expression: str) -> None:
    """Wait for an expression to hold; evaluated from outside because of the page's content policy."""
    end = time.monotonic() + 10
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"never held: {expression}"
        time.sleep(0.02)


def listed(page: Any, panel: str, expected: list[str] | None = None) -> list[str]:
    """The titles of a list, once they are as expected or time is up; without an expectation, once there are some."""
    region = page.get_by_role("region", name=panel, exact=True)
    end = time.monotonic() + 8
    while True:
        found = region.locator(".item a").all_inner_texts()
        if found == expected or (expected is None and found) or time.monotonic() > end:
            return found
        time.sleep(0.02)


def settled(page: Any) -> None:
    until(page, "!document.querySelector('[aria-busy]') && Boolean(document.querySelector('main .items, main .empty'))")


def matches(page: Any) -> list[str]:
    """The matches of the search, once it has responded to the input."""
    page.locator("#matches-note", has_text="match").wait_for()
    return [text.split("\n")[0] for text in page.locator("#matches .title").all_inner_texts()]


def busiest(run: runs.Trained) -> list[str]:
    """Users by number of items, then by id."""
    count = np.diff(run.seen.start.numpy())
    return [str(id) for id in run.ids.query_ids.decode(np.lexsort((np.arange(len(count)), -count)))]


def test_a_user_is_found_by_typing_and_shown_with_history_and_recommendations(
    visit: Open, trained: dict[str, runs.Trained]
) -> None:
    """Typing the id opens the user; the history is that of the data, the list has the k best other items."""
    run, user = trained["ssl_pop"], busiest(trained["ssl_pop"])[0]
    page = visit()
    page.get_by_role("combobox", name="Find a user").fill(user)
    matching = [each for each in busiest(run) if each.startswith(user)]
    assert matches(page) == [user, *(each for each in matching if each != user)][:8]
    page.locator("#match-0").click()
    page.get_by_role("heading", name=f"User {user}").wait_for()
    assert listed(page, "Recommended, ssl_pop", expected := of_user(run, user)) == expected
    past = titles(run, seen(run, user))
    assert listed(page, "History", past[:15]) == past[:15]
    if len(past) > 15:
        page.get_by_role("button", name="more item").click()
        assert listed(page, "History", past) == past
    scores = page.locator(".score").all_inner_texts()
    assert scores == sorted(scores, key=float, reverse=True)
    assert len(scores) == K


def test_an_item_is_found_by_words_of_its_title_with_keys_alone(visit: Open, trained: dict[str, runs.Trained]) -> None:
    """/ focuses the search, arrows cycle through the matches, Enter opens one, and its neighbours are correct."""
    run = trained["ssl_pop"]
    page = visit()
    page.get_by_role("heading", name="Explore").wait_for()
    settled(page)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to content"
    page.keyboard.press("/")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("ArrowRight")  # users, items
    page.keyboard.press("Tab")
    word = titles(run, [3])[0].split()[1]
    page.keyboard.type(word.upper())
    count = np.bincount(run.seen.items.numpy(), minlength=len(run.ids.item_ids))
    table = run.ids.item_table["title"].to_list()
    matching = [at for at in np.lexsort((np.arange(len(count)), -count)) if word.lower() in table[at].lower()]
    matching.sort(key=lambda at: not table[at].lower().startswith(word.lower()))
    assert matches(page) == titles(run, matching[:8])
    options = len(matching[:8])
    for _ in range(options + 1):
        page.keyboard.press("ArrowDown")
    assert page.get_attribute("[role=option][aria-selected=true]", "id") == "match-0"
    assert page.get_attribute("#text", "aria-activedescendant") == "match-0"
    page.keyboard.press("Enter")
    page.get_by_role("heading", name=titles(run, matching[:1])[0], level=1).wait_for()
    assert page.evaluate("document.activeElement.tagName") == "H1"
    vectors = run.model.item_vectors().detach().numpy()
    others = np.arange(len(vectors)) != matching[0]
    assert (
        listed(page, "Similar items, ssl_pop", expected := titles(run, best(run, vectors[matching[0]], others)))
        == expected
    )
    for _ in range(3):
        page.keyboard.press("Tab")
        style = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert style == "solid"
    page.go_back()
    page.get_by_role("heading", name="Explore").wait_for()


def test_filters_keep_what_passes_and_can_be_taken_off(visit: Open, trained: dict[str, runs.Trained]) -> None:
    """A category and a price keep exactly the matching items; a chip removes its condition; seen items are marked."""
    run, user = trained["ssl_pop"], busiest(trained["ssl_pop"])[1]
    table = run.ids.item_table
    page = visit(f"user/{user}")
    settled(page)
    category = table["category"][
        int(best(run, run.model.item_vectors().detach().numpy()[0], np.ones(40, dtype=bool))[0])
    ]
    page.get_by_label("Column").select_option("category")
    page.get_by_label("Value").fill(str(category))
    page.keyboard.press("Enter")
    page.get_by_text(f"category is {category}").wait_for()
    settled(page)
    among = (table["category"].cast(pl.String) == str(category)).to_numpy()
    assert listed(page, "Recommended, ssl_pop", expected := of_user(run, user, among)) == expected
    page.get_by_label("Column").select_option("price")
    page.get_by_label("Condition").select_option("<")
    page.get_by_label("Value").fill("cheap")
    page.get_by_role("button", name="Filter", exact=True).click()
    assert "“cheap” is not" in page.locator(".filters .wrong").inner_text()
    page.get_by_label("Value").fill("40.5")
    page.keyboard.press("Enter")
    page.get_by_text("price < 40.5").wait_for()
    settled(page)
    cheap = (table["price"] < 40.5).to_numpy()
    expected = of_user(run, user, among & cheap)
    assert listed(page, "Recommended, ssl_pop", expected) == expected
    page.get_by_role("button", name=f"Remove the filter category is {category}").click()
    page.get_by_text(f"category is {category}").wait_for(state="detached")
    page.get_by_label("Hide seen items").uncheck()
    page.get_by_label("How many").select_option("20")
    until(page, "location.hash.includes('seen=show') && location.hash.includes('k=20')")
    settled(page)
    assert listed(page, "Recommended, ssl_pop", expected := of_user(run, user, cheap, with_seen=True, k=20)) == expected
    panel = page.get_by_role("region", name="Recommended, ssl_pop")
    taken = set(titles(run, seen(run, user)))
    marked = panel.locator(".item", has=page.locator(".mark")).locator("a").all_inner_texts()
    assert marked == [title for title in expected if title in taken]
    assert marked


def test_two_runs_side_by_side_tell_what_moved_is_new_and_is_missing(
    visit: Open, trained: dict[str, runs.Trained]
) -> None:
    """The marks equal a position-by-position comparison of the two lists."""
    user = busiest(trained["uns"])[2]
    page = visit(f"user/{user}")
    settled(page)
    page.get_by_label("Compare with").select_option("uns")
    page.get_by_role("region", name="Recommended, uns").wait_for()
    settled(page)
    first, second = of_user(trained["ssl_pop"], user), of_user(trained["uns"], user)
    assert listed(page, "Recommended, ssl_pop", first) == first
    assert listed(page, "Recommended, uns", second) == second
    assert first != second

    def marks(panel: str) -> list[str]:
        rows = page.get_by_role("region", name=panel).locator(".item").all()
        return ["".join(row.locator(".mark").all_inner_texts()).split("\n")[0] for row in rows]

    assert marks("Recommended, ssl_pop") == ["" if title in second else "missing" for title in first]
    expected = []
    for at, title in enumerate(second):
        if title not in first:
            expected.append("new")
        else:
            by = first.index(title) - at
            expected.append("" if by == 0 else f"{'↑' if by > 0 else '↓'}{abs(by)}")
    assert marks("Recommended, uns") == expected
    both = len(set(first) & set(second))
    moved = sum(mark[:1] in ("↑", "↓") for mark in expected)
    counted = f"{both} of {K} in both · {moved} moved · {K - both} new · {K - both} missing"
    assert page.locator(".summary").inner_text() == f"uns compared with ssl_pop{counted}"
    page.reload()
    settled(page)
    assert listed(page, "Recommended, uns", second) == second


def test_a_text_is_answered_and_a_history_is_shown_latest_first(
    visit: Open, reading: tuple[str, runs.Trained, runs.Trained]
) -> None:
    """A text query lists its nearest items if a tower reads texts; an ordered history starts with the last item."""
    base, words, past = reading
    page = visit(base=base)
    page.get_by_text("Text", exact=True).click()
    text = words.ids.item_table["text"][3]
    page.locator("#text").fill(text)
    page.keyboard.press("Enter")
    vector = words.encode_texts([text], "query").detach().numpy()[0]
    expected = titles(words, best(words, vector, np.ones(40, dtype=bool)))
    assert listed(page, "Recommended, words", expected) == expected
    page.get_by_label("Run", exact=True).select_option("past")
    page.locator("main").get_by_text("does not read texts").wait_for()
    user = int(past.ids.query_ids.decode([1])[0])
    page.evaluate("hash => { location.hash = hash; }", f"#/user/{user}?run=past")
    start = past.model.query.start.tolist()
    taken = titles(past, past.model.query.items[start[1] : start[2]].tolist())[::-1]
    assert listed(page, "History", taken[:15]) == taken[:15]
    assert "Latest first." in page.get_by_role("region", name="History").inner_text()


def test_an_item_shows_its_columns_its_picture_and_the_negatives_it_met(
    visit: Open, trained: dict[str, runs.Trained]
) -> None:
    """Columns match the table, markup in a title stays text, and negatives have falling shares."""
    run = trained["ssl_pop"]
    item = str(run.ids.item_ids.decode([7])[0])
    page = visit(f"item/{item}?with=uns")
    page.get_by_role("heading", name=NASTY, level=1).wait_for()
    facts = page.locator(".about dl").inner_text().split("\n")
    row = run.ids.item_table.row(7, named=True)
    assert facts == ["id", item, "category", str(row["category"]), "price", f"{row['price']:g}"]
    until(page, "document.querySelector('.picture.wide img').naturalWidth === 1")
    page.get_by_role("button", name="Compute").click()
    for name in trained:
        panel = page.get_by_role("region", name=f"Negatives, {name}")
        panel.locator(".item").first.wait_for()
        shares = [float(text.rstrip("%")) for text in panel.locator(".share .number").all_inner_texts()]
        assert shares == sorted(shares, reverse=True)
        assert 0 < sum(shares) <= 101
        assert NASTY not in panel.locator(".item a").all_inner_texts()
        assert "24 steps of 64 pairs" in panel.inner_text()
    assert page.title() == f"{NASTY} · Sparring"


def test_what_is_not_there_is_said(visit: Open) -> None:
    """Unknown user or item, no match, empty filter result and empty history each have their own message."""
    page = visit("user/nobody")
    page.get_by_text("No user has the id “nobody”").wait_for()
    page.locator("#text").fill("zzz")
    page.get_by_text("No user matches “zzz”.").wait_for()
    page.goto(page.url.split("#")[0] + "#/item/none%2Fsuch")
    page.get_by_text("No item has the id “none/such”").wait_for()
    page.goto(page.url.split("#")[0] + "#/user/newcomer")
    page.get_by_text("No items yet").wait_for()
    assert len(listed(page, "Recommended, ssl_pop")) == K
    page.get_by_label("Column").select_option("price")
    page.get_by_label("Condition").select_option("<")
    page.get_by_label("Value").fill("-1")
    page.keyboard.press("Enter")
    page.get_by_text("No item matches the filters").wait_for()
    page.get_by_role("button", name="Remove the filters").click()
    assert len(listed(page, "Recommended, ssl_pop")) == K


def test_a_server_that_refuses_or_is_gone_is_said_and_asked_again(
    visit: Open, trained: dict[str, runs.Trained]
) -> None:
    """The server's message is shown; without a server the page says so, and recovers when it is back."""
    user = busiest(trained["uns"])[0]
    where = json.dumps([{"column": "nope", "op": "=", "value": 1}])
    page = visit(f"user/{user}?where={where}")
    page.get_by_role("alert").get_by_text("unknown item column 'nope'").wait_for()
    page.get_by_role("button", name="Remove the filter nope is 1").click()
    page.get_by_role("alert").get_by_text("unknown item column 'nope'").wait_for(state="detached")
    settled(page)
    page.context.set_offline(True)
    page.get_by_label("How many").select_option("5")
    page.locator("main").get_by_text("The server does not respond").wait_for()
    page.get_by_role("combobox", name="Find").fill("1")
    page.locator("#matches-note", has_text="The server does not respond.").wait_for()
    page.context.set_offline(False)
    page.get_by_role("button", name="Try again").click()
    page.locator("main").get_by_text("The server does not respond").wait_for(state="detached")
    assert len(listed(page, "Recommended, ssl_pop")) == 5


def test_a_token_is_asked_for_and_kept_for_the_session(
    visit: Open, guarded: str, trained: dict[str, runs.Trained]
) -> None:
    """Nothing is shown without the token or with a wrong one; the right one opens the page and survives a reload."""
    item = str(trained["uns"].ids.item_ids.decode([0])[0])
    page = visit(f"item/{item}", base=guarded)
    page.get_by_label("This service requires a token.").fill("guess")
    page.keyboard.press("Enter")
    page.get_by_label("Wrong token.").fill(TOKEN)
    page.keyboard.press("Enter")
    assert len(listed(page, "Similar items, uns")) == K
    until(page, "document.querySelector('.picture.wide img').src.startsWith('data:image/png')")
    page.reload()
    assert len(listed(page, "Similar items, uns")) == K
    page.get_by_role("button", name="Compute").click()
    page.locator("main").get_by_text("cannot read the training data").wait_for()
    page.get_by_role("link", name="Training").click()
    with page.expect_download() as saving:
        page.get_by_role("button", name="Save the comparison report").click()
    assert "<h1>Comparison</h1>" in Path(saving.value.path()).read_text()


def test_curves_test_figures_and_the_report(visit: Open, trained: dict[str, runs.Trained]) -> None:
    """One curve per run with a point per epoch, the metrics of result.json, and a sandboxed report with its script."""
    page = visit("training")
    page.locator(".plot svg").first.wait_for()
    for plot in page.locator(".plot").all():
        assert [path.get_attribute("d").count("L") for path in plot.locator(".series path").all()] == [2, 2]
    cells = [row.locator("th, td").all_inner_texts() for row in page.locator("tbody tr").all()]
    names = page.locator("thead th").all_inner_texts()
    for row in cells:
        test = json.loads((trained[row[0]].folder / "result.json").read_text())["test"]["metrics"]
        shown = {name: value for name, value in zip(names, row, strict=True) if "@" in name}
        assert shown == {name: f"{test[name]:.4f}" for name in shown}
        assert len(shown) >= 4
    page.locator(".plot").first.focus()
    page.keyboard.press("ArrowRight")
    first = json.loads((trained["ssl_pop"].folder / "metrics.jsonl").read_text().splitlines()[0])
    text = page.locator(".readout").first.inner_text()
    assert text.startswith("epoch 1")
    assert float(text.split("ssl_pop ")[1].split()[0]) == pytest.approx(first["ndcg@10"], rel=1e-3)
    with page.expect_popup() as opening:
        page.get_by_role("link", name="Comparison report").first.click()
    report = opening.value
    report.get_by_role("button", name="recall").click()
    assert report.locator("tbody tr").first.inner_text().split()[0] == "bir"
    assert report.evaluate("origin") == "null"


def test_a_phone_needs_no_scrolling_sideways(visit: Open, trained: dict[str, runs.Trained]) -> None:
    """Every view fits into 360 pixels; controls are at least 32 pixels high."""
    user, item = busiest(trained["uns"])[0], str(trained["uns"].ids.item_ids.decode([7])[0])
    page = visit(width=360)
    for path, ready in {
        "": ".items",
        f"user/{user}?with=uns": ".history .item",
        f"item/{item}?with=uns": ".sides .item",
        "training": ".plot svg",
        "user/nobody": ".empty",
    }.items():
        page.evaluate("hash => { location.hash = hash; }", f"#/{path}")
        page.locator(f"main {ready}").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, path
        touched = "[...document.querySelectorAll('button, select, #text')].filter(each => each.offsetParent)"
        heights = page.evaluate(f"{touched}.map(each => each.offsetHeight)")
        assert len(heights) >= 4
        assert min(heights) >= 32


def test_light_and_dark_follow_the_system_until_chosen(visit: Open) -> None:
    """Dark follows the system; the button chooses light, which survives a reload; contrast is high in both."""
    page = visit(colours="dark")
    page.get_by_role("heading", name="Explore").wait_for()

    def contrast() -> float:
        colours = page.evaluate(
            "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
        )
        light = []
        for colour in colours:
            channels = [int(part) / 255 for part in colour.strip("rgb()").split(",")]
            linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
            light.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
        return (max(light) + 0.05) / (min(light) + 0.05) * (1 if light[1] > light[0] else -1)

    assert contrast() < -7
    page.get_by_role("button", name="Theme: auto").click()
    assert contrast() > 7
    page.reload()
    page.get_by_role("button", name="Theme: light").click()
    assert contrast() < -7
