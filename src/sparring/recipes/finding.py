"""Recipes by name: one of ours, one from an installed package, or a function in a file or module."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import TypeVar, get_type_hints

from sparring.core.errors import UserError, did_you_mean
from sparring.recipes import RECIPES
from sparring.recipes.run import Run
from sparring.recipes.setup import Setup

Recipe = Callable[..., Run]
T = TypeVar("T")


def find(recipe: str | Recipe) -> Recipe:
    """The recipe of this name; a recipe function is returned unchanged.

    A name is one of RECIPES (hyphens may stand for underscores), an entry point `sparring.recipes` of an installed
    package, `path/to/file.py:function` or `module:function`.

        find("xir"), find("mine.py:loss_tilted")
    """
    if not isinstance(recipe, str):
        return _checked(recipe, getattr(recipe, "__name__", repr(recipe)))
    if is_ours(recipe):
        return RECIPES[recipe.replace("-", "_")]
    if ":" in recipe:
        return _checked(_imported(recipe), recipe)
    packages = installed()
    if recipe in packages:
        return _checked(_attempt(packages[recipe].load, f"the recipe {recipe!r} of {source(recipe)}"), recipe)
    if recipe.endswith(".py"):
        raise UserError(f"{recipe!r} names no function: write {recipe}:FUNCTION")
    raise UserError(
        f"unknown recipe {recipe!r}{did_you_mean(recipe, [*RECIPES, *packages])}; `sparring recipes` lists them"
    )


def is_ours(name: str) -> bool:
    """Whether a name is that of a recipe of Sparring: finding any other imports code."""
    return name.replace("-", "_") in RECIPES


def named(recipe: str | Recipe) -> str:
    """The name that finds a recipe from any working directory: a file by its full path. run.json holds it.

    A function that cannot be imported again, defined in a notebook or inside another function, still has a name.
    """
    if not isinstance(recipe, str):
        module = sys.modules.get(recipe.__module__)
        if RECIPES.get(recipe.__name__) is recipe:
            return recipe.__name__
        return f"{_place(recipe.__module__, getattr(module, '__file__', None))}:{recipe.__qualname__}"
    find(recipe)
    module_name, colon, function = recipe.rpartition(":")
    if not colon:
        return recipe.replace("-", "_") if is_ours(recipe) else recipe
    return f"{_place(module_name, _file(module_name))}:{function}"


def lasting(recipe: str | Recipe) -> str:
    """The same, but refuse a function that another process cannot import."""
    name = named(recipe)
    if not isinstance(recipe, str):
        module = sys.modules.get(recipe.__module__)
        known = RECIPES.get(name) is recipe or getattr(module, recipe.__name__, None) is recipe
        if name.startswith("__main__:") or not known:
            why = "defined in a notebook or inside another function"
            raise UserError(f"{recipe.__name__} is {why}: move it to the top level of a file that processes can import")
    return name


def source_digest(name: str) -> str | None:
    """A short hash of the file of a custom recipe, to detect changes; None for our recipes."""
    module, colon, _ = name.rpartition(":")
    file = _file(module) if colon else None
    if file is None or not Path(file).is_file():
        return None
    return hashlib.blake2b(Path(file).read_bytes(), digest_size=8).hexdigest()


def short(name: str) -> str:
    """A recipe's name for tables, folders and titles: its function's, with its file's if that is also one of ours."""
    module, colon, function = name.rpartition(":")
    if not colon:
        return name
    return f"{Path(module).stem}.{function}" if function in RECIPES else function


def installed() -> dict[str, EntryPoint]:
    """The recipes of installed packages, by name; they cannot replace one of ours."""
    return {
        entry.name: entry
        for entry in entry_points(group="sparring.recipes")
        if entry.name.replace("-", "_") not in RECIPES
    }


def source(name: str) -> str:
    """The origin of a recipe in words: sparring, an installed package, or a file or module."""
    module, colon, _ = name.rpartition(":")
    if colon:
        return module
    entry = installed().get(name)
    if entry is None:
        return "sparring"
    return f"{entry.value} of the package {entry.dist.name} {entry.dist.version}" if entry.dist else entry.value


