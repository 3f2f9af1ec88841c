"""Guests: packages that add to the engine, which does not import them.

A guest is a package that registers what it adds by an entry point (``[project.entry-points]`` in its pyproject.toml),
and that imports only public names of pronk. The wheel of pronk brings some guests; packages of others work alike. An
entry point may name the extra of pronk that installs what the guest needs: ``"package.module:name [extra]"``.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from pronk.checks import install_extra
from pronk.errors import OptionError, describe_error

Group = Literal["pronk.backends"]


def load_guest(group: Group, name: str, purpose: str) -> Any:
    """Return the object that a guest registers under a name.

    Raises ``OptionError`` if there is no such guest, or if it cannot be imported. ``purpose`` is what asks for the
    guest, such as an option; the message begins with it.
    """
    entry = next(iter(entry_points(group=group, name=name)), None)
    if entry is None:
        msg = f"{purpose}: expected a package that registers {name} in {group}, found none; install pronk again"
        raise OptionError(msg)
    try:
        return entry.load()
    except ImportError as error:
        msg = f"{purpose}: {_import_failure(entry, error)}"
        raise OptionError(msg) from error


def _import_failure(entry: EntryPoint, error: ImportError) -> str:
    """Return why a guest cannot be imported, and what helps."""
    advice = install_extra(entry.extras[0]) if entry.extras else f"install {entry.module.partition('.')[0]} again"
    if isinstance(error, ModuleNotFoundError):
        return f"expected {error.name}, found none; {advice}"
    package = entry.extras[0] if entry.extras else entry.module
    return f"expected {package} that can be imported, found {describe_error(error)[:80]!r}; {advice}"
