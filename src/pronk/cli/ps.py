"""``pronk ps``: the loaded models of a running server."""

import json
from typing import Annotated, Any

import httpx
import typer
from rich.table import Table

from pronk.base.errors import OptionError, describe_error, refuse
from pronk.base.quantities import size_texts
from pronk.cli.console import TerminalOutput
from pronk.cli.panels import option

_TIMEOUT = 10.0  # seconds


def ps(
    *,
    url: Annotated[str, option("Address of the server.", metavar="URL")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="PRONK_API_KEY", help="Key of the server.", metavar="KEY", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, option("Print one JSON document.", "--json", metavar="")] = False,
) -> None:
    """List the loaded models of a running server.

    [bold]Examples[/]

    pronk ps

    pronk ps --url http://127.0.0.1:8080
    """
    models = _loaded(url, api_key)
    screen = TerminalOutput()
    if as_json:
        typer.echo(json.dumps(models, ensure_ascii=False))
    elif not models:
        screen.note(f"no model is loaded at {url}; the first request of a model loads it")
    else:
        table = Table("name", box=None, pad_edge=False)
        table.add_column("size", justify="right")
        table.add_column("context", justify="right")
        for model in models:
            size = size_texts(model["size"])[0] if model.get("size") else ""
            table.add_row(model["name"], size, str(model.get("context_length", "")))
        screen.result(table, one_line_rows=True)


def _loaded(url: str, api_key: str | None) -> list[dict[str, Any]]:
    """Return the loaded models, as the server's ``/api/ps`` describes them."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        reply = httpx.get(f"{url.rstrip('/')}/api/ps", headers=headers, timeout=_TIMEOUT)
        reply.raise_for_status()
        models: list[dict[str, Any]] = reply.json()["models"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        expected = f"expected a server of pronk at {url}, found: {describe_error(error)}"
        refuse("ps", f"{expected}; start one with pronk serve", OptionError, error)
    return models
