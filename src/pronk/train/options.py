"""Everything that defines a training run, checked once. Light to import: ``pronk train --help`` needs it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pronk.checks import check_choice, check_integer, check_number
from pronk.errors import OptionError
from pronk.train.sources import SourceSpec

__all__ = [
    "OPTIMIZERS",
    "DataOptions",
    "DraftOptions",
    "LoopOptions",
    "ModelShape",
    "OnPolicyOptions",
    "StudentOptions",
    "TrainOptions",
    "fit_lengths",
    "option_name",
]

OPTIMIZERS = ("muon", "adamw")


@dataclass(frozen=True)
class ModelShape:
    """A Llama-architecture model with tied embeddings; ``mlp`` is the width of its gated layers.

    Raises:
        OptionError: sizes that are not positive or do not divide each other.
    """

    hidden: int = 320
    layers: int = 8
    heads: int = 10
    kv_heads: int = 2
    mlp: int = 832
    vocab: int = 4096
    context: int = 2048

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_integer("positions" if name == "context" else option_name(name), value, 1)
        if self.hidden % (2 * self.heads) or self.heads % self.kv_heads:
            msg = (
                "expected heads to divide hidden into even parts, and kv-heads to divide heads; "
                f"found hidden {self.hidden}, heads {self.heads}, kv-heads {self.kv_heads}"
            )
            raise OptionError(msg)


@dataclass(frozen=True)
class DataOptions:
    """What to read and how to mix it.

    ``dialogues`` is the share of the mixture that dialogues get, wherever they were found. ``valid`` files are
    measured on, never trained on; ``exclude`` files name prompts that no training text may share 13 words with.
    ``tokenizer_bytes`` and ``valid_tokens`` limit the text that the tokenizer and one validation look at.

    Raises:
        OptionError: no sources, no such file, or the share of dialogues is out of range.
    """

    sources: tuple[SourceSpec, ...]
    valid: tuple[Path, ...] = ()
    exclude: tuple[Path, ...] = ()
    dialogues: float = 0.05
    vocab_size: int = 4096
    tokenizer_bytes: int = 30_000_000
    valid_tokens: int = 16384
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.sources:
            msg = "expected at least one source (--source WHAT=WEIGHT), found none"
            raise OptionError(msg)
        if not 0 <= self.dialogues < 1:
            msg = f"dialogues: expected a share from 0 to below 1, found {self.dialogues}"
            raise OptionError(msg)
        for name in ("valid", "exclude"):
            for file in getattr(self, name):
                if not file.is_file():
                    found = "a folder" if file.is_dir() else "none"
                    msg = f"{name}: expected a file at {file}, found {found}; check the path"
                    raise OptionError(msg)


@dataclass(frozen=True)
class LoopOptions:
    """Settings of the training loop, whatever is trained.

    ``batch`` is in tokens per step, ``micro`` in tokens per pass (gradients are accumulated over ``batch / micro``
    passes). The last ``final_share`` of the run reads sequences of ``final_length`` tokens instead of ``length``; a
    length that no part of the run reads may be any.
    ``minutes`` on the clock (see :mod:`pronk.train.clock`) end the run early, with its schedule intact; so do
    ``patience`` evaluations in a row that are no better than the best one before them, wherever the schedule is.
    ``floor`` is the last learning rate as a share of the peak ``rate``. ``warmup`` and the intervals are in steps.

    Raises:
        OptionError: an option out of its range.
    """

    # Options that may change when a run is resumed; all others define what it computes.
    FREE: ClassVar[frozenset[str]] = frozenset(
        {"minutes", "patience", "threads", "compile", "device", "evaluate_every", "save_every", "log_every"}
    )

    steps: int = 3000
    minutes: float | None = None
    patience: int | None = None
    batch: int = 8192
    micro: int = 4096
    length: int = 256
    final_length: int = 2048
    final_share: float = 0.2
    optimizer: str = "muon"
    rate: float = 3e-3
    floor: float = 0.02
    warmup: int = 60
    weight_decay: float = 0.1
    clip: float = 1.0
    compile: bool = False
    device: str = "cpu"
    threads: int | None = None
    seed: int = 0
    evaluate_every: int = 200
    save_every: int = 100
    log_every: int = 10

    def __post_init__(self) -> None:
        names = ("steps", "batch", "micro", "evaluate_every", "save_every", "log_every")
        self._check(check_integer, (*names, *self._given("patience", "threads")), 1)
        self._check(check_integer, ("warmup", "seed"), 0)
        self._check(check_number, ("rate", "clip", *self._given("minutes")), 0, above=True)
        self._check(check_number, ("weight_decay",), 0)
        self._check(check_number, ("floor", "final_share"), 0, 1)
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        self._check(check_integer, self.lengths, 1, self._longest())
        self._check(check_integer, ("length", "final_length"), 1)
        if self.batch % self.micro:
            msg = f"micro: expected a divisor of batch {self.batch}, found {self.micro}"
            raise OptionError(msg)
        for name, value in self.lengths.items():
            if self.micro % value:
                msg = f"micro: expected a multiple of {option_name(name)} {value}, found {self.micro}"
                raise OptionError(msg)

    def _given(self, *names: str) -> list[str]:
        """Those of the options that have a value."""
        return [name for name in names if getattr(self, name) is not None]

    def _check(self, check: Callable[..., object], names: Iterable[str], *limits: float | None, **how: bool) -> None:
        """Check each of the options, by its name on the command line."""
        for name in names:
            check(option_name(name), getattr(self, name), *limits, **how)

    @property
    def lengths(self) -> dict[str, int]:
        """Tokens of the sequences that are read, by the fields that say so: the first part's, then the last one's."""
        shares = {"length": 1 - self.final_share, "final_length": self.final_share}
        return {name: getattr(self, name) for name, share in shares.items() if share > 0}

    @property
    def first_length(self) -> int:
        """Tokens of the sequences that the run begins with."""
        return next(iter(self.lengths.values()))

    @property
    def last_length(self) -> int:
        """Tokens of the sequences that the run ends with."""
        return [*self.lengths.values()][-1]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that is read."""
        return max(self.lengths.values())

    @property
    def least_text(self) -> int:
        """Tokens that a text must have for one sequence in each part of the run."""
        shares = {"length": 1 - self.final_share, "final_length": self.final_share}
        return 2 + max(math.ceil((value + 1) / shares[name]) for name, value in self.lengths.items())

    def defining(self) -> dict[str, Any]:
        """The options that a resumed run must have as before."""
        return {name: value for name, value in asdict(self).items() if name not in self.FREE}

    def _longest(self) -> int | None:
        """Positions that no sequence may exceed."""
        return None


