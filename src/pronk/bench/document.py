"""Result of a benchmark as dataclasses: ``--json`` writes it; tables, plots and report show it.

All metrics of a method are taken over the prompts that *both* the method and plain decoding finished in every repeat;
failed prompts are counted separately. Times are in seconds, sizes in bytes. ``None`` means not measured: a peer, for
example, does not report its forward passes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pronk.bench.records import PLAIN, Model, Start

__all__ = ["ALL", "SOUND", "Document", "Failure", "Figures", "Latency", "ModelResult", "PassCost", "Range", "Split"]

# Names of two aggregates over all tasks. SOUND leaves out prompts on which plain decoding repeats itself (a loop).
ALL = "all"
SOUND = "sound"


@dataclass(frozen=True)
class Range:
    """Median over the repeats, and half the distance from the smallest value to the largest."""

    median: float
    spread: float


@dataclass(frozen=True)
class Latency:
    """Percentiles of a latency in seconds."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class Split:
    """Fractions of the time, 0..1: drafting, forward passes of the target model, everything else."""

    draft: float
    target: float
    host: float


@dataclass(frozen=True)
class PassCost:
    """Time of a forward pass over ``rows`` rows: seconds, and ratio to the time with the fewest rows."""

    rows: int
    seconds: float
    ratio: float


@dataclass(frozen=True)
class Failure:
    """A prompt that was not measured, and the reason."""

    id: str
    reason: str


@dataclass(frozen=True)
class Figures:
    """Metrics of one method on one task at one temperature."""

    task: str  # a task, or one of the aggregates ALL and SOUND
    method: str  # a drafter or a peer, as the user wrote it
    engine: str  # "pronk", or the name of the peer's engine
    temperature: float  # 0 is greedy
    prompts: int  # number of prompts that the metrics are taken over
    asked: int  # number of prompts, failed ones included
    failures: tuple[Failure, ...] = ()
    tokens: int = 0  # number of generated tokens in one repeat
    tokens_per_second: Range | None = None  # generated tokens / (prefill + decoding time)
    speedup: Range | None = None  # throughput relative to plain decoding in the same repeat
    decode_speedup: Range | None = None  # speedup without the first step, which includes the prefill
    # Mean time of a step after the first, drafting included / time to read the weights and the KV cache once.
    over_floor: float | None = None
    steps: int | None = None  # forward passes of the target model in one repeat
    S: float | None = None  # mean tokens per forward pass
    alpha: float | None = None  # acceptance rate at the first draft position
    drafted: int | None = None  # number of verified draft tokens in one repeat
    accepted: int | None = None  # number of accepted draft tokens in one repeat
    acceptance: tuple[float | None, ...] = ()  # acceptance rate at each draft position
    ctar: tuple[float, ...] = ()  # share of the steps whose first 1, 2, 3, … draft tokens were accepted
    # Calibration of predictions, one entry per bin of draft tokens: mean predicted probability of acceptance, observed
    # acceptance rate, number of draft tokens. Only draft tokens with an accepted parent are counted.
    trust: tuple[tuple[float, float, int], ...] = ()
    rows_per_pass: float | None = None  # mean number of rows of the forward passes after the prefill
    cost_coefficient: float | None = None  # time to draft one position / time of a plain forward pass
    expected_speedup: float | None = None  # predicted from alpha, the draft depth and the cost coefficient
    verify_cost: float | None = None  # mean time of a forward pass / that of plain decoding
    ttft: Range | None = None  # time to the first token: mean over the prompts, median over the repeats
    itl: Latency | None = None  # time between tokens; the tokens of a step share its time equally
    split: Split | None = None
    peak_memory: int | None = None  # peak memory in bytes of the process that ran the method
    waited: float | None = None  # share of the time in communication with the model's workers, waiting included
    # Number of prompts whose outputs in all repeats equal plain decoding's first one, out of ``compared`` prompts.
    same: int | None = None
    compared: int | None = None
    near_ties: int | None = None  # number of unequal outputs whose first difference is a near tie
    repeated: float | None = None  # mean share of an output's 4-grams that occurred before in that output
    degenerated: int | None = None  # number of outputs that count as loops

    @property
    def is_plain(self) -> bool:
        """Whether the method is plain decoding."""
        return self.method == PLAIN

    @property
    def is_peer(self) -> bool:
        """Whether another engine ran the method."""
        return self.engine != "pronk"


@dataclass(frozen=True, kw_only=True)
class ModelResult(Model):
    """A model and all metrics measured on it."""

    bandwidth: Range | None  # bytes per second of reading memory, measured between the prompts
    pass_cost: tuple[PassCost, ...]  # time of a forward pass by its number of rows
    peers: dict[str, dict[str, str]]  # versions and settings of each peer, or its error
    skipped: tuple[Failure, ...]  # prompts that do not fit the model's context
    figures: tuple[Figures, ...]  # ordered by task, temperature and method

    @property
    def temperatures(self) -> list[float]:
        """Sampling temperatures in the order of the measurement."""
        return list(dict.fromkeys(figures.temperature for figures in self.figures))

    @property
    def storage(self) -> str | None:
        """Description of the quantization of weights and KV cache; ``None`` if everything is in :attr:`dtype`."""
        descriptions = []
        if self.weights not in ("", self.dtype) and self.weight_bits is not None:
            descriptions.append(f"{self.weights}: {self.weight_bits:.2f} bits a weight")
        if self.kv_dtype == "int8":
            descriptions.append("cache int8")
        return ", ".join(descriptions) or None


@dataclass(frozen=True, kw_only=True)
class Document(Start):
    """Result of a benchmark."""

    degenerate_above: float  # share of repeated 4-grams above which an output counts as a loop
    harness_share: float  # time of the harness divided by the time of the methods
    interrupted: bool  # whether the benchmark stopped before its end
    models: tuple[ModelResult, ...] = ()

    @property
    def threads(self) -> str:
        """Threads and processes of the model: ``2 threads``, or ``2 workers (tree), threads of each: 1``."""
        count, workers = self.hardware.get("threads"), self.arguments.get("workers", 1)
        if workers == 1:
            return f"{count} threads"
        return f"{workers} workers ({self.arguments.get('parallel')}), threads of each: {count}"

    def to_dict(self) -> dict[str, Any]:
        """Return the document as plain JSON values."""
        return asdict(self)
