"""What a request may ask for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from pronk.checks import check_choice, check_flag, check_integer, check_number
from pronk.errors import OptionError
from pronk.sampling.guide import Guide, GuideMode

__all__ = ["MAX_SEED", "Rule", "SamplingParams"]

Rule = Literal["coupled", "rejection", "block"]

# Seeds above it are for numbers that no request may ask for (:mod:`pronk.sampling.noise`).
MAX_SEED = 2**63 - 1
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
        logprob_token_ids: of the output's tokens, report the log-probabilities of these ids, too; with ``logprobs``.
        guide: the form that the text must have. Log-probabilities are the model's own, before its mask, too.
        guide_mode: what becomes of text that the guide leaves no choice about. ``"forced"``: it is guessed, and the
            model confirms it on the way, for nothing. ``"plain"``: it is not guessed; the tokens are the same.
            ``"jump"``: it is appended as the tokenizer writes it, without asking the model, which then has no
            log-probabilities to report, and does not choose between several tokens that end a text.
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
    logprob_token_ids: Sequence[int] = ()
    guide: Guide | None = None
    guide_mode: GuideMode = "forced"

    def __post_init__(self) -> None:
        for name, low, high in _INTEGERS:
            if getattr(self, name) is not None or name not in _OPTIONAL:
                check_integer(name, getattr(self, name), low, high)
        for name, least, most, above in _NUMBERS:
            check_number(name, getattr(self, name), least, most, above=above)
        if self.min_tokens > self.max_tokens:
            msg = f"min_tokens: expected at most max_tokens = {self.max_tokens}, found {self.min_tokens}"
            raise OptionError(msg)
        check_flag("ignore_eos", self.ignore_eos)
        check_choice("rule", self.rule, get_args(Rule))
        _check_bias(self.logit_bias)
        for name in ("stop_token_ids", "logprob_token_ids"):
            for token in _items(name, getattr(self, name)):
                check_integer(name, token, 0)
        if self.logprob_token_ids and self.logprobs is None:
            msg = f"logprob_token_ids: expected logprobs beside them, found {self.logprob_token_ids!r} alone"
            raise OptionError(msg)
        _check_guide(self)
        _items("stop", (self.stop,) if isinstance(self.stop, str) else self.stop)
        for name, texts in (("stop", self.stops), ("bad_words", _items("bad_words", self.bad_words))):
            if not all(isinstance(text, str) and text for text in texts):
                msg = f"{name}: expected texts that are not empty, found {getattr(self, name)!r}"
                raise OptionError(msg)

    @property
    def stops(self) -> tuple[str, ...]:
        """``stop`` as texts."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

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

    def to_dict(self) -> dict[str, Any]:
        """The options as plain JSON values."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        values["guide"] = None if self.guide is None else self.guide.to_dict()
        values["bad_words"], values["stop"] = list(self.bad_words), list(self.stops)
        values["stop_token_ids"] = list(self.stop_token_ids)
        values["logprob_token_ids"] = list(self.logprob_token_ids)
        values["logit_bias"] = None if self.logit_bias is None else dict(self.logit_bias)
        return values


_INTEGERS: tuple[tuple[str, int, int | None], ...] = (
    ("max_tokens", 1, None),
    ("min_tokens", 0, None),
    ("top_k", 0, None),
    ("n", 1, 1024),
    ("seed", 0, MAX_SEED),
    ("logprobs", 0, _MAX_LOGPROBS),
    ("prompt_logprobs", 0, _MAX_LOGPROBS),
)
_OPTIONAL = ("seed", "logprobs", "prompt_logprobs")

# The last says whether the least value itself is out.
_NUMBERS: tuple[tuple[str, float, float, bool], ...] = (
    ("temperature", 0.0, 100.0, False),
    ("top_p", 0.0, 1.0, True),
    ("min_p", 0.0, 1.0, False),
    ("repetition_penalty", 0.0, 100.0, True),
    ("presence_penalty", -2.0, 2.0, False),
    ("frequency_penalty", -2.0, 2.0, False),
)


def _check_guide(params: SamplingParams) -> None:
    check_choice("guide_mode", params.guide_mode, get_args(GuideMode))
    if params.guide is None:
        return
    if not isinstance(params.guide, Guide):
        msg = f"guide: expected a Guide, found {params.guide!r:.60}"
        raise OptionError(msg)
    if params.ignore_eos:
        msg = "ignore_eos: expected False beside a guide, which says where the text ends, found True"
        raise OptionError(msg)
    if params.guide_mode == "jump" and (params.logprobs is not None or params.bad_words):
        name = "bad_words" if params.bad_words else "logprobs"
        msg = f'{name}: expected another guide_mode beside it, found "jump", which does not ask the model; use "forced"'
        raise OptionError(msg)


def _check_bias(bias: object) -> None:
    if bias is None:
        return
    if not isinstance(bias, Mapping):
        msg = f"logit_bias: expected token ids with a value each, found {bias!r}"
        raise OptionError(msg)
    for token, value in bias.items():
        check_integer("logit_bias", token, 0)
        check_number("logit_bias", value, -100.0, 100.0)


def _items(name: str, value: object) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, Collection):
        msg = f"{name}: expected a list, found {value!r}"
        raise OptionError(msg)
    return tuple(value)
