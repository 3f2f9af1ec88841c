"""Sampling parameters of a request."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from pronk.base.checks import check_choice, check_flag, check_integer, check_number
from pronk.base.errors import OptionError
from pronk.base.keywords import known_keywords
from pronk.text.guide import Guide, GuideMode

Rule = Literal["coupled", "rejection", "block"]

# Largest seed of a request; larger seeds are for the trials of draft tokens (:mod:`pronk.sampling.noise`).
MAX_SEED = 2**63 - 1
_MAX_LOGPROBS = 64


@known_keywords
@dataclass(frozen=True)
class SamplingParams:
    """Options of a request. Every drafter honours every option, or an error names the option.

    Attributes:
        max_tokens: maximum number of tokens to generate, at least 1.
        min_tokens: minimum number of tokens to generate: end-of-text and stop tokens are banned until then.
        temperature: divisor of the logits, in [0, 100]; 0 is greedy.
        top_k: number of likeliest tokens to keep; 0 keeps all.
        top_p: cumulative probability of the likeliest tokens to keep, in (0, 1].
        min_p: minimum probability to keep, relative to the likeliest token's, in [0, 1].
        repetition_penalty: for tokens in prompt or output, divisor of positive logits and factor of negative logits,
            in (0, 100].
        presence_penalty: value subtracted from the logit of each token in the output, in [-2, 2].
        frequency_penalty: value subtracted from a token's logit for each occurrence in the output, in [-2, 2].
        logit_bias: token id to a value in [-100, 100] that is added to its logit.
        bad_words: texts never to generate, as the tokenizer writes them with and without a leading space. Other token
            sequences with the same text are not caught.
        stop: texts that end the generation and are not part of the output; ignored before ``min_tokens`` tokens. They
            may contain names of special tokens, such as ``<|im_end|>``, which have no text in the output.
        stop_token_ids: token ids that end the generation; part of ``token_ids``, not of the text.
        thinking_budget: maximum number of tokens of thoughts, before the model's end marker of thinking is forced;
            ``None`` sets no limit.
        ignore_eos: whether to continue after end-of-text.
        seed: integer in [0, 2**63 - 1]; ``None`` draws a random one, which the result has in its ``seed``.
        rule: acceptance of draft tokens when sampling; greedy decoding is the same under all rules. ``"coupled"``: the
            target samples without looking at the draft tokens, so the same seed gives the same tokens with every
            drafter. ``"rejection"``: draft tokens are accepted one by one with the probability that preserves the
            target's distribution; the tokens depend on the seed and on the draft tokens. ``"block"``: like rejection,
            but the draft tokens of a chain are tried together, and at least as many are accepted on average.
        n: number of independent samples of the prompt, in [1, 1024]; sample 0 has ``seed``, the others derived seeds.
        logprobs: number of likeliest tokens, in [0, 64], whose log-probabilities are reported for each output token,
            besides that of the token itself; ``None`` reports none.
        prompt_logprobs: like ``logprobs``, for the tokens of the prompt.
        logprob_token_ids: token ids whose log-probabilities are reported for each output token; needs ``logprobs``.
        guide: required form of the text. Log-probabilities are those of the model before the guide's mask.
        guide_mode: treatment of forced text: text at places where the guide allows exactly one continuation.
            ``"forced"``: proposed as draft tokens and verified by the model. ``"plain"``: generated token by token,
            with the same result. ``"jump"``: appended as the tokenizer writes it, without running the model; the tokens
            have no log-probabilities, and the model does not choose among several end-of-text tokens.
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
    thinking_budget: int | None = None
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
        for name, minimum, maximum in _INTEGERS:
            if getattr(self, name) is not None or name not in _MAY_BE_NONE:
                check_integer(name, getattr(self, name), minimum, maximum)
        for name, lower, upper, excludes_lower in _NUMBERS:
            check_number(name, getattr(self, name), lower, upper, exclusive_min=excludes_lower)
        if self.min_tokens > self.max_tokens:
            msg = f"min_tokens: expected at most max_tokens = {self.max_tokens}, found {self.min_tokens}"
            raise OptionError(msg)
        check_flag("ignore_eos", self.ignore_eos)
        check_choice("rule", self.rule, get_args(Rule))
        _check_bias(self.logit_bias)
        for name in ("stop_token_ids", "logprob_token_ids"):
            for token in _check_list(name, getattr(self, name)):
                check_integer(name, token, 0)
        if self.logprob_token_ids and self.logprobs is None:
            msg = f"logprob_token_ids: expected logprobs with it, found {self.logprob_token_ids!r} alone; set logprobs"
            raise OptionError(msg)
        _check_guide(self)
        _check_list("stop", (self.stop,) if isinstance(self.stop, str) else self.stop)
        for name, texts in (("stop", self.stops), ("bad_words", _check_list("bad_words", self.bad_words))):
            if not all(isinstance(text, str) and text for text in texts):
                msg = f"{name}: expected texts that are not empty, found {getattr(self, name)!r}"
                raise OptionError(msg)

    @property
    def stops(self) -> tuple[str, ...]:
        """All texts of ``stop``, which may be a single text."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def greedy(self) -> bool:
        """Whether the temperature is 0."""
        return self.temperature == 0.0

    @property
    def rejects(self) -> bool:
        """Whether the rejection or block rule applies; False for greedy decoding under any rule.

        If True, sampled tokens depend on the draft tokens, so a retry with the same seed may give other tokens.
        """
        return self.rule != "coupled" and not self.greedy

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p is set."""
        return bool(self.top_k or self.top_p < 1.0 or self.min_p)

    def to_dict(self) -> dict[str, Any]:
        """Return the options as JSON values."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["guide"] = None if self.guide is None else self.guide.to_dict()
        values["bad_words"], values["stop"] = list(self.bad_words), list(self.stops)
        values["stop_token_ids"] = list(self.stop_token_ids)
        values["logprob_token_ids"] = list(self.logprob_token_ids)
        values["logit_bias"] = None if self.logit_bias is None else dict(self.logit_bias)
        return values


# (option, minimum, maximum); None: no maximum.
_INTEGERS: tuple[tuple[str, int, int | None], ...] = (
    ("max_tokens", 1, None),
    ("min_tokens", 0, None),
    ("top_k", 0, None),
    ("n", 1, 1024),
    ("thinking_budget", 0, None),
    ("seed", 0, MAX_SEED),
    ("logprobs", 0, _MAX_LOGPROBS),
    ("prompt_logprobs", 0, _MAX_LOGPROBS),
)
_MAY_BE_NONE = ("thinking_budget", "seed", "logprobs", "prompt_logprobs")

# (option, lower bound, upper bound, whether the lower bound itself is refused).
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
        msg = "ignore_eos: expected False with a guide, which determines the end of the text, found True"
        raise OptionError(msg)
    if params.guide_mode == "jump" and (params.logprobs is not None or params.bad_words):
        name = "bad_words" if params.bad_words else "logprobs"
        msg = f'{name}: expected another guide_mode with it, found "jump", which skips the model; use "forced"'
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


def _check_list(name: str, value: object) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, Collection):
        msg = f"{name}: expected a list, found {value!r}"
        raise OptionError(msg)
    return tuple(value)
