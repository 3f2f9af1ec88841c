r"""Measure real models on public prompts: pronk's drafters and other engines on the same file.

    python benchmarks/real.py smollm2 --out benchmarks/results/2026-11-real-avx512
    python benchmarks/real.py smollm2 model.gguf --out FOLDER/NAME --minutes 60 \
        --peer-python llama_cpp=/path/to/python
    python benchmarks/real.py --out FOLDER/NAME --show

``pronk bench`` measures each model for at most ``--minutes`` per call. The prompts are those of the
suites in ``benchmarks/suites`` and of the files given by ``--prompts``; all methods answer one
prompt after the other. OUT.MODEL.trace.jsonl keeps every output, and the same command continues
after an interruption. OUT.json has one row for each model, method and group of prompts, with the
processor and the date, also for models that were measured earlier. OUT.md shows the rows as tables;
``--show`` writes it again. ``python tools/docs/blocks.py`` draws the plot of the README and writes
its table.

The groups of prompts are *chat*, questions answered in free text (GSM8K, MT-Bench, …), *code*, code
written from a description, and *copy*, answers that repeat much of the prompt (code edits,
summaries, JSON).
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
# Number of prompts from each suite. Those of long_context are few, because each takes minutes with
# large models.
PROMPTS = {
    "gsm8k": 20,
    "humaneval": 20,
    "code_edit": 20,
    "mbpp": 20,
    "json_schema": 20,
    "long_context": 2,
}
# Tasks of each group; other tasks belong to the group chat.
GROUPS = {
    "code": ("humaneval", "mbpp_sanitized"),
    "copy": ("code_edit", "long_summarization", "json_schema", "summarization", "rag"),
}
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
            # Models of earlier calls keep their command, which may have had other prompts.
            if row["model"] not in given.models:
                row["command"] = commands.get(row["model"], row["command"])
        new_models = {row["model"] for row in measured}
        rows = [row for row in rows if row["model"] not in new_models]
        rows += measured
    if not rows:
        parser.error(
            f"expected measurements in {outputs['json']}, found none; name a model, without --show"
        )
    save_result("out", outputs["json"], json.dumps(rows, indent=1) + "\n")
    save_result("out", outputs["md"], markdown(rows))
    print(markdown(rows))


def write_prompts(path: Path, others: Iterable[Path]) -> None:
    """Write the prompts of the suites and of other files into one file.

    The suites take turns, and the order does not depend on the machine.
    """
    lists: list[list[bytes]] = []
    for name, limit in PROMPTS.items():
        with gzip.open(SUITES / f"{name}.jsonl.gz") as file:
            lines = file.read().splitlines()
        step = 1 if name == "long_context" else max(1, len(lines) // limit)
        lists.append(lines[::step][:limit])
    for other in others:
        by_task: dict[str, list[bytes]] = defaultdict(list)
        data = other.read_bytes()
        if other.suffix == ".gz":
            data = gzip.decompress(data)
        for line in data.splitlines():
            by_task[json.loads(line).get("task", other.stem)].append(line)
        lists += [lines[:20] for lines in by_task.values()]
    with path.open("wb") as out:
        for group in zip_longest(*lists):
            out.writelines(line + b"\n" for line in group if line is not None)


def measure(model: str, prompts: Path, given: argparse.Namespace) -> None:
    """Run ``pronk bench`` on a model, or continue an earlier run."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", model)
    trace = given.out.parent / f"{given.out.name}.{name}.trace.jsonl"
    peers = [peer for peer in given.peer or PEERS if peer != "none"]
    command = [sys.executable, "-m", "pronk", "bench", "--model", model, "--fit"]
    command += ["--prompts", str(prompts), "--max-tokens", str(given.max_tokens)]
    command += ["--repeats", "1", "--minutes", str(given.minutes)]
    command += repeated("--temperature", map(str, TEMPERATURES))
    command += repeated("--drafter", given.drafter or DRAFTERS)
    command += repeated("--peer", peers)
    command += repeated("--peer-python", given.peer_python)
    if given.threads is not None:
        command += ["--threads", str(given.threads)]
    command += ["--trace", str(trace), "--resume"]
    done = subprocess.run(command, check=False, stdout=subprocess.DEVNULL)  # noqa: S603
    if done.returncode:
        sys.exit(done.returncode)  # pronk bench has printed the error


def repeated(option: str, values: Iterable[str]) -> list[str]:
    """Return the words of an option of the command line for each value."""
    words = list[str]()
    for value in values:
        words += [option, value]
    return words


def command_of(arguments: dict[str, Any], prompts: Iterable[Path]) -> str:
    """Return the command that began a trace, from the arguments of its ``pronk bench``.

    The command has names of files without their folders.
    """
    models = [Path(model).name if "." in model else model for model in arguments["model"]]
    engines = [pair.partition("=")[0] for pair in arguments["peer_python"] or ()]
    words = ["python", "benchmarks/real.py", *models, "--out", "OUT"]
    words += ["--minutes", f"{arguments['minutes']:g}"]
    words += ["--max-tokens", str(arguments["max_tokens"])]
    if arguments["threads"] is not None:
        words += ["--threads", str(arguments["threads"])]
    words += repeated("--prompts", [file.name for file in prompts])
    words += repeated("--drafter", arguments["drafter"])
    words += repeated("--peer", arguments["peer"] or ["none"])
    words += repeated("--peer-python", [f"{engine}=PYTHON" for engine in engines])
    return shlex.join(words)


