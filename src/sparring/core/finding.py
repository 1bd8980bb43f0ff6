"""Functions by name: one of ours, one from an installed package, or a function in a file or module.

Recipes and models are found by the same rules (recipes/finding.py, models/finding.py).
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar, get_type_hints

from sparring.core.errors import UserError, did_you_mean

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class Finder(Generic[F]):
    """The functions of one kind, such as recipes: ours, and those that others write.

    A name is one of `ours` (hyphens may stand for underscores), an entry point `sparring.KINDs` of an installed
    package, `path/to/file.py:function` or `module:function`. `check` raises for a function that is none of this kind.
    """

    def __init__(self, kind: str, ours: Mapping[str, F], check: Callable[[F, str], None]) -> None:
        self.kind, self.ours, self.check = kind, ours, check
        self._passed: dict[str, F] = {}  # functions given as values, which a name in a Setup then finds

    def find(self, function: str | F) -> F:
        """The function of this name; a function is returned unchanged."""
        if not isinstance(function, str):
            name = getattr(function, "__name__", repr(function))
            self.check(function, name)
            return function
        if self.is_ours(function):
            return self.ours[function.replace("-", "_")]
        if function in self._passed:
            return self._passed[function]
        found = self._found(function)
        self.check(found, function)
        return found

    def _found(self, name: str) -> F:
        if ":" in name:
            return imported(name, self.kind)  # type: ignore[no-any-return]
        packages = self.installed()
        if name in packages:
            return attempt(packages[name].load, f"the {self.kind} {name!r} of {self.source(name)}")  # type: ignore[no-any-return]
        if name.endswith(".py"):
            raise UserError(f"{name!r} names no function: write {name}:FUNCTION")
        hint = did_you_mean(name, [*self.ours, *packages])
        raise UserError(f"unknown {self.kind} {name!r}{hint}; `sparring {self.kind}s` lists them")

    def passed(self, function: str | F) -> str:
        """The name of a function; one that was given as a value is found by this name in this process."""
        name = self.named(function)
        if not isinstance(function, str) and not self.is_ours(name):
            self.check(function, name)
            self._passed[name] = function
        return name

    def is_ours(self, name: str) -> bool:
        """Whether a name is one of Sparring's own: finding any other imports code."""
        return name.replace("-", "_") in self.ours

    def named(self, function: str | F) -> str:
        """The name that finds a function from any working directory: a file by its full path. run.json holds it.

        A function that cannot be imported again, defined in a notebook or inside another function, still has a name.
        """
        if not isinstance(function, str):
            module = sys.modules.get(function.__module__)
            if self.ours.get(function.__name__) is function:
                return function.__name__
            return f"{_place(function.__module__, getattr(module, '__file__', None))}:{function.__qualname__}"
        self.find(function)
        module_name, colon, name = function.rpartition(":")
        if not colon:
            return function.replace("-", "_") if self.is_ours(function) else function
        return f"{_place(module_name, _file(module_name))}:{name}"

    def lasting(self, function: str | F) -> str:
        """The same, but refuse a function that another process cannot import."""
        name = self.named(function)
        if not isinstance(function, str):
            module = sys.modules.get(function.__module__)
            known = self.ours.get(name) is function or getattr(module, function.__name__, None) is function
            if name.startswith("__main__:") or not known:
                why = "defined in a notebook or inside another function"
                move = "move it to the top level of a file that processes can import"
                raise UserError(f"{function.__name__} is {why}: {move}")
        return name

    def short(self, name: str) -> str:
        """A name for tables, folders and titles: the function's, with its file's if that is also one of ours."""
        module, colon, function = name.rpartition(":")
        if not colon:
            return name
        return f"{Path(module).stem}.{function}" if function in self.ours else function

    def installed(self) -> dict[str, EntryPoint]:
        """The functions of installed packages, by name; they cannot replace one of ours."""
        return {
            entry.name: entry
            for entry in entry_points(group=f"sparring.{self.kind}s")
            if entry.name.replace("-", "_") not in self.ours
        }

    def source(self, name: str) -> str:
        """The origin of a function in words: sparring, an installed package, or a file or module."""
        module, colon, _ = name.rpartition(":")
        if colon:
            return module
        entry = self.installed().get(name)
        if entry is None:
            return "sparring"
        return f"{entry.value} of the package {entry.dist.name} {entry.dist.version}" if entry.dist else entry.value


