"""Options of training runs, checked on creation; without torch, so that ``--help`` is fast."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pronk import OptionError
from pronk.base import refuse
from pronk.base.checks import check_choice, check_integer, check_number
from pronk.train.corpus.sources import SourceSpec

OPTIMIZERS = ("muon", "adamw")


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a Llama-architecture model with tied embeddings.

    ``mlp`` is the width of its gated layers.
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
    """Sources of the text and their mixture."""

    sources: tuple[SourceSpec, ...]
    valid: tuple[Path, ...] = ()  # files of held-out text
    # files of prompts: no training text shares 13 words in a row with one
    exclude: tuple[Path, ...] = ()
    # fraction of the training text that the dialogues of all sources make up
    dialogues: float = 0.05
    vocab_size: int = 4096
    tokenizer_bytes: int = 30_000_000  # maximum size of the text that the tokenizer is trained on
    valid_tokens: int = 16384  # maximum size of a held-out set
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.sources:
            msg = "expected at least one source (--source WHAT=WEIGHT), found none"
            raise OptionError(msg)
        if not 0 <= self.dialogues < 1:
            refuse(
                "dialogues",
                f"expected a share from 0 to below 1, found {self.dialogues}",
                OptionError,
            )
        for name in ("valid", "exclude"):
            for file in getattr(self, name):
                if not file.is_file():
                    found = "a folder" if file.is_dir() else "none"
                    refuse(
                        name,
                        f"expected a file at {file}, found {found}; check the path",
                        OptionError,
                    )


@dataclass(frozen=True)
class LoopOptions:
    """Settings of the training loop; intervals and ``warmup`` are in steps."""

    # Options that a resumed run may change; the other options determine the result.
    FREE: ClassVar[frozenset[str]] = frozenset(
        {
            "minutes",
            "patience",
            "threads",
            "compile",
            "device",
            "evaluate_every",
            "save_every",
            "log_every",
        }
    )

    adamw_share: ClassVar[float] = 1.0  # learning rate of AdamW, relative to Muon's beside it

    steps: int = 3000  # the run ends after these, or earlier by one of the next two options
    minutes: float | None = None
    patience: int | None = None  # evaluations without improvement
    batch: int = 8192  # tokens per step
    micro: int = 4096  # tokens per forward pass
    length: int = 256  # tokens of a sequence
    final_length: int = 2048  # the same, in the last part of the run
    final_share: float = 0.2  # fraction of the run that the last part takes
    optimizer: str = "muon"
    rate: float = 3e-3  # peak learning rate
    floor: float = 0.02  # learning rate at the end, as a fraction of ``rate``
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
        self._check(check_number, ("rate", "clip", *self._given("minutes")), 0, exclusive_min=True)
        self._check(check_number, ("weight_decay",), 0)
        self._check(check_number, ("floor", "final_share"), 0, 1)
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        self._check(check_integer, self.lengths, 1, self._max_length())
        self._check(check_integer, ("length", "final_length"), 1)
        if self.batch % self.micro:
            refuse(
                "micro",
                f"expected a divisor of batch {self.batch}, found {self.micro}",
                OptionError,
            )
        for name, value in self.lengths.items():
            if self.micro % value:
                refuse(
                    "micro",
                    f"expected a multiple of {option_name(name)} {value}, found {self.micro}",
                    OptionError,
                )

    def _given(self, *names: str) -> list[str]:
        return [name for name in names if getattr(self, name) is not None]

    def _check(
        self,
        check: Callable[..., object],
        names: Iterable[str],
        *limits: float | None,
        **flags: bool,
    ) -> None:
        for name in names:
            check(option_name(name), getattr(self, name), *limits, **flags)

    def _check_heads(self, num_heads: int) -> None:
        """Raise unless every sequence has a token for the last of ``num_heads`` heads to predict."""
        for name, length in self.lengths.items():
            if length <= num_heads:
                msg = (
                    f"{option_name(name)}: expected at least {num_heads + 1} for {num_heads} "
                    f"heads, found {length}"
                )
                raise OptionError(msg)

    @property
    def lengths(self) -> dict[str, int]:
        """Sequence length by option, ``length`` first.

        An option for a phase of zero length is left out.
        """
        shares = {"length": 1 - self.final_share, "final_length": self.final_share}
        return {name: getattr(self, name) for name, share in shares.items() if share > 0}

    @property
    def first_length(self) -> int:
        return next(iter(self.lengths.values()))

    @property
    def last_length(self) -> int:
        return [*self.lengths.values()][-1]

    @property
    def longest(self) -> int:
        """Largest sequence length in tokens that the run uses."""
        return max(self.lengths.values())

    @property
    def min_text_tokens(self) -> int:
        """Length in tokens of the shortest training text with at least one sequence of each length."""
        shares = {"length": 1 - self.final_share, "final_length": self.final_share}
        return 2 + max(
            math.ceil((value + 1) / shares[name]) for name, value in self.lengths.items()
        )

    def defining(self) -> dict[str, Any]:
        """Return the options that a resumed run must repeat."""
        return {name: value for name, value in asdict(self).items() if name not in self.FREE}

    def _max_length(self) -> int | None:
        """Return the maximum sequence length, or ``None`` if any length is allowed."""
        return None


@dataclass(frozen=True)
class TrainOptions(LoopOptions):
    """Settings of a language model of ``shape``, with optional ``heads`` (``HeadsShape``)."""

    shape: ModelShape = field(default_factory=ModelShape)
    heads: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads is not None:
            self._check_heads(self.heads.num_heads)

    def _max_length(self) -> int | None:
        return self.shape.context


@dataclass(frozen=True)
class DrafterOptions(LoopOptions):
    """Settings of a drafter that learns from a frozen target."""

    FREE: ClassVar[frozenset[str]] = LoopOptions.FREE | {"num_tokens"}

    context: int = 2048  # of the target, in tokens
    # draft tokens per step when the engine measures the drafter; 0: no measurement
    num_tokens: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check(check_integer, ("num_tokens",), 0, 64)

    def _max_length(self) -> int | None:
        return self.context


@dataclass(frozen=True)
class StudentOptions(DrafterOptions):
    """Settings of a drafter of ``shape`` that learns from text."""

    shape: Any = None
    share: float = 0.5  # fraction of the training sequences that the target has written
    # loss: hard * (cross-entropy of the text) + (1 - hard) * (divergence from the target)
    hard: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check(check_number, ("share", "hard"), 0, 1)


@dataclass(frozen=True)
class DraftOptions(StudentOptions):
    """Settings of a draft model of ``shape``."""

    shape: ModelShape = field(default_factory=ModelShape)

    def _max_length(self) -> int | None:
        # both the draft model and the target read each sequence
        return min(self.shape.context, self.context)


@dataclass(frozen=True)
class HeadsOptions(StudentOptions):
    """Settings of ``shape.num_heads`` heads.

    Head i + 1 predicts one token further ahead than head i.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        count = self.shape.num_heads
        self._check_heads(count)
        if self.num_tokens > count:
            refuse(
                "num-tokens",
                f"expected 0 to {count}, the heads, found {self.num_tokens}",
                OptionError,
            )


