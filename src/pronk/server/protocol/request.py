"""What all requests for text have in common: their options, and how answers are put together."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from pronk.outputs import Completion, Piece
from pronk.sampling.guide import Guide
from pronk.sampling.params import SamplingParams
from pronk.server.errors import ApiError
from pronk.server.settings import RequestLimits

__all__ = [
    "TOOLS",
    "GenerationWork",
    "Ids",
    "Reply",
    "RequestBody",
    "RunningUsage",
    "StreamOptions",
    "Text",
    "TextRequest",
    "Texts",
    "leaps",
    "refuse",
    "unsupported",
    "usage",
]

# Tools, and how they are to be used; without any there is nothing to use.
TOOLS: Mapping[str, Sequence[Any]] = {
    "tools": [[]],
    "tool_choice": ["none", "auto"],
    "parallel_tool_calls": [True, False],
}
# OpenAI's seeds may be negative, the engine's may not.
_SEEDS = 2**63


class RequestBody(BaseModel):
    """A request's JSON: unknown fields are refused, and so are numbers that are written as texts.

    Attributes:
        idle: fields of OpenAI's that are not built here, with the values by which they ask for nothing.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    idle: ClassVar[Mapping[str, Sequence[Any]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _given(cls, value: Any) -> Any:
        """Fields that are null are not there; of unknown ones the first is enough, however many there are."""
        if not isinstance(value, dict):
            return value
        given = {name: each for name, each in value.items() if each is not None}
        for name in cls.idle.keys() & given.keys():
            found, fine = given.pop(name), [json.dumps(each) for each in cls.idle[name]]
            if json.dumps(found) not in fine:
                msg = f"not built here; expected {' or '.join([*fine, 'no such field'])}"
                raise unsupported(name, msg)
        names = {info.alias or name for name, info in cls.model_fields.items()}
        known = {name: each for name, each in given.items() if name in names}
        unknown = next((name for name in given if name not in known), None)
        return known if unknown is None else {**known, unknown: None}


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        msg = "expected text, found half of a surrogate pair"
        raise ValueError(msg) from error
    return text


# JSON can write halves of characters, which no encoding has.
Text = Annotated[str, AfterValidator(_encodable)]
# A list of millions has one mistake to tell of, not millions.
Texts = Annotated[list[Text], Field(fail_fast=True)]
Ids = Annotated[list[Annotated[int, Field(ge=-(2**63), lt=2**63)]], Field(fail_fast=True)]


class StreamOptions(RequestBody):
    """What a stream has besides its text."""

    idle: ClassVar = {"include_obfuscation": [False]}

    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's; its load generators always set it


class TextRequest(RequestBody):
    """The options of a request for text; ``None`` is each one's default, as clients send it.

    ``drafter``, ``rule``, ``guide_mode``, ``priority``, ``leaps``, ``cache_salt``, ``top_k``, ``min_p``,
    ``repetition_penalty``, ``min_tokens``, ``stop_token_ids``, ``bad_words`` and ``ignore_eos`` are not OpenAI's.
    """

    idle: ClassVar = {"service_tier": ["auto", "default"], "store": [False]}

    model: Text | None = None
    temperature: float | None = Field(None, ge=0.0, le=100.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=0, le=2**31)
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    n: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=-_SEEDS, lt=_SEEDS)
    stop: Text | Texts | None = None
    stop_token_ids: Ids | None = None
    bad_words: Texts | None = None
    presence_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    frequency_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    repetition_penalty: float | None = Field(None, gt=0.0, le=100.0)
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Text | None = Field(None, max_length=512, description="for your own records: it is neither used nor kept")
    safety_identifier: Text | None = Field(None, max_length=512, description="likewise")
    prompt_cache_key: Text | None = Field(None, max_length=512, description="likewise: texts are known by themselves")
    metadata: dict[Text, Text] | None = Field(None, max_length=16, description="likewise")
    drafter: Text | None = Field(None, min_length=1, max_length=256)
    rule: Literal["coupled", "rejection", "block"] | None = None
    guide_mode: Literal["forced", "plain", "jump"] | None = None
    priority: int | None = Field(None, ge=-1000, le=1000)
    cache_salt: Text | None = Field(None, min_length=1, max_length=256)
    leaps: bool | None = Field(None, description="say of each token who guessed it, and with which pass it came")

    @field_validator("logit_bias")
    @classmethod
    def _ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for token, bias in (value or {}).items():
            if not (token.isascii() and token.isdigit() and len(token) < 10 and -100.0 <= bias <= 100.0):
                msg = "expected token ids with a value in -100..100 each"
                raise ValueError(msg)
        return value

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage, which its other chunks have as null."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk of a stream has the token counts so far instead of null."""
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    def check(self, limits: RequestLimits) -> None:
        """Hold the options to the server's limits.

        Raises:
            ApiError: one of them asks for more.
        """
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        for name, found, most in (
            ("n", self.n or 1, limits.n),
            ("stop", len(stops), limits.stop),
            ("stop_token_ids", len(self.stop_token_ids or ()), limits.stop),
            ("bad_words", len(self.bad_words or ()), limits.stop),
            ("logit_bias", len(self.logit_bias or ()), limits.logit_bias),
        ):
            if found > most:
                raise refuse(name, f"expected at most {most}, found {found}")
        for name, texts in (("stop", stops), ("bad_words", self.bad_words or [])):
            longest = max(map(len, texts), default=0)
            if longest > limits.stop_length:
                raise refuse(name, f"expected at most {limits.stop_length} characters each, found {longest}")
        if self.stream_options is not None and not self.stream:
            raise refuse("stream_options", "expected it with stream: true alone")
        if self.leaps and not self.stream:
            raise refuse("leaps", "expected them with stream: true alone")

    def params(
        self,
        max_tokens: int,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        guide: Guide | None = None,
    ) -> SamplingParams:
        """The options as the engine has them; OpenAI's default is to sample at temperature 1."""
        plain = ("top_p", "top_k", "min_p", "n", "min_tokens", "ignore_eos", "rule", "stop", "guide_mode")
        penalties = ("presence_penalty", "frequency_penalty", "repetition_penalty")
        given = {name: value for name in (*plain, *penalties) if (value := getattr(self, name)) is not None}
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            seed=None if self.seed is None else self.seed % _SEEDS,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            bad_words=tuple(self.bad_words or ()),
            logit_bias={int(token): bias for token, bias in self.logit_bias.items()} if self.logit_bias else None,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            guide=guide,
            **given,
        )