def summarize(records: Sequence[Record], prompts: Iterable[Path] = ()) -> list[dict[str, Any]]:
    """Return the rows of one trace: one for each group of prompts, method and temperature.

    A row is about the prompts that both the method and plain decoding have finished. Times are sums
    over prompts. ``prompts`` are the files given by ``--prompts``.
    """
    start = records[0]
    assert isinstance(start, Start)
    model = next(record for record in records if isinstance(record, Model))
    peers = {record.method: record.notes for record in records if isinstance(record, PeerRecord)}
    every = [record for record in records if isinstance(record, Sample)]
    finished = [s for s in every if s.error is None]
    samples = {(s.method, s.temperature, s.task, s.id): s for s in finished}
    failed = [s for s in every if s.error is not None]
    # Paths of a build are cut from the messages.
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
                pairs = list[tuple[Sample, Sample]]()
                for key, sample in samples.items():
                    plain = samples.get((PLAIN, *key[1:]))
                    is_own = key[:2] == (method, temperature)
                    if is_own and plain is not None and group in ("all", group_of(sample.task)):
                        pairs.append((sample, plain))
                load = model.load_seconds
                if method in peers:
                    load = peers[method].get("load_seconds")
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
    """Return the group of prompts to which a task belongs."""
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
    first_times = [s.ttft for s in ours if s.ttft is not None]
    num_tokens = sum(len(s.tokens) for s in ours)
    return {
        "prompts": len(pairs),
        "speed": rate(ours),
        "speed_after_first": rate_after_first(ours),
        "speedup": rate(ours) / rate(plain),
        "speedup_after_first": ratio(rate_after_first(ours), rate_after_first(plain)),
        "first_token": fmean(first_times) if first_times else None,
        "tokens_per_pass": num_tokens / sum(passes) if passes else None,
        "peak_memory": max(peaks) if peaks else None,
        "same": sum(a.tokens == b.tokens for a, b in pairs) if comparable else None,
    }


def rate(samples: Sequence[Sample]) -> float:
    """Return the tokens per second, with the time of the prompt."""
    num_tokens = sum(len(s.tokens) for s in samples)
    return num_tokens / sum(s.total_seconds for s in samples)


def rate_after_first(samples: Sequence[Sample]) -> float | None:
    """Return the tokens per second after the first token.

    Returns ``None`` if the engine does not report the time of the first token.
    """
    num_tokens = 0
    seconds = 0.0
    for sample in samples:
        if sample.ttft is not None and len(sample.tokens) > 1:
            num_tokens += len(sample.tokens) - 1
            seconds += sample.total_seconds - sample.ttft
    return num_tokens / seconds if num_tokens else None


def ratio(a: float | None, b: float | None) -> float | None:
    """Return ``a / b``, or ``None`` if one is missing."""
    return None if a is None or b is None else a / b


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the page with the tables of all models."""
    text = ["# Real models\n"]
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        first = mine[0]
        command = f"\n\n```sh\n{first['command']}\n```" if "command" in first else ""
        counts = ", ".join(f"{group} {count(mine, group)}" for group in ("chat", "code", "copy"))
        machine = f"{first['processor']}, {first['threads']} threads, {first['kernels']}"
        about = f"{machine}, {first['date']}. Prompts: {counts}."
        text.append(f"## {model}\n\n{about}{command}\n")
        text += [table(mine, temperature) for temperature in TEMPERATURES]
    text.append(
        "*load*: seconds until the model is ready, after the import. *first*: seconds to the first "
        "token, mean. *tokens/s*: with the time of the prompt, and after the first token. *× "
        "plain*: of pronk's plain decoding, by group of prompts. *per pass*: tokens per forward "
        "pass of the model. *same*: outputs equal to those of pronk's plain decoding; an engine "
        "with other random numbers is compared at T = 0 only.\n"
    )
    return "\n".join(text)


def count(rows: Sequence[dict[str, Any]], group: str) -> int:
    """Return the number of prompts of a group that plain decoding finished."""
    plain = [row for row in rows if row["group"] == group and row["method"] == PLAIN]
    return max((row["prompts"] for row in plain), default=0)


def table(rows: Sequence[dict[str, Any]], temperature: float) -> str:
    """Return the table of one model at one temperature."""
    heads = ["method", "load, s", "first, s", "tokens/s", "after first"]
    heads += ["× plain, all", "chat", "code", "copy", "per pass", "peak, GB", "same"]
    lines = [f"T = {temperature:g}\n", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    at_temperature = [row for row in rows if row["temperature"] == temperature]
    for method in dict.fromkeys(row["method"] for row in rows):
        by_group = {row["group"]: row for row in at_temperature if row["method"] == method}
        row = by_group["all"]
        name = "plain decoding" if method == PLAIN else f"`{method}`"
        if not row["prompts"]:
            error = row.get("error", "no output")[:90]
            lines.append(f"| {name} | {error} |" + " |" * (len(heads) - 2))
            continue
        cells = [name, show(row["load"], 2), show(row["first_token"], 2), show(row["speed"], 1)]
        cells.append(show(row["speed_after_first"], 1))
        groups = ("all", "chat", "code", "copy")
        cells += [show(by_group[group].get("speedup"), 2) for group in groups]
        peak = None if row["peak_memory"] is None else row["peak_memory"] / 1e9
        cells += [show(row["tokens_per_pass"], 2), show(peak, 2)]
        cells.append("–" if row["same"] is None else f"{row['same']}/{row['prompts']}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def show(value: float | None, digits: int) -> str:
    """Return a number with some digits after the point, or a dash for ``None``."""
    return "–" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    main()
