"""Settings given by name become values of the declared type, or raise a one-line error."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Literal

import pytest
import torch

from sparring.core.errors import UserError
from sparring.data.interactions import Split
from sparring.models.settings import ModelSettings
from sparring.recipes import PAPER, RECIPES, xir
from sparring.recipes.finding import find
from sparring.recipes.run import OWN
from sparring.recipes.settings import build, given, known, own_arguments, own_setup, resolve
from sparring.recipes.setup import GROUPS, SETTINGS, Setup, check, find_setting, flat_name, parse, parse_setup


def line_of(error: pytest.ExceptionInfo[UserError]) -> str:
    text = str(error.value)
    assert len(text.splitlines()) == 1
    return text


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("xir", {"lam": 0.3, "dim": 16, "seed": 2}),
        ("default", {"model": "sasrec", "model.blocks": 1, "epochs": 7}),
        ("default", {"encoder": "bag", "lr": 0.25}),
        ("ials", {"dim": 8, "epochs": 3, "alpha": 2.5}),
        ("ease", {"novelty": 0.2}),
        ("ngame", {}),
    ],
)
def test_settings_are_found_again(recipe: str, settings: dict[str, Any]) -> None:
    """From a resolved Setup and arguments, `given` finds the settings that resolve to them, and no others."""
    setup, arguments = resolve(find(recipe), settings)
    assert given(find(recipe), setup, arguments) == settings
    if not {"model", "encoder"} & settings.keys():
        assert given(find(recipe), setup.replaced(model_name=OWN, model_options={}), arguments) == settings


def test_user_is_another_name_of_query_in_settings() -> None:
    """`user_tower` and `model.user_tower` set what `query_tower` sets, and run.json has one name."""
    for name in ("user_tower", "model.user_tower", "query_tower"):
        setup, _ = resolve(find("tables"), {name: "history"})
        assert setup.model.query_tower == "history"
        assert flat_name(name) == "query_tower"
    assert find_setting("user_nothing") is None


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("xri", "xir"),
        ("ssl_popp", "ssl_pop"),
        ("fullsoftmax", "full_softmax"),
        ("gtower", "g_tower"),
        ("defualt", "default"),
    ],
)
def test_an_unknown_recipe_suggests_the_nearest(asked: str, meant: str) -> None:
    """A misspelt recipe raises a one-line error that suggests the right name; hyphens are fine."""
    with pytest.raises(UserError) as error:
        find(asked)
    assert repr(asked) in line_of(error)
    assert repr(meant) in line_of(error)
    assert find(meant.replace("_", "-")) is RECIPES[meant]


def test_an_unknown_recipe_unlike_any_other_suggests_nothing() -> None:
    """If no recipe name is close, nothing is suggested."""
    with pytest.raises(UserError) as error:
        find("zzzzzz")
    assert "did you mean" not in line_of(error)


def test_an_unknown_setting_suggests_the_nearest(parts: Split) -> None:
    """Suggestions include the recipe's own arguments and the fields of the Setup."""
    for asked, meant in (("lamb", "lam"), ("batchsize", "batch_size"), ("weight_deacy", "weight_decay")):
        with pytest.raises(UserError) as error:
            build("xir", parts.train, {asked: 1})
        assert repr(asked) in line_of(error)
        assert repr(meant) in line_of(error)


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        ("3", int, 3),
        (3, int, 3),
        ("-2", int, -2),
        ("0.5", float, 0.5),
        ("1e-3", float, 0.001),
        (2, float, 2.0),
        ("true", bool, True),
        ("No", bool, False),
        ("1", bool, True),
        (False, bool, False),
        ("none", int | None, None),
        ("None", float | None, None),
        (None, int | None, None),
        ("7", int | None, 7),
        ("dot", Literal["cosine", "dot"], "dot"),
        ("", tuple[int, ...], ()),
        ("32,16", tuple[int, ...], (32, 16)),
        ([32, 16], tuple[int, ...], (32, 16)),
        ("category, brand", tuple[str, ...], ("category", "brand")),
        ("category", tuple[str, ...], ("category",)),
    ],
)
def test_values_and_strings_are_read_as_the_declared_type(value: object, kind: Any, expected: object) -> None:
    """Command-line text and Python values give the same setting."""
    found = parse("name", value, kind)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        ("2.5", int, "a whole number"),
        (2.5, int, "a whole number"),
        (True, int, "a whole number"),
        ("many", int, "a whole number"),
        ("fast", float, "a number"),
        (True, float, "a number"),
        ("maybe", bool, "true or false"),
        (1, bool, "true or false"),
        ("angle", Literal["cosine", "dot"], "one of cosine, dot"),
        ("x", int | None, "a whole number or none"),
        ("a,b", tuple[int, ...], "a comma-separated list of a whole number"),
        (5, tuple[int, ...], "a comma-separated list of a whole number"),
        (["a", 3], tuple[str, ...], "a comma-separated list of text"),
    ],
)
def test_a_wrong_type_names_the_setting_the_type_and_the_value(value: object, kind: Any, words: str) -> None:
    """The error states the expected type in plain words and the given value."""
    with pytest.raises(UserError) as error:
        parse("width", value, kind)
    assert line_of(error) == f"width must be {words}, got {value!r}"


