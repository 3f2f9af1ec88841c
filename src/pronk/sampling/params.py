"""Sampling parameters of a request."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from pronk.base.checks import check_integer, check_number
from pronk.base.errors import OptionError
from pronk.base.keywords import known_keywords
from pronk.base.options import Option, check_options, documented
from pronk.text.guide import Guide, GuideMode

Rule = Literal["coupled", "rejection", "block"]

# Largest seed of a request. Larger seeds are reserved for the trials of draft tokens
# (:mod:`pronk.sampling.noise`).
MAX_SEED = 2**63 - 1
# Maximum number of likeliest tokens per position whose log-probabilities a request may ask for.
_MAX_LOGPROBS = 64


@known_keywords
@documented
@dataclass(frozen=True)
class SamplingParams:
    """Options of a request: how its tokens are sampled, and where its text ends.

    Every drafter honours every option, or an error names the option.
    """

    max_tokens: Annotated[int, Option("Maximum number of tokens to generate.", low=1)] = 128
    min_tokens: Annotated[
        int,
        Option(
            "Minimum number of tokens before the text may end, at most max_tokens.",
            low=0,
            details="End-of-text and stop tokens are banned until then.",
        ),
    ] = 0
    temperature: Annotated[
        float,
        Option(
            "0 takes the most likely token; higher is more random.",
            low=0.0,
            high=100.0,
            details="It divides the logits.",
        ),
    ] = 0.0
    top_k: Annotated[
        int, Option("Sample from this many most likely tokens; 0 is all tokens.", low=0)
    ] = 0
    top_p: Annotated[
        float,
        Option(
            "Sample from the most likely tokens that together reach this probability.",
            low=0.0,
            high=1.0,
            exclusive_min=True,
        ),
    ] = 1.0
    min_p: Annotated[
        float,
        Option("Drop tokens below this fraction of the highest probability.", low=0.0, high=1.0),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Option(
            "Above 1 makes tokens of the prompt and the generated text less likely.",
            low=0.0,
            high=100.0,
            exclusive_min=True,
            details="It divides positive logits and multiplies negative ones.",
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float,
        Option(
            "Subtracted once from the logit of each token in the generated text.",
            low=-2.0,
            high=2.0,
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Option(
            "Subtracted from a token's logit for each occurrence in the generated text.",
            low=-2.0,
            high=2.0,
        ),
    ] = 0.0
    logit_bias: Annotated[
        Mapping[int, float] | None, Option("Values in -100..100 to add to the logits of token ids.")
    ] = None
    bad_words: Annotated[
        Sequence[str],
        Option(
            "Texts that are never generated.",
            details=(
                "They are banned as the tokenizer writes them with and without a leading space; "
                "other token sequences with the same text are not caught."
            ),
        ),
    ] = ()
    stop: Annotated[
        str | Sequence[str],
        Option(
            "Stop before these texts.",
            details=(
                "They are not part of the output, and ignored before ``min_tokens`` tokens. They "
                "may contain names of special tokens, such as ``<|im_end|>``, which have no text "
                "in the output."
            ),
        ),
    ] = ()
    stop_token_ids: Annotated[
        Sequence[int],
        Option(
            "Stop after these token ids.",
            details="They are part of ``token_ids``, not of the text.",
        ),
    ] = ()
    thinking_budget: Annotated[
        int | None,
        Option(
            "Maximum number of tokens that the model thinks before it answers.",
            low=0,
            absent="no limit",
            details="Then the model's end marker of thinking is forced.",
        ),
    ] = None
    thinking_message: Annotated[
        str,
        Option(
            "Text that closes thoughts which have used up the budget.",
            details=(
                "It is forced before the model's end marker of thinking, such as ``I have to "
                "answer now.``, and is a part of the thoughts. Its tokens are not counted by "
                "``thinking_budget``."
            ),
        ),
    ] = ""
    ignore_eos: Annotated[bool, Option("Continue after the end-of-text token.")] = False
    seed: Annotated[
        int | None,
        Option(
            "Same seed, same text.",
            low=0,
            high=MAX_SEED,
            absent="random, and reported",
            details="The result has it in its ``seed``.",
        ),
    ] = None
    rule: Annotated[
        Rule,
        Option(
            "Acceptance of draft tokens when sampling. coupled: same seed, same text, whatever "
            "the drafter. rejection, block: only the distribution is the same; see "
            "docs/concepts.md.",
            details=(
                'Greedy decoding is the same under all rules. Under ``"coupled"``, the target '
                'samples without looking at the draft tokens. ``"rejection"`` accepts draft '
                "tokens one by one with the probability that preserves the target's distribution; "
                'the tokens depend on the seed and on the draft tokens. ``"block"`` tries the '
                "draft tokens of a chain together, and accepts at least as many on average."
            ),
        ),
    ] = "coupled"
    prediction: Annotated[
        str | Sequence[int] | None,
        Option(
            "Text that is expected as the output, such as a file to be changed. It is drafted "
            "from, and never changes the output.",
            absent="none",
            details=(
                "A text or token ids. The drafters ``auto`` and ``prediction`` use it; the "
                "statistics count how many of its tokens the output has."
            ),
        ),
    ] = None
    n: Annotated[
        int,
        Option(
            "Number of independent samples.",
            low=1,
            high=1024,
            details="Sample 0 has ``seed``, the others derived seeds.",
        ),
    ] = 1
    logprobs: Annotated[
        int | None,
        Option(
            "Report log-probabilities of each generated token and of this many most likely ones.",
            low=0,
            high=_MAX_LOGPROBS,
            absent="none",
        ),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        Option(
            "Like logprobs, for the tokens of the prompt.", low=0, high=_MAX_LOGPROBS, absent="none"
        ),
    ] = None
    logprob_token_ids: Annotated[
        Sequence[int], Option("With logprobs, report these token ids, too.")
    ] = ()
    guide: Annotated[
        Guide | None,
        Option(
            "Required form of the text.",
            absent="none",
            details="Log-probabilities are those of the model before the guide's mask.",
        ),
    ] = None
    guide_mode: Annotated[
        GuideMode,
        Option(
            "Tokens that the guide allows no alternative to. forced: proposed as draft tokens, at "
            "no cost. plain: not proposed; the text is the same. jump: appended without a forward "
            "pass.",
            details=(
                'With ``"jump"``, these tokens are as the tokenizer writes the text, have no '
                "log-probabilities, and the model does not choose among several end-of-text "
                "tokens."
            ),
        ),
    ] = "forced"

    def __post_init__(self) -> None:
        check_options(self)
        if self.min_tokens > self.max_tokens:
            msg = (
                f"min_tokens: expected at most max_tokens = {self.max_tokens}, found "
                f"{self.min_tokens}"
            )
            raise OptionError(msg)
        _check_bias(self.logit_bias)
        _check_prediction(self.prediction)
        for name in ("stop_token_ids", "logprob_token_ids"):
            for token in _check_list(name, getattr(self, name)):
                check_integer(name, token, 0)
        if self.logprob_token_ids and self.logprobs is None:
            msg = (
                f"logprob_token_ids: expected logprobs with it, found {self.logprob_token_ids!r} "
                "alone; set logprobs"
            )
            raise OptionError(msg)
        _check_guide(self)
        _check_list("stop", (self.stop,) if isinstance(self.stop, str) else self.stop)
        bad_words = _check_list("bad_words", self.bad_words)
        for name, texts in (("stop", self.stops), ("bad_words", bad_words)):
            if not all(isinstance(text, str) and text for text in texts):
                msg = f"{name}: expected texts that are not empty, found {getattr(self, name)!r}"
                raise OptionError(msg)

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts of the option ``stop`` as a tuple, even if it is a single text."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def greedy(self) -> bool:
        """Whether the temperature is 0."""
        return self.temperature == 0.0

    @property
    def rejects(self) -> bool:
        """Whether draft tokens are accepted at random, by the rejection or block rule.

        False for greedy decoding under any rule. If True, sampled tokens depend on the draft
        tokens, so a retry with the same seed may give other tokens.
        """
        return self.rule != "coupled" and not self.greedy

    @property
    def truncates(self) -> bool:
        """Whether unlikely tokens are excluded before sampling: by top-k, top-p or min-p."""
        return bool(self.top_k or self.top_p < 1.0 or self.min_p)

    def to_dict(self) -> dict[str, Any]:
        """Return the options as JSON values, by their names."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["guide"] = None if self.guide is None else self.guide.to_dict()
        if not isinstance(self.prediction, str | None):
            values["prediction"] = list(self.prediction)
        values["bad_words"] = list(self.bad_words)
        values["stop"] = list(self.stops)
        values["stop_token_ids"] = list(self.stop_token_ids)
        values["logprob_token_ids"] = list(self.logprob_token_ids)
        values["logit_bias"] = None if self.logit_bias is None else dict(self.logit_bias)
        return values


def _check_guide(params: SamplingParams) -> None:
    if params.guide is None:
        return
    if not isinstance(params.guide, Guide):
        msg = f"guide: expected a Guide, found {params.guide!r:.60}"
        raise OptionError(msg)
    if params.ignore_eos:
        msg = (
            "ignore_eos: expected False with a guide, which determines the end of the text, "
            "found True"
        )
        raise OptionError(msg)
    if params.guide_mode == "jump" and (params.logprobs is not None or params.bad_words):
        name = "bad_words" if params.bad_words else "logprobs"
        msg = (
            f'{name}: expected another guide_mode with it, found "jump", which skips the model; '
            'use "forced"'
        )
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


def _check_prediction(prediction: object) -> None:
    if prediction is None or isinstance(prediction, str):
        return
    if isinstance(prediction, bytes) or not isinstance(prediction, Sequence):
        msg = f"prediction: expected a text or a list of token ids, found {prediction!r:.60}"
        raise OptionError(msg)
    for token in prediction:
        check_integer("prediction", token, 0)


def _check_list(name: str, value: object) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, Collection):
        msg = f"{name}: expected a list, found {value!r}"
        raise OptionError(msg)
    return tuple(value)
