"""Recommendations from a history: by a tower that reads histories, otherwise by the mean of the items' vectors."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from sparring.cli import main
from sparring.core.errors import UserError
from sparring.data.interactions import Split, Vocabulary
from sparring.recipes.settings import build
from sparring.training import trained as runs
from sparring.training.fitting import fit
from support.settings import quick

N_ITEMS = 40
NAMES = ["a", "a,b", "b", *(f"c{at:02}" for at in range(N_ITEMS - 4)), "é"]  # in vocabulary order
SMALL = quick()
TOWERS: dict[str, dict[str, object]] = {
    "cosine": {"score": "cosine"},
    "dot": {"score": "dot", "tau": 1.0},
    "bias": {"score": "dot", "tau": 1.0, "item_bias": True},
    "history": {"query_tower": "history"},
}


@pytest.fixture(scope="module")
def trained(parts: Split, tmp_path_factory: pytest.TempPathFactory) -> dict[str, runs.Trained]:
    """A run of each kind on the small world; some of its items have awkward names."""
    ids = Vocabulary(NAMES)
    split = Split(
        *(None if part is None else replace(part, item_ids=ids) for part in (parts.train, parts.valid, parts.test))
    )  # type: ignore[arg-type]
    found = {}
    for name, more in TOWERS.items():
        folder = tmp_path_factory.mktemp("runs") / name
        fit(build("ssl_pop", split.train, {**SMALL, **more}), split, folder, k=(10,), device="cpu")
        found[name] = runs.load(folder)
    return found


@pytest.mark.parametrize("name", ["cosine", "dot", "bias"])
def test_where_no_tower_reads_it_a_history_is_the_mean_of_its_items(
    trained: dict[str, runs.Trained], name: str
) -> None:
    """The mean has length 1 under cosine, else the items' mean length, and includes biases; its items are excluded."""
    run, rows = trained[name], [3, 7, 20]
    vectors = run.model.item_vectors().numpy().astype(np.float64)
    width = vectors.shape[1] - (name == "bias")
    query = vectors[rows, :width].mean(0)
    length = 1.0 if name == "cosine" else np.mean([np.sqrt((vectors[row, :width] ** 2).sum()) for row in rows])
    scores = vectors[:, :width] @ (query / np.sqrt((query**2).sum()) * length)
    if name == "bias":
        scores += vectors[:, -1]
    assert not run.reads_histories
    for with_seen in (False, True):
        order = [row for row in np.argsort(-scores) if with_seen or row not in rows][:6]
        best = run.recommend_history([NAMES[row] for row in rows], 6, with_seen)
        assert best["item"].to_list() == [NAMES[row] for row in order]
        assert best["score"].to_numpy() == pytest.approx(scores[order], abs=1e-5)


@pytest.mark.parametrize("name", TOWERS)
def test_the_service_answers_a_history_alike(trained: dict[str, runs.Trained], name: str) -> None:
    """A history has the same vector in a service and without one."""
    from sparring.serving.http.served_run import load_served

    run = trained[name]
    served = load_served(run.folder, name)
    scores, found = served.index.search(served.history_vector(np.array([3, 7, 20])), 5, [np.array([3, 7, 20])])
    best = run.recommend_history([NAMES[3], NAMES[7], NAMES[20]], 5)
    assert best["item"].to_list() == [NAMES[row] for row in found[0]]
    assert best["score"].to_numpy() == pytest.approx(scores[0], abs=1e-5)


@pytest.mark.parametrize("name", ["cosine", "history"])
def test_items_that_the_run_does_not_know_are_named(
    trained: dict[str, runs.Trained], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning names unknown items and the others are used; a history without known items is an error."""
    run = trained[name]
    best = run.recommend_history(["c05", "nonsense", "b", "more"], 4)
    assert best.equals(run.recommend_history(["c05", "b"], 4))
    (record,) = caplog.records
    assert "'nonsense', 'more'" in record.getMessage()
    with pytest.raises(UserError, match=r"no item of the history .*'nonsense'"):
        run.recommend_history(["nonsense"])


def test_one_id_by_itself_is_one_id(trained: dict[str, runs.Trained]) -> None:
    """A single text is one id, not a list of letters; a single integer needs no list."""
    run = trained["cosine"]
    query = run.ids.query_ids.ids[4]
    assert run.recommend(query, 3).equals(run.recommend([query], 3))
    assert run.recommend(str(query), 3)["item"].equals(run.recommend([query], 3)["item"])
    assert run.recommend_history("a,b", 3).equals(run.recommend_history(["a,b"], 3))


def test_errors_of_the_library_name_no_options(trained: dict[str, runs.Trained]) -> None:
    """Errors raised in Python mention no command-line options."""
    run = trained["cosine"]
    asks: list[Callable[[], object]] = [lambda: run.recommend("nobody"), lambda: run.recommend_history(["x"])]
    asks += [lambda: run.recommend_text(["a text"]), lambda: run.recommend([run.ids.query_ids.ids[0]], k=1000)]
    for ask in asks:
        with pytest.raises(UserError) as caught:
            ask()
        assert "--" not in str(caught.value)
    with pytest.raises(UserError, match=r"'nobody' is not in the training data.*history"):
        run.recommend("nobody")
    with pytest.raises(UserError, match=r"query 1000000 is not in the training data"):
        run.recommend(np.array([10**6]))  # a number of numpy is named as any other


def test_the_command_says_how_a_history_was_read(
    trained: dict[str, runs.Trained], capsys: pytest.CaptureFixture[str]
) -> None:
    """stderr has a note about the mean and a warning about unknown items; stdout has only the list."""
    for name, note in (("cosine", True), ("history", False)):
        assert main(["recommend", str(trained[name].folder), "--history", "c05,nonsense", "-k", "3", "--json"]) == 0
        out, err = capsys.readouterr()
        assert len([json.loads(line) for line in out.splitlines()]) == 3
        assert ("mean of the items' vectors" in err) == note
        assert "sparring: warning: " in err
        assert "'nonsense'" in err


def test_an_id_with_a_comma_can_be_named(trained: dict[str, runs.Trained], capsys: pytest.CaptureFixture[str]) -> None:
    """A value that is an id is one id, otherwise a comma-separated list; the option may be repeated."""
    run = trained["cosine"]

    def listed(*words: str) -> list[str]:
        options = [word for each in words for word in ("--history", each)]
        assert main(["recommend", str(run.folder), *options, "-k", "4", "--json"]) == 0
        return [json.loads(line)["item"] for line in capsys.readouterr().out.splitlines()]

    for words, items in (
        (["a,b"], ["a,b"]),
        (["a", "b"], ["a", "b"]),
        (["b, c05", "a,b", "é"], ["b", "c05", "a,b", "é"]),
    ):
        assert listed(*words) == run.recommend_history(items, 4)["item"].to_list()
    assert main(["recommend", str(run.folder), "--history", " , "]) == 2
    assert "holds no item ids" in capsys.readouterr().err
