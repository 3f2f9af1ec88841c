"""Options in the panels of ``--help``."""

from collections.abc import Callable
from typing import Any

import typer


def panel(title: str | None, **common: Any) -> Callable[..., Any]:
    """Return ``option(text, *names, **settings)``, which makes a typer.Option in the help panel ``title``."""
    return lambda text, *names, **settings: typer.Option(
        *names, help=text, rich_help_panel=title, **common | settings
    )


option = panel(None)
