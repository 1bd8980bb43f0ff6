"""Optional dependencies: imported where they are used, with an error that names the extra to install."""

from __future__ import annotations

import importlib
from typing import Any

from sparring.core.errors import UserError


def optional(module: str, extra: str, purpose: str) -> Any:
    """The module, or a one-line error that says which extra provides it.

    optional("faiss", "serve", "an approximate index")
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f'{purpose} needs {module}: pip install "sparring[{extra}]"') from error