def _file(module: str) -> str | None:
    """The file of a module: a path, a module that can be imported, or one in the working directory."""
    if module.endswith(".py"):
        return str(Path(module).resolve())
    try:
        spec = importlib.util.find_spec(module)
    except (ModuleNotFoundError, ValueError):  # a missing package; __main__ in a notebook
        return None
    except Exception as error:  # finding a module imports its parent packages
        raise UserError(f"cannot import {module}: {type(error).__name__}: {error}") from error
    if spec is not None:
        return spec.origin
    local = Path(f"{module}.py")
    return str(local.resolve()) if "." not in module and local.is_file() else None


def _place(module: str, file: str | None) -> str:
    """A module by its name if it is installed or part of a package, else by the full path of its file."""
    if file is None or not file.endswith(".py") or {"site-packages", "dist-packages"} & set(Path(file).parts):
        return module
    packaged = "." in module and not module.endswith(".py") and (Path(file).parent / "__init__.py").is_file()
    return module if packaged else str(Path(file).resolve())


def _imported(name: str) -> Recipe:
    module_name, _, function = name.rpartition(":")
    file, place = _file(module_name), _place(module_name, _file(module_name))
    if module_name == "__main__":
        raise UserError(f"{name!r} was defined in a notebook: put it into a file and name it FILE.py:{function}")
    if module_name.endswith(".py") and not Path(module_name).is_file():
        raise UserError(f"no such file: {module_name} (of the recipe {name!r})")
    if file is None:
        raise UserError(f"no module called {module_name!r} ({name!r}): write FILE.py:{function}, or install it")
    module = _attempt(
        lambda: _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(module_name),
        module_name,
        file,
    )
    recipe = getattr(module, function, None)
    if recipe is None:
        defined = [
            key for key, value in inspect.getmembers(module, inspect.isfunction) if value.__module__ == module.__name__
        ]
        raise UserError(f"there is no function {function!r} in {module_name}{did_you_mean(function, defined)}")
    return recipe  # type: ignore[no-any-return]


def _from_file(path: Path) -> ModuleType:
    """Import a file once, under its path as the module's unique name; it can import the modules in its folder."""
    if str(path) in sys.modules:
        return sys.modules[str(path)]
    spec = importlib.util.spec_from_file_location(str(path), path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    sys.modules[str(path)] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[str(path)]
        raise
    return module


def _attempt(load: Callable[[], T], what: str, file: str = "") -> T:
    try:
        return load()
    except (Exception, SystemExit) as error:
        syntax = isinstance(error, SyntaxError)
        message = f"SyntaxError: {error}" if syntax else traceback.format_exception_only(error)[-1].strip()
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        line = f", line {frames[-1].lineno}" if frames else ""
        raise UserError(f"cannot import {what}{line}: {message}") from error


def _checked(recipe: Recipe, name: str) -> Recipe:
    """Refuse a function without a Setup, and arguments without a type or a default."""
    if not callable(recipe) or inspect.isclass(recipe) or not hasattr(recipe, "__name__"):
        signature = "a function (data, setup=Setup(...), *, ...) -> Run"
        raise UserError(f"{name} is a {type(recipe).__name__}, not a recipe: {signature}")
    try:
        parameters, hints = list(inspect.signature(recipe).parameters.values()), get_type_hints(recipe)
    except Exception as error:
        raise UserError(f"the types of the recipe {name} cannot be read: {type(error).__name__}: {error}") from error
    setup = next((p for p in parameters[1:2] if p.name == "setup" and isinstance(p.default, Setup)), None)
    if setup is None:
        raise UserError(f"the recipe {name} must start with (data, setup=Setup(...)): the default must be a Setup")
    for p in parameters[2:]:
        if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) or p.default is p.empty or p.name not in hints:
            example = f"such as `{p.name}: int = 256`"
            raise UserError(f"the argument {p.name!r} of the recipe {name} needs a type and a default, {example}")
    return recipe
