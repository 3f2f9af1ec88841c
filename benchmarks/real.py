"""Measure real models on public prompts: pronk's drafters and other engines on the same file, interleaved by prompt.

    python benchmarks/real.py smollm2 --out benchmarks/results/2026-11-real-avx512 python
    benchmarks/real.py smollm2 model.gguf --out FOLDER/NAME --minutes 60 --peer-python
    llama_cpp=/path/to/python python benchmarks/real.py --out FOLDER/NAME --show

Each model is measured by ``pronk bench`` for at most ``--minutes`` in this call, on one prompt
after the other of the suites in ``benchmarks/suites`` and of the files given by ``--prompts``.
OUT.MODEL.trace.jsonl keeps every output; the same command continues after an interruption. OUT.json
has one row for each model, method and group of prompts, with the processor and the date, also of
models that were measured earlier; OUT.md shows it. ``--show`` writes OUT.md again. ``python
tools/docs/blocks.py`` draws the plot of the README and writes its table.

Groups: *chat* are questions answered in free text (GSM8K, MT-Bench, …); *code* is code written from
a description;
*copy* are answers that repeat much of the prompt (code edits, summaries, JSON).
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

from pronk.base.files.results import save_result
from pronk.lab.bench.records import PLAIN, Model, PeerRecord, Record, Sample, Start, read_trace

SUITES = Path(__file__).parent / "suites"
# Number of prompts taken from each suite; few of long_context, which take minutes with large
# models.
PROMPTS = {
    "gsm8k": 20,
    "humaneval": 20,
    "code_edit": 20,
    "mbpp": 20,
    "json_schema": 20,
    "long_context": 2,
}
GROUPS = {
    "code": ("humaneval", "mbpp_sanitized"),
    "copy": ("code_edit", "long_summarization", "json_schema", "summarization", "rag"),
}  # other tasks are chat
DRAFTERS = ("auto", "suffix(store_tokens=0)", "prompt_lookup", "recycling", "lookahead")
PEERS = ("llama_cpp", "llama_cpp_prompt_lookup", "openvino", "openvino_prompt_lookup")
TEMPERATURES = (0.0, 0.7)


def main() -> None:
    """Measure the models, then write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help="names, as in pronk pull, or files")
    parser.add_argument(
        "--out", type=Path, required=True, help="path of the results, without a suffix"
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="time limit per model and call")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument(
        "--prompts", type=Path, action="append", default=[], help="more prompts, JSON lines"
    )
    parser.add_argument("--drafter", action="append", help="instead of the usual ones; repeatable")
    parser.add_argument(
        "--peer", action="append", help="instead of all; none: no other engine; repeatable"
    )
    parser.add_argument("--peer-python", action="append", default=[], metavar="ENGINE=PATH")
    parser.add_argument("--threads", type=int)
    parser.add_argument(
        "--show", action="store_true", help="measure nothing; show the results in OUT.json"
    )
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    outputs = {suffix: given.out.parent / f"{given.out.name}.{suffix}" for suffix in ("json", "md")}
    rows = json.loads(outputs["json"].read_text()) if outputs["json"].is_file() else []
    if not given.show:
        prompts = given.out.parent / f"{given.out.name}.prompts.jsonl"
        write_prompts(prompts, given.prompts)
        for model in given.models:
            measure(model, prompts, given)
        traces = sorted(given.out.parent.glob(f"{given.out.name}.*.trace.jsonl"))
        measured = [row for trace in traces for row in summarize(read_trace(trace), given.prompts)]
        commands = {row["model"]: row["command"] for row in rows if "command" in row}
        for row in measured:
            # measured by an earlier call, perhaps with other prompts
            if row["model"] not in given.models:
                row["command"] = commands.get(row["model"], row["command"])
        rows = [
            row for row in rows if row["model"] not in {new["model"] for new in measured}
        ] + measured
    if not rows:
        parser.error(
            f"expected measurements in {outputs['json']}, found none; name a model, without --show"
        )
    save_result("out", outputs["json"], json.dumps(rows, indent=1) + "\n")
    save_result("out", outputs["md"], markdown(rows))
    print(markdown(rows))


