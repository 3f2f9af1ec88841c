"""Raw measurements of a benchmark, one record after the other, and the trace file that stores them.

All metrics are computed from these records alone (:mod:`pronk.lab.bench.figures`), so that a saved
trace reproduces the same tables and reports. A trace is a file of JSON lines. It is flushed after
every record: a benchmark that is killed leaves a trace that can be read up to its last complete
line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TextIO, get_args

from pronk import OptionError
from pronk.base import describe_error, read_json_lines, refuse, replace_file
from pronk.serving import GainStats, StepStats

FORMAT = "pronk-bench/2"

# Name of plain decoding, the method with which all other methods are compared.
PLAIN = "autoregressive"


@dataclass(frozen=True)
class Start:
    """First record of a benchmark: time, command and machine."""

    started: str  # start of the benchmark: ISO 8601, UTC
    arguments: dict[str, Any]  # options of the command, seed included
    versions: dict[str, str]  # version by name: pronk, Python, torch and other packages
    hardware: dict[str, Any]  # from :func:`~pronk.lab.bench.machine.describe_hardware`
    format: str = FORMAT


@dataclass(frozen=True)
class Model:
    """A loaded model; the following records, up to the next ``Model``, belong to it.

    Fields with a default are missing in older traces.
    """

    name: str  # folder or id of the model, as the user wrote it
    parameters: int
    # Bytes of the tensors that a forward pass reads as a whole: in the model's files, or in memory
    # if the weights take less there. An embedding table counts only if it is also the output head.
    pass_bytes: int
    # Bytes of KV cache that a forward pass reads for each token of the context.
    kv_bytes_per_token: int
    dtype: str  # data type of the weights that are not quantized
    context: int  # maximum number of tokens, prompt and output together
    methods: tuple[str, ...]  # names of the measured methods, in the order of the tables
    # Entry ``pronk_inflated`` of config.json: the original of a small model that was padded to a
    # large shape. ``None`` for other models.
    inflated: dict[str, Any] | None = None
    # Instruction set of pronk's kernels; "torch": torch's operators, in traces of 0.1.
    kernels: str = "torch"
    weights: str = ""  # formats of the matrices, most bytes first, such as "int4 in groups of 32"
    weight_bits: float | None = None  # mean bits per parameter of the matrices, scales included
    kv_dtype: str = ""
    load_seconds: float | None = None  # time to load the model


@dataclass(frozen=True)
class PeerRecord:
    """Versions and settings of a peer: a method of another engine, in a process of its own."""

    method: str  # name of the peer, as the user wrote it
    notes: dict[str, str]  # versions and settings by name; ``{"error": …}`` if it did not start


@dataclass(frozen=True)
class Bandwidth:
    """One measurement of the bandwidth of reading memory."""

    bytes_per_second: float


@dataclass(frozen=True)
class PassTime:
    """Duration of one forward pass over ``rows`` rows."""

    rows: int
    seconds: float


@dataclass(frozen=True)
class Skip:
    """A prompt that is not measured, and the reason."""

    id: str  # id of the prompt
    task: str
    reason: str


@dataclass(frozen=True)
class Sample:
    """Output and measurements of one method for one prompt, in one repeat.

    Times are in seconds. ``None``: not known.
    """

    task: str
    id: str  # id of the prompt, or of one turn of a conversation
    method: str  # a drafter or a peer (another engine), as the user wrote it
    engine: str  # "pronk", or the name of the peer's engine
    temperature: float  # sampling temperature; 0 is greedy decoding
    seed: int
    repeat: int  # index of the repeat
    seconds: float = 0.0  # wall-clock time of the call for the whole batch, divided by ``batch``
    total_seconds: float = 0.0  # from the start of the request to its end
    prompt_tokens: int = 0  # number of tokens of the prompt
    tokens: tuple[int, ...] = ()  # ids of the generated tokens
    ttft: float | None = None  # from the start of the request to its first token
    steps: tuple[StepStats, ...] | None = None  # one per forward pass that generated tokens
    # Predicted and observed acceptance of the draft tokens, one entry per bin of predictions.
    trust: tuple[GainStats, ...] | None = None
    peak_memory: int | None = None  # peak memory during the call, in bytes; see PeakMemory
    batch: int = 1  # number of prompts in the batch, this one included
    # Part of ``seconds`` for sending to the model's workers and waiting for them.
    waited: float | None = None
    error: str | None = None  # reason why there is no output; ``None`` if there is one


@dataclass(frozen=True)
class DivergenceRecord:
    """First difference between an output and plain decoding's output, both of the first repeat."""

    task: str
    id: str
    method: str
    temperature: float
    position: int  # index of the first token that differs, or the length of the shorter output
    # Log-probability of plain decoding's token at ``position``, minus that of the other output's
    # token. ``None`` if the sampling parameters exclude the other output's token, or if only the
    # lengths differ.
    gap: float | None
    near_tie: bool  # whether rounding of the logits explains the difference


