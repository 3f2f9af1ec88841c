"""``pronk bench --server``: load on servers that speak OpenAI's protocol, ours and others, by one client.

typer wants the real types of the options: no postponed annotations here. httpx is imported when the command runs.
"""

import json
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from pronk.cli.progress import status_bar
from pronk.errors import OptionError, PronkError

if TYPE_CHECKING:
    from pronk.bench.load.document import LoadDocument
    from pronk.bench.load.measure import Found, LoadPlan
    from pronk.bench.load.records import Targets

__all__ = ["SHARED", "bench_servers", "load_plan"]

# Options of the other benchmark that mean the same here.
SHARED = (
    *("suite", "data", "prompts", "limit", "max_tokens", "temperature", "repeats", "seed", "ignore_eos"),
    *("as_json", "report"),
)

_INTERRUPTED = 130
_STDOUT = Path("-")


def _server(help: str, *names: str, **more: Any) -> Any:  # noqa: A002 - typer's word
    return typer.Option(*names, help=help, rich_help_panel="Load on servers", **more)


def load_plan(
    shared: Mapping[str, Any],
    *,
    server: Annotated[
        list[str] | None,
        _server(
            "Measure a server that speaks OpenAI's protocol, such as http://localhost:8000; repeatable.",
            metavar="[NAME=]URL",
            show_default=False,
        ),
    ] = None,
    server_model: Annotated[
        list[str] | None,
        _server("What to ask for there.", metavar="[NAME=]MODEL", show_default="the first that the server lists"),
    ] = None,
    api_key: Annotated[
        list[str] | None, _server("What it lets in.", metavar="[NAME=]KEY", show_default=False, envvar="PRONK_API_KEY")
    ] = None,
    endpoint: Annotated[Literal["chat", "completions"], _server("Conversations, or texts to continue.")] = "chat",
    extra_body: Annotated[
        list[str] | None,
        _server(
            """Fields that requests have besides, such as '{"drafter": "autoregressive"}'.""",
            metavar="[NAME=]JSON",
            show_default=False,
        ),
    ] = None,
    concurrency: Annotated[
        str | None,
        _server(
            "So many clients, each asking again when it is answered.",
            metavar="N,N",
            show_default="1,2,4 without --rate",
        ),
    ] = None,
    rate: Annotated[
        str | None,
        _server("So many requests a second, coming at random.", metavar="R,R", show_default=False),
    ] = None,
    requests: Annotated[int, _server("Requests of each level and round.", min=1)] = 16,
    warmup: Annotated[int, _server("Requests to each server that are not counted.", min=0)] = 2,
    timeout: Annotated[float, _server("Seconds for an answer.", min=0.001)] = 600.0,
    goodput: Annotated[
        str | None,
        _server(
            "Count the answers that keep all targets, in milliseconds.",
            metavar="ttft=MS,tpot=MS,e2e=MS",
            show_default=False,
        ),
    ] = None,
    unique: Annotated[bool, _server("Number the prompts, so that no cache has them.", "--unique", metavar="")] = False,
) -> "LoadPlan":
    """What to measure on servers, checked; ``shared`` has the options that :data:`SHARED` names.

    Raises:
        OptionError: a mistake in the options, or a missing httpx.
    """
    from pronk.bench.load.levels import parse_levels
    from pronk.bench.load.measure import LoadPlan
    from pronk.bench.load.requests import Ask, make_jobs, parse_servers
    from pronk.bench.prompts import load_tasks

    servers = parse_servers(server or [], api_key or [], server_model or [], extra_body or [])
    levels = parse_levels(concurrency if concurrency or rate else "1,2,4", rate)
    clients = max((level.value for level in levels if level.loop == "closed"), default=1)
    if requests < clients:
        msg = f"requests: expected at least one for each of {clients:g} clients, found {requests}"
        raise OptionError(msg)
    temperatures = shared["temperature"]
    if len(temperatures) > 1:
        msg = f"temperature: expected one with --server, found {', '.join(f'{value:g}' for value in temperatures)}"
        raise OptionError(msg)
    (temperature,) = temperatures
    tasks = load_tasks(shared["suite"], shared["data"], shared["prompts"] or [], shared["limit"])
    prompts = [prompt for task in tasks.values() for prompt in task]
    return LoadPlan(
        servers=servers,
        ask=Ask(endpoint, shared["max_tokens"], temperature, shared["ignore_eos"], unique),
        jobs=tuple(make_jobs(prompts, requests, shared["seed"], temperature)),
        levels=levels,
        rounds=shared["repeats"],
        warmup=warmup,
        timeout=timeout,
        targets=_targets(goodput),
        seed=shared["seed"],
    )