@dataclass(frozen=True)
class GenerationWork:
    """What an ask comes to.

    Attributes:
        prompts: token ids of each.
        params: of all.
        answer: what makes the reply of what they give.
    """

    prompts: Sequence[list[int]]
    params: SamplingParams
    answer: Reply


class Reply(Protocol):
    """Puts replies together. Samples are numbered over all prompts: sample ``s`` of prompt ``p`` is ``p * n + s``."""

    def start(self) -> list[dict[str, Any]]:
        """What a stream begins with."""
        ...

    def step(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """What a stream has of a step's tokens."""
        ...

    def read(self, pieces: Sequence[Piece]) -> None:
        """The same step, where it is no stream: what texts alone do not tell is kept for :meth:`body`."""
        ...

    def end(self, done: Sequence[Completion]) -> list[dict[str, Any]]:
        """What a stream ends with."""
        ...

    def body(self, done: Sequence[Completion]) -> dict[str, Any]:
        """All at once; ``done`` are the samples in the order of their numbers."""
        ...


def refuse(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """A field that is not as it may be."""
    return ApiError(HTTPStatus.BAD_REQUEST, f"{param}: {message}", code, param)


def unsupported(param: str, message: str) -> ApiError:
    """A field of OpenAI's that is not built here."""
    return refuse(param, message, "unsupported")


def leaps(pieces: Sequence[Piece]) -> list[Mapping[str, Any]]:
    """Of each token its id, the text that became final with it, who guessed it, and with which pass it came."""
    return [{"id": p.token_id, "text": p.text, "source": p.source, "step": p.step} for p in pieces]


class RunningUsage:
    """Token counts of each sample of a stream so far.

    Args:
        prompts: token ids of each prompt.
        n: samples of each prompt.
    """

    def __init__(self, prompts: Sequence[list[int]], n: int) -> None:
        self._prompts, self._n = prompts, n
        self._generated = Counter[int]()

    def add(self, pieces: Sequence[Piece], chunks: Sequence[dict[str, Any]]) -> None:
        """Count the tokens of a step, and put each sample's counts into its chunks."""
        self._generated.update(piece.index for piece in pieces)
        for chunk in chunks:
            for choice in chunk.get("choices", ()):
                prompt, generated = len(self._prompts[choice["index"] // self._n]), self._generated[choice["index"]]
                chunk["usage"] = {
                    "prompt_tokens": prompt,
                    "completion_tokens": generated,
                    "total_tokens": prompt + generated,
                }


def usage(done: Sequence[Completion], n: int) -> dict[str, Any]:
    """Counts of all samples; the prompt's tokens count once for each prompt.

    Args:
        done: the samples.
        n: samples of each prompt.
    """
    stats = [completion.stats for completion in done]
    prompt = sum(each.prompt_tokens for each in stats[::n])
    generated = sum(each.generated_tokens for each in stats)
    drafted, accepted = sum(each.drafted for each in stats), sum(each.accepted for each in stats)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(min(s.cached_tokens, s.prompt_tokens) for s in stats[::n])},
        "steps": sum(each.target_steps for each in stats),
        "drafted": drafted,
        "accepted": accepted,
    }
