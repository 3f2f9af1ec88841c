"""Options of training runs, checked on creation; without torch, so that ``--help`` is fast."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from pronk import OptionError
from pronk.base import refuse
from pronk.base.checks import check_choice, check_integer, check_number
from pronk.train.corpus.sources import SourceSpec

OPTIMIZERS = ("muon", "adamw")


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a Llama-architecture model with tied embeddings."""

    hidden: int = 320  # hidden size
    layers: int = 8
    heads: int = 10  # number of query heads
    kv_heads: int = 2  # number of key/value heads
    mlp: int = 832  # width of the gated MLP
    vocab: int = 4096  # size of the vocabulary
    context: int = 2048  # maximum length of a text in tokens

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
    """Sources of the training text, and how they are mixed."""

    sources: tuple[SourceSpec, ...]
    valid: tuple[Path, ...] = ()  # JSONL files of held-out text, in addition to that of the sources
    # Files of prompts. Text that shares 13 successive words with one of the prompts is not trained
    # on.
    exclude: tuple[Path, ...] = ()
    # Fraction of the training text that the dialogues of all sources make up.
    dialogues: float = 0.05
    vocab_size: int = 4096  # size of the vocabulary of a new tokenizer
    # maximum number of bytes of text that a new tokenizer is trained on
    tokenizer_bytes: int = 30_000_000
    valid_tokens: int = 16384  # maximum number of tokens of a held-out set
    seed: int = 0  # seed of the order of the documents

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
    """Options of the training loop.

    ``warmup`` and the fields of the form ``…_every`` are numbers of steps.
    """

    # Names of options that may change when a run is resumed. The others determine the result.
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

    # learning rate of AdamW, relative to that of Muon in the same run
    adamw_share: ClassVar[float] = 1.0

    steps: int = 3000  # number of optimizer steps after which the run ends
    # Time limit of the whole run in minutes, start and final evaluation included; ``None``: no
    # limit.
    minutes: float | None = None
    # number of successive evaluations without improvement after which the run ends
    patience: int | None = None
    batch: int = 8192  # tokens per optimizer step
    micro: int = 4096  # tokens per forward pass; a step has ``batch / micro`` passes
    length: int = 256  # tokens of a sequence in the first phase of the run
    final_length: int = 2048  # tokens of a sequence in the last phase of the run
    final_share: float = 0.2  # fraction of the run that the last phase takes
    optimizer: str = "muon"
    rate: float = 3e-3  # peak learning rate
    floor: float = 0.02  # learning rate at the end, as a fraction of ``rate``
    warmup: int = 60
    weight_decay: float = 0.1
    clip: float = 1.0  # maximum norm of the gradient
    compile: bool = False  # whether to use ``torch.compile``
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
        """Call ``check`` for each of the fields ``names``; messages have the names of the options.

        ``limits`` and ``flags`` are further arguments of ``check``.
        """
        for name in names:
            check(option_name(name), getattr(self, name), *limits, **flags)

    def _check_heads(self, num_heads: int) -> None:
        """Raise OptionError if a sequence is too short for each of ``num_heads`` heads to learn."""
        for name, length in self.lengths.items():
            if length <= num_heads:
                msg = (
                    f"{option_name(name)}: expected at least {num_heads + 1} for {num_heads} "
                    f"heads, found {length}"
                )
                raise OptionError(msg)

    @property
    def lengths(self) -> dict[str, int]:
        """Sequence lengths by option name, ``length`` first.

        The length of a phase without steps is left out.
        """
        shares = {"length": 1 - self.final_share, "final_length": self.final_share}
        return {name: getattr(self, name) for name, share in shares.items() if share > 0}

    @property
    def first_length(self) -> int:
        """Sequence length at the beginning of the run, in tokens."""
        return next(iter(self.lengths.values()))

    @property
    def last_length(self) -> int:
        """Sequence length at the end of the run, in tokens."""
        return [*self.lengths.values()][-1]

    @property
    def longest(self) -> int:
        """Largest sequence length of the run, in tokens."""
        return max(self.lengths.values())

    @property
    def min_text_tokens(self) -> int:
        """Minimum number of tokens of the training text, enough for one sequence in each phase."""
        shares = {"length": 1 - self.final_share, "final_length": self.final_share}
        needed = [math.ceil((value + 1) / shares[name]) for name, value in self.lengths.items()]
        return 2 + max(needed)

    def defining(self) -> dict[str, Any]:
        """Return the options that must be unchanged when a run is resumed, by name."""
        return {name: value for name, value in asdict(self).items() if name not in self.FREE}

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the default of each option: its value in runs from before the option existed."""
        return {each.name: each.default for each in fields(cls) if each.default is not MISSING}

    def _max_length(self) -> int | None:
        """Return the maximum sequence length in tokens; ``None`` if any length is allowed."""
        return None


@dataclass(frozen=True)
class TrainOptions(LoopOptions):
    """Options of the training of a language model."""

    shape: ModelShape = field(default_factory=ModelShape)
    # shape of the heads (``HeadsShape``) that are trained with the model; ``None`` without heads
    heads: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads is not None:
            self._check_heads(self.heads.num_heads)

    def _max_length(self) -> int | None:
        return self.shape.context


@dataclass(frozen=True)
class DrafterOptions(LoopOptions):
    """Options of the training of a drafter that learns from a frozen target."""

    FREE: ClassVar[frozenset[str]] = LoopOptions.FREE | {"num_tokens"}

    context: int = 2048  # context length of the target, in tokens
    # Draft tokens per step when the engine measures the drafter; 0: it is not measured.
    num_tokens: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check(check_integer, ("num_tokens",), 0, 64)

    def _max_length(self) -> int | None:
        return self.context


@dataclass(frozen=True)
class StudentOptions(DrafterOptions):
    """Options of the training of a drafter on text of sources and text of the target."""

    shape: Any = None  # sizes of the drafter: an object such as ``KangarooShape``
    # fraction of the training sequences that are text which the target has written
    share: float = 0.5
    # Weight of the text in the loss, 0..1: the loss is ``hard * (cross-entropy of the text) + (1 -
    # hard) * (divergence from the target)``.
    hard: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check(check_number, ("share", "hard"), 0, 1)


@dataclass(frozen=True)
class DraftOptions(StudentOptions):
    """Options of the training of a draft model."""

    shape: ModelShape = field(default_factory=ModelShape)

    def _max_length(self) -> int | None:
        # Both the draft model and the target must be able to compute each sequence.
        return min(self.shape.context, self.context)


@dataclass(frozen=True)
class HeadsOptions(StudentOptions):
    """Options of the training of multi-token heads; each head predicts one token further ahead."""

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
    """Options of the training of an EAGLE-3 or MTP head."""

    FREE: ClassVar[frozenset[str]] = DrafterOptions.FREE | {"states", "init"}
    # small, because the LM head begins as a copy of the target's
    adamw_share: ClassVar[float] = 0.15

    final_share: float = 0.0
    kind: str = "eagle3"  # ``eagle3`` or ``mtp``
    depth: int = 4  # number of draft tokens in training-time test
    # Weighting of the draft tokens in the loss: ``decay`` or ``dpace``
    # (``pronk.train.eagle.position_weights``).
    weighting: str = "decay"
    decay: float = 0.8
    # Number of tokens in the loss, the most frequent ones of the answers. An EAGLE-3 head proposes
    # only these.
    draft_vocab: int = 8192
    mlp: int | None = None  # intermediate size of the MLP; ``None``: the target's
    # Numbers (from 1) of the target's layers that an EAGLE-3 head reads; ``None``: 2, the middle
    # one, and the last but 3. An MTP head reads the last layer.
    sources: tuple[int, ...] | None = None
    # fraction of the rows that draft further tokens after their first one, above 0 and at most 1
    chains: float = 1.0
    # The head is trained with its weights rounded to this many bits, 8 or 4; ``None``: unrounded.
    bits: int | None = None
    # folder of the head whose weights the training begins with; ``None``: a linear fit
    init: str | None = None
    # number of answer tokens after which no more dialogues are trained on; ``None``: all are
    tokens: int | None = None
    # folder in which the target's outputs are stored, so that they are computed once
    states: Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("kind", self.kind, ("eagle3", "mtp"))
        self._check(check_integer, ("depth",), 1, 16)
        self._check(check_integer, ("draft_vocab", *self._given("mlp", "tokens")), 1)
        self._check(check_number, ("decay", "chains"), 0, 1, exclusive_min=True)
        if self.bits not in (None, 4, 8):
            refuse("bits", f"expected 4 or 8, found {self.bits}", OptionError)
        if self.bits is not None and (self.mlp or 0) % 8:
            refuse("mlp", f"expected a multiple of 8 with --bits, found {self.mlp}", OptionError)
        if self.depth == 1 and self.chains < 1:
            found = f"found {self.chains:g} with a depth of 1"
            refuse("chains", f"expected 1 without later draft tokens, {found}", OptionError)
        check_choice("weighting", self.weighting, ("decay", "dpace"))


@dataclass(frozen=True)
class OnPolicyOptions:
    """Amount of the text that the target writes, and how it is sampled."""

    tokens: int = 1_000_000  # number of tokens that the target writes
    prompt: int = 192  # maximum tokens of a prompt
    length: int = 192  # maximum tokens of the continuation of a prompt
    batch: int = 96  # prompts that are continued together; an interruption loses at most one batch
    held_out: int = 24  # number of prompts that are held out for evaluation
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)  # the prompts have these temperatures in turn
    seed: int = 0
    at_most: bool = False  # whether the time limit may end the text before it has ``tokens`` tokens

    def __post_init__(self) -> None:
        check_integer("on-policy", self.tokens, 0)
        check_integer("prompt", self.prompt, 8)
        check_integer("length", self.length, 1)
        check_integer("batch", self.batch, 1)
        check_integer("held-out", self.held_out, 0)


def fit_lengths(settings: Mapping[str, Any], context: int) -> dict[str, Any]:
    """Return the settings with numbers in place of ``None`` for micro, length and final_length.

    - ``micro`` becomes the largest divisor of ``batch``, up to the default, that is a multiple of
      the given lengths.
    - A length becomes the largest divisor of ``micro``, up to its default and ``context``.

    If there is no such number above half of the limit, the limit itself is the result, which
    :class:`LoopOptions` refuses.
    """
    fitted = dict(settings)
    shares = {"length": 1 - settings["final_share"], "final_length": settings["final_share"]}
    lengths = [fitted[name] for name, share in shares.items() if share > 0]
    given_lengths = [length for length in lengths if length is not None and length > 0]
    batch = fitted["batch"]
    if fitted["micro"] is None:

        def fits(n: int) -> bool:
            return batch % n == 0 and not any(n % length for length in given_lengths)

        fitted["micro"] = _largest(min(LoopOptions.micro, max(1, batch)), fits)
    micro = fitted["micro"]
    defaults = {"length": LoopOptions.length, "final_length": LoopOptions.final_length}
    for name, default in defaults.items():
        if fitted[name] is None:
            limit = max(1, min(default, context, micro))
            fitted[name] = _largest(limit, lambda n: micro % n == 0)
    return fitted


def _largest(limit: int, is_valid: Callable[[int], bool]) -> int:
    """Return the largest valid number in ``limit // 2 + 1 .. limit``, or else ``limit``."""
    return next((n for n in range(limit, limit // 2, -1) if is_valid(n)), limit)


def option_name(field_name: str) -> str:
    """Return the name of a field's option on the command line, without the leading dashes."""
    return "lr" if field_name == "rate" else field_name.replace("_", "-")
