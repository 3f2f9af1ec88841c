"""``pronk doctor``: what works on this machine, and how fast models can be."""

import json
import platform
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from pronk.base.quantities import count_text, size_texts
from pronk.cli.console import TerminalOutput
from pronk.cli.panels import option

if TYPE_CHECKING:
    from pronk.diagnosis import Measured

_LABEL_WIDTH = 14  # characters before the values
_EXIT_FAULT = 1
# Load average per core above which the measured speeds are those of a busy machine.
_MOST_LOAD = 0.3
# Packages that extras bring, by the extra's name.
_EXTRAS = {"guided": "llguidance", "serve": "fastapi", "train": "torch", "ray": "ray"}


def doctor(
    model: Annotated[
        list[str] | None,
        typer.Argument(
            help="Models whose speed is estimated: a folder, GGUF file, or name",
            show_default="those on this machine",
        ),
    ] = None,
    *,
    as_json: Annotated[bool, option("Print one JSON document.", "--json", metavar="")] = False,
) -> None:
    """Check this installation, and measure what speed the machine allows.

    This takes about five seconds. Every instruction set of the processor must
    pass its self-check, and give the bits that are recorded for all processors.

    The speed of reading memory limits plain decoding, and the speed of
    multiplying limits the reading of prompts. Drafting multiplies the first
    limit by the tokens per forward pass.

    Please paste the output into bug reports.

    [bold]Exit codes[/]: 0; 1 something does not work, and the output says what.

    [bold]Examples[/]

    pronk doctor

    pronk doctor ./model.gguf
    """
    from pronk.models.resolve import resolve_model

    screen = TerminalOutput()
    paths = [resolve_model(name, may_download=False) for name in model or ()]
    if screen.interactive:
        screen.say("checking the kernels and measuring memory: about five seconds")
    facts = _facts(paths)
    if as_json:
        typer.echo(json.dumps(facts, ensure_ascii=False))
    else:
        screen.facts(_lines(facts), _LABEL_WIDTH)
        if facts["models"]:
            screen.result(_table(facts["models"]), one_line_rows=True)
    for fault in facts["faults"]:
        sys.stderr.write(f"pronk: fault: {fault}\n")
    if facts["faults"]:
        raise typer.Exit(_EXIT_FAULT)


def _facts(paths: Sequence[Path]) -> dict[str, Any]:
    """Return what was found and measured; ``faults`` has a line for each part that fails."""
    import numpy as np

    from pronk import BITS, __version__
    from pronk.checkpoint.hub.cache import cache_folder, cached_models
    from pronk.diagnosis import describe_machine, machine_load, measure, usable_kernels

    machine = describe_machine()
    cached = cached_models()
    folder = cache_folder()
    facts: dict[str, Any] = {
        "pronk": __version__,
        "bits": BITS,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "system": machine["system"],
        "processor": machine["processor"],
        "cores": machine["cores"],
        "threads": machine["threads"],
        "memory_bytes": machine["memory"],
        "load": machine_load(),
        "extras": {name: find_spec(package) is not None for name, package in _EXTRAS.items()},
        "cache": str(folder),
        "cached_models": len(cached),
        "cached_bytes": sum(each.num_bytes for each in cached),
        "kernels": {},
        "models": [],
        "faults": [],
    }
    kernels = usable_kernels()
    if isinstance(kernels, str):
        facts["faults"].append(kernels)
        return facts
    # The checks come later: their many short runs look to the kernels as if other programs took a
    # core, which leaves one thread for a while.
    speeds = measure(kernels)
    facts["kernels"] = _check_kernels(facts["faults"])
    facts["read_bytes_per_second"] = speeds.bandwidth
    facts["products_per_second"] = speeds.products
    for path in paths or [each.path for each in cached]:
        facts["models"].append(_model(path, speeds))
    return facts


def _check_kernels(faults: list[str]) -> dict[str, str]:
    """Return the verdict on each instruction set, and add the faults to a list."""
    from pronk.diagnosis import check_bits, check_kernels

    verdicts: dict[str, str] = {}
    for name, failure in check_kernels():
        fault = failure or check_bits(name)
        verdicts[name] = fault or "ok"
        if fault:
            faults.append(f"{name} kernels: {fault}")
    return verdicts


def _model(path: Path, speeds: "Measured") -> dict[str, Any]:
    """Return the name of a model, and the limits of its speed or why they are unknown."""
    from pronk.base.errors import PronkError
    from pronk.checkpoint.hub.cache import model_label
    from pronk.diagnosis import decoding_work

    row: dict[str, Any] = {"name": model_label(path)}
    try:
        work = decoding_work(path)
    except PronkError as error:
        return row | {"error": str(error)}
    decoding, prompt = work.limits(speeds)
    return row | {
        "bytes_per_token": work.num_bytes,
        "decoding_tokens_per_second": decoding,
        "prompt_tokens_per_second": prompt,
    }


def _lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the facts as pairs of a label and a text, in the order in which they are shown."""
    installed = [name for name, is_installed in facts["extras"].items() if is_installed]
    memory = size_texts(facts["memory_bytes"], binary=True)[0] if facts["memory_bytes"] else "?"
    lines = [
        ("pronk", f"{facts['pronk']}, BITS {facts['bits']}"),
        ("python", f"{facts['python']}, NumPy {facts['numpy']}, {facts['system']}"),
        ("extras", ", ".join(installed) or "none"),
        ("processor", f"{facts['processor']}, {count_text(facts['cores'], 'core')}, {memory}"),
        ("threads", str(facts["threads"])),
    ]
    if facts["load"] is not None:
        is_busy = facts["load"] > _MOST_LOAD * facts["cores"]
        note = "; other programs slow what is measured below" if is_busy else ""
        lines.append(("load", f"{facts['load']:.1f} running threads{note}"))
    lines += [("kernels", f"{name}: {verdict}") for name, verdict in facts["kernels"].items()]
    if facts["kernels"]:
        lines += [
            ("memory", f"{facts['read_bytes_per_second'] / 1e9:.0f} GB/s"),
            ("products", f"{facts['products_per_second'] / 1e9:,.0f} billion/s of 8-bit numbers"),
        ]
    size = size_texts(facts["cached_bytes"])[0]
    cache = f"{facts['cache']}: {count_text(facts['cached_models'], 'model')}, {size}"
    return [*lines, ("model cache", cache)]


def _table(models: Sequence[dict[str, Any]]) -> Table:
    """Return the table of the models' limits."""
    table = Table("model", box=None, pad_edge=False)
    for heading in ("reads per token", "at most tokens/s", "prompts, about"):
        table.add_column(heading, justify="right")
    for row in models:
        if "error" in row:
            table.add_row(row["name"], row["error"])
            continue
        table.add_row(
            row["name"],
            size_texts(row["bytes_per_token"])[0],
            f"{row['decoding_tokens_per_second']:,.0f}",
            f"{row['prompt_tokens_per_second']:,.0f}",
        )
    return table
