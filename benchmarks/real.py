r"""Measure real models on public prompts: pronk's drafters and other engines on the same file.

    PATH=~/llama.cpp/build/bin:$PATH python benchmarks/real.py smollm2 qwen2.5-coder-0.5b \
        qwen2.5-coder-1.5b gemma-3-270m.gguf --limit 12 --peer-python openvino=/path/to/python \
        --out benchmarks/results/2026-11-real-avx512
    python benchmarks/real.py smollm2 --limit 1 --out FOLDER/NAME    # a first look
    python benchmarks/real.py --out FOLDER/NAME --show

``pronk bench`` measures each model at each temperature for at most ``--minutes`` per call. The
prompts are those of the suites in ``benchmarks/suites`` and of the files given by ``--prompts``;
all methods answer one prompt after the other. The peers are llama.cpp's own server, found on PATH,
with its drafts from n-grams, and OpenVINO GenAI with prompt lookup; with a temperature above 0 they
decode plainly, to save time. OUT.MODEL.T.trace.jsonl keeps every output at temperature T, and the
same command continues after an interruption: a model with all of its prompts takes seconds.
OUT.json has one row for each model, method and group of prompts, with the processor and the date,
also for models that were measured earlier; it is written after each model, and at an interruption.
OUT.md shows the rows as tables; ``--show`` writes it again. ``python tools/docs/blocks.py`` draws
the plot of the README and writes the table of docs/benchmarks.md.

A method that drafts is compared with the plain decoding of its own engine, at the same seed: texts
of two engines may differ, because each rounds in its own way.

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
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

from pronk.base.estimate import duration_text
from pronk.base.files.results import save_result
from pronk.lab.bench.peers.process import PEERS as PEER_SPECS
from pronk.lab.bench.records import PLAIN, Model, PeerRecord, Record, Sample, Start, read_trace

SUITES = Path(__file__).parent / "suites"
# Number of prompts from each suite. There is one of long_context, because it takes minutes with
# large models.
PROMPTS = {
    "gsm8k": 20,
    "humaneval": 20,
    "code_edit": 20,
    "mbpp": 20,
    "json_schema": 20,
    "long_context": 1,
}
# Tasks of each group; other tasks belong to the group chat.
GROUPS = {
    "code": ("humaneval", "mbpp_sanitized"),
    "copy": ("code_edit", "long_summarization", "json_schema", "summarization", "rag"),
}
GROUP_NAMES = ("all", "chat", "code", "copy")
DRAFTERS = ("auto", "suffix(store_tokens=0)")
PEERS = (
    "llama_server",
    "llama_server_ngram_simple",
    "llama_server_ngram_map_k",
    "llama_server_ngram_mod",
    "llama_server_ngram_cache",
    "openvino",
    "openvino_prompt_lookup",
)
TEMPERATURES = (0.0, 0.7)
# Method, task and id of a sample.
Key = tuple[str, str, str]
REPORT_SECONDS = 5  # between two looks at the trace of a running benchmark
# Notes of a peer that have the version of its engine.
VERSIONS = ("llama-server", "openvino-genai", "llama-cpp-python", "transformers")


def main() -> None:
    """Measure the models, then write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help="names, as in pronk pull, or files")
    parser.add_argument(
        "--out", type=Path, required=True, help="path of the results, without a suffix"
    )
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="time limit per model, temperature and call"
    )
    parser.add_argument("--limit", type=int, help="number of prompts of each model; default: all")
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
    rows: list[dict[str, Any]] = []
    if output(given.out, "json").is_file():
        rows = json.loads(output(given.out, "json").read_text())
    models = [] if given.show else given.models
    if models:
        prompts = output(given.out, "prompts.jsonl")
        num_prompts = write_prompts(prompts, given.prompts, given.limit)
        say(
            f"models: {len(models)}, temperatures: {len(TEMPERATURES)}, prompts: {num_prompts}; "
            f"at most {given.minutes:g} minutes for a model and temperature; shorter: --limit "
            "or --minutes; the same command continues"
        )
    status = 0
    for number, model in enumerate(models, 1):
        traces = [trace_path(given.out, model, temperature) for temperature in TEMPERATURES]
        for temperature, trace in zip(TEMPERATURES, traces, strict=True):
            label = f"[{number}/{len(models)}] {model_name(model)}, T = {temperature:g}"
            say(label)
            command = bench_command(model, prompts, temperature, trace, given)
            status = run(command, trace, num_prompts, label)
            if status:
                break
        found = [records for trace in traces if (records := finished_records(trace))]
        if found:
            measured = summarize(found, given.prompts, given.limit)
            rows = [row for row in rows if row["model"] != measured[0]["model"]]
            rows += measured
            save(given.out, rows)
        if status:
            sys.exit(status)  # pronk bench has printed the error
    if not rows:
        parser.error(
            f"expected measurements in {output(given.out, 'json')}, found none; name a model, "
            "without --show"
        )
    save(given.out, rows)
    print(markdown(rows))