@pytest.mark.parametrize(
    "fields",
    [
        {"dim": 0},
        {"batch_size": 0},
        {"epochs": 0},
        {"eval_every": 0},
        {"lr_decay_every": 0},
        {"history": 0},
        {"valid_queries": 0},
        {"lr": 0.0},
        {"lr": float("nan")},
        {"lr": float("inf")},
        {"tau": -0.1},
        {"init_std": 0.0},
        {"lr_decay": 0.0},
        {"weight_decay": -1e-9},
        {"weight_decay": float("nan")},
        {"warmup": -1},
        {"clip": 0.0},
        {"clip": -1.0},
        {"patience": 0},
        {"seed": -1},
        {"hidden": (8, 0)},
    ],
)
def test_values_that_no_training_could_use_are_refused(fields: dict[str, Any], parts: Split) -> None:
    """An out-of-range Setup value raises a one-line error with its name and value before anything is built."""
    name, value = next(iter(fields.items()))
    with pytest.raises(UserError) as error:
        check(Setup().replaced(**fields))
    assert name in line_of(error)
    assert str(value) in line_of(error)
    with pytest.raises(UserError):
        build("default", parts.train, fields)


@pytest.mark.parametrize(
    ("recipe", "name", "value"),
    [
        ("xir", "lam", 1.5),
        ("xir", "lam", float("nan")),
        ("xir", "n", 0),
        ("xir", "cache_size", 0),
        ("bir", "n", -3),
        ("uns", "n", 0),
        ("cbns", "size", 0),
        ("g_tower", "alpha", 2.0),
        ("shown", "n", 0),
        ("ssl", "form", "papr"),
        ("bir", "draw", "random"),
        ("uns", "correction", "counts"),
    ],
)
def test_arguments_of_recipes_out_of_range_are_user_errors(recipe: str, name: str, value: object, parts: Split) -> None:
    """A value rejected by a part of the recipe raises a one-line error that contains it."""
    with pytest.raises(UserError) as error:
        build(recipe, parts.train, {name: value})
    assert str(value) in line_of(error)


def test_build_remembers_the_recipe_and_its_resolved_arguments(parts: Split) -> None:
    """A run records all arguments of its recipe, defaults included; Setup settings go to the Setup."""
    run = build("xir", parts.train, {"lam": "0.2", "cache_size": "64", "lr": "0.02", "hidden": "8,4"})
    assert run.recipe == "xir"
    assert run.arguments == {"lam": 0.2, "cache_size": 64, "n": None, "draw": "expected", "form": "paper"}
    assert run.setup == PAPER.replaced(lr=0.02, hidden=(8, 4))
    assert [term.weight for term in run.terms] == [0.8, 0.2]
    assert build("full-softmax", parts.train).recipe == "full_softmax"


def test_a_base_setup_is_changed_by_settings_and_replaces_the_recipes_own(parts: Split) -> None:
    """Settings override `base`; without a base they override the recipe's own Setup."""
    base = Setup.of(dim=5, lr=0.3)
    assert build("xir", parts.train, {"lr": 0.1}, base).setup == base.replaced(lr=0.1)
    assert build("xir", parts.train, {"lr": 0.1}).setup == own_setup(xir).replaced(lr=0.1)


def test_a_base_setup_leaves_a_recipe_what_makes_it(parts: Split) -> None:
    """A base Setup replaces everything except the settings that define the method: DEXA keeps its cluster vectors,
    PRIME its propensity draws, label rows stay queries, and the classifier settings stay. Explicit settings still
    override all."""
    base = own_setup(RECIPES["tables"])
    runs = {
        name: build(name, parts.train, {}, base)
        for name in ("ngame", "dexa", "prime", "dpr", "ance", "dexml", "ssl_pop")
    }
    own = {name: own_setup(RECIPES[name]) for name in runs}
    for name, run in runs.items():
        same = run.setup.flat()
        kept = {key: same.pop(key) for key in ("rows", "draw", "auxiliary", "private", "centroids", "clf_epochs")}
        assert kept == {key: own[name].flat()[key] for key in kept}
        others = base.replaced(tau=run.setup.temperature.tau).flat()
        assert same == {key: others[key] for key in same}
    assert {run.setup.batches.rows for name, run in runs.items() if name != "ssl_pop"} == {"queries"}
    assert runs["ssl_pop"].setup.batches.rows == "pairs"
    tables = {name: sum(part.numel() for part in run.model.item.parameters()) for name, run in runs.items()}
    assert tables["dexa"] > tables["ngame"]
    items = torch.arange(parts.train.n_items)
    vectors = {name: runs[name].model.encode_items(items) for name in ("ngame", "dexa")}
    assert not torch.equal(vectors["ngame"], vectors["dexa"])
    assert build("dexa", parts.train, {"auxiliary": 0, "rows": "pairs"}, base).setup.model.auxiliary == 0
    labels = own_setup(RECIPES["dpr"])
    assert build("ssl_pop", parts.train, {}, labels).setup.batches.rows == "queries"


