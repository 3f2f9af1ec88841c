"""``pronk verify --url``: check that any OpenAI-compatible server is deterministic."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from pronk.cli.options import given_options, panel
from pronk.cli.progress import INTERRUPTED, status_bar
from pronk.errors import OptionError

if TYPE_CHECKING:
    from pronk.bench.prompts import Prompt
    from pronk.verification.remote import RemoteReport, RemoteServer, RemoteSettings

__all__ = ["check_given", "remote_options", "verify_remote", "write_document"]

# Options of ``pronk verify`` that need ``--url``, and the others that may be given with it.
_REMOTE_ONLY = {"api_key_file", "rounds", "tolerance", "timeout"}
_SHARED = {"url", "model", "as_json", "prompts", "limit", "max_tokens", "seed"}
_EXIT_FAILED, _EXIT_NOT_TESTED = 1, 2
_server = panel("Server")


def remote_options(
    model: str | None,
    max_tokens: int,
    seed: int,
    *,
    url: Annotated[
        str | None, _server("Address of a server of any engine, which is verified instead of a model.", metavar="URL")
    ] = None,
    api_key_file: Annotated[
        Path | None, _server("File whose first key is sent to the server.", metavar="FILE", show_default="no key")
    ] = None,
    rounds: Annotated[int, _server("Number of repetitions of each comparison.", min=1)] = 1,
    tolerance: Annotated[float, _server("Largest difference of equal log-probabilities.", min=0.0)] = 1e-5,
    timeout: Annotated[float, _server("Seconds to wait for an answer.", min=0.1)] = 120.0,
) -> "tuple[RemoteServer, RemoteSettings] | None":
    """Return the connection and the settings; ``None`` without ``--url``."""
    if url is None:
        return None
    from pronk.server.settings import read_keys
    from pronk.verification.remote import RemoteServer, RemoteSettings

    settings = RemoteSettings(max_tokens, rounds, tolerance=tolerance, seed=seed)
    key = None if api_key_file is None else read_keys(api_key_file)[0]
    return RemoteServer(url, model, key, timeout), settings


def check_given(command: typer.Context, *, url: bool) -> None:
    """Raise OptionError if the command line has an option that does not apply with, or without, ``--url``."""
    for name in given_options(command):
        option = name.replace("_", "-")
        if url and name not in _SHARED | _REMOTE_ONLY:
            msg = f"url: expected only options for servers, found --{option}; leave it out"
            raise OptionError(msg)
        if not url and name in _REMOTE_ONLY:
            msg = f"{option}: expected --url beside it, found none; add the address of a server"
            raise OptionError(msg)


def verify_remote(
    server: "RemoteServer",
    settings: "RemoteSettings",
    prompts: "list[Prompt] | None",
    limit: int | None,
    as_json: Path | None,
) -> None:
    """Verify a server, show the report, and exit with the code of the result.

    Args:
        server: connection to the server, which is closed at the end.
        settings: lengths, repetitions and tolerances.
        prompts: prompts of a file; ``None``: the first ``limit`` built-in ones.
        limit: number of built-in prompts; ``None``: all.
        as_json: file for the report as JSON; ``-`` is standard output, instead of the table.
    """
    from pronk.verification.remote import TEXTS
    from pronk.verification.remote.checks import verify_server_steps
    from pronk.verification.remote.client import ServerUnreachableError

    builtin = dict([*TEXTS.items()][:limit])
    texts = builtin if prompts is None else {prompt.id: prompt.text or prompt.turns[0] for prompt in prompts}
    report: RemoteReport | None = None
    code, cause = 0, None
    with server, status_bar(Console(stderr=True)) as progress:
        try:
            for report in verify_server_steps(server, texts, settings, progress):  # noqa: B007 - shown below
                pass
        except KeyboardInterrupt:
            code = INTERRUPTED
        except ServerUnreachableError as error:
            cause = error
    if report is not None:
        _show(report, as_json)
    if cause is not None:
        raise cause
    if report is None or not report.tested:
        raise typer.Exit(code or _EXIT_NOT_TESTED)
    raise typer.Exit(code or (0 if report.passed else _EXIT_FAILED))


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Write a report as JSON to a file, or as one line to standard output (``-``)."""
    if str(path) == "-":
        typer.echo(json.dumps(document, ensure_ascii=False))
    else:
        from pronk.files.atomic import write_json

        write_json(path, document, indent=1)


def _show(report: "RemoteReport", as_json: Path | None) -> None:
    from pronk.verification.remote.table import show_server

    if as_json is not None:
        write_document(as_json, report.to_dict())
    if str(as_json) != "-":
        show_server(report, Console(highlight=False))