def _targets(text: str | None) -> "Targets":
    """``"ttft=2000,tpot=150"``, milliseconds, in seconds."""
    from pronk.bench.load.records import Targets

    found: dict[str, float] = {}
    for part in (text or "").split(",") if text is not None else ():
        name, _, value = part.strip().partition("=")
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        if name not in ("ttft", "tpot", "e2e") or name in found or not 0 < number < float("inf"):
            msg = f"goodput: expected milliseconds as in ttft=2000,tpot=150,e2e=9000, found {part!r}"
            raise OptionError(msg)
        found[name] = number / 1e3
    return Targets(**found)


def bench_servers(served: "partial[LoadPlan]", shared: Mapping[str, Any]) -> None:
    """Measure, then write and show what was found.

    Args:
        served: what to measure, with the user's values filled in.
        shared: the options that :data:`SHARED` names.

    Raises:
        PronkError: a server that cannot be measured, or none that answered anything.
    """
    from pronk.bench.host import host, versions
    from pronk.bench.load.figures import make_document
    from pronk.bench.load.measure import Found

    plan = served(shared)
    found, started = Found(), datetime.now(UTC).isoformat(timespec="seconds")
    problem = _measure(plan, found)
    facts = {
        "started": started,
        "arguments": {name: value for name, value in {**served.keywords, **shared}.items() if name != "api_key"},
        "versions": versions(("pronk", "httpx")),
        "hardware": host(),
    }
    if any(window.calls for window in found.windows):
        _deliver(
            make_document(plan, found, interrupted=problem is not None, **json.loads(json.dumps(facts, default=str))),
            shared["as_json"],
            shared["report"],
        )
    if problem is not None:
        raise problem
    failed = [call for window in found.windows for call in window.calls]
    if all(call.error is not None for call in failed):
        msg = f"nothing was measured: expected answers, found {failed[0].error} ({failed[0].reason or 'no reason'})"
        raise PronkError(msg)


def _measure(plan: "LoadPlan", found: "Found") -> Exception | None:
    """Measure; returns what ended it early, to be raised once the figures up to there have been shown."""
    from pronk.bench.load.measure import run

    try:
        with status_bar(Console(stderr=True)) as status:
            run(plan, found, status)
    except KeyboardInterrupt:
        return typer.Exit(_INTERRUPTED)
    except Exception as error:  # noqa: BLE001 - no file descriptors left, say, after levels that have been measured
        return error
    return None


def _deliver(document: "LoadDocument", as_json: Path | None, report: Path | None) -> None:
    """Write the files, then show the tables: a terminal that is gone, or lacks a letter, costs no figures."""
    from pronk.bench.load.tables import show

    text = json.dumps(document.to_dict(), ensure_ascii=False) + "\n"
    if as_json is not None and as_json != _STDOUT:
        as_json.write_text(text, encoding="utf-8")
    if report is not None:
        from pronk.bench.load.report import write_load_report

        sys.stderr.write(f"{write_load_report(document, report)}\n")
    show(document, Console(highlight=False, stderr=as_json == _STDOUT))
    if as_json == _STDOUT:
        sys.stdout.write(text)
