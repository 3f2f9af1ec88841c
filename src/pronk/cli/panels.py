"""Options in the panels of ``--help``."""

from collections.abc import Callable
from typing import Any

import typer


def panel(title: str | None, **common: Any) -> Callable[..., Any]:
    """Return a function that makes a ``typer.Option`` in the help panel ``title``.

    The function takes the help text, the names of the option on the command line, and further
    settings of ``typer.Option``. ``common`` are settings of all options of the panel.
    """

    def make(text: str, *names: str, **settings: Any) -> Any:
        return typer.Option(*names, help=text, rich_help_panel=title, **common | settings)

    return make


option = panel(None)
