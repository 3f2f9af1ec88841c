"""Write the generated parts of the documentation: tables of options, figures of results, and plots.

    python tools/docs/blocks.py    # after a change of an option or of a result

A block in ``README.md`` and ``docs/**/*.md`` stands between ``<!-- begin: KIND NAME -->`` and
``<!-- end -->``. The tests fail if a block or a plot is not up to date. The kinds are:

- ``options``: options of a drafter, from its class
- ``figures``: measurements of a drafter, from ``benchmarks/results``
- ``speedups``: speeds of a drafter by model, from ``benchmarks/results``
- ``fields``: fields of other servers that pronk does not have
- ``attacks``: results of attacks on the server, from ``benchmarks/results``
- ``names``: names of a public module
- ``pairs``: published heads or draft models of a drafter, from ``src/pronk/models/pairs.json``
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap
from typing import Any, get_origin
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parent))

from plots import PEERS, PLOTS, REAL, REAL_ELSEWHERE, faster_mode, real_rows, short_name

from pronk.drafting import REGISTRY
from pronk.models.pairs import all_pairs
from pronk.server.protocol.field_table import TABLE, Accepted, Envelope, Refused, Renamed, Treatment

__all__ = ["ROOT", "pages", "update"]

# Heading of each part of the server's table of fields.
FIELD_PLACES = {
    "text": "All routes that generate text",
    "chat": "`/v1/chat/completions`",
    "completions": "`/v1/completions`",
    "responses": "`/v1/responses`",
    "messages": "`/v1/messages`",
    "message": "Messages in a conversation",
    "function": "Functions of tools",
    "structured_outputs": "`structured_outputs`",
    "embeddings": "`/v1/embeddings`",
    "moderations": "`/v1/moderations`",
    "rerank": "`/v1/rerank`",
    "ollama": "`/api/chat` and `/api/generate` of Ollama",
    "ollama_generate": "`/api/generate` of Ollama alone",
    "ollama_show": "`/api/show` of Ollama",
    "ollama_pull": "`/api/pull` of Ollama",
    "infill": "`/infill`",
    "tokenize": "`/tokenize`",
}

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
LINE = 120  # characters
ATTACK = "2026-11-attack"
EVERY_METHOD = "2026-11-drafters-smollm2-avx512"
# Results of benchmarks/papers/counts.py, with the arguments after the models.
COUNTED = {
    "2026-11-draft-methods-qwen15": "QWEN-1.5B.gguf drafts --draft QWEN-0.5B.gguf",
    "2026-11-methods-smollm2": "SMOLLM2.gguf ctar --drafter NAME=SPEC",
}
_BLOCK = re.compile(
    r"(<!-- begin: (options|figures|speedups|fields|attacks|names|pairs) ([\w.]+) -->\n)"
    r".*?(<!-- end -->)",
    re.DOTALL,
)
_ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n        .*)*)", re.MULTILINE)


def describe_options(name: str) -> dict[str, str]:
    """Return the documentation of a drafter's options by name, with those of base classes."""
    found: dict[str, str] = {}
    for each in reversed(REGISTRY[name].__mro__):
        if not dataclasses.is_dataclass(each):
            continue
        text = inspect.cleandoc(each.__doc__ or "")
        _, _, attributes = text.partition("\nAttributes:\n")
        section = attributes.partition("\n\n")[0] + "\n"
        for option, meaning in _ATTRIBUTE.findall(section):
            found[option] = as_markdown(" ".join(meaning.split())).rstrip(".")
    return found


def as_markdown(text: str) -> str:
    """Convert text of a docstring to Markdown for the cell of a table."""
    plain = re.sub(r":\w+:`(?:~[\w.]*\.)?([^`]+)`", r"`\1`", text)
    return plain.replace("``", "`").replace("|", "\\|")


def options(name: str) -> str:
    """Return a table of a drafter's options: name, default, meaning with range."""
    drafter = REGISTRY[name]()
    meanings = describe_options(name)
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(drafter):  # type: ignore[arg-type]
        value: Any = getattr(drafter, field.name)
        if field.name == "parts":
            default = ", ".join(f"`{part.name}`" for part in value) or "none"
            meaning = meanings.get("parts", "the drafters")
            lines.append(f"| in parentheses | {default} | {meaning} |")
        else:
            lines.append(f"| `{field.name}` | `{value!r}` | {meanings[field.name]} |")
    return "\n".join(lines) if len(lines) > 2 else "It has no options."


def figures(name: str) -> str:
    """Return the measured figures of a drafter, each table with its command and machine."""
    return "\n\n".join([*_every_method(name), *_counted(name), *_real_models(name)])


