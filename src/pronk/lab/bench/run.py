"""Run of a benchmark: load each model, start other engines on it, and measure all methods.

Another engine is a *peer*, such as llama.cpp; it runs in a process of its own. A benchmark that was
interrupted is continued: its records are kept, and only the missing prompts are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from pronk import LLM, OptionError
from pronk.backends import count_parameters, forward_weights, kv_bytes_per_token, num_threads
from pronk.base import refuse
from pronk.checkpoint import is_gguf, read_json
from pronk.diagnosis import BandwidthMeter
from pronk.drafting import make_drafter
from pronk.lab.bench.machine import PeakMemory, describe_hardware, versions
from pronk.lab.bench.measure import Bench, Options
from pronk.lab.bench.methods import DrafterMethod, Method, PeerMethod
from pronk.lab.bench.peers.process import Peer, PeerError, PeerSpec
from pronk.lab.bench.prompts import Prompt
from pronk.lab.bench.records import (
    PLAIN,
    DivergenceRecord,
    End,
    Finished,
    Model,
    PeerRecord,
    Record,
    Sample,
    Skip,
    Start,
    Trace,
    with_models,
)

Progress = Callable[[str, int, int], None]

# Options that may differ when a benchmark is continued.
_FREE_OPTIONS = ("minutes", "resume", "as_json", "markdown", "report", "trace")


@dataclass(frozen=True)
class Plan:
    """Drafters, peers (other engines), prompts and options of a benchmark.

    The first measured method is always plain decoding.
    """

    drafters: tuple[str, ...]
    tasks: Mapping[str, Sequence[Prompt]]  # prompts by task
    options: Options
    peers: tuple[PeerSpec, ...] = ()
    # Path of the Python interpreter that runs the peers of an engine, by name of the engine. An
    # engine that is missing here runs with the interpreter of this process.
    interpreters: Mapping[str, str] = field(default_factory=dict)

    @property
    def all_drafters(self) -> tuple[str, ...]:
        """Plain decoding, then the drafters, without duplicates."""
        return tuple(dict.fromkeys((PLAIN, *self.drafters)))

    @property
    def num_methods(self) -> int:
        """Number of measured methods: drafters, plain decoding and peers."""
        return len(self.all_drafters) + len(self.peers)

    @property
    def size(self) -> str:
        """Number of runs of each model as a product, such as ``8 prompts × 3 methods``."""
        options = self.options
        prompts = sum(prompt.num_turns for prompts in self.tasks.values() for prompt in prompts)
        parts = [f"{prompts} prompts", f"{self.num_methods} methods"]
        if len(options.temperatures) > 1:
            parts.append(f"{len(options.temperatures)} temperatures")
        if options.repeats > 1:
            parts.append(f"{options.repeats} repeats")
        return " × ".join(parts)


def check(plan: Plan) -> None:
    """Raise OptionError if a drafter, peer or interpreter of the plan cannot be measured."""
    for drafter in plan.drafters:
        make_drafter(drafter)
    if plan.peers and plan.options.batch > 1:
        msg = (
            "peers are measured one prompt at a time; expected --batch 1, found "
            f"{plan.options.batch}"
        )
        raise OptionError(msg)
    engines = {spec.engine for spec in plan.peers}
    for engine in plan.interpreters:
        if engine not in engines:
            known = ", ".join(sorted(engines)) or "none"
            refuse(
                "peer-python",
                f"expected an engine that is measured ({known}), found {engine}",
                OptionError,
            )


def run(
    loaders: Mapping[str, Callable[[Callable[[int, int], None]], LLM]],
    plan: Plan,
    trace: Trace,
    arguments: dict[str, Any],
    progress: Progress = lambda _label, _done, _total: None,
) -> None:
    """Measure every model, one after the other, and add all records to ``trace``.

    Args:
        loaders: by name of the model, the function that loads the model; its argument is a progress
            callback.
        plan: drafters, peers and prompts to measure.
        trace: an empty trace, or that of the benchmark to continue. If an exception ends the run,
            the trace has all records before the exception.
        arguments: options of the command, for the first record.
        progress: receives a label, the number of finished runs, and the number of all runs.

    Raises PronkError if a model cannot be loaded.
    """
    finished = False
    try:
        for name, load in loaders.items():
            tasks = remaining(plan.tasks, trace.records, name)
            if not any(tasks.values()):
                continue
            began = perf_counter()
            llm = load(partial(progress, f"loading {name}"))
            seconds = perf_counter() - began
            if not trace.records:
                started = datetime.now(UTC).isoformat(timespec="seconds")
                trace.add(Start(started, arguments, versions(), describe_hardware(llm.device)))
            trace.add(_model_record(name, llm, plan, seconds))
            _measure(name, llm, replace(plan, tasks=tasks), trace, progress)
            del llm  # free its memory before the next model is loaded
        finished = True
    finally:
        if trace.records:
            trace.add(End(interrupted=not finished))


def _measure(name: str, llm: LLM, plan: Plan, trace: Trace, progress: Progress) -> None:
    with ExitStack() as stack:
        bandwidth = BandwidthMeter(llm.engine.runner.decoder.kernels)
        peak = PeakMemory(llm.device, bandwidth.nbytes)
        methods: list[Method] = [DrafterMethod(llm, drafter, peak) for drafter in plan.all_drafters]
        for spec in plan.peers:
            progress(f"loading {spec.name}", 0, 0)
            methods.append(_start_peer(spec, llm, plan.interpreters.get(spec.engine), trace, stack))
        bench = Bench(llm, methods, plan.options, bandwidth=bandwidth, trace=trace)
        bench.run(plan.tasks, partial(progress, name))


def _model_record(name: str, llm: LLM, plan: Plan, load_seconds: float) -> Model:
    raw = {} if is_gguf(llm.path) else read_json(llm.path / "config.json")
    weights = forward_weights(llm.engine.runner.decoder)
    return Model(
        name=name,
        parameters=count_parameters(llm.config),
        pass_bytes=weights.floor_bytes + 2 * llm.engine.cache.state_bytes,
        kv_bytes_per_token=kv_bytes_per_token(llm.config, llm.engine.cache.kv_dtype),
        dtype=str(llm.dtype),
        context=llm.config.context,
        methods=(*plan.all_drafters, *(spec.name for spec in plan.peers)),
        inflated=raw.get("pronk_inflated"),
        kernels=llm.kernels,
        weights=weights.formats,
        weight_bits=weights.bits,
        kv_dtype=str(llm.engine.cache.kv_dtype),
        load_seconds=load_seconds,
    )


def _start_peer(
    spec: PeerSpec, llm: LLM, python: str | None, trace: Trace, stack: ExitStack
) -> Method:
    """Start a peer and record its versions and settings; ``stack`` closes the peer.

    If the peer does not start, its method fails with the same error for every prompt.
    """
    threads = num_threads() * llm.workers
    peer = Peer(spec, llm.path, dtype=str(llm.dtype), threads=threads, python=python)
    stack.callback(peer.close)
    method = PeerMethod(peer, llm.config.eos_ids)
    try:
        began = perf_counter()
        notes = peer.load() | {"load_seconds": f"{perf_counter() - began:.2f}"}
    except PeerError as error:
        method.error = error
        notes = {"error": str(error)}
    trace.add(PeerRecord(spec.name, notes))
    return method


def resumable_records(
    records: Sequence[Record], arguments: Mapping[str, Any], path: Path
) -> list[Record]:
    """Return the records that a continued benchmark keeps: all but those of unfinished prompts.

    ``arguments`` are the options of the command as JSON values; messages name the trace by
    ``path``. Raises OptionError if the benchmark had other options, or ran on another machine or
    with other versions.
    """
    start = records[0]
    assert isinstance(start, Start)
    hardware = describe_hardware(str(arguments["device"]))
    # The number of threads is not compared, because it is set only when a model is loaded.
    is_same_machine = all(
        start.hardware.get(name) == value for name, value in hardware.items() if name != "threads"
    )
    if start.versions != versions() or not is_same_machine:
        msg = (
            f"resume: expected the machine and the versions of {path}, found others; "
            "use another trace"
        )
        raise OptionError(msg)
    before = _binding_options(start.arguments)
    now = _binding_options(arguments)
    if before != now:
        names = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
        msg = (
            f"resume: expected the options of {path}, found others: {', '.join(names)}; use "
            "another trace"
        )
        raise OptionError(msg)
    finished = _finished(records)
    kept: list[Record] = []
    for model, record in with_models(records):
        if isinstance(record, End):
            continue
        if isinstance(record, (Sample, Skip, DivergenceRecord)):
            if (model, record.task, record.id) in finished:
                kept.append(record)
        else:
            kept.append(record)
    return kept


def _binding_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a continued benchmark must repeat."""
    return {name: value for name, value in arguments.items() if name not in _FREE_OPTIONS}


def remaining(
    tasks: Mapping[str, Sequence[Prompt]], records: Sequence[Record], model: str
) -> dict[str, list[Prompt]]:
    """Return the prompts whose runs on a model are not all in ``records``."""
    finished = _finished(records)
    return {
        task: [prompt for prompt in prompts if (model, task, prompt.id) not in finished]
        for task, prompts in tasks.items()
    }


def _finished(records: Sequence[Record]) -> set[tuple[str, str, str]]:
    """Return model, task and id of the finished prompts, and of each of their turns."""
    finished: set[tuple[str, str, str]] = set()
    for model, record in with_models(records):
        if isinstance(record, Finished):
            finished.update((model, record.task, name) for name in (record.id, *record.names))
    return finished