@dataclass(frozen=True)
class Finished:
    """All runs of a prompt are done; a resumed benchmark does not repeat them."""

    task: str
    id: str
    names: tuple[str, ...]  # ids of the prompt's turns, as in the records of its samples


@dataclass(frozen=True)
class End:
    """End of the benchmark, which may have stopped before all prompts were measured."""

    interrupted: bool


Record = (
    Start
    | Model
    | PeerRecord
    | Bandwidth
    | PassTime
    | Skip
    | Sample
    | DivergenceRecord
    | Finished
    | End
)

# Class of a record by its kind: the value of "kind" in the record's line of the trace.
_KINDS: dict[str, type[Any]] = {
    cls.__name__.removesuffix("Record").lower(): cls for cls in get_args(Record)
}
_KIND_NAMES = {cls: name for name, cls in _KINDS.items()}


def with_models(records: Iterable[Record]) -> Iterator[tuple[str, Record]]:
    """Yield each record with the name of its model, which is empty before the first model."""
    model = ""
    for record in records:
        if isinstance(record, Model):
            model = record.name
        yield model, record


@dataclass
class Trace:
    """The records of a benchmark so far, in memory and, unless ``file`` is ``None``, on disk."""

    records: list[Record] = field(default_factory=list)
    file: TextIO | None = None

    def add(self, record: Record) -> None:
        """Append a record to ``records`` and to the file.

        The first record replaces the earlier content of the file. Raises OptionError if the file
        cannot be written; ``records`` then has the record nevertheless.
        """
        self.records.append(record)
        if self.file is None:
            return
        try:
            if len(self.records) == 1:
                self.file.truncate(0)
            self.file.write(_line(record))
            self.file.flush()
        except OSError as error:
            found = f"{describe_error(error)} after {len(self.records)} records"
            self.file = None
            msg = f"trace: expected room for a record, found {found}; the results so far are shown"
            raise OptionError(msg) from error


def write_trace(path: Path, records: Sequence[Record]) -> None:
    """Write a trace file atomically: if writing fails, an older file of this name stays."""
    with replace_file(path) as file:
        file.writelines(_line(record).encode() for record in records)


def _line(record: Record) -> str:
    return json.dumps({"kind": _KIND_NAMES[type(record)]} | asdict(record)) + "\n"


def read_trace(path: Path) -> list[Record]:
    """Read the records of a trace file; a truncated last line is left out.

    Raises OptionError if the file is damaged, or is no trace of this format.
    """
    records = (_parse(row, f"{path}, line {number}") for number, row in _complete_rows(path))
    start = next(records, None)
    if not isinstance(start, Start):
        refuse(path, "expected a trace that pronk bench --trace wrote, found none", OptionError)
    if start.format != FORMAT:
        refuse(path, f"expected a trace of format {FORMAT}, found {start.format}", OptionError)
    return [start, *records]


def _complete_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    number = 0
    try:
        for number, row in read_json_lines(path):
            yield number, row
    except OptionError:
        # A benchmark that was killed may have cut off the last line; other damage is an error.
        if not path.is_file() or path.read_bytes().count(b"\n") != number:
            raise


def _parse(row: dict[str, Any], where: str) -> Record:
    cls = _KINDS.get(str(row.pop("kind", None)))
    if cls is None or not set(row) <= {f.name for f in fields(cls)}:
        refuse(where, f"expected a record of a trace, found {row!r:.60}", OptionError)
    try:
        if row.get("steps") is not None:
            row["steps"] = tuple(StepStats(*step) for step in row["steps"])
        if row.get("trust") is not None:
            row["trust"] = tuple(GainStats(*counts) for counts in row["trust"])
        for name in {"tokens", "methods", "names"} & set(row):
            row[name] = tuple(row[name])
        record: Record = cls(**row)
    except TypeError as error:
        msg = (
            f"{where}: expected a whole record, found one with missing or invalid fields; use "
            "another trace"
        )
        raise OptionError(msg) from error
    return record