def _every_method(name: str) -> Iterator[str]:
    result = json.loads((RESULTS / f"{EVERY_METHOD}.json").read_text(encoding="utf-8"))
    found = list[tuple[float, dict[str, Any]]]()
    for cell in result["cells"]:
        found += [(cell["temperature"], row) for row in cell["rows"] if row["method"] == name]
    if not found:
        return
    _, first = found[0]
    suites = list(first["tokens per pass"])
    command = (
        "python benchmarks/drafter_table.py MODEL.gguf --prompts spec_bench.jsonl --heads RUNS"
    )
    link = f"([every method](../../benchmarks/results/{EVERY_METHOD}.md))"
    yield (
        "Tokens per forward pass by task of Spec-Bench, and speed relative to plain decoding: "
        f"{result['model']}, {result['machine']}, `{command}` {link}.{_describe_training(first)}"
    )
    head = ["T", *(each.replace("_", " ") for each in suites), "mean", "× plain"]
    rows = list[list[Any]]()
    for temperature, row in found:
        by_suite = [f"{row['tokens per pass'][each]:.2f}" for each in suites]
        rows.append([temperature, *by_suite, f"{row['mean']:.2f}", f"**{row['over plain']:.2f}**"])
    yield table(head, rows)


def _describe_training(row: dict[str, Any]) -> str:
    tokens, _, duration = row["training"].partition(", ")
    if not tokens:
        return ""
    size = f"{row['parameters']:.1f} M"
    return f" The drafter has {size} parameters and was trained on {tokens} tokens ({duration})."


def _counted(name: str) -> Iterator[str]:
    for result, arguments in COUNTED.items():
        document = json.loads((RESULTS / f"{result}.json").read_text(encoding="utf-8"))
        for cell in document["cells"]:
            suites = list[str]()
            rows = list[list[Any]]()
            for spec, by_suite in cell["S by suite"].items():
                if re.match(r"\w*", spec)[0] == name:  # type: ignore[index]
                    suites = [*by_suite]
                    figures = [f"{by_suite[suite]:.2f}" for suite in suites]
                    drafted = f"{cell['draft tokens per pass'][spec]:.1f}"
                    rows.append([f"`{spec}`", *figures, f"{cell['S'][spec][-1]:.2f}", drafted])
            if not rows:
                continue
            command = f"`python benchmarks/papers/counts.py {arguments} --prompts FILES …`"
            link = f"([command, all columns](../../benchmarks/results/{result}.md))"
            yield (
                "Tokens per forward pass by suite with all draft tokens verified, "
                f"T = {cell['temperature']:g}: {document['model']}, {document['machine']}, "
                f"{command} {link}."
            )
            names = [suite.replace("_", " ") for suite in suites]
            yield table(["drafter", *names, "all", "draft tokens per pass"], rows)


def _real_models(name: str) -> Iterator[str]:
    for result in (REAL, REAL_ELSEWHERE):
        rows = json.loads((RESULTS / f"{result}.json").read_text(encoding="utf-8"))
        # Speed by group of prompts, by model and temperature.
        found: dict[tuple[str, float], dict[str, float]] = {}
        for row in rows:
            method = re.match(r"\w*", row["method"])[0]  # type: ignore[index]
            if method == name and "speedup" in row:
                by_group = found.setdefault((row["model"], row["temperature"]), {})
                by_group[row["group"]] = row["speedup"]
        if found:
            kinds = "free text, code, and answers that repeat their prompt"
            command = "`python benchmarks/real.py MODEL --out OUT`"
            link = f"([all columns](../../benchmarks/results/{result}.md))"
            yield (
                "Speed relative to plain decoding, the time of the prompt included, by kind of "
                f"answer: {kinds}; {_describe_machine(rows[0])}, {command} {link}."
            )
            cells = list[list[Any]]()
            for key, by_group in found.items():
                speeds = [by_group.get(group) for group in ("chat", "code", "copy", "all")]
                model, temperature = key
                shown = ["" if each is None else f"{each:.2f}" for each in speeds]
                cells.append([short_name(model), temperature, *shown])
            yield table(["model", "T", "free text", "code", "copy", "all"], cells)


def _describe_machine(row: dict[str, Any]) -> str:
    return f"{row['processor']}, {row['threads']} threads, kernels {row['kernels']}, {row['date']}"


def speedups(name: str) -> str:
    """Return machine and command of the measurements of real models, and a table of speeds.

    The table has the speed of a drafter relative to plain decoding and to other engines.
    """
    models = real_rows(RESULTS)
    groups = [real_rows(RESULTS, group) for group in ("chat", "code", "copy", "all")]
    warm = real_rows(RESULTS, temperature=0.7)
    head = ["model", "prompts", "× plain: free text", "code", "copy", "all", "all, T = 0.7"]
    head += [f"× {engine}" for engine in PEERS.values()]
    lines = []
    for model, rows in models.items():
        cells = [group[model][name].get("speedup_after_first") for group in groups]
        cells += [warm.get(model, {}).get(name, {}).get("speedup_after_first")]
        peers = [faster_mode(rows, peer) for peer in PEERS]
        cells += [rows[name]["speed"] / row["speed"] if row["prompts"] else None for row in peers]
        shown = ["–" if cell is None else f"{cell:.2f}" for cell in cells]
        lines.append([short_name(model), rows[name]["prompts"], *shown])
    machine = _describe_machine(next(iter(models.values()))[name])
    command = f"`python benchmarks/real.py {' '.join(models)} --out OUT`"
    link = f"([all options, all columns](../benchmarks/results/{REAL}.md))"
    return f"*{machine}: {command} {link}.*\n\n{table(head, lines)}"


