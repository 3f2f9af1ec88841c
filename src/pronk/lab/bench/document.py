"""Result of a benchmark as dataclasses: ``--json`` writes it; tables, plots and report show it.

A *method* is plain decoding, a drafter, or a peer (a decoding method of another engine). Its
metrics cover the prompts that *both* the method and plain decoding finished in every repeat; other
prompts count as failed. Times are in seconds, sizes in bytes. ``None`` means not measured: a peer,
for example, does not report its forward passes.
"""

from __future__ import annotations

from dataclasses import dataclass

from pronk.lab.bench.records import PLAIN, Model, Start

# Names of two aggregates over all tasks: all prompts, and all prompts on which plain decoding does
# not end in a loop.
ALL = "all"
SOUND = "sound"


@dataclass(frozen=True)
class Range:
    """Median over the repeats, and half the distance from the smallest value to the largest."""

    median: float
    spread: float


@dataclass(frozen=True)
class Latency:
    """Median, 90th and 99th percentile of a latency, in seconds."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class Split:
    """Fractions 0..1 of a method's time, with the sum 1."""

    draft: float  # fraction of the time that the drafter takes
    target: float  # fraction for forward passes of the target model
    host: float  # fraction for the rest: scheduling, sampling, detokenizing


@dataclass(frozen=True)
class PassCost:
    """Time of a forward pass of the target model over a number of rows."""

    rows: int
    seconds: float  # duration of the forward pass, median over the measurements
    ratio: float  # ``seconds`` divided by those of the smallest number of rows measured


@dataclass(frozen=True)
class Failure:
    """A prompt that was skipped or that failed, and the reason."""

    id: str  # id of the prompt
    reason: str


@dataclass(frozen=True)
class Figures:
    """Metrics of one method on one task at one temperature."""

    task: str  # a task, or one of the aggregates ALL and SOUND
    method: str  # a drafter or a peer, as the user wrote it
    engine: str  # "pronk", or the name of the peer's engine
    temperature: float  # sampling temperature; 0 is greedy decoding
    prompts: int  # number of prompts that the metrics cover
    asked: int  # number of prompts given to the method, failed ones included
    failures: tuple[Failure, ...] = ()  # prompts without an output, left out of the metrics
    tokens: int = 0  # number of generated tokens in one repeat
    tokens_per_second: Range | None = None  # generated tokens / (prefill + decoding time)
    # ``tokens_per_second``, divided by that of plain decoding in the same repeat.
    speedup: Range | None = None
    # ``speedup`` without the first step of each request (prefill).
    decode_speedup: Range | None = None
    # Mean time of a step with its drafting, first steps (prefill) left out, divided by the time to
    # read weights and KV cache once.
    over_floor: float | None = None
    steps: int | None = None  # number of forward passes that generated tokens, in one repeat
    S: float | None = None  # mean number of tokens per step; plain decoding has 1
    alpha: float | None = None  # acceptance rate of the first draft token of a step
    drafted: int | None = None  # number of verified draft tokens in one repeat
    accepted: int | None = None  # number of accepted draft tokens in one repeat
    # Acceptance rate of draft tokens at depth 1, 2, 3, … of the tree.
    acceptance: tuple[float | None, ...] = ()
    # Calibration, one entry per bin of draft tokens with similar predictions: mean predicted
    # probability of acceptance, observed acceptance rate, number of draft tokens. Only draft tokens
    # with an accepted parent are counted.
    trust: tuple[tuple[float, float, int], ...] = ()
    # Mean number of rows of the forward passes after the prefill.
    rows_per_pass: float | None = None
    # Time to draft one level of the tree, divided by the time of a plain forward pass.
    cost_coefficient: float | None = None
    # Speed-up predicted from alpha, the depth of the trees and ``cost_coefficient``.
    expected_speedup: float | None = None
    # Mean time of a forward pass, divided by that of plain decoding.
    verify_cost: float | None = None
    ttft: Range | None = None  # seconds to the first token, mean over the prompts
    itl: Latency | None = None  # seconds per token; the tokens of a step share its time equally
    split: Split | None = None  # fractions of the time for drafting, the target and the rest
    # Peak memory in bytes, the largest over the prompts; see PeakMemory. That of a peer is measured
    # in the peer's process.
    peak_memory: int | None = None
    # Fraction 0..1 of the method's time for sending to workers and waiting for them.
    waited: float | None = None
    # Number of prompts, out of ``compared``, whose outputs in all repeats are equal to the output
    # of plain decoding in the first repeat.
    same: int | None = None
    compared: int | None = None  # number of prompts whose outputs were compared
    # Number of the ``compared - same`` prompts whose first difference is a near tie.
    near_ties: int | None = None
    # Mean fraction of an output's 4-grams that occurred before in that output.
    repeated: float | None = None
    # Number of outputs that are loops (see ``Document.degenerate_above``).
    degenerated: int | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the method is plain decoding."""
        return self.method == PLAIN


@dataclass(frozen=True, kw_only=True)
class ModelResult(Model):
    """A model and all metrics measured on it."""

    bandwidth: Range | None  # bytes per second of reading memory, measured between the prompts
    pass_cost: tuple[PassCost, ...]  # time of a forward pass, by rising number of rows
    peers: dict[str, dict[str, str]]  # by peer: its versions and settings, or ``error``
    skipped: tuple[Failure, ...]  # prompts that do not fit the model's context
    figures: tuple[Figures, ...]  # one per task, temperature and method, in this order

    @property
    def temperatures(self) -> list[float]:
        """Sampling temperatures in the order of the measurement."""
        return list(dict.fromkeys(figures.temperature for figures in self.figures))


@dataclass(frozen=True, kw_only=True)
class Document(Start):
    """Result of a benchmark."""

    degenerate_above: float  # share of repeated 4-grams above which an output counts as a loop
    interrupted: bool  # whether the benchmark stopped before its end
    models: tuple[ModelResult, ...] = ()
