"""Write the generated parts of the documentation: tables of options, figures of results, and plots.

    python tools/docs/blocks.py    # after a change of an option or of a result

A block in ``README.md`` and ``docs/**/*.md`` stands between ``<!-- begin: KIND NAME -->`` and
``<!-- end -->``. The kinds are ``options`` (of a drafter, from its class), ``figures`` (of a
drafter, from ``benchmarks/results``), ``speedups`` (of a drafter, by model, from the same),
``fields`` (that the server does not have), ``attacks`` (on the server, from ``benchmarks/results``)
and ``names`` (of a public module, from its stub). The tests fail if a block or a plot is not up to
date.
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
from typing import Any, get_origin

sys.path.insert(0, str(Path(__file__).parent))

from plots import PLOTS, REAL, REAL_ELSEWHERE, faster_mode, real_rows

from pronk.drafting import REGISTRY
from pronk.server.protocol.fields import TABLE, Accepted, Envelope, Refused, Renamed, Treatment

__all__ = ["ROOT", "pages", "update"]

# Headings of the parts of the table of fields.
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
    "tokenize": "`/tokenize`",
}

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
ATTACK = "2026-11-attack"
EVERY_METHOD = "2026-11-drafters-smollm2-avx512"
_BLOCK = re.compile(
    r"(<!-- begin: (options|figures|speedups|fields|attacks|names) ([\w.]+) -->\n).*?(<!-- end "
    r"-->)",
    re.DOTALL,
)
_ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n        .*)*)", re.MULTILINE)


def describe_options(name: str) -> dict[str, str]:
    """Return the documented options of a drafter, those of base classes included."""
    found: dict[str, str] = {}
    for each in reversed(REGISTRY[name].__mro__):
        text = inspect.cleandoc(each.__doc__ or "") if dataclasses.is_dataclass(each) else ""
        _, _, attributes = text.partition("\nAttributes:\n")
        for option, meaning in _ATTRIBUTE.findall(attributes.partition("\n\n")[0] + "\n"):
            plain = re.sub(r":\w+:`(?:~[\w.]*\.)?([^`]+)`", r"`\1`", " ".join(meaning.split()))
            found[option] = plain.replace("``", "`").replace("|", "\\|").rstrip(".")
    return found


def options(name: str) -> str:
    """Return a table of a drafter's options: name, default, meaning with range."""
    drafter = REGISTRY[name]()
    meanings = describe_options(name)
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(drafter):  # type: ignore[arg-type]
        value: Any = getattr(drafter, field.name)
        if field.name == "parts":
            default = ", ".join(f"`{part.name}`" for part in value) or "none"
            lines.append(
                f"| in parentheses | {default} | {meanings.get('parts', 'the drafters')} |"
            )
        else:
            lines.append(f"| `{field.name}` | `{value!r}` | {meanings[field.name]} |")
    return "\n".join(lines) if len(lines) > 2 else "It has no options."


def figures(name: str) -> str:
    """Return the measured figures of a drafter, each table with its command and machine."""
    return "\n\n".join([*_every_method(name), *_real_models(name)])


def _every_method(name: str) -> Iterator[str]:
    result = json.loads((RESULTS / f"{EVERY_METHOD}.json").read_text(encoding="utf-8"))
    found = [
        (cell["temperature"], row)
        for cell in result["cells"]
        for row in cell["rows"]
        if row["method"] == name
    ]
    if not found:
        return
    suites = list(found[0][1]["tokens per pass"])
    yield (
        "Tokens per forward pass by task of Spec-Bench, and speed relative to plain decoding: "
        f"{result['model']}, "
        f"{result['machine']}, `python benchmarks/drafter_table.py MODEL.gguf --prompts "
        "spec_bench.jsonl --heads RUNS` "
        "([every "
        f"method](../../benchmarks/results/{EVERY_METHOD}.md)).{_describe_training(found[0][1])}"
    )
    head = ["T", *(each.replace("_", " ") for each in suites), "mean", "× plain"]
    rows = [
        [
            temperature,
            *(f"{row['tokens per pass'][each]:.2f}" for each in suites),
            f"{row['mean']:.2f}",
            f"**{row['over plain']:.2f}**",
        ]
        for temperature, row in found
    ]
    yield table(head, rows)


def _describe_training(row: dict[str, Any]) -> str:
    tokens, _, duration = row["training"].partition(", ")
    size = f"{row['parameters']:.1f} M"
    return (
        f" The drafter has {size} parameters and was trained on {tokens} tokens ({duration})."
        if tokens
        else ""
    )


def _real_models(name: str) -> Iterator[str]:
    for result in (REAL, REAL_ELSEWHERE):
        rows = json.loads((RESULTS / f"{result}.json").read_text(encoding="utf-8"))
        found: dict[tuple[str, float], dict[str, float]] = {}
        for row in rows:
            if re.match(r"\w*", row["method"])[0] == name and "speedup" in row:  # type: ignore[index]
                found.setdefault((row["model"], row["temperature"]), {})[row["group"]] = row[
                    "speedup"
                ]
        if found:
            yield (
                "Speed relative to plain decoding, the time of the prompt included, by kind of "
                "answer: free text, "
                f"code, and answers that repeat their prompt; {_describe_machine(rows[0])}, "
                "`python benchmarks/real.py MODEL --out OUT` ([all "
                f"columns](../../benchmarks/results/{result}.md))."
            )
            groups = ("chat", "code", "copy", "all")
            values = [
                [*key, *(f"{cell[g]:.2f}" if g in cell else "" for g in groups)]
                for key, cell in found.items()
            ]
            yield table(["model", "T", "free text", "code", "copy", "all"], values)