def test_a_whole_setup_is_taken_as_it_is(parts: Split) -> None:
    """A complete Setup, as stored in a run folder, is used unchanged, even where the recipe's own Setup differs."""
    saved = build("dexa", parts.train, {"auxiliary": 0, "private": 0, "rows": "pairs", "clf_epochs": 0}).setup
    assert build("dexa", parts.train, {}, setup=saved).setup == saved


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_run_survives_json(name: str, parts: Split) -> None:
    """A Setup and arguments that went through JSON build the same run."""
    features = {} if name == "quick" else {"item_features": "category"}  # the spectral start of `quick` needs id tables
    settings = known(RECIPES[name], {"dim": 4, "hidden": "6,3", "patience": "none", **features})
    run = build(name, parts.train, settings)
    setup, arguments = json.loads(json.dumps([dataclasses.asdict(run.setup), run.arguments]))
    assert parse_setup(setup) == run.setup
    again = build(name, parts.train, arguments, setup=parse_setup(setup))
    assert again.setup == run.setup
    assert again.arguments == run.arguments


def test_a_saved_setup_of_another_version_is_refused() -> None:
    """An unknown field in a saved Setup is named."""
    with pytest.raises(UserError) as error:
        parse_setup({**dataclasses.asdict(Setup()), "momentum": 0.9})
    assert "'momentum'" in line_of(error)


def test_every_recipe_declares_types_and_defaults() -> None:
    """Every argument of every recipe has a type that can be parsed from text and a default of that type."""
    for recipe in RECIPES.values():
        assert recipe.__doc__
        for name, (kind, default) in own_arguments(recipe).items():
            assert parse(name, default, kind) == default
            written = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
            assert resolve(recipe, {name: written})[1] == {name: default}


def test_no_argument_of_a_recipe_hides_a_setting_of_all() -> None:
    """`--set NAME=VALUE` means the same for every recipe of a comparison, except for the names listed here."""
    allowed = {
        ("bir", "draw"),
        ("xir", "draw"),
    }  # the resampling method; Setup.draw applies to rows=queries and has other values
    hidden = {
        (name, argument)
        for name, recipe in RECIPES.items()
        for argument in own_arguments(recipe)
        if argument in SETTINGS
    }
    assert hidden == allowed


def test_every_setting_has_one_flat_name_one_dotted_name_and_a_description() -> None:
    """Flat names are unique and differ from group names, and all fields of all groups are settings."""
    assert len({setting.path for setting in SETTINGS.values()}) == len(SETTINGS)
    assert not set(SETTINGS) & set(GROUPS)
    assert len(SETTINGS) == 1 + sum(len(dataclasses.fields(group)) for group in GROUPS.values())
    for name, setting in SETTINGS.items():
        assert find_setting(name) is find_setting(setting.path) is setting
        assert setting.description, name
        assert "\n" not in setting.description


@pytest.mark.parametrize(
    ("flat", "dotted"), [("dim", "model.dim"), ("lr", "training.lr"), ("clf_lr", "classifiers.lr")]
)
def test_a_setting_is_set_by_its_flat_or_its_dotted_name(flat: str, dotted: str, parts: Split) -> None:
    """`--set dim=8` and `--set model.dim=8` are equivalent, as text and as values, and change nothing else."""
    named = [build("xir", parts.train, {name: value}).setup for name in (flat, dotted) for value in (8, "8")]
    assert named[0] == named[1] == named[2] == named[3] == PAPER.replaced(**{flat: 8})
    assert {name for name, value in named[0].flat().items() if value != PAPER.flat()[name]} == {flat}


def test_a_dotted_name_reaches_a_setting_that_an_argument_hides(parts: Split) -> None:
    """`draw` is an argument of BIR; `batches.draw` is the shared setting."""
    run = build("bir", parts.train, {"draw": "expected", "batches.draw": "propensity", "rows": "queries"})
    assert run.arguments is not None
    assert (run.arguments["draw"], run.setup.batches.draw) == ("expected", "propensity")


@pytest.mark.parametrize(
    ("asked", "meant"), [("model.dmi", "model.dim"), ("model", "dim"), ("classifiers", "clf_epochs")]
)
def test_a_wrong_dotted_name_and_the_name_of_a_group_are_refused(asked: str, meant: str, parts: Split) -> None:
    """The one-line error suggests the nearest name or lists the group's members, also on the command line."""
    for refused in (lambda: build("xir", parts.train, {asked: 1}), lambda: Setup.of(**{asked: 1})):
        with pytest.raises(UserError) as error:
            refused()
        assert asked in line_of(error)
        assert meant in line_of(error)


def test_a_group_can_be_replaced_as_one_value() -> None:
    """`replaced(model=ModelSettings(...))` leaves the other groups unchanged."""
    changed = PAPER.replaced(model=ModelSettings(dim=8), lr=0.5)
    assert changed.model == ModelSettings(dim=8)
    assert changed.batches == PAPER.batches
    assert changed.training.lr == 0.5
