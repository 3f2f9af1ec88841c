"""Modules whose names come from other modules: public ones, and former names."""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from warnings import warn


def export(name: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a public module.

    Args:
        name: name of the module.
        file: its ``__file__``. The stub beside it, which type checkers read, has one line for each
            of its names, such as ``from pronk.kernels.threads import num_threads as num_threads``.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    homes = {
        str(alias.asname): (str(node.module), alias.name)
        for node in imports
        for alias in node.names
    }
    names = sorted(homes)

    def get(attribute: str) -> Any:
        if attribute not in homes:
            msg = f"module {name!r} has no attribute {attribute!r}"
            raise AttributeError(msg)
        module, own_name = homes[attribute]
        return getattr(import_module(module), own_name)

    return get, lambda: names, names


def former(name: str, *homes: str) -> Callable[[str], Any]:
    """Return ``__getattr__`` of module ``name``, whose names have moved to ``homes``.

    Its use warns.
    """

    def get(attribute: str) -> Any:
        msg = f"module {name!r} has no attribute {attribute!r}"
        # Above all not __path__: the modules of a package would be imported a second time.
        if attribute.startswith("__") and attribute != "__all__":
            raise AttributeError(msg)
        for home in homes:
            found = getattr(import_module(home), attribute, None)
            if found is not None:
                warn(
                    f"{name} is deprecated; use {home}; it will be removed in 0.4",
                    DeprecationWarning,
                    stacklevel=2,
                )
                return found
        raise AttributeError(msg)

    return get
