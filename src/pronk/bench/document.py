"""The one document that a benchmark gives: what ``--json`` writes and what tables and reports are made from.

Every figure is taken over the prompts that *both* the method and plain decoding finished, with the same repeats; what
failed is counted beside it. Times are in seconds, sizes in bytes. ``None`` stands for what was not or cannot be
measured: a peer tells nothing of its steps.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = [
    "ALL",
    "FORMAT",
    "PLAIN",
    "SOUND",
    "Document",
    "Failure",
    "Figures",
    "Latency",
    "ModelResult",
    "PassCost",
    "Range",
    "Split",
]

FORMAT = "pronk-bench/1"

# The method that all others are compared with.
PLAIN = "autoregressive"

# What stands for all tasks together, and for all without the prompts whose plain output repeats itself.
ALL = "all"
SOUND = "sound"


@dataclass(frozen=True)
class Range:
    """A median over repeats, and half of the distance from the least to the greatest."""

    median: float
    spread: float


@dataclass(frozen=True)
class Latency:
    """Percentiles in seconds."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class Split:
    """Shares of the time: in the drafter, in the target's passes, and in all that is around them."""

    draft: float
    target: float
    host: float


@dataclass(frozen=True)
class PassCost:
    """What a pass over ``rows`` rows costs: seconds, and as a multiple of the pass over one row."""

    rows: int
    seconds: float
    ratio: float


@dataclass(frozen=True)
class Failure:
    """A prompt that was not measured, and why."""

    id: str
    reason: str


@dataclass(frozen=True)
class Figures:
    """One method on one task at one temperature.

    Attributes:
        task: a task's name; :data:`ALL` and :data:`SOUND` are over all tasks, the latter without the prompts whose
            plain output repeats itself.
        method: a drafter or a peer, as it was asked for.
        engine: ``"pronk"``, or the peer's name.
        temperature: of the sampling; 0 is greedy.
        prompts: how many prompts the figures are taken over, of ``asked``.
        tokens: generated tokens of one repeat.
        tokens_per_second: the prompt's time included.
        speedup: against plain decoding, in the same repeat.
        decode_speedup: the same without the time to the first token.
        over_floor: time of a step after the first, its drafting included, over the time to read the weights and the
            keys and values once.
        steps: passes of the target of one repeat; ``S``: tokens per pass.
        alpha: acceptance at the first position; ``acceptance``: at each; ``ctar``: share of the steps whose first
            1, 2, 3, … guesses were all accepted.
        gain_stats: of guesses that were said to be about equally likely, given that their parent was right: what was said in
            the mean, the share that was right, and how many.
        rows_per_pass: mean rows of a pass after the first.
        cost_coefficient: time of drafting one position over the time of a plain pass.
        expected_speedup: what ``alpha``, the drafted depth and the cost coefficient let expect.
        verify_cost: mean time of a pass over that of a plain pass.
        ttft: of the prompts, median and spread over repeats of their mean.
        itl: inter-token latency: a step's wait, shared by its tokens.
        split: where the time went.
        peak_memory: of the process that ran the method.
        waited: share of the time that went into other processes of the model: telling them, and waiting for them.
        same: outputs equal to plain decoding's, of ``compared``; ``near_ties`` of the others part at a near tie.
            Plain decoding's own are compared with its first repeat.
        repeated: share of the 4-grams that occurred before in their output.
        degenerated: outputs that repeat themselves more than the document's threshold.
    """

    task: str
    method: str
    engine: str
    temperature: float
    prompts: int
    asked: int
    failures: tuple[Failure, ...] = ()
    tokens: int = 0
    tokens_per_second: Range | None = None
    speedup: Range | None = None
    decode_speedup: Range | None = None
    over_floor: float | None = None
    steps: int | None = None
    S: float | None = None
    alpha: float | None = None
    drafted: int | None = None
    accepted: int | None = None
    acceptance: tuple[float | None, ...] = ()
    ctar: tuple[float, ...] = ()
    gain_stats: tuple[tuple[float, float, int], ...] = ()
    rows_per_pass: float | None = None
    cost_coefficient: float | None = None
    expected_speedup: float | None = None
    verify_cost: float | None = None
    ttft: Range | None = None
    itl: Latency | None = None
    split: Split | None = None
    peak_memory: int | None = None
    waited: float | None = None
    same: int | None = None
    compared: int | None = None
    near_ties: int | None = None
    repeated: float | None = None
    degenerated: int | None = None


@dataclass(frozen=True)
class ModelResult:
    """All figures of one model.

    Attributes:
        name: as it was asked for.
        parameters: how many.
        pass_bytes: what a pass reads at least: every matrix but the embedding's other rows, as it is kept.
        kv_bytes_per_token: what a pass reads beside them for each token of the context.
        dtype: of its weights; of quantized ones, what is not quantized.
        weights: how the matrices are kept, what weighs most first: ``int4 in groups of 32, int8 in groups of 128``.
        weight_bits: bits of memory for each number of a matrix, scales included.
        kv_dtype: of the KV cache.
        context: positions that it has.
        kernels: what computes: the instruction set of pronk's kernels, or ``"torch"``.
        inflated: the entry that ``benchmarks/inflate.py`` leaves in ``config.json``: real acceptance, simulated size.
        bandwidth: bytes per second of reading memory, measured between the prompts.
        pass_cost: a pass against its number of rows.
        peers: what each peer says of itself: versions and settings, or why it is missing.
        skipped: prompts that do not fit the model's context.
    """

    name: str
    parameters: int
    pass_bytes: int
    kv_bytes_per_token: int
    dtype: str
    weights: str
    weight_bits: float | None
    kv_dtype: str
    context: int
    kernels: str
    inflated: dict[str, Any] | None
    bandwidth: Range | None
    pass_cost: tuple[PassCost, ...]
    peers: dict[str, dict[str, str]]
    skipped: tuple[Failure, ...]
    figures: tuple[Figures, ...]

    @property
    def kept(self) -> str | None:
        """How matrices are kept, at how many bits each number, and the cache; ``None`` if all in :attr:`dtype`."""
        parts = []
        if self.weights not in ("", self.dtype) and self.weight_bits is not None:
            parts.append(f"{self.weights}: {self.weight_bits:.2f} bits a weight")
        if self.kv_dtype == "int8":
            parts.append("cache int8")
        return ", ".join(parts) or None


@dataclass(frozen=True)
class Document:
    """A benchmark.

    Attributes:
        started: in ISO 8601, UTC.
        arguments: the command's, the seed among them.
        versions: of pronk, Python, torch and what else took part.
        hardware: the processor's name, its cores, the threads used, the memory.
        degenerate_above: the share of repeated 4-grams above which an output counts as degenerated.
        harness_share: time of the harness itself over that of the methods' runs.
        interrupted: whether it was stopped before its end.
    """

    started: str
    arguments: dict[str, Any]
    versions: dict[str, str]
    hardware: dict[str, Any]
    degenerate_above: float
    harness_share: float
    interrupted: bool
    models: tuple[ModelResult, ...] = field(default=())

    @property
    def threads(self) -> str:
        """Who computes: ``2 threads``, or ``2 workers (tree), threads of each: 1``."""
        count, workers = self.hardware.get("threads"), self.arguments.get("workers", 1)
        if workers == 1:
            return f"{count} threads"
        return f"{workers} workers ({self.arguments.get('parallel')}), threads of each: {count}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"format": FORMAT, **asdict(self)}