def say(message: str) -> None:
    """Print a message to standard error, which a result on standard output does not mix with."""
    print(f"real: {message}", file=sys.stderr, flush=True)


def output(out: Path, suffix: str) -> Path:
    """Return the path of a file of the results, such as OUT.json."""
    return out.parent / f"{out.name}.{suffix}"


def model_name(model: str) -> str:
    """Return the name of a model as the results have it: that of a file without its folders."""
    return Path(model).name if model.endswith(".gguf") else model


def trace_path(out: Path, model: str, temperature: float) -> Path:
    """Return the path of the trace of a model at a temperature."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", model_name(model))
    return output(out, f"{name}.{temperature:g}.trace.jsonl")


def finished_records(trace: Path) -> list[Record]:
    """Return the records of a trace that has at least one finished prompt, otherwise none."""
    return read_trace(trace) if num_finished(trace) else []


def num_finished(trace: Path) -> int:
    """Return the number of finished prompts in a trace, which need not exist."""
    return trace.read_bytes().count(b'{"kind": "finished"') if trace.is_file() else 0


def save(out: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write OUT.json and OUT.md."""
    save_result("out", output(out, "json"), json.dumps(rows, indent=1) + "\n")
    save_result("out", output(out, "md"), markdown(rows))


def write_prompts(path: Path, others: Iterable[Path], limit: int | None = None) -> int:
    """Write the prompts of the suites and of other files into one file; return their number.

    The suites take turns, and the order does not depend on the machine. ``limit`` is the maximum
    number of prompts.
    """
    lists: list[list[bytes]] = []
    for name, number in PROMPTS.items():
        with gzip.open(SUITES / f"{name}.jsonl.gz") as file:
            lines = file.read().splitlines()
        step = 1 if name == "long_context" else max(1, len(lines) // number)
        lists.append(lines[::step][:number])
    for other in others:
        by_task: dict[str, list[bytes]] = defaultdict(list)
        data = other.read_bytes()
        if other.suffix == ".gz":
            data = gzip.decompress(data)
        for line in data.splitlines():
            by_task[json.loads(line).get("task", other.stem)].append(line)
        lists += [lines[:20] for lines in by_task.values()]
    turns = [line for group in zip_longest(*lists) for line in group if line is not None]
    chosen = turns[:limit]
    path.write_bytes(b"".join(line + b"\n" for line in chosen))
    return len(chosen)


def bench_command(
    model: str, prompts: Path, temperature: float, trace: Path, given: argparse.Namespace
) -> list[str]:
    """Return the words of ``pronk bench`` for a model, which continue an earlier trace."""
    peers = [peer for peer in given.peer or PEERS if peer != "none"]
    interpreters = given.peer_python
    if temperature > 0:
        peers = [peer for peer in peers if peer in PEER_SPECS and not PEER_SPECS[peer].variant]
        engines = {PEER_SPECS[peer].engine for peer in peers}
        interpreters = [pair for pair in interpreters if pair.partition("=")[0] in engines]
    command = [sys.executable, "-m", "pronk", "bench", "--model", model, "--fit"]
    command += ["--prompts", str(prompts), "--max-tokens", str(given.max_tokens)]
    command += ["--repeats", "1", "--minutes", str(given.minutes)]
    command += ["--temperature", str(temperature)]
    command += repeated("--drafter", given.drafter or DRAFTERS)
    command += repeated("--peer", peers)
    command += repeated("--peer-python", interpreters)
    if given.threads is not None:
        command += ["--threads", str(given.threads)]
    return [*command, "--trace", str(trace), "--resume"]


def run(command: Sequence[str], trace: Path, num_prompts: int, label: str) -> int:
    """Run ``pronk bench``, and print each finished prompt and the expected time of the others.

    Returns the exit status of the command. Ctrl-C ends the command, too, which then has stored the
    finished prompts.
    """
    began = time.monotonic()
    earlier = num_finished(trace)
    reported = earlier
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:  # noqa: S603
        while True:
            try:
                return process.wait(REPORT_SECONDS)
            except subprocess.TimeoutExpired:
                finished = num_finished(trace)
            except KeyboardInterrupt:
                return interrupted(process)
            if finished > reported:
                reported = finished
                seconds = (time.monotonic() - began) / (finished - earlier)
                left = num_prompts - finished
                rest = f"; the others: about {duration_text(seconds * left)}" if left else ""
                say(f"{label}: {finished} of {num_prompts} prompts{rest}")


def interrupted(process: subprocess.Popen[bytes]) -> int:
    """Wait for the end of a process after Ctrl-C, and return its exit status."""
    try:
        return process.wait(REPORT_SECONDS)  # a terminal has interrupted both processes
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        return process.wait()


def repeated(option: str, values: Iterable[str]) -> list[str]:
    """Return the words of an option of the command line for each value."""
    words = list[str]()
    for value in values:
        words += [option, value]
    return words


def command_of(arguments: dict[str, Any], prompts: Iterable[Path], limit: int | None = None) -> str:
    """Return the command that began a trace, from the arguments of its ``pronk bench``.

    The command has names of files without their folders. ``prompts`` and ``limit`` are options of
    this script alone.
    """
    models = [model_name(model) for model in arguments["model"]]
    engines = [pair.partition("=")[0] for pair in arguments["peer_python"] or ()]
    words = ["python", "benchmarks/real.py", *models, "--out", "OUT"]
    words += ["--minutes", f"{arguments['minutes']:g}"]
    if limit is not None:
        words += ["--limit", str(limit)]
    words += ["--max-tokens", str(arguments["max_tokens"])]
    if arguments["threads"] is not None:
        words += ["--threads", str(arguments["threads"])]
    words += repeated("--prompts", [file.name for file in prompts])
    words += repeated("--drafter", arguments["drafter"])
    words += repeated("--peer", arguments["peer"] or ["none"])
    words += repeated("--peer-python", [f"{engine}=PYTHON" for engine in engines])
    return shlex.join(words)


def summarize(
    traces: Sequence[Sequence[Record]], prompts: Iterable[Path] = (), limit: int | None = None
) -> list[dict[str, Any]]:
    """Return the rows of a model: one for each group of prompts, temperature and method.

    ``traces`` has the records of each temperature. A row is about the prompts that both the method
    and plain decoding have finished. Times are sums over prompts. ``prompts`` are the files given
    by ``--prompts``, and ``limit`` is the number given by ``--limit``.
    """
    start = traces[0][0]
    assert isinstance(start, Start)
    command = command_of(start.arguments, prompts, limit)
    found = [rows_of(records, command) for records in traces]
    rows = [row for group in found for row in group]
    return sorted(rows, key=lambda row: GROUP_NAMES.index(row["group"]))


def rows_of(records: Sequence[Record], command: str) -> list[dict[str, Any]]:
    """Return the rows of one trace, which has one temperature."""
    start = records[0]
    assert isinstance(start, Start)
    (temperature,) = start.arguments["temperature"]
    model = next(record for record in records if isinstance(record, Model))
    peers = {record.method: record.notes for record in records if isinstance(record, PeerRecord)}
    every = [record for record in records if isinstance(record, Sample)]
    finished = [s for s in every if s.error is None]
    samples = {(s.method, s.task, s.id): s for s in finished}
    failed = [s for s in every if s.error is not None]
    # Paths of a build are cut from the messages.
    errors = {s.method: re.sub(r" at /\S+", "", str(s.error)) for s in failed}
    head = {
        "model": model_name(model.name),
        "processor": start.hardware.get("processor"),
        "threads": start.hardware.get("threads"),
        "kernels": model.kernels,
        "date": start.started[:10],
        "command": command,
    }
    rows = []
    for group in GROUP_NAMES:
        for method in model.methods:
            chosen = [
                sample
                for key, sample in samples.items()
                if key[0] == method and group in ("all", group_of(sample.task))
            ]
            pairs = with_output_of(PLAIN, chosen, samples)
            own_plain = plain_method(chosen[0].engine) if chosen else PLAIN
            own_pairs = []
            if own_plain != method:
                own_pairs = with_output_of(own_plain, chosen, samples)
            label = {
                "group": group,
                "temperature": temperature,
                "method": method,
                "load": load_seconds(model, peers.get(method)),
            }
            row = head | label | figures(pairs) | equality(own_pairs)
            if method in peers:
                row["engine"] = version_of(peers[method])
            if not pairs and method in errors:
                row["error"] = errors[method]
            rows.append(row)
    return rows


def load_seconds(model: Model, notes: Mapping[str, str] | None) -> float | None:
    """Return the seconds to load a model: those in the notes of a peer, or else pronk's."""
    if notes is None:
        return model.load_seconds
    seconds = notes.get("load_seconds")
    return None if seconds is None else float(seconds)


def with_output_of(
    method: str, chosen: Iterable[Sample], samples: Mapping[Key, Sample]
) -> list[tuple[Sample, Sample]]:
    """Pair samples with those of a method for the same prompt, where it has one."""
    pairs = list[tuple[Sample, Sample]]()
    for sample in chosen:
        other = samples.get((method, sample.task, sample.id))
        if other is not None:
            pairs.append((sample, other))
    return pairs


def plain_method(engine: str) -> str:
    """Return the method that is the plain decoding of an engine."""
    return PLAIN if engine == "pronk" else engine


def version_of(notes: dict[str, str]) -> str | None:
    """Return name and version of a peer's engine, or ``None`` if it did not start."""
    found = [f"{name} {notes[name]}" for name in VERSIONS if name in notes]
    return found[0] if found else None


def equality(pairs: Sequence[tuple[Sample, Sample]]) -> dict[str, int]:
    """Return how many outputs were compared with plain decoding of their engine, and are equal.

    Without pairs, as for plain decoding itself, the result is empty.
    """
    if not pairs:
        return {}
    return {"compared": len(pairs), "equal": sum(a.tokens == b.tokens for a, b in pairs)}


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
        counts = ", ".join(f"{group} {count(mine, group)}" for group in GROUP_NAMES[1:])
        machine = f"{first['processor']}, {first['threads']} threads, {first['kernels']}"
        engines = dict.fromkeys(row["engine"] for row in mine if row.get("engine"))
        about = f"{machine}, {first['date']}. Prompts: {counts}."
        if engines:
            about += f" Engines: {', '.join(engines)}."
        text.append(f"## {model}\n\n{about}{command}\n")
        measured = dict.fromkeys(row["temperature"] for row in mine)
        text += [table(mine, temperature) for temperature in measured]
    text.append(
        "*load*: seconds until the model is ready, after the import. *first*: seconds to the first "
        "token, mean. *tokens/s*: with the time of the prompt, and after the first token. *× "
        "plain*: of pronk's plain decoding, by group of prompts. *per pass*: tokens per forward "
        "pass of the model. *equal*: outputs equal to those of the engine's own plain decoding, at "
        "the same seed.\n"
    )
    return "\n".join(text)


def count(rows: Sequence[dict[str, Any]], group: str) -> int:
    """Return the number of prompts of a group that plain decoding finished."""
    plain = [row for row in rows if row["group"] == group and row["method"] == PLAIN]
    return max((row["prompts"] for row in plain), default=0)


def table(rows: Sequence[dict[str, Any]], temperature: float) -> str:
    """Return the table of one model at one temperature."""
    heads = ["method", "load, s", "first, s", "tokens/s", "after first"]
    heads += ["× plain, all", "chat", "code", "copy", "per pass", "peak, GB", "equal"]
    lines = [f"T = {temperature:g}\n", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    at_temperature = [row for row in rows if row["temperature"] == temperature]
    for method in dict.fromkeys(row["method"] for row in at_temperature):
        by_group = {row["group"]: row for row in at_temperature if row["method"] == method}
        row = by_group["all"]
        name = "plain decoding" if method == PLAIN else f"`{method}`"
        if not row["prompts"]:
            error = row.get("error", "no output")[:90]
            lines.append(f"| {name} | {error} |" + " |" * (len(heads) - 2))
            continue
        cells = [name, show(row["load"], 2), show(row["first_token"], 2), show(row["speed"], 1)]
        cells.append(show(row["speed_after_first"], 1))
        cells += [show(by_group[group].get("speedup"), 2) for group in GROUP_NAMES]
        peak = None if row["peak_memory"] is None else row["peak_memory"] / 1e9
        cells += [show(row["tokens_per_pass"], 2), show(peak, 2)]
        cells.append(f"{row['equal']}/{row['compared']}" if "equal" in row else "–")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def show(value: float | None, digits: int) -> str:
    """Return a number with some digits after the point, or a dash for ``None``."""
    return "–" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    main()
