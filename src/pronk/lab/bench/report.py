"""Report of ``pronk bench --report FOLDER``: one HTML page without scripts or external files."""

from __future__ import annotations

import os
from base64 import b64encode
from contextlib import suppress
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from pronk import OptionError
from pronk.base import refuse, save_result
from pronk.base.checks import require_extra
from pronk.lab.bench.document import ALL, SOUND, Document, ModelResult
from pronk.lab.bench.plots import draw_plots
from pronk.lab.bench.tables import (
    cost_table,
    describe,
    explain,
    failures,
    inflation_note,
    result_sentence,
    speed_table,
)


def write_report(document: Document, folder: Path) -> Path:
    """Write ``folder/index.html`` atomically and return its path.

    A missing folder is created. The same document always gives the same page, byte by byte. Raises
    OptionError if matplotlib is not installed, or if the folder cannot be written; the message then
    names another file, which has the page.
    """
    page_path = folder / "index.html"
    page = _render(document)
    with suppress(OSError):  # save_result reports that the folder is missing
        folder.mkdir(parents=True, exist_ok=True)
    save_result("report", page_path, page)
    return page_path


def check_report(folder: Path) -> None:
    """Check, before the benchmark, that a report can be written into ``folder``.

    Raises OptionError if matplotlib is missing, or the folder cannot be written.
    """
    require_extra("report", "report", "matplotlib")
    candidates = (folder.absolute(), *folder.absolute().parents)
    existing = next(path for path in candidates if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        refuse(
            "report",
            f"expected a folder that can be written, found {folder}; name another",
            OptionError,
        )


def _render(document: Document) -> str:
    environment = Environment(
        loader=PackageLoader("pronk.lab.bench", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"data_url": _data_url, "flat": _flat}
    sections = [_make_section(model, document) for model in document.models]
    template = environment.get_template("report.html.j2")
    results = [result_sentence(model) for model in document.models]
    return template.render(
        document=document, sections=sections, results=results, terms=explain(document)
    )


def _data_url(svg: str) -> str:
    encoded = b64encode(svg.encode("utf-8", "backslashreplace"))
    return f"data:image/svg+xml;base64,{encoded.decode()}"


def _flat(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _make_section(model: ModelResult, document: Document) -> dict[str, Any]:
    """Return the variables of one model's section in the template ``report.html.j2``."""
    tasks = list(dict.fromkeys(f.task for f in model.figures))
    overall = [task for task in tasks if task in {ALL, SOUND}]
    single_tasks = [task for task in tasks if task not in overall]
    tables = {}
    details = {}
    if overall:
        tables["Speed-up and acceptance"] = speed_table(model, tasks=overall)
        tables["Latency and cost"] = cost_table(model, overall[:1])
    if single_tasks:
        details["Each task: speed-up and acceptance"] = speed_table(model, tasks=single_tasks)
        details["Each task: latency and cost"] = cost_table(model, single_tasks)
    reasons = {
        f"Skipped prompts: {len(model.skipped)}": {skip.id: skip.reason for skip in model.skipped},
        "Failures": dict(failures(model)),
    }
    return {
        "model": model,
        "description": describe(model, document),
        "origin": inflation_note(model),
        "tables": tables,
        "plots": list(draw_plots(model)),
        "details": details,
        "failures": {title: entries for title, entries in reasons.items() if entries},
    }
