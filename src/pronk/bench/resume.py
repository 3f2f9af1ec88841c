"""Continue an interrupted benchmark from its trace."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pronk.bench.machine import describe_hardware, versions
from pronk.bench.prompts import Prompt
from pronk.bench.records import DivergenceRecord, End, Finished, Model, Record, Sample, Skip, Start
from pronk.errors import OptionError

__all__ = ["remaining", "resumable_records"]

# Options that may differ when a benchmark is continued.
_FREE_OPTIONS = ("minutes", "resume", "as_json", "markdown", "report", "trace")


def resumable_records(records: Sequence[Record], arguments: Mapping[str, Any], path: Path) -> list[Record]:
    """Return the records that a continued benchmark keeps: all but those of unfinished prompts.

    Raises:
        OptionError: the benchmark had other options, or ran elsewhere; ``path`` names its trace.
    """
    start = records[0]
    assert isinstance(start, Start)
    hardware = describe_hardware(str(arguments["device"]))
    same = all(
        start.hardware.get(name) == value for name, value in hardware.items() if name != "threads"
    )  # not set yet
    if start.versions != versions() or not same:
        msg = f"resume: expected the machine and the versions of {path}, found others; use another trace"
        raise OptionError(msg)
    before, now = ({k: v for k, v in given.items() if k not in _FREE_OPTIONS} for given in (start.arguments, arguments))
    if before != json.loads(json.dumps(now, default=str)):
        names = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
        msg = f"resume: expected the options of {path}, found others: {', '.join(names)}; use another trace"
        raise OptionError(msg)
    kept = list[Record]()
    model = ""
    finished = _finished(records)
    for record in records:
        if isinstance(record, Model):
            model = record.name
        if isinstance(record, (Sample, Skip, DivergenceRecord)) and (model, record.task, record.id) not in finished:
            continue
        if not isinstance(record, End):
            kept.append(record)
    return kept


def remaining(tasks: Mapping[str, Sequence[Prompt]], records: Sequence[Record], model: str) -> dict[str, list[Prompt]]:
    """Return the prompts whose runs on a model are not all in ``records``."""
    finished = _finished(records)
    return {
        task: [prompt for prompt in prompts if (model, task, prompt.id) not in finished]
        for task, prompts in tasks.items()
    }


def _finished(records: Sequence[Record]) -> set[tuple[str, str, str]]:
    """Return model, task and id of the finished prompts, and of each of their turns."""
    found, model = set[tuple[str, str, str]](), ""
    for record in records:
        if isinstance(record, Model):
            model = record.name
        elif isinstance(record, Finished):
            found |= {(model, record.task, name) for name in (record.id, *record.names)}
    return found
