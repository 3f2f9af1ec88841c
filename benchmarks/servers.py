"""Print reports of ``pronk verify --url … --json FILE`` as a Markdown table.

    python benchmarks/servers.py "pronk 0.2.0=pronk.json" "engine 1.2=other.json" --note "…"

The table has a column for each server and route.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pronk.lab.verification.remote.checks import CHECKS
from pronk.lab.verification.remote.client import ROUTES


def cell(report: dict[str, Any], check: str, route: str) -> str:
    """Return the result of a check on a route as the text of a cell."""
    key = (check, route)
    found = [each for each in report["checks"] if (each["check"], each["route"]) == key]
    if not found:
        return "–"
    result = found[0]
    status = str(result["status"])
    if status != "failed":
        return status
    if result["kind"] is None:
        return "**failed**"
    what = "text differs" if result["kind"] == "text" else "only log-probabilities differ"
    return f"**{what}**, {result['differences']} of {result['comparisons']}"


def findings(label: str, report: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each failed check, and for each check that a server does not support."""
    for result in report["checks"]:
        first = result["first"]
        name = f"{label}, {result['route']}, {CHECKS[result['check']].title}"
        if result["status"] == "failed" and first is not None:
            place = f"{first['where']}, prompt {first['prompt']}, position {first['position']}"
            yield f"- {name}: {place}: `{first['expected']}` / `{first['found']}`"
        elif result["status"] in ("failed", "not supported") and result["note"]:
            yield f"- {name}: {result['status']}: {result['note']}"


def table(reports: Sequence[tuple[str, dict[str, Any]]], note: str) -> str:
    """Return the table, and below it the note and the findings."""
    columns = [(label, report, route) for label, report in reports for route in ROUTES]
    heads = ["check", *(f"{label}, {route}" for label, _, route in columns)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, check in CHECKS.items():
        cells = [cell(report, name, route) for _, report, route in columns]
        lines.append(f"| {check.title} | {' | '.join(cells)} |")
    facts = []
    for label, report in reports:
        limit = f"up to {report['settings']['max_tokens']} tokens"
        requests = f"{report['requests']} requests of {limit}"
        how = f"{requests} in {report['seconds']:.0f} s, by pronk {report['pronk']}"
        facts.append(f"{label}: `{report['model']}`, {report['date'][:10]}, {how}")
    lines += ["", "; ".join(facts) + f". {note}".rstrip(), ""]
    lines += [line for label, report in reports for line in findings(label, report)]
    return "\n".join(lines)


def main() -> None:
    """Read the reports that the command line names, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "reports", nargs="+", metavar="LABEL=FILE", help="server with its version, and its report"
    )
    parser.add_argument(
        "--note", default="", help="sentence below the table, such as the processor"
    )
    options = parser.parse_args()
    reports = list[tuple[str, dict[str, Any]]]()
    for given in options.reports:
        label, _, file = given.rpartition("=")
        reports.append((label, json.loads(Path(file).read_text())))
    print(table(reports, options.note))


if __name__ == "__main__":
    main()
