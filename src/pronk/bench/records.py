"""What a benchmark measured, one record after the other, as it happened.

All figures are computed from these records alone, so that a saved trace gives the same tables and reports again.
Saved, a trace is a file of JSON lines: it grows while the benchmark runs, and one that was cut off can be read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TextIO

from pronk.bench.document import FORMAT, PLAIN
from pronk.engine.stats import GainStats, StepStats
from pronk.errors import OptionError
from pronk.files.json_lines import read_json_lines

__all__ = [
    "PLAIN",
    "Bandwidth",
    "DivergenceRecord",
    "End",
    "Model",
    "PassTime",
    "PeerRecord",
    "Record",
    "Sample",
    "Skip",
    "Start",
    "StepTrace",
    "read_trace",
]


@dataclass(frozen=True)
class Start:
    """The benchmark begins; see :class:`~pronk.bench.document.Document`."""

    started: str
    arguments: dict[str, Any]
    versions: dict[str, str]
    hardware: dict[str, Any]
    format: str = FORMAT


@dataclass(frozen=True)
class Model:
    """A model was loaded; what follows is about it. See :class:`~pronk.bench.document.ModelResult`.

    ``methods`` are in the order in which they are shown. Traces from before there were kernels, or weights of several
    kinds, do not name them.
    """

    name: str
    parameters: int
    pass_bytes: int
    kv_bytes_per_token: int
    dtype: str
    context: int
    methods: tuple[str, ...]
    inflated: dict[str, Any] | None = None
    kernels: str = "torch"
    weights: str = ""
    weight_bits: float | None = None
    kv_dtype: str = ""


@dataclass(frozen=True)
class PeerRecord:
    """What a peer says of itself: versions and settings, or why it is missing."""

    method: str
    notes: dict[str, str]


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second of reading memory."""

    bytes_per_second: float


@dataclass(frozen=True)
class PassTime:
    """Seconds of one pass over ``rows`` rows."""

    rows: int
    seconds: float


@dataclass(frozen=True)
class Skip:
    """A prompt that is not measured."""

    id: str
    task: str
    reason: str


@dataclass(frozen=True)
class Sample:
    """One method's output for one prompt, in one repeat.

    Attributes:
        task, id: the prompt's.
        method: as it was asked for; ``engine`` is ``"pronk"`` or the peer's name.
        temperature, seed: of the request.
        repeat: its number, from 0.
        seconds: the time of the batch it was in, shared by the batch's prompts.
        total_seconds: from the request's start to its end.
        prompt_tokens: how many.
        tokens: the output.
        ttft: seconds to the first token, if known.
        steps: the target's passes, if known.
        gain_stats: how likely guesses were said to be, and how often they were right, if known; see
            :class:`~pronk.engine.stats.Stats`.
        peak_memory: bytes of the process, if known.
        batch: prompts that shared its passes, itself among them.
        waited: those of ``seconds`` that went into other processes of the model, if it has some.
        error: why there is no output.
    """

    task: str
    id: str
    method: str
    engine: str
    temperature: float
    seed: int
    repeat: int
    seconds: float = 0.0
    total_seconds: float = 0.0
    prompt_tokens: int = 0
    tokens: tuple[int, ...] = ()
    ttft: float | None = None
    steps: tuple[StepStats, ...] | None = None
    gain_stats: tuple[GainStats, ...] | None = None
    peak_memory: int | None = None
    batch: int = 1
    waited: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class DivergenceRecord:
    """An output that parts from plain decoding's.

    Attributes:
        task, id, method, temperature: of the sample, whose first repeat it is.
        position: index of the first token that differs, or the shorter one's length.
        gap: by how much plain decoding prefers its own token, in log-probability; ``None`` if the other's is not among
            the likeliest.
        near_tie: whether rounding explains it.
    """

    task: str
    id: str
    method: str
    temperature: float
    position: int
    gap: float | None
    near_tie: bool


@dataclass(frozen=True)
class End:
    """The benchmark ended, perhaps early; ``harness_share`` is the harness's time over the measured time."""

    harness_share: float
    interrupted: bool


Record = Start | Model | PeerRecord | Bandwidth | PassTime | Skip | Sample | DivergenceRecord | End

# What the lines of a trace call them.
_KINDS: dict[str, type[Any]] = {
    "start": Start,
    "model": Model,
    "peer": PeerRecord,
    "bandwidth": Bandwidth,
    "passtime": PassTime,
    "skip": Skip,
    "sample": Sample,
    "divergence": DivergenceRecord,
    "end": End,
}
_NAMES = {cls: name for name, cls in _KINDS.items()}


@dataclass
class StepTrace:
    """The records so far, and the file they go to as well."""

    records: list[Record] = field(default_factory=list)
    file: TextIO | None = None

    @property
    def measured(self) -> bool:
        """Whether any method ran on any prompt."""
        return any(isinstance(record, Sample) for record in self.records)

    def add(self, record: Record) -> None:
        """Keep a record; on disk at once, so that nothing is lost when the benchmark is killed."""
        self.records.append(record)
        if self.file is not None:
            self.file.write(json.dumps({"kind": _NAMES[type(record)]} | asdict(record)) + "\n")
            self.file.flush()


def read_trace(path: Path) -> list[Record]:
    """The records of a saved trace; a last line that was cut off is left out.

    Raises:
        OptionError: not a trace, or one of another format.
    """
    read = _read(path)
    start = next(read, None)
    if not isinstance(start, Start):
        msg = f"{path}: expected a trace that pronk bench --trace wrote, found none"
        raise OptionError(msg)
    if start.format != FORMAT:
        msg = f"{path}: expected a trace of format {FORMAT}, found {start.format}"
        raise OptionError(msg)
    return [start, *read]


def _read(path: Path) -> Iterator[Record]:
    rows, number = read_json_lines(path), 0
    while True:
        try:
            number, row = next(rows)
        except StopIteration:
            return
        except OptionError:
            if path.is_file() and path.read_bytes().count(b"\n") == number:  # the last line, which has no end
                return
            raise
        yield _parse(row, f"{path}, line {number}")


def _parse(row: dict[str, Any], where: str) -> Record:
    cls = _KINDS.get(str(row.pop("kind", None)))
    if cls is None or not set(row) <= {each.name for each in fields(cls)}:
        msg = f"{where}: expected a record of a trace, found {row!r:.60}"
        raise OptionError(msg)
    try:
        if row.get("steps") is not None:
            row["steps"] = tuple(StepStats(*step) for step in row["steps"])
        if row.get("trust") is not None:
            row["trust"] = tuple(GainStats(*each) for each in row["trust"])
        for name in {"tokens", "methods"} & set(row):
            row[name] = tuple(row[name])
        record: Record = cls(**row)
    except TypeError as error:
        msg = f"{where}: expected a whole record, found {error}"
        raise OptionError(msg) from error
    return record