def write_prompts(path: Path, others: Iterable[Path]) -> None:
    """Write the prompts of the suites and of ``others`` as one file.

    Their order does not depend on the machine.
    """
    lists: list[list[bytes]] = []
    for name, limit in PROMPTS.items():
        with gzip.open(SUITES / f"{name}.jsonl.gz") as file:
            lines = file.read().splitlines()
            lists.append(
                lines[:: max(1, len(lines) // limit)][:limit]
                if name != "long_context"
                else lines[:limit]
            )
    for other in others:
        by_task: dict[str, list[bytes]] = defaultdict(list)
        for line in (gzip.open if other.suffix == ".gz" else open)(other, "rb"):
            by_task[json.loads(line).get("task", other.stem)].append(line.rstrip())
        lists += [lines[:20] for lines in by_task.values()]
    path.write_bytes(
        b"".join(
            line + b"\n" for group in zip_longest(*lists) for line in group if line is not None
        )
    )


def measure(model: str, prompts: Path, given: argparse.Namespace) -> None:
    """Run ``pronk bench`` on a model; continue an earlier run."""
    trace = (
        given.out.parent / f"{given.out.name}.{re.sub(r'[^A-Za-z0-9._-]+', '-', model)}.trace.jsonl"
    )
    command = [
        sys.executable,
        "-m",
        "pronk",
        "bench",
        "--model",
        model,
        "--prompts",
        str(prompts),
        "--fit",
    ]
    command += [
        "--max-tokens",
        str(given.max_tokens),
        "--repeats",
        "1",
        "--minutes",
        str(given.minutes),
    ]
    command += [word for t in TEMPERATURES for word in ("--temperature", str(t))]
    command += [word for drafter in given.drafter or DRAFTERS for word in ("--drafter", drafter)]
    command += [word for peer in given.peer or PEERS if peer != "none" for word in ("--peer", peer)]
    command += [word for pair in given.peer_python for word in ("--peer-python", pair)]
    command += [] if given.threads is None else ["--threads", str(given.threads)]
    command += ["--trace", str(trace), "--resume"]
    done = subprocess.run(command, check=False, stdout=subprocess.DEVNULL)  # noqa: S603 - this interpreter
    if done.returncode:
        sys.exit(done.returncode)  # pronk bench has said why; the same command continues


def command_of(arguments: dict[str, Any], prompts: Iterable[Path]) -> str:
    """Return the command that began a trace, from the arguments of its ``pronk bench``.

    Without folders.
    """
    models = [Path(model).name if "." in model else model for model in arguments["model"]]
    words = ["python", "benchmarks/real.py", *models, "--out", "OUT"]
    words += [
        "--minutes",
        f"{arguments['minutes']:g}",
        "--max-tokens",
        str(arguments["max_tokens"]),
    ]
    words += [] if arguments["threads"] is None else ["--threads", str(arguments["threads"])]
    words += [word for file in prompts for word in ("--prompts", file.name)]
    words += [word for drafter in arguments["drafter"] for word in ("--drafter", drafter)]
    words += [word for peer in arguments["peer"] or ["none"] for word in ("--peer", peer)]
    pairs = [pair.partition("=")[0] for pair in arguments["peer_python"] or ()]
    return shlex.join(
        words + [word for engine in pairs for word in ("--peer-python", f"{engine}=PYTHON")]
    )


def summarize(records: Sequence[Record], prompts: Iterable[Path] = ()) -> list[dict[str, Any]]:
    """Return the rows of one trace: one for each group of prompts, method and temperature.

    A row covers the prompts that the method and plain decoding finished. Times are sums over
    prompts. ``prompts`` are the files given by ``--prompts``.
    """
    start = records[0]
    assert isinstance(start, Start)
    model = next(record for record in records if isinstance(record, Model))
    peers = {record.method: record.notes for record in records if isinstance(record, PeerRecord)}
    samples = {
        (s.method, s.temperature, s.task, s.id): s
        for s in records
        if isinstance(s, Sample) and s.error is None
    }
    failed = [s for s in records if isinstance(s, Sample) and s.error is not None]
    # without paths of a build
    errors = {s.method: re.sub(r" at /\S+", "", str(s.error)) for s in failed}
    head = {
        "model": model.name,
        "processor": start.hardware.get("processor"),
        "threads": start.hardware.get("threads"),
        "kernels": model.kernels,
        "date": start.started[:10],
        "command": command_of(start.arguments, prompts),
    }
    rows = []
    for group in ("all", "chat", "code", "copy"):
        for temperature in TEMPERATURES:
            for method in model.methods:
                pairs = [
                    (sample, samples[PLAIN, *key[1:]])
                    for key, sample in samples.items()
                    if key[:2] == (method, temperature)
                    and (PLAIN, *key[1:]) in samples
                    and group in ("all", group_of(sample.task))
                ]
                load = (
                    model.load_seconds if method not in peers else peers[method].get("load_seconds")
                )
                label = {
                    "group": group,
                    "temperature": temperature,
                    "method": method,
                    "load": load and float(load),
                }
                row = head | label | figures(pairs)
                if not pairs and method in errors:
                    row["error"] = errors[method]
                rows.append(row)
    return rows


def group_of(task: str) -> str:
    """Return the group of a task."""
    return next((group for group, tasks in GROUPS.items() if task in tasks), "chat")


def figures(pairs: Sequence[tuple[Sample, Sample]]) -> dict[str, Any]:
    """Return the figures of a method from its samples and those of plain decoding."""
    if not pairs:
        return {"prompts": 0}
    ours = [pair[0] for pair in pairs]
    plain = [pair[1] for pair in pairs]
    passes = [len(s.steps) for s in ours if s.steps is not None]
    comparable = ours[0].engine == "pronk" or ours[0].temperature == 0
    peaks = [s.peak_memory for s in ours if s.peak_memory is not None]
    return {
        "prompts": len(pairs),
        "speed": rate(ours),
        "speed_after_first": rate_after_first(ours),
        "speedup": rate(ours) / rate(plain),
        "speedup_after_first": ratio(rate_after_first(ours), rate_after_first(plain)),
        "first_token": fmean(times)
        if (times := [s.ttft for s in ours if s.ttft is not None])
        else None,
        "tokens_per_pass": sum(len(s.tokens) for s in ours) / sum(passes) if passes else None,
        "peak_memory": max(peaks) if peaks else None,
        "same": sum(a.tokens == b.tokens for a, b in pairs) if comparable else None,
    }


def rate(samples: Sequence[Sample]) -> float:
    """Return tokens per second, the time of the prompt included."""
    return sum(len(s.tokens) for s in samples) / sum(s.total_seconds for s in samples)


def rate_after_first(samples: Sequence[Sample]) -> float | None:
    """Return tokens per second after the first token.

    ``None`` if an engine does not report its time.
    """
    times = [
        (len(s.tokens) - 1, s.total_seconds - s.ttft)
        for s in samples
        if s.ttft is not None and len(s.tokens) > 1
    ]
    return (
        sum(tokens for tokens, _ in times) / sum(seconds for _, seconds in times) if times else None
    )


def ratio(a: float | None, b: float | None) -> float | None:
    """Return ``a / b``, or ``None`` if one is missing."""
    return None if a is None or b is None else a / b


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the tables of all models."""
    text = ["# Real models\n"]
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        first = mine[0]
        command = f"\n\n```sh\n{first['command']}\n```" if "command" in first else ""
        counts = ", ".join(f"{group} {count(mine, group)}" for group in ("chat", "code", "copy"))
        text.append(
            f"## {model}\n\n{first['processor']}, {first['threads']} threads, {first['kernels']}, "
            f"{first['date']}. "
            f"Prompts: {counts}.{command}\n"
        )
        text += [table(mine, temperature) for temperature in TEMPERATURES]
    text.append(
        "*load*: seconds until the model is ready, after the import. *first*: seconds to the first "
        "token, mean. "
        "*tokens/s*: with the time of the prompt, and after the first token. *× plain*: of pronk's "
        "plain decoding, by "
        "group of prompts. *per pass*: tokens per forward pass of the model. *same*: outputs equal "
        "to those of pronk's "
        "plain decoding; an engine with other random numbers is compared at T = 0 only.\n"
    )
    return "\n".join(text)


def count(rows: Sequence[dict[str, Any]], group: str) -> int:
    """Return the number of prompts of a group that plain decoding finished."""
    return max(
        (row["prompts"] for row in rows if row["group"] == group and row["method"] == PLAIN),
        default=0,
    )


def table(rows: Sequence[dict[str, Any]], temperature: float) -> str:
    """Return the table of one model at one temperature."""
    heads = [
        "method",
        "load, s",
        "first, s",
        "tokens/s",
        "after first",
        "× plain, all",
        "chat",
        "code",
        "copy",
    ]
    heads += ["per pass", "peak, GB", "same"]
    lines = [f"T = {temperature:g}\n", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for method in dict.fromkeys(row["method"] for row in rows):
        by_group = {
            r["group"]: r for r in rows if (r["method"], r["temperature"]) == (method, temperature)
        }
        row = by_group["all"]
        name = "plain decoding" if method == PLAIN else f"`{method}`"
        if not row["prompts"]:
            lines.append(
                f"| {name} | {row.get('error', 'no output')[:90]} |" + " |" * (len(heads) - 2)
            )
            continue
        cells = [show(row["load"], 2), show(row["first_token"], 2), show(row["speed"], 1)]
        cells.append(show(row["speed_after_first"], 1))
        cells += [
            show(by_group[group].get("speedup"), 2) for group in ("all", "chat", "code", "copy")
        ]
        same = "–" if row["same"] is None else f"{row['same']}/{row['prompts']}"
        peak = None if row["peak_memory"] is None else row["peak_memory"] / 1e9
        lines.append(
            f"| {' | '.join([name, *cells, show(row['tokens_per_pass'], 2), show(peak, 2), same])} "
            "|"
        )
    return "\n".join(lines) + "\n"


def show(value: float | None, digits: int) -> str:
    """Return a number as text."""
    return "–" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    main()