@dataclass(frozen=True)
class TrainOptions(LoopOptions):
    """The loop's settings for a language model of ``shape``, whose context no sequence may exceed.

    ``heads`` (``HeadsShape``) are trained with it to predict the tokens after the next.
    """

    shape: ModelShape = field(default_factory=ModelShape)
    heads: Any = None

    def _longest(self) -> int | None:
        return self.shape.context


@dataclass(frozen=True)
class StudentOptions(LoopOptions):
    """The loop's settings for a drafter that learns from a frozen target.

    ``shape`` is what its kind is made by; no sequence may exceed the target's ``context``. ``share`` of the training
    sequences are the target's own continuations. ``hard`` is the weight of the ordinary cross-entropy on the text; the
    rest is that of the divergence from the target. ``num_tokens`` guesses a step are made when the decoding engine
    measures the drafter; with 0 it does not.
    """

    FREE: ClassVar[frozenset[str]] = LoopOptions.FREE | {"num_tokens"}

    shape: Any = None
    context: int = 2048
    share: float = 0.5
    hard: float = 0.0
    num_tokens: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check(check_number, ("share", "hard"), 0, 1)
        self._check(check_integer, ("num_tokens",), 0, 64)

    def _longest(self) -> int | None:
        return self.context


@dataclass(frozen=True)
class DraftOptions(StudentOptions):
    """The loop's settings for a draft model of ``shape``."""

    shape: ModelShape = field(default_factory=ModelShape)

    def _longest(self) -> int | None:
        return min(self.shape.context, self.context)  # the target reads the same sequences


@dataclass(frozen=True)
class OnPolicyOptions:
    """What the target is to write.

    ``tokens`` in all, after prompts of up to ``prompt`` tokens from the text, up to ``length`` tokens after each, one
    third of them greedy and the rest sampled. ``batch`` prompts are continued together, and an interruption loses no
    more. ``held_out`` prompts are kept to measure on. ``at_most``: a run with a time limit may do with less of it all.

    Raises:
        OptionError: an option out of its range.
    """

    tokens: int = 1_000_000
    prompt: int = 192
    length: int = 192
    batch: int = 96
    held_out: int = 24
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    seed: int = 0
    at_most: bool = False

    def __post_init__(self) -> None:
        for name, least in (("tokens", 0), ("prompt", 8), ("length", 1), ("batch", 1), ("held_out", 0)):
            check_integer("on-policy" if name == "tokens" else option_name(name), getattr(self, name), least)


def fit_lengths(settings: Mapping[str, Any], context: int) -> dict[str, Any]:
    """The loop's settings with whatever is ``None`` of ``micro``, ``length`` and ``final_length`` filled in.

    By default they are those of :class:`LoopOptions`, or the largest below, if it is more than half of that, that fits:
    passes divide the batch and are made of whole sequences, and no sequence exceeds ``context``. Where nothing fits the
    options' own rules say what is wrong.
    """
    found, share = dict(settings), settings["final_share"]
    used = [name for name, part in (("length", 1 - share), ("final_length", share)) if part > 0]
    given = [found[name] for name in used if found[name] is not None and found[name] > 0]
    batch = found["batch"]
    if found["micro"] is None:
        most = min(LoopOptions.micro, max(1, batch))
        found["micro"] = _largest(most, lambda n: batch % n == 0 and not any(n % each for each in given))
    for name, wanted in (("length", LoopOptions.length), ("final_length", LoopOptions.final_length)):
        if found[name] is None:
            found[name] = _largest(max(1, min(wanted, context, found["micro"])), lambda n: found["micro"] % n == 0)
    return found


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to ``most`` and above its half that fits, or else ``most``."""
    return next((n for n in range(most, most // 2, -1) if fits(n)), most)


def option_name(field_name: str) -> str:
    """What the command line calls a field of :class:`LoopOptions`."""
    return "lr" if field_name == "rate" else field_name.replace("_", "-")
