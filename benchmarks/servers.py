"""Print the reports of ``pronk verify --url … --json FILE`` as one Markdown table, a column per server and route.

::

    python benchmarks/servers.py "pronk 0.2.0=pronk.json" "another engine 1.2=other.json" --note "processor: …"
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pronk.lab.verification.remote.checks import CHECKS
from pronk.lab.verification.remote.client import ROUTES


def cell(report: dict[str, Any], check: str, route: str) -> str:
    """Return the result of a check on a route in words."""
    result = next(
        (each for each in report["checks"] if (each["check"], each["route"]) == (check, route)),
        None,
    )
    if result is None:
        return "–"
    status = str(result["status"])
    if status == "failed" and result["kind"] is not None:
        what = "text differs" if result["kind"] == "text" else "only log-probabilities differ"
        return f"**{what}**, {result['differences']} of {result['comparisons']}"
    return "**failed**" if status == "failed" else status


def findings(label: str, report: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each failed check, and for each answer of a server that does not support a check."""
    for result in report["checks"]:
        first = result["first"]
        title = CHECKS[result["check"]].title
        if result["status"] == "failed" and first is not None:
            yield (
                f"- {label}, {result['route']}, {title}: {first['where']}, prompt "
                f"{first['prompt']}, position "
                f"{first['position']}: `{first['expected']}` / `{first['found']}`"
            )
        elif result["status"] in ("failed", "not supported") and result["note"]:
            yield f"- {label}, {result['route']}, {title}: {result['status']}: {result['note']}"


def table(reports: Sequence[tuple[str, dict[str, Any]]], note: str) -> str:
    """Return the table, the notes and the findings."""
    columns = [(label, report, route) for label, report in reports for route in ROUTES]
    lines = [
        "| check | " + " | ".join(f"{label}, {route}" for label, _, route in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for name, check in CHECKS.items():
        cells = [cell(report, name, route) for _, report, route in columns]
        lines.append(f"| {check.title} | {' | '.join(cells)} |")
    facts = []
    for label, report in reports:
        requests = (
            f"{report['requests']} requests of up to {report['settings']['max_tokens']} tokens"
        )
        how = f"{requests} in {report['seconds']:.0f} s, by pronk {report['pronk']}"
        facts.append(f"{label}: `{report['model']}`, {report['date'][:10]}, {how}")
    lines += ["", "; ".join(facts) + f". {note}".rstrip(), ""]
    lines += [line for label, report in reports for line in findings(label, report)]
    return "\n".join(lines)


def main() -> None:
    """Read the reports that the command line names."""
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
    pairs = [each.rpartition("=")[::2] for each in options.reports]
    print(
        table([(label, json.loads(Path(file).read_text())) for label, file in pairs], options.note)
    )


if __name__ == "__main__":
    main()
