"""Guests: packages that add backends, drafters and commands to the engine, which does not import them.

A guest is a package that registers what it adds by entry points (``[project.entry-points]`` in its
pyproject.toml), and that imports only public names of pronk. The wheel of pronk brings some guests;
packages of others work alike:

==================  =====================================================================================
group               object of an entry point
==================  =====================================================================================
``pronk.backends``  a function of device and dtype that returns a :class:`~pronk.models.backend.Backend`
``pronk.commands``  a :class:`Command` of the command line
``pronk.drafters``  a subclass of :class:`~pronk.drafting.proposer.Drafter`, by its name
``pronk.workers``   ``processes``: a function that starts worker processes (:mod:`pronk.engine.workers`)
==================  =====================================================================================

An entry point may name the extra of pronk that installs what the guest needs:
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

Group = Literal["pronk.backends", "pronk.commands", "pronk.drafters", "pronk.workers"]


@dataclass(frozen=True)
class Command:
    """A command of the command line, whose module is imported when the command runs.

    Attributes:
        home: ``"package.module:name"`` of a function with typer's annotations, or of a
            ``typer.Typer``.
        summary: first line of the help text.
    """

    home: str
    summary: str


@cache
def guests(group: Group) -> Mapping[str, EntryPoint]:
    """Return the entry points of a group by name, of all installed packages."""
    from importlib.metadata import entry_points  # noqa: PLC0415 - takes longer than all else of `import pronk`

    return {entry.name: entry for entry in entry_points(group=group)}


def load_guest(group: Group, name: str, purpose: str) -> Any:
    """Return the object that a guest registers under a name.

    Raises ``OptionError`` if there is no such guest, or if it cannot be imported. ``purpose`` is
    what asks for the guest, such as an option; the message begins with it.
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
    """Return why a guest cannot be imported, and what helps."""
    package = entry.module.partition(".")[0]
    missing = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    is_own = missing.partition(".")[0] == package
    advice = (
        f"install {package} again" if is_own or not entry.extras else install_extra(entry.extras[0])
    )
    if missing:
        return f"expected {missing}, found none; {advice}"
    needed = entry.extras[0] if entry.extras else entry.module
    found = describe_error(error)[:80]
    return f"expected {needed} that can be imported, found {found!r}; {advice}"
