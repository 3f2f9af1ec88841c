"""What a request may ask for, and the coupled choice that answers it.

The target's token at position ``p`` is ::

    argmax over tokens v of  processed log-probability(v) + Gumbel noise(seed, p, v)

which is a sample of the processed distribution (Gumbel 1954; Maddison et al. 2014), and for greedy decoding the
same without noise. The noise is a hash of ``(seed, p, v)``, so the emitted token depends on the logits, the seed and
the position alone: not on the drafter, the batch, or what was computed before.

That is the *coupled* rule. The other two, *rejection* and *block* (:mod:`pronk.choosing.walk`), draw from the same
distribution with numbers of their own, and look at the guesses. Why the argmax is a sample: with ``u`` uniform, Gumbel
noise is ``-log(-log u)``, so the argmax of ``log p(v) + noise(v)`` is the argmin of ``-log u(v) / p(v)``. Those are
exponential variables of rates ``p(v)``, and the first of them is ``v`` with probability ``p(v) / Σ p``.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from pronk.errors import OptionError

__all__ = [
    "Rule",
    "SamplingParams",
    "block_uniform",
    "derive_seed",
    "draft_noise",
    "fresh_seed",
    "gumbel_noise",
    "lots",
    "noise_key",
    "rejection_noise",
    "rejection_uniform",
    "seed_key",
]

Rule = Literal["coupled", "rejection", "block"]

_MAX_SEED = 2**63 - 1
_MAX_LOGPROBS = 64


@dataclass(frozen=True)
class SamplingParams:
    """Options of a request. Every one is honoured with every drafter, or refused with an error that names it.

    Attributes:
        max_tokens: most tokens to generate, at least 1.
        min_tokens: end-of-text and stop tokens are not chosen before so many tokens.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the ``k`` likeliest tokens; 0 keeps all.
        top_p: keep the likeliest tokens that together reach this probability, in (0, 1].
        min_p: drop tokens less likely than this share of the likeliest, in [0, 1].
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output, > 0.
        presence_penalty: subtracted from the logits of tokens in the output, in [-2, 2].
        frequency_penalty: subtracted once per occurrence in the output, in [-2, 2].
        logit_bias: token id to a value in [-100, 100] that is added to its logit.
        bad_words: texts whose tokens, as the tokenizer writes the text with and without a space in front, are never
            completed. Other tokens that read the same are not caught.
        stop: texts that end the generation; they are not part of the output. Looked for from token ``min_tokens`` on.
        stop_token_ids: token ids that end the generation; they are part of ``token_ids``, not of the text.
        ignore_eos: go on after end-of-text.
        seed: in [0, 2**63); ``None`` draws a fresh one, which the result reports.
        rule: how a guess is accepted when sampling. ``"coupled"``: the target's token is chosen without a look at the
            guesses, so the same seed gives the same tokens whatever the drafter. ``"rejection"``: the guesses are tried
            one after the other, each accepted with the chance that leaves the distribution as it is, but the tokens
            depend on the guesses as well as on the seed. ``"block"``: the same with the guesses of a chain tried
            together, of which never fewer are accepted. Greedy decoding is the same under all.
        n: independent samples of the prompt; sample 0 has ``seed``, the others seeds derived from it.
        logprobs: report the log-probability of each token and of the so many likeliest, 0..64.
        prompt_logprobs: the same for the prompt's tokens.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] = ()
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    rule: Rule = "coupled"
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stops: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, low, high in _INTEGERS:
            _check_integer(name, getattr(self, name), low, high)
        for name, least, most, rule in _NUMBERS:
            _check_number(name, getattr(self, name), least, most, rule)
        if self.min_tokens > self.max_tokens:
            msg = f"min_tokens: expected at most max_tokens = {self.max_tokens}, found {self.min_tokens}"
            raise OptionError(msg)
        _check_flag("ignore_eos", self.ignore_eos)
        if self.rule not in get_args(Rule):
            msg = f'rule: expected "coupled", "rejection" or "block", found {self.rule!r}'
            raise OptionError(msg)
        _check_bias(self.logit_bias)
        for token in _items("stop_token_ids", self.stop_token_ids):
            _check_integer("stop_token_ids", token, 0, None)
        stops = (self.stop,) if isinstance(self.stop, str) else _items("stop", self.stop)
        object.__setattr__(self, "stops", stops)
        for name, texts in (("stop", stops), ("bad_words", _items("bad_words", self.bad_words))):
            if not all(isinstance(text, str) and text for text in texts):
                msg = f"{name}: expected texts that are not empty, found {getattr(self, name)!r}"
                raise OptionError(msg)

    @property
    def greedy(self) -> bool:
        """Whether the choice has no noise."""
        return self.temperature == 0.0

    @property
    def rejects(self) -> bool:
        """Whether guesses are accepted by chance: the choice depends on them, so it is not to be made a second time."""
        return self.rule != "coupled" and not self.greedy

    @property
    def truncates(self) -> bool:
        """Whether the less likely tokens are left out."""
        return bool(self.top_k or self.top_p < 1.0 or self.min_p)

    @property
    def shapes_logits(self) -> bool:
        """Whether the choice depends on more than logits and noise: the plain ``argmax`` is not enough."""
        return bool(
            self.min_tokens
            or self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.bad_words
        )

    def to_dict(self) -> dict[str, Any]:
        """The options as plain JSON values."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        values["bad_words"], values["stop"] = list(self.bad_words), list(self.stops)
        values["stop_token_ids"] = list(self.stop_token_ids)
        values["logit_bias"] = None if self.logit_bias is None else dict(self.logit_bias)
        return values


_INTEGERS: tuple[tuple[str, int, int | None], ...] = (
    ("max_tokens", 1, None),
    ("min_tokens", 0, None),
    ("top_k", 0, None),
    ("n", 1, 1024),
    ("seed", 0, _MAX_SEED),
    ("logprobs", 0, _MAX_LOGPROBS),
    ("prompt_logprobs", 0, _MAX_LOGPROBS),
)
_OPTIONAL = ("seed", "logprobs", "prompt_logprobs")

_NUMBERS: tuple[tuple[str, float, float, str], ...] = (
    ("temperature", 0.0, 100.0, "0..100"),
    ("top_p", math.ulp(0.0), 1.0, "above 0 and at most 1"),
    ("min_p", 0.0, 1.0, "0..1"),
    ("repetition_penalty", math.ulp(0.0), 100.0, "above 0 and at most 100"),
    ("presence_penalty", -2.0, 2.0, "-2..2"),
    ("frequency_penalty", -2.0, 2.0, "-2..2"),
)


def _check_integer(name: str, value: object, low: int, high: int | None) -> None:
    if value is None and name in _OPTIONAL:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        wanted = f"{low} or more" if high is None else f"{low}..{high}"
        msg = f"{name}: expected an integer, {wanted}; found {value!r}"
        raise OptionError(msg)


def _check_number(name: str, value: object, low: float, high: float, rule: str) -> None:
    # NaN fails both comparisons, hence the form of the test.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        msg = f"{name}: expected a number, {rule}; found {value!r}"
        raise OptionError(msg)


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        msg = f"{name}: expected true or false, found {value!r}"
        raise OptionError(msg)


def _check_bias(bias: object) -> None:
    if bias is None:
        return
    if not isinstance(bias, Mapping):
        msg = f"logit_bias: expected token ids with a value each, found {bias!r}"
        raise OptionError(msg)
    for token, value in bias.items():
        _check_integer("logit_bias", token, 0, None)
        _check_number("logit_bias", value, -100.0, 100.0, "-100..100")


def _items(name: str, value: object) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, Collection):
        msg = f"{name}: expected a list, found {value!r}"
        raise OptionError(msg)
    return tuple(value)


def fresh_seed() -> int:
    """A seed for a request that has none, short enough to be typed again."""
    return secrets.randbits(32)


def derive_seed(seed: int, sample: int) -> int:
    """The seed of a request's sample number ``sample``; sample 0 keeps the request's own."""
    return seed if sample == 0 else _mix(_mix(seed) + sample) & 0xFFFFFFFF


# SplitMix64 (Steele, Lea & Flood 2014): its increment and the two multipliers of its finalizer.
_INCREMENT = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
_MASK = 2**64 - 1


def _mix(x: int) -> int:
    x &= _MASK
    x = (x ^ (x >> 30)) * _MULTIPLIER_1 & _MASK
    x = (x ^ (x >> 27)) * _MULTIPLIER_2 & _MASK
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    """The int64 with the same bits; torch's own products and sums are modulo 2**64 as well."""
    return x - 2**64 if x >= 2**63 else x


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64, whose own shift repeats the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def seed_key(seed: int) -> int:
    """What a request's :func:`noise_key` is a hash of, beside the position, in [0, 2**64)."""
    return _mix(seed)


