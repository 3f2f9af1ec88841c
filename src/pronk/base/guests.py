"""Guests: packages that add devices, drafters and commands to pronk.

The engine does not import a guest. A guest imports only public names of pronk, and registers
objects as entry points, in the section ``[project.entry-points]`` of its pyproject.toml. Some
guests are a part of pronk's wheel; other packages work in the same way. The groups of entry points:

``pronk.commands``
    A :class:`Command` of the command line.
``pronk.devices``
    Under the name of a device, a function that opens it (:mod:`pronk.engine.workers`).
``pronk.drafters``
    A subclass of :class:`~pronk.drafting.proposer.Drafter`, under the drafter's name.
``pronk.workers``
    Under ``processes``, a function that starts worker processes (:mod:`pronk.engine.workers`).

An entry point may name the extra of pronk that installs the guest's requirements:
``"package.module:name [extra]"``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from pronk.base.checks import install_extra
from pronk.base.errors import OptionError, describe_error

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Group = Literal["pronk.commands", "pronk.devices", "pronk.drafters", "pronk.workers"]


@dataclass(frozen=True)
class Command:
    """A command of the command line; its module is imported when the command runs.

    Attributes:
        home: ``"package.module:name"`` of a function with typer's annotations, or of a
            ``typer.Typer``.
        summary: first line of the help text.
    """

    home: str
    summary: str


@cache
def guests(group: Group) -> Mapping[str, EntryPoint]:
    """Return the entry points of a group in all installed packages, by name."""
    # This import takes longer than all others of pronk together.
    from importlib.metadata import entry_points  # noqa: PLC0415

    return {entry.name: entry for entry in entry_points(group=group)}


def load_guest(group: Group, name: str, purpose: str) -> Any:
    """Import and return the object that a guest registers.

    Args:
        group: group of entry points.
        name: name of the entry point.
        purpose: the option or command that needs the guest; an error message begins with it.

    Raises:
        OptionError: no installed package registers the name, or the guest cannot be imported.
    """
    entry = guests(group).get(name)
    if entry is None:
        msg = (
            f"{purpose}: expected a package that registers {name} in {group}, found none; "
            "install pronk again"
        )
        raise OptionError(msg)
    try:
        return entry.load()
    except ImportError as error:
        msg = f"{purpose}: {_import_failure(entry, error)}"
        raise OptionError(msg) from error


def _import_failure(entry: EntryPoint, error: ImportError) -> str:
    """Return the problem of an import and a remedy, for an error message."""
    package = entry.module.partition(".")[0]
    missing = ""
    if isinstance(error, ModuleNotFoundError):
        missing = error.name or ""
    is_own = missing.partition(".")[0] == package
    extra = entry.extras[0] if entry.extras else ""
    advice = install_extra(extra) if extra and not is_own else f"install {package} again"
    if missing:
        return f"expected {missing}, found none; {advice}"
    needed = extra or entry.module
    found = describe_error(error)[:80]
    return f"expected {needed} that can be imported, found {found!r}; {advice}"