def fields(_: str) -> str:
    """Return the fields that the server accepts, renames and refuses, by route."""
    return "\n\n".join(_fields_of(place, rows) for place, rows in TABLE.items())


def _fields_of(place: str, rows: dict[str, Treatment]) -> str:
    accepted = list[str]()
    renamed = list[str]()
    opened = list[str]()
    refused: dict[str, list[str]] = {}  # names of refused fields by advice
    for name, row in rows.items():
        match row:
            case Accepted():
                accepted.append(f"`{name}`")
            case Renamed(target):
                renamed.append(f"`{name}` (`{target}`)")
            case Envelope():
                opened.append(f"`{name}`")
            case Refused(neutral, advice):
                values = " or ".join(json.dumps(each) for each in neutral)
                shown = f"`{name}` (but {values})" if values else f"`{name}`"
                refused.setdefault(advice, []).append(shown)
    lines = [f"### {FIELD_PLACES[place]}", ""]
    if accepted:
        lines.append(f"- Accepted: {', '.join(accepted)}.")
    if renamed:
        lines.append(f"- Other names: {', '.join(renamed)}.")
    if opened:
        lines.append(f"- Objects with options of the request: {', '.join(opened)}.")
    lines += [f"- Refused, {advice}: {', '.join(names)}." for advice, names in refused.items()]
    return "\n".join(lines)


def attacks(_: str) -> str:
    """Return the results of attacks on a server, with machine and command, without the heading."""
    page = (RESULTS / f"{ATTACK}.md").read_text(encoding="utf-8")
    _, _, text = page.partition("\n\n")
    return text.rstrip()


def names(module: str) -> str:
    """Return a table of the names of a public module, with the first line of their docstrings."""
    public = importlib.import_module(module)
    rows = [[f"`{name}`", first_line(getattr(public, name))] for name in public.__all__]
    return table(["name", "what it is"], rows)


def first_line(named: Any) -> str:
    """Return the first line of the docstring of a class or function, or what another value is."""
    if inspect.isclass(named) or inspect.isroutine(named):
        docstring = inspect.getdoc(named) or ""
        return as_markdown(docstring.partition("\n")[0])
    return "a constant" if get_origin(named) is None else "a type"


def table(head: list[str], rows: list[list[Any]]) -> str:
    """Return a Markdown table."""
    lines = list[str]()
    for cells in (head, ["---"] * len(head), *rows):
        joined = " | ".join(map(str, cells))
        lines.append(f"| {joined} |")
    return "\n".join(lines)


def wrapped(text: str) -> str:
    """Return a text whose long lines are wrapped, but for rows of tables."""
    lines = list[str]()
    for line in text.splitlines():
        if len(line) <= LINE or line.startswith("|"):
            lines.append(line)
            continue
        indent = "  " if line.startswith("- ") else ""
        lines += wrap(
            line, LINE, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
    return "\n".join(lines)


def pairs(drafter: str) -> str:
    """Return a table of the heads or draft models that others have published for a drafter."""
    rows = list[list[Any]]()
    for pair in all_pairs():
        if pair.drafter == drafter:
            address = urlsplit(pair.confirmed)
            site = "/".join([address.netloc, *address.path.split("/")[1:3]])
            page = f"[{site}]({pair.confirmed})"
            rows.append([pair.target, f"`{pair.source}`", pair.license or "see its page", page])
    return table(["target", "`model`", "license", "named by"], rows)


def pages() -> list[Path]:
    """Return the paths of the pages that may have blocks."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def update(text: str) -> str:
    """Return the text of a page with all blocks up to date."""
    kinds = {
        "options": options,
        "figures": figures,
        "speedups": speedups,
        "fields": fields,
        "attacks": attacks,
        "names": names,
        "pairs": pairs,
    }

    def replace(match: re.Match[str]) -> str:
        begin, kind, name, end = match.groups()
        return f"{begin}{wrapped(kinds[kind](name))}\n{end}"

    return _BLOCK.sub(replace, text)


def main() -> None:
    for path in pages():
        old = path.read_text(encoding="utf-8")
        new = update(old)
        if new != old:
            path.write_text(new, encoding="utf-8")
            print(path.relative_to(ROOT))
    for name, draw in PLOTS.items():
        (ROOT / "docs" / "plots" / name).write_text(draw(RESULTS), encoding="utf-8")


if __name__ == "__main__":
    main()