@dataclass(frozen=True)
class EagleOptions(DrafterOptions):
    """Settings of an EAGLE-3 or MTP head."""

    FREE: ClassVar[frozenset[str]] = DrafterOptions.FREE | {"states"}
    adamw_share: ClassVar[float] = 0.15  # the LM head begins as the target's

    final_share: float = 0.0
    kind: str = "eagle3"  # or mtp
    depth: int = 4  # number of draft tokens that are trained
    # of draft token s, from 0: ``decay ** s``; ``dpace``: by the acceptance reached so far
    weighting: str = "decay"
    decay: float = 0.8
    # the loss compares the most frequent tokens of the answers; EAGLE-3 proposes only these
    draft_vocab: int = 8192
    mlp: int | None = None  # width of the MLP; ``None``: the target's
    # layers that an EAGLE-3 head reads; an MTP head reads the last layer
    sources: tuple[int, ...] | None = None
    states: Path | None = None  # folder for the target's outputs, so that they are computed once

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("kind", self.kind, ("eagle3", "mtp"))
        self._check(check_integer, ("depth",), 1, 16)
        self._check(check_integer, ("draft_vocab", *self._given("mlp")), 1)
        self._check(check_number, ("decay",), 0, 1, exclusive_min=True)
        check_choice("weighting", self.weighting, ("decay", "dpace"))


@dataclass(frozen=True)
class OnPolicyOptions:
    """Amount and sampling of the target's own text."""

    tokens: int = 1_000_000  # in total
    prompt: int = 192  # maximum tokens of a prompt
    length: int = 192  # maximum tokens after a prompt
    batch: int = 96  # prompts that are continued together; an interruption loses at most one batch
    held_out: int = 24  # number of prompts for evaluation
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)  # of the prompts, in turn
    seed: int = 0
    at_most: bool = False  # whether a run with a time limit may end with less text

    def __post_init__(self) -> None:
        for name, minimum in (
            ("tokens", 0),
            ("prompt", 8),
            ("length", 1),
            ("batch", 1),
            ("held_out", 0),
        ):
            check_integer(
                "on-policy" if name == "tokens" else option_name(name), getattr(self, name), minimum
            )


def fit_lengths(settings: Mapping[str, Any], context: int) -> dict[str, Any]:
    """Return the settings with ``None`` replaced in ``micro``, ``length`` and ``final_length``.

    ``micro`` becomes the largest divisor of ``batch`` that is a multiple of the lengths that are
    not ``None``; its default is the limit. A length becomes the largest divisor of ``micro``; the
    smaller of its default and ``context`` is the limit. If no such number is above half the limit,
    the limit is returned; :class:`LoopOptions` refuses it.
    """
    fitted = dict(settings)
    share = settings["final_share"]
    used = [
        name for name, fraction in (("length", 1 - share), ("final_length", share)) if fraction > 0
    ]
    given_lengths = [fitted[name] for name in used if fitted[name] is not None and fitted[name] > 0]
    batch = fitted["batch"]
    if fitted["micro"] is None:
        limit = min(LoopOptions.micro, max(1, batch))
        fitted["micro"] = _largest(
            limit, lambda n: batch % n == 0 and not any(n % length for length in given_lengths)
        )
    for name, default in (
        ("length", LoopOptions.length),
        ("final_length", LoopOptions.final_length),
    ):
        if fitted[name] is None:
            fitted[name] = _largest(
                max(1, min(default, context, fitted["micro"])), lambda n: fitted["micro"] % n == 0
            )
    return fitted


def _largest(limit: int, is_valid: Callable[[int], bool]) -> int:
    """Return the largest valid number in ``limit // 2 + 1 .. limit``, or ``limit`` if none is valid."""
    return next((n for n in range(limit, limit // 2, -1) if is_valid(n)), limit)


def option_name(field_name: str) -> str:
    """Return the command-line option of a field of :class:`LoopOptions`, without dashes in front."""
    return "lr" if field_name == "rate" else field_name.replace("_", "-")
