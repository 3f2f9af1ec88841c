"""Modules without code of their own: public modules, and former names of modules.

Their names come from other modules, which are imported when a name is first used.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from warnings import warn


def export(name: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a public module.

    The stub beside the module (``.pyi``), which type checkers read, has one line for each name of
    the module, such as ``from pronk.kernels.threads import num_threads as num_threads``.

    Args:
        name: name of the module.
        file: ``__file__`` of the module.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    homes: dict[str, tuple[str, str]] = {}  # module and name of each public name
    for node in stub.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                homes[str(alias.asname)] = (str(node.module), alias.name)
    names = sorted(homes)

    def get(attribute: str) -> Any:
        if attribute not in homes:
            msg = f"module {name!r} has no attribute {attribute!r}"
            raise AttributeError(msg)
        module, own_name = homes[attribute]
        return getattr(import_module(module), own_name)

    return get, lambda: names, names


def former(name: str, *homes: str) -> Callable[[str], Any]:
    """Return ``__getattr__`` of a former module, whose names have moved to other modules.

    The use of a name gives a ``DeprecationWarning``.

    Args:
        name: name of the former module.
        *homes: the modules that have its names now.
    """

    def get(attribute: str) -> Any:
        msg = f"module {name!r} has no attribute {attribute!r}"
        # A former package must not have the new package's ``__path__``: its modules would be
        # imported a second time.
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