def _describe_machine(row: dict[str, Any]) -> str:
    return f"{row['processor']}, {row['threads']} threads, kernels {row['kernels']}, {row['date']}"


def speedups(name: str) -> str:
    """Return machine and command of the measured real models, and how much faster a drafter is than other ways."""
    models = real_rows(RESULTS)
    groups = [real_rows(RESULTS, group) for group in ("chat", "code", "copy", "all")]
    warm = real_rows(RESULTS, temperature=0.7)
    head = ["model", "prompts", "× plain: free text", "code", "copy", "all", "all, T = 0.7"]
    head += ["× llama.cpp", "× OpenVINO"]
    lines = []
    for model, rows in models.items():
        cells = [group[model][name].get("speedup_after_first") for group in groups]
        cells += [warm[model][name].get("speedup_after_first")]
        peers = [faster_mode(rows, peer) for peer in ("llama_cpp", "openvino")]
        cells += [rows[name]["speed"] / row["speed"] if row["prompts"] else None for row in peers]
        lines.append(
            [
                model,
                rows[name]["prompts"],
                *("–" if cell is None else f"{cell:.2f}" for cell in cells),
            ]
        )
    return (
        f"*{_describe_machine(next(iter(models.values()))[name])}: `python benchmarks/real.py "
        f"{' '.join(models)} "
        "--out OUT` ([all options, all "
        f"columns](benchmarks/results/{REAL}.md)).*\n\n{table(head, lines)}"
    )


def fields(_: str) -> str:
    """Return the fields that the server accepts, renames and refuses, by route."""
    return "\n\n".join(_fields_of(place, rows) for place, rows in TABLE.items())


def _fields_of(place: str, rows: dict[str, Treatment]) -> str:
    accepted = ", ".join(f"`{name}`" for name, row in rows.items() if isinstance(row, Accepted))
    renamed = ", ".join(
        f"`{name}` (`{row.name}`)" for name, row in rows.items() if isinstance(row, Renamed)
    )
    opened = ", ".join(f"`{name}`" for name, row in rows.items() if isinstance(row, Envelope))
    refused: dict[str, list[str]] = {}
    for name, row in rows.items():
        if isinstance(row, Refused):
            neutral = " or ".join(json.dumps(each) for each in row.neutral)
            refused.setdefault(row.advice, []).append(
                f"`{name}`" + (f" (but {neutral})" if neutral else "")
            )
    lines = [f"### {FIELD_PLACES[place]}", ""]
    lines += [f"- Accepted: {accepted}."] if accepted else []
    lines += [f"- Other names: {renamed}."] if renamed else []
    lines += [f"- Objects with options of the request: {opened}."] if opened else []
    lines += [f"- Refused, {advice}: {', '.join(names)}." for advice, names in refused.items()]
    return "\n".join(lines)


def attacks(_: str) -> str:
    """Return machine and command of the measured attacks on a server, and how it fared."""
    _, _, text = (RESULTS / f"{ATTACK}.md").read_text(encoding="utf-8").partition("\n\n")
    return text.rstrip()


def names(module: str) -> str:
    """Return a table of the names of a public module, with the first line of what is documented of each."""
    public = importlib.import_module(module)
    rows = [[f"`{name}`", first_line(getattr(public, name))] for name in public.__all__]
    return table(["name", "what it is"], rows)


def first_line(named: Any) -> str:
    """Return the first line of an object's documentation; for other values, what they are."""
    if inspect.isclass(named) or inspect.isroutine(named):
        line = (inspect.getdoc(named) or "").partition("\n")[0]
        plain = re.sub(r":\w+:`(?:~[\w.]*\.)?([^`]+)`", r"`\1`", line)
        return plain.replace("``", "`").replace("|", "\\|")
    return "a constant" if get_origin(named) is None else "a type"


def table(head: list[str], rows: list[list[Any]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def pages() -> list[Path]:
    """Return the pages that may have blocks."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def update(text: str) -> str:
    """Return the text of a page with all blocks up to date."""
    kinds = {
        "options": options,
        "figures": figures,
        "speedups": speedups,
        "fields": fields,
        "attacks": attacks,
    }
    kinds["names"] = names
    return _BLOCK.sub(lambda match: f"{match[1]}{kinds[match[2]](match[3])}\n{match[4]}", text)


def main() -> None:
    for path in pages():
        old = path.read_text(encoding="utf-8")
        if (new := update(old)) != old:
            path.write_text(new, encoding="utf-8")
            print(path.relative_to(ROOT))
    for name, draw in PLOTS.items():
        (ROOT / "docs" / "plots" / name).write_text(draw(RESULTS), encoding="utf-8")


if __name__ == "__main__":
    main()