def noise_key(seed: int, position: int) -> int:
    """What the noise at a position is a hash of, beside the token, in [0, 2**64)."""
    return _mix(seed_key(seed) + position * _INCREMENT)


def gumbel_noise(seed: int, position: int, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise for ``tokens`` (int64, any shape) at a position: float64 of the same shape.

    A pure function of its arguments on every device, up to the last bit of the device's logarithm.
    """
    key = noise_key(seed, position)
    x = tokens * _signed(_INCREMENT) + _signed(key)
    x = (x ^ _shift_right(x, 30)) * _signed(_MULTIPLIER_1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MULTIPLIER_2)
    x = x ^ _shift_right(x, 31)
    # 52 random bits and a half, which float64 holds exactly, so that neither 0 nor 1 occurs.
    uniform = (_shift_right(x, 12).to(torch.float64) + 0.5) * 2.0**-52
    return uniform.log_().neg_().log_().neg_()


# Added to a seed, it gives one that no request has: the numbers of the rules that reject are none of those that a
# drafter may have drawn its guesses with. Among them, "tokens" from 0 on are for the draw after the last rejection,
# those from -1 down for single guesses, and those from -1 - 2**32 down for chains.
_REJECTION = _MAX_SEED + 1
_CHAINS = 2**32


def lots(seed: int, prompt: Sequence[int]) -> int:
    """The seed of what follows, for one prompt.

    How much is guessed for a request depends on how its neighbours in the batch fare. If they had a seed in common, and
    so the same numbers at the same positions, it would depend on numbers that the request has yet to draw.
    """
    digest = hashlib.blake2b(array("q", prompt).tobytes(), digest_size=8).digest()
    return _mix(_mix(seed) ^ int.from_bytes(digest, "little")) & _MAX_SEED


def rejection_uniform(seed: int, position: int, trial: int) -> float:
    """A number in [0, 1) for the trial of guess number ``trial`` at a position; a pure function of its arguments.

    It is the hash at "token" ``-1 - trial``, which :func:`rejection_noise` has no use for.
    """
    key = noise_key(seed + _REJECTION, position)
    return (_mix(key - (trial + 1) * _INCREMENT) >> 11) * 2.0**-53


def rejection_noise(seed: int, position: int, tokens: Tensor) -> Tensor:
    """:func:`gumbel_noise` for the draw after all guesses at a position were rejected, independent of their trials."""
    return gumbel_noise(seed + _REJECTION, position, tokens)


def block_uniform(seed: int, position: int, index: int) -> float:
    """A number in [0, 1) for the trial of the first ``index`` guesses of a chain that begins at a position.

    It is none of :func:`rejection_uniform`'s: of a chain that begins at position 5, guess number 3 is the one for
    position 7, and if it is rejected a chain of the next step may begin there.
    """
    return rejection_uniform(seed, position, _CHAINS + index)


# The same for what a drafter draws where guesses are accepted by chance.
_DRAFT = 3 * 2**62


def draft_noise(seed: int, root: int, position: int, tokens: Tensor) -> Tensor:
    """:func:`gumbel_noise` for a drafter's own draw at a position, in the step whose last certain token is at ``root``.

    Each step has a root of its own: noise that was looked at in a step is never used again.
    """
    return gumbel_noise(_mix(seed + _DRAFT) + root * _INCREMENT, position, tokens)
