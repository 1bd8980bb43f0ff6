"""A recipe is found by name, file, module or installed package, from any working folder; anything else raises a
one-line error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from sparring import Setup, Term, compose
from sparring.core.errors import UserError
from sparring.data.interactions import Interactions, Split
from sparring.experiments.comparison import Comparison
from sparring.experiments.search_space import OneOf, Range, space, untuned
from sparring.negatives import Sampled, Uniform
from sparring.recipes import xir
from sparring.recipes.finding import find, lasting, named, short
from sparring.recipes.run import Run
from sparring.recipes.settings import build, own_arguments

GOOD = '''
from sparring import Setup, Term, compose
from sparring.negatives import Sampled, Uniform

def mine(data, setup=Setup.of(dim=4), *, n: int = 8):
    """Mine."""
    return compose(data, setup, Term(1.0, Sampled(Uniform(data.n_items), n)))

def bir(data, setup=Setup.of(dim=4)):
    return mine(data, setup)
'''


SETUP = Setup.of(dim=4)


def here(data: Interactions, setup: Setup = SETUP, *, n: int = 8) -> Run:
    """A recipe defined in this file."""
    return compose(data, setup, Term(1.0, Sampled(Uniform(data.n_items), n)))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a valid recipe file; sys.path is restored afterwards."""
    (tmp_path / "mine_found.py").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def test_a_file_is_found_again_from_anywhere(folder: Path, parts: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path and a module name find one function; its full recorded name works from any folder."""
    name = f"{folder.resolve()}/mine_found.py:mine"
    assert named("mine_found.py:mine") == named("./mine_found.py:mine") == named("mine_found:mine") == name
    assert find("mine_found.py:mine") is find("mine_found:mine")
    monkeypatch.chdir("/")
    assert named(name) == name
    run = build(name, parts.train, {"n": "5"})
    assert (run.recipe, run.arguments) == (name, {"n": 5})
    assert named(find(name)) == name


def test_short_names_never_hide_one_of_ours(folder: Path) -> None:
    """A function that shares a built-in recipe's name gets its file name as a prefix; built-in names stay bare."""
    names = ("xir", f"{folder}/mine_found.py:mine", f"{folder}/mine_found.py:bir")
    assert [short(name) for name in names] == ["xir", "mine", "mine_found.bir"]
    assert find("bir") is not find("mine_found.py:bir")


def test_a_module_of_a_package_keeps_its_name() -> None:
    """A recipe of an installed package is recorded by module name, without a path of this machine."""
    assert named("sparring.recipes.in_batch:xir") == "sparring.recipes.in_batch:xir"
    assert named(xir) == "xir"
    assert named("ssl-pop") == "ssl_pop"


def test_what_lies_beside_the_file_can_be_imported(folder: Path, parts: Split) -> None:
    """A recipe file can import a helper from its own folder, like a script."""
    (folder / "sub").mkdir()
    (folder / "sub" / "helper_found.py").write_text("WIDTH = 6\n")
    (folder / "sub" / "outer.py").write_text("import helper_found\n" + GOOD.replace("dim=4", "dim=helper_found.WIDTH"))
    assert build("sub/outer.py:mine", parts.train).setup.model.dim == 6


BAD = {
    "no_setup": ("def f(data): ...", "setup=Setup("),
    "no_default": ("from sparring import Setup\ndef f(data, setup): ...", "setup=Setup("),
    "no_type": ("from sparring import Setup\ndef f(data, setup=Setup(), *, n=3): ...", "'n'"),
    "no_value": ("from sparring import Setup\ndef f(data, setup=Setup(), *, n: int): ...", "'n'"),
    "kwargs": ("from sparring import Setup\ndef f(data, setup=Setup(), **rest): ...", "'rest'"),
    "unknown_type": ("from sparring import Setup\ndef f(data, setup=Setup(), *, n: 'Nothing' = 3): ...", "NameError"),
    "a_class": ("class f: ...", "not a recipe"),
    "a_number": ("f = 3", "not a recipe"),
    "built_in": ("f = max", "cannot be read: ValueError"),
    "other_name": ("def ff(): ...", "did you mean 'ff'?"),
    "fails": ("import math\nmath.nothing", "line 2"),
    "syntax": ("def f(:", "SyntaxError"),
    "missing": ("import nothing_of_that_name", "No module named 'nothing_of_that_name'"),
    "exits": ("raise SystemExit(3)", "SystemExit"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("command", ["train", "compare", "diagnose", "recipes"])
def test_a_bad_file_is_one_line(case: str, command: str, folder: Path, refused: Callable[..., str]) -> None:
    """Every command that takes a recipe reports a bad file in one line that names it, before it reads any data."""
    source, mention = BAD[case]
    (folder / f"bad_{case}.py").write_text(source)
    name = f"bad_{case}.py:f"
    words: dict[str, list[Any]] = {
        "train": ["--data", "none.parquet", "--recipe", name, "--out", "run"],
        "compare": ["--data", "none.parquet", "--recipes", f"uns,{name}", "--out", "out"],
        "diagnose": ["run", "--samplers", f"own,{name}"],
        "recipes": [name],
    }
    refused([command, *words[command]], f"bad_{case}.py", mention)


def test_what_is_not_there_is_one_line(folder: Path, refused: Callable[..., str]) -> None:
    """A missing file, module or function name, a notebook and a failing package raise one-line errors."""
    refused(["recipes", "gone.py:f"], "no such file: gone.py")
    refused(["recipes", "no_such_module:f"], "no module called 'no_such_module'")
    refused(["recipes", "no_such.module:f"], "no module called 'no_such.module'")
    refused(["recipes", "mine_found.py"], "mine_found.py:FUNCTION")
    refused(["recipes", "__main__:f"], "notebook")
    (folder / "bad_package").mkdir()
    (folder / "bad_package" / "__init__.py").write_text("1 / 0\n")
    (folder / "bad_package" / "part.py").write_text(GOOD)
    sys.path.insert(0, str(folder))
    refused(["recipes", "bad_package.part:mine"], "cannot import bad_package.part: ZeroDivisionError")


def test_what_is_no_run_is_refused(folder: Path, parts: Split) -> None:
    """A recipe that returns no Run raises an error that names the returned type."""
    (folder / "forgot.py").write_text(GOOD.replace("return compose(", "compose("))
    with pytest.raises(UserError, match="NoneType"):
        build("forgot.py:mine", parts.train)


def test_a_function_stands_for_itself(parts: Split, tmp_path: Path) -> None:
    """`build` and `Comparison` take a function. `Comparison` rejects one that another process cannot import and one
    whose name is taken."""
    assert find(here) is here
    run = build(here, parts.train, {"n": 5})
    assert run.recipe == f"{Path(__file__).resolve()}:here"
    assert own_arguments(here) == {"n": (int, 8)}
    plan = Comparison(tmp_path, (), ("ssl-pop", here, xir), baseline=here)
    assert (plan.names, plan.baseline_name) == (("ssl_pop", "here", "xir"), "here")
    assert plan.methods["here"].recipe == run.recipe

    def inner(data: Interactions, setup: Setup = SETUP) -> Run:
        return here(data, setup)

    with pytest.raises(UserError, match="inner is defined"):
        Comparison(tmp_path, (), ("uns", inner))
    assert build(inner, parts.train).terms
    with pytest.raises(UserError, match="named twice"):
        Comparison(tmp_path, (), (here, here))
    (tmp_path / "twin.py").write_text(GOOD.replace("mine", "here"))
    with pytest.raises(UserError, match="share a name"):
        Comparison(tmp_path, (), (here, f"{tmp_path}/twin.py:here"))


def test_a_function_of_a_notebook_has_a_name_but_cannot_be_compared(
    parts: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook function gets a `__main__` name, and a Comparison rejects it."""
    monkeypatch.setattr(here, "__module__", "__main__")
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    assert named(here) == "__main__:here"
    with pytest.raises(UserError, match="notebook"):
        lasting(here)


def test_packages_offer_recipes(
    folder: Path, parts: Split, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recipes of the entry point group sparring.recipes are found by name; broken ones give a warning."""
    from sparring.cli import main
    from sparring.recipes import RECIPES

    info = folder / "paper-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: paper\nVersion: 1.2\n")
    entries = ("offered = mine_found:mine", "broken = nowhere_found:f", "long = mine_long:f", "xir = mine_found:mine")
    (info / "entry_points.txt").write_text("\n".join(["[sparring.recipes]", *entries]))
    (folder / "mine_long.py").write_text("raise ValueError('two\\nlines')\n")
    monkeypatch.syspath_prepend(folder)
    assert named("offered") == "offered"
    assert build("offered", parts.train).recipe == "offered"
    assert main(["recipes"]) == 0
    shown, told = capsys.readouterr()
    assert (
        shown.count("Mine.\n    n=8\n    from mine_found:mine of the package paper 1.2")
        == shown.count("paper 1.2")
        == 1
    )
    why = "sparring: warning: cannot import the recipe 'broken' of nowhere_found:f of the package paper 1.2: "
    assert told.splitlines()[0].startswith(f"{why}ModuleNotFoundError: ")
    assert told.splitlines()[1].endswith("'long' of mine_long:f of the package paper 1.2: ValueError: two lines")
    assert told.count("\n") == 2
    assert main(["recipes", "--json"]) == 0
    shown, told_again = capsys.readouterr()
    listed = json.loads(shown)
    assert told_again == told
    assert [*listed] == [*RECIPES, "offered"]
    assert (listed["xir"]["source"], listed["offered"]["source"]) == (
        "sparring",
        "mine_found:mine of the package paper 1.2",
    )
    assert (listed["offered"]["summary"], listed["offered"]["arguments"]["n"]["default"]) == ("Mine.", "8")
    assert main(["recipes", "offered"]) == 0
    assert "from mine_found:mine of the package paper 1.2" in capsys.readouterr().out
    assert main(["recipes", "mine_found.py:mine", "--json"]) == 0
    ((name, facts),) = json.loads(capsys.readouterr().out).items()
    assert name == f"{facts['source']}:mine" == f"{folder.resolve()}/mine_found.py:mine"
    with pytest.raises(UserError, match="did you mean 'offered'"):
        find("offerred")


def test_own_arguments_are_tuned_where_their_types_say_so() -> None:
    """Annotated ranges and choices join the common search space; `untuned` lists the other arguments."""

    def f(
        data: Interactions,
        setup: Setup = SETUP,
        *,
        alpha: Annotated[float, Range(0.0, 1.0)] = 0.5,
        k: Annotated[int, Range(1, 16, log=True)] = 4,
        way: Annotated[Literal["a", "b"], OneOf()] = "a",
        power: Annotated[float | None, OneOf((0.5, 1.0))] = None,
        lam: float = 3.0,
        n: int = 8,
    ) -> Run:
        return here(data, setup, n=n)

    own = {
        "alpha": Range(0.0, 1.0),
        "k": Range(1, 16, log=True, whole=True),
        "way": OneOf(("a", "b")),
        "power": OneOf((0.5, 1.0)),
    }
    common = {"lr", "tau", "weight_decay", "item_bias"}
    found = space(f)
    assert {
        name: entry for name, entry in found.items() if name not in common
    } == own  # only the built-in recipes tune lam
    assert common < set(found)
    assert untuned(f) == ["lam", "n"]
    assert untuned(f, {"n": 3, "alpha": 0.1}) == ["lam"]
    assert set(space(f, {"alpha": 0.1})) == {*common, "k", "way", "power"}
    assert untuned("ssl_pop") == ["form", "correction"]


@pytest.mark.parametrize(
    "kind",
    [Annotated[float, Range(1.0, 0.0)], Annotated[float, Range(0.0, 1.0, log=True)], Annotated[int, OneOf(("a",))]],
)
def test_a_range_that_cannot_be_tuned_is_refused(kind: Any) -> None:
    """A reversed range, a log range from 0 and choices of another type raise errors that name the argument."""

    def f(data: Interactions, setup: Setup = SETUP, *, alpha=1) -> Run:  # type: ignore[no-untyped-def]
        return here(data, setup)

    f.__annotations__["alpha"] = kind
    with pytest.raises(UserError, match="alpha"):
        space(f)
