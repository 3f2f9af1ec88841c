"""Report about a server on a terminal: one row per check, one column per route, and findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from urllib.parse import urlsplit

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pronk.lab.verification.remote.checks import CHECKS
from pronk.lab.verification.remote.client import ROUTES
from pronk.lab.verification.remote.report import CheckResult, RemoteReport, Status

_STYLES: dict[Status, str] = {
    "passed": "green",
    "failed": "bold red",
    "not supported": "yellow",
    "skipped": "yellow",
}


def show_server(report: RemoteReport, console: Console) -> None:
    """Print the configuration, the table, and the findings."""
    server = f" ({report.software})" if report.software else ""
    address = urlsplit(report.url).netloc or report.url
    heading = (
        f"{report.model} at {address}{server}: {len(report.prompts)} prompts, "
        f"up to {report.settings.max_tokens} tokens each, {report.num_requests} requests in "
        f"{report.seconds:.0f} s"
    )
    console.print(Text(heading))
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("check", overflow="fold", ratio=1)
    for route in ROUTES:
        table.add_column(route, overflow="fold")
    for name, check in CHECKS.items():
        results = [report.get(name, route) for route in ROUTES]
        if any(result is not None for result in results):
            table.add_row(Text(check.title), *(_cell(result) for result in results))
    console.print(table)
    for note in _notes(report):
        console.print(note, soft_wrap=True)
    console.print(_summary(report))


def _cell(result: CheckResult | None) -> Text:
    if result is None:
        return Text("–")
    words: str = result.status
    if result.status == "failed" and result.comparisons:
        words = "FAILED"
        if result.differences:
            words = f"FAILED {result.differences}/{result.comparisons}"
        if result.kind == "log-probabilities":
            words += " (only log-probs)"
    return Text(words, style=_STYLES[result.status])


def _notes(report: RemoteReport) -> Iterator[Text]:
    for status in ("failed", "not supported"):
        for result in report.results:
            found = result.note if result.first is None else str(result.first)
            if result.status == status and found:
                title = CHECKS[result.check].title
                yield Text(f"{result.route}, {title}: {found}", style=_STYLES[result.status])
    for result in report.results:
        details = [result.note] if result.note else []
        largest = result.max_logprob_difference
        if largest is not None:
            details.append(f"log-probabilities differ by at most {largest:.2g}")
        if result.status == "passed" and details:
            title = CHECKS[result.check].title
            yield Text(f"{result.route}, {title}: {', '.join(details)}", style="dim")


def _summary(report: RemoteReport) -> Text:
    if not report.complete:
        return Text("Interrupted: only the checks above were carried out.", style="yellow")
    if not report.tested:
        return Text("NOT tested: the server supports no check.", style="bold red")
    if report.failed:
        counts = Counter(result.kind for result in report.failed)
        kinds = {
            "text": "texts",
            "log-probabilities": "log-probabilities only",
            None: "other properties",
        }
        numbers = ", ".join(
            f"{counts[kind]} in {words}" for kind, words in kinds.items() if counts[kind]
        )
        # Without a difference between two answers, the server may be deterministic, but is wrong.
        verdict = "NOT as expected"
        if counts["text"] + counts["log-probabilities"]:
            verdict = "NOT deterministic"
        return Text(f"{verdict}: {len(report.failed)} checks failed, {numbers}.", style="bold red")
    num_passed = sum(result.status == "passed" for result in report.results)
    return Text(
        f"Deterministic: {num_passed} of {len(report.results)} checks passed, none failed.",
        style="green",
    )