def source_digest(name: str) -> str | None:
    """A short hash of the file of a custom function, to detect changes; None for one of ours."""
    module, colon, _ = name.rpartition(":")
    file = _file(module) if colon else None
    if file is None or not Path(file).is_file():
        return None
    return hashlib.blake2b(Path(file).read_bytes(), digest_size=8).hexdigest()


def parameters(function: Callable[..., Any], kind: str, name: str, signature: str) -> list[inspect.Parameter]:
    """The parameters of a function; raises for a value that is no function, or types that cannot be read."""
    if not callable(function) or inspect.isclass(function) or not hasattr(function, "__name__"):
        raise UserError(f"{name} is a {type(function).__name__}, not a {kind}: a function {signature}")
    try:
        get_type_hints(function)
        return list(inspect.signature(function).parameters.values())
    except Exception as error:
        raise UserError(f"the types of the {kind} {name} cannot be read: {type(error).__name__}: {error}") from error


def own_arguments(function: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """The arguments that follow the first two, which all functions of a kind share: name -> (type, default)."""
    hints = get_type_hints(function)
    return {p.name: (hints[p.name], p.default) for p in list(inspect.signature(function).parameters.values())[2:]}


def argument_metadata(function: Callable[..., Any]) -> dict[str, tuple[Any, ...]]:
    """The metadata of these arguments: a description (str), a range for tuning (Range, OneOf)."""
    hints = get_type_hints(function, include_extras=True)
    return {name: getattr(hints[name], "__metadata__", ()) for name in own_arguments(function)}


def check_arguments(function: Callable[..., Any], kind: str, name: str) -> None:
    """Refuse arguments after the second that have no type or no default."""
    hints = get_type_hints(function)
    for p in list(inspect.signature(function).parameters.values())[2:]:
        if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) or p.default is p.empty or p.name not in hints:
            example = f"such as `{p.name}: int = 256`"
            raise UserError(f"the argument {p.name!r} of the {kind} {name} needs a type and a default, {example}")


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


def imported(name: str, kind: str) -> Any:
    """The function FILE.py:FUNCTION or MODULE:FUNCTION; `kind` is for errors."""
    module_name, _, function = name.rpartition(":")
    file, place = _file(module_name), _place(module_name, _file(module_name))
    if module_name == "__main__":
        raise UserError(f"{name!r} was defined in a notebook: put it into a file and name it FILE.py:{function}")
    if module_name.endswith(".py") and not Path(module_name).is_file():
        raise UserError(f"no such file: {module_name} (of the {kind} {name!r})")
    if file is None:
        raise UserError(f"no module called {module_name!r} ({name!r}): write FILE.py:{function}, or install it")
    module = attempt(
        lambda: _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(module_name),
        module_name,
        file,
    )
    found = getattr(module, function, None)
    if found is None:
        defined = [
            key for key, value in inspect.getmembers(module, inspect.isfunction) if value.__module__ == module.__name__
        ]
        raise UserError(f"there is no function {function!r} in {module_name}{did_you_mean(function, defined)}")
    return found


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


def attempt(load: Callable[[], T], what: str, file: str = "") -> T:
    """The result of an import, whose failure is an error of one line."""
    try:
        return load()
    except (Exception, SystemExit) as error:
        syntax = isinstance(error, SyntaxError)
        message = f"SyntaxError: {error}" if syntax else traceback.format_exception_only(error)[-1].strip()
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        line = f", line {frames[-1].lineno}" if frames else ""
        raise UserError(f"cannot import {what}{line}: {message}") from error
