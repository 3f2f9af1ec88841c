"""Base classes of requests and replies, and types of their fields."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from itertools import islice
from typing import Annotated, Any, ClassVar, NamedTuple, Protocol, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    Tag,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError, PydanticKnownError

from pronk import Completion, Guide, GuideError, OptionError, Piece, PronkError, SamplingParams
from pronk.base import SMALL_JOB, count_text, declared_options
from pronk.server.errors import ApiError, name_once, to_api_error
from pronk.server.protocol.field_report import summarize
from pronk.server.protocol.field_table import rows_of
from pronk.server.protocol.fields import ObjectFields, Path, read_fields
from pronk.server.settings import RequestLimits
from pronk.serving import GuideKind, GuideMode, Rule
from pronk.text import AnswerCalls

GUIDE_KINDS = get_args(GuideKind)  # names of the arguments of ``Guide``
_NUM_SEEDS = 2**63  # number of seeds of the engine; a request's seed is taken modulo this number


class RequestBody(BaseModel):
    """Base of the JSON objects of a request.

    Fields that the class does not have are treated as :mod:`pronk.server.protocol.fields` says.
    Numbers written as strings are refused.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    # Parts of the table in :mod:`pronk.server.protocol.field_table` that apply to the object.
    places: ClassVar[Sequence[str]] = ()
    # Whether the object only describes something, so that unknown fields are ignored.
    is_record: ClassVar[bool] = False
    # Empty values that are not the same as no field, by the name of the field: the schema {} allows
    # any value.
    meaningful: ClassVar[Mapping[str, Any]] = {}
    about: ClassVar[ObjectFields] = ObjectFields()

    # Fields of this object that the server ignored or read under another name, such as "user" or
    # "n_predict (as max_tokens)"; ignored() reports them to the client.
    _ignored: list[str] = PrivateAttr(default_factory=list)
    # The object as the client sent it.
    _given: Mapping[str, Any] = PrivateAttr(default_factory=dict)
    # For each field that the client wrote under another name: the names that lead to it, such as
    # ("options", "num_predict") for "max_tokens".
    _written: dict[str, Path] = PrivateAttr(default_factory=dict)
    _num_bytes: int = PrivateAttr(SMALL_JOB + 1)

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        super().__pydantic_init_subclass__(**options)
        names = {info.alias or name: info for name, info in cls.model_fields.items()}
        optional = {name for name, info in names.items() if not info.is_required()}
        cls.about = ObjectFields(
            frozenset(names), optional, cls.meaningful, rows_of(cls.places), cls.is_record
        )

    @classmethod
    def adapt(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Convert an object in the form of another API to the form of this class."""
        return value

    @model_validator(mode="wrap")
    @classmethod
    def _read(
        cls, value: Any, validate: ModelWrapValidatorHandler[Self], info: ValidationInfo
    ) -> Self:
        """Treat unknown and renamed fields of an object before its fields are validated.

        ``info.context`` is ``None`` or a list, to which the new object is added.
        """
        if not isinstance(value, dict):
            return validate(value)
        fields = read_fields(cls.adapt(value), cls.about)
        try:
            body = validate(fields.known)
        except ValidationError as error:
            raise _as_written(error, fields.written) from error
        # These attributes are this class's own.
        body._given = value  # noqa: SLF001
        body._ignored = fields.ignored  # noqa: SLF001
        body._written = fields.written  # noqa: SLF001
        if info.context is not None:
            info.context.append(body)
        return body

    @property
    def given(self) -> Mapping[str, Any]:
        """The object as the client sent it."""
        return self._given

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the request's JSON text; until it is set, that of a large body."""
        return self._num_bytes

    @num_bytes.setter
    def num_bytes(self, number: int) -> None:
        self._num_bytes = number

    def written(self, name: str) -> str:
        """Return the path of a field as the client wrote it.

        For example ``options.num_predict`` for ``max_tokens``.
        """
        info = type(self).model_fields.get(name)
        own = (info and info.alias) or name
        return ".".join(self._written.get(own, (own,)))

    def ignored(self) -> list[str]:
        """Return the paths of all ignored and renamed fields, such as ``messages[].phase``."""
        return summarize(self.report(""))

    def note_ignored(self, names: Iterable[str]) -> None:
        """Add fields to :meth:`ignored` that the model in use cannot follow."""
        self._ignored.extend(names)

    def report(self, path: str) -> Iterator[str]:
        """Yield the path of each ignored field in this object, whose own path is ``path``."""
        prefix = f"{path}." if path else ""
        yield from (f"{prefix}{name}" for name in self._ignored)
        for name, info in type(self).model_fields.items():
            yield from _report(getattr(self, name), f"{prefix}{info.alias or name}")


def _as_written(error: ValidationError, written: Mapping[str, Path]) -> ValidationError:
    """Return pydantic's error with locations in the words of the client.

    ``written`` has, for each field that the client wrote under another name, the names that lead to
    it.
    """
    problems = list[InitErrorDetails]()
    for problem in error.errors(include_url=False):
        location = problem["loc"]
        if location:
            first, *inner = location
            location = (*written.get(str(first), (first,)), *inner)
        problems.append(_at(problem, location))
    return ValidationError.from_exception_data(error.title, problems)


def _at(problem: ErrorDetails, location: tuple[str | int, ...]) -> InitErrorDetails:
    """Return a problem that pydantic has reported, at another location."""
    context = {**problem.get("ctx", {}), "message": problem["msg"]}
    kind = PydanticCustomError(problem["type"], "{message}", context)
    return {"type": kind, "loc": location, "input": problem["input"]}


def _report(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, RequestBody):
        yield from value.report(path)
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _report(each, f"{path}[{number}]")


class Record(RequestBody):
    """Base of objects that describe something of the client, such as a message.

    Unknown fields of such an object are ignored.
    """

    is_record: ClassVar = True


class Skipped(Record):
    """Object of a type that this server does not use, such as a tool of another server."""

    type: str = "function"

    @property
    def name_of_tool(self) -> str | None:
        """Name of the ignored tool, from the object or the definition in it, or ``None``."""
        definitions = [self._given, self._given.get("function"), self._given.get(self.type)]
        names = [each.get("name") for each in definitions if isinstance(each, Mapping)]
        return next((name for name in names if isinstance(name, str) and name), None)

    def report(self, path: str) -> Iterator[str]:
        yield f"{path} ({self.type})"


def check_encodable(text: str) -> str:
    """Return a text unchanged if UTF-8 can encode it.

    Raises:
        ValueError: the text has half of a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        msg = "expected text, found half of a surrogate pair"
        raise ValueError(msg) from error
    return text


# Text without lone surrogates, which JSON can escape, but UTF-8 cannot encode.
Text = Annotated[str, AfterValidator(check_encodable)]
# With fail_fast, a list of a million wrong elements raises one error, not a million.
Texts = Annotated[list[Text], Field(fail_fast=True)]
MAX_IDS = 2**20  # maximum number of token ids of one prompt
# Number of token ids or biases that one call of pydantic checks, in which no other thread runs. A
# call takes a millisecond; one for 2**20 ids would take 40 ms, and 300 ms on a busy machine.
_PART = 2**14


def _check_ids_in_parts(ids: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Check the length of a list of token ids, and then its parts, so that other threads go on."""
    if not isinstance(ids, list) or len(ids) <= _PART:
        return check(ids)
    if len(ids) > MAX_IDS:
        sizes = {"field_type": "List", "max_length": MAX_IDS, "actual_length": len(ids)}
        raise PydanticKnownError("too_long", sizes)
    for start in range(0, len(ids), _PART):
        try:
            check(ids[start : start + _PART])
        except ValidationError as error:
            raise _at_later_index(error, start) from error
    return ids


def _check_biases_in_parts(biases: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Check the parts of a ``logit_bias``, so that other threads go on."""
    if not isinstance(biases, dict) or len(biases) <= _PART:
        return check(biases)
    checked = dict[str, float]()
    items = iter(biases.items())
    while part := dict(islice(items, _PART)):
        checked |= check(part)
    return checked


def _at_later_index(error: ValidationError, start: int) -> ValidationError:
    """Return pydantic's error about a part of a list, with the indices of the whole list."""
    problems = list[InitErrorDetails]()
    for problem in error.errors(include_url=False):
        index, *inner = problem["loc"]
        problems.append(_at(problem, (start + int(index), *inner)))
    return ValidationError.from_exception_data(error.title, problems)


# Token ids of one prompt.
Ids = Annotated[
    list[Annotated[int, Field(ge=-(2**63), lt=2**63)]],
    Field(fail_fast=True, max_length=MAX_IDS),
    WrapValidator(_check_ids_in_parts),
]


def _without_empty(texts: Any) -> Any:
    """Return a list of stop strings or bad words without the empty ones, which mean nothing."""
    if not isinstance(texts, list):
        return texts
    return [each for each in texts if each != ""]


StopTexts = Annotated[Text | Texts, BeforeValidator(_without_empty)]
BadWords = Annotated[Texts, BeforeValidator(_without_empty)]

NO_LIMIT = 2**31  # as a maximum number of tokens: as many as fit into the model's context


def _read_limit(limit: Any) -> Any:
    """Return a maximum number of tokens, with ``NO_LIMIT`` for the values that mean no limit.

    In llama.cpp, -1 and -2 mean no limit. Clients in JavaScript send 2**53 - 1.
    """
    if not isinstance(limit, int) or isinstance(limit, bool):
        return limit
    return NO_LIMIT if limit in (-1, -2) or NO_LIMIT < limit < 2**63 else limit


# Both -1 and 0 switch top-k sampling off, even if the model's developers recommend a value.
TopK = Annotated[
    int, Field(ge=0, le=2**31), BeforeValidator(lambda value: 0 if value == -1 else value)
]
MaxTokens = Annotated[int, Field(ge=1, le=NO_LIMIT), BeforeValidator(_read_limit)]


def _prompt_type(prompt: Any) -> str:
    """Return the tag of the type in the union ``Prompts`` to which a field ``prompt`` belongs.

    The first element of a list decides. Pydantic then validates the value as this type alone.
    """
    if not isinstance(prompt, list):
        return "<text>"
    first = prompt[0] if prompt else ""
    if isinstance(first, list):
        return "<lists>"
    return "<texts>" if isinstance(first, str) else "<ids>"


Prompts = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[Texts, Tag("<texts>")]
    | Annotated[Ids, Tag("<ids>")]
    | Annotated[list[Ids], Field(fail_fast=True), Tag("<lists>")],
    Discriminator(_prompt_type),
]


def list_prompts(prompts: Any) -> list[str | list[int]]:
    """Return the prompts of a field ``Prompts``, each a text or a list of token ids."""
    return [prompts] if _prompt_type(prompts) in ("<text>", "<ids>") else [*prompts]


class StreamOptions(RequestBody):
    """Field ``stream_options``: token counts in a stream."""

    # Unknown fields are ignored: such options of other servers never change the text.
    is_record: ClassVar = True

    include_usage: bool = False
    continuous_usage_stats: bool = False  # field of vLLM, whose benchmark clients always set it


def _sampling_field(name: str) -> Any:
    """Return an optional pydantic field with the range of the option ``name``.

    The option is one of ``SamplingParams``, which declares its range.
    """
    option = declared_options(SamplingParams)[name].option
    bounds: dict[str, Any] = {"gt" if option.exclusive_min else "ge": option.low, "le": option.high}
    return Field(None, **bounds)


class TextRequest(RequestBody):
    """Base of requests for text, with their common options; ``None`` is the same as no field.

    The OpenAI API lacks ``drafter``, ``rule``, ``guide_mode``, ``priority``, ``leaps``,
    ``cache_salt``, ``top_k``, ``min_p``, ``repetition_penalty``, ``min_tokens``,
    ``stop_token_ids``, ``bad_words`` and ``ignore_eos``.
    """

    places: ClassVar[Sequence[str]] = ("text",)

    model: Text | None = None
    temperature: float | None = _sampling_field("temperature")
    do_sample: bool | None = Field(None, description="Whether the temperature is above 0.")
    top_p: float | None = Field(None, ge=0.0, le=1.0)  # 0 means greedy decoding, see params()
    top_k: TopK | None = None
    min_p: float | None = _sampling_field("min_p")
    n: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=-_NUM_SEEDS, lt=2 * _NUM_SEEDS)
    stop: StopTexts | None = None
    stop_token_ids: Ids | None = None
    bad_words: BadWords | None = None
    presence_penalty: float | None = _sampling_field("presence_penalty")
    frequency_penalty: float | None = _sampling_field("frequency_penalty")
    repetition_penalty: float | None = _sampling_field("repetition_penalty")
    logit_bias: Annotated[dict[str, float], WrapValidator(_check_biases_in_parts)] | None = None
    min_tokens: int | None = _sampling_field("min_tokens")
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    drafter: Text | None = Field(None, min_length=1, max_length=256)
    rule: Rule | None = None
    guide_mode: GuideMode | None = None
    priority: int | None = Field(None, ge=-1000, le=1000)
    cache_salt: Text | None = Field(None, min_length=1, max_length=1024)
    leaps: bool | None = Field(
        None, description="Report id, text, drafter and step of each streamed token."
    )

    @field_validator("logit_bias")
    @classmethod
    def _check_bias(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for token, bias in (value or {}).items():
            is_id = token.isascii() and token.isdigit() and len(token) < 10
            if not is_id or not -100.0 <= bias <= 100.0:
                msg = (
                    "expected token ids with a value in -100..100 each, found another key or value"
                )
                raise ValueError(msg)
        return value

    @property
    def include_usage(self) -> bool:
        """Whether the last chunk of a stream has token counts, and all others ``"usage": null``."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk of a stream has the token counts so far."""
        options = self.stream_options
        return options is not None and options.include_usage and options.continuous_usage_stats

    def check(self, limits: RequestLimits) -> None:
        """Raise ``ApiError`` if an option exceeds its limit, or contradicts another option."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        check_max("n", self.n, limits.n)
        check_max("stop", len(stops), limits.stop)
        check_max("stop_token_ids", len(self.stop_token_ids or ()), limits.stop)
        check_max("bad_words", len(self.bad_words or ()), limits.stop)
        check_max("logit_bias", len(self.logit_bias or ()), limits.logit_bias)
        for name, texts in (("stop", stops), ("bad_words", self.bad_words or [])):
            longest = max(map(len, texts), default=0)
            if longest > limits.stop_length:
                most = count_text(limits.stop_length, "character")
                raise refuse(name, f"expected at most {most} each, found {longest}")
        if self.do_sample is False and self.temperature:
            found = f"{self.temperature}; leave one out"
            raise refuse("do_sample", f"expected temperature: 0 with false, found {found}")
        if self.do_sample and self.temperature == 0:
            found = "temperature: 0; leave one out"
            raise refuse("do_sample", f"expected temperature above 0 with true, found {found}")
        if self.leaps and not self.stream:
            problem = "expected stream: true, found no stream; add it, or leave the field out"
            raise refuse("leaps", problem)
        self._check_forms()

    def _check_forms(self) -> None:
        """Raise ``ApiError`` if two fields require different forms of the answer."""
        forms = [*self.guide_arguments().items()]
        for field, form in forms[1:]:
            first, expected = forms[0]
            if form != expected:
                found = f"{first} and {field}; leave one out"
                raise refuse(field, f"expected one form of the answer, found {found}")

    def as_written(self, error: ApiError) -> ApiError:
        """Return an error in which the field has the name that the client wrote.

        For example ``options.num_predict`` instead of ``max_tokens``.
        """
        written = None if error.param is None else self.written(error.param)
        if written is None or written == error.param:
            return error
        message = name_once(written, error.message.removeprefix(f"{error.param}: "))
        return ApiError(error.status, message, error.code, written, error.headers)

    def guide_arguments(self) -> dict[str, Mapping[str, Any]]:
        """Return the arguments of ``Guide`` for each field that requires a form of the answer.

        For example ``{"guided_regex": {"regex": "a+"}}``.

        Raises:
            ApiError: a field is invalid.
        """
        return {}

    def guide(self) -> Guide | None:
        """Return the guide for the form of the answer, or ``None`` if no form is required.

        Raises:
            ApiError: the form is invalid.
        """
        arguments = next(iter(self.guide_arguments().values()), None)
        if arguments is None:
            return None
        try:
            return Guide(**arguments)
        except GuideError as error:
            raise self.field_error(error) or error from error

    def field_error(self, error: PronkError) -> ApiError | None:
        """Convert a ``GuideError`` to an ``ApiError`` that names the field with the invalid form.

        Such a field is for example ``guided_regex``. Returns ``None`` for other errors, and if the
        request has no such field.
        """
        field = next(iter(self.guide_arguments()), None)
        if not isinstance(error, GuideError) or field is None:
            return None
        message = str(error).removeprefix("guide: ")
        kind, _, rest = message.partition(": ")
        return refuse(field, rest if kind in GUIDE_KINDS else message)

    def answer_calls(self) -> AnswerCalls | None:
        """Return the tool calls that an answer may have; ``None`` if it may have one at most."""
        return None

    def params(self, max_tokens: int, **options: Any) -> SamplingParams:
        """Return the sampling parameters of the request, with further ``options``.

        The service has set missing fields to the values that are recommended for the model.
        """
        given = {name: value for name in _UNCHANGED if (value := getattr(self, name)) is not None}
        if given.get("top_p") == 0.0:  # as in OpenAI's API: only the likeliest token may be chosen
            given |= {"top_p": 1.0, "top_k": 1}
        logit_bias = None
        if self.logit_bias:
            logit_bias = {int(token): bias for token, bias in self.logit_bias.items()}
        return SamplingParams(
            max_tokens=max_tokens,
            seed=None if self.seed is None else self.seed % _NUM_SEEDS,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            bad_words=tuple(self.bad_words or ()),
            logit_bias=logit_bias,
            **given,
            **options,
        )


# Options of SamplingParams whose values params() converts from the form that requests have.
_CONVERTED = frozenset({"seed", "stop_token_ids", "bad_words", "logit_bias", "prediction"})
# Options of SamplingParams that are fields of requests with the same values.
_UNCHANGED = [
    name
    for name in declared_options(SamplingParams)
    if name in TextRequest.model_fields and name not in _CONVERTED
]


class Reply(Protocol):
    """Builder of a reply; sample ``s`` of prompt ``p`` has the index ``p * n + s``."""

    def start(self) -> list[dict[str, Any]]:
        """Return the first chunks of a stream."""

    def step(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """Return the chunks of a stream for ``pieces``, the new tokens of one decoding step."""

    def record(self, pieces: Sequence[Piece]) -> None:
        """Record the new tokens of a step for :meth:`whole`; called for replies without stream."""

    def end(self, done: Sequence[Completion]) -> list[dict[str, Any]]:
        """Return the last chunks of a stream; ``done`` has all samples, ordered by index."""

    def whole(self, done: Sequence[Completion]) -> dict[str, Any]:
        """Return the whole reply; ``done`` has all samples, ordered by index."""


class EngineInputs(NamedTuple):
    """Input of the engine for one request."""

    prompts: Sequence[list[int]]  # token ids
    params: SamplingParams  # of all prompts
    # branch positions of each prompt (:class:`pronk.text.ChatPrompt`); empty without conversations
    branch_positions: Sequence[Sequence[int]] = ()


class PreparedRequest(NamedTuple):
    """A request that was checked and tokenized, and the builder of its reply."""

    inputs: EngineInputs
    reply: Reply  # builder of the reply


def refuse(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """Return the error for a field with an invalid value, with status 400.

    Args:
        param: name of the field, as the client wrote it.
        message: what is expected and found; it may begin with the field's name.
        code: ``code`` of OpenAI's error object.
    """
    return ApiError(HTTPStatus.BAD_REQUEST, name_once(param, message), code, param)


def unsupported(param: str, message: str) -> ApiError:
    """Return the error for a field or value that the server does not support.

    Arguments as in :func:`refuse`.
    """
    return refuse(param, message, "unsupported")


@contextmanager
def naming_fields_of(request: TextRequest) -> Iterator[None]:
    """Convert an error about an option, raised in the ``with`` block, to an ``ApiError``.

    The ``ApiError`` names the field as the client wrote it in ``request``.
    """
    try:
        yield
    except (ApiError, OptionError) as error:
        raise request.as_written(to_api_error(error)) from error


def check_max(param: str, value: int | None, maximum: int) -> None:
    """Raise ``ApiError`` if the value of the field ``param`` exceeds its maximum."""
    if (value or 0) > maximum:
        raise refuse(param, f"expected at most {maximum}, found {value}")


def by_sample(pieces: Sequence[Piece]) -> list[tuple[int, list[Piece]]]:
    """Return the index and the pieces of each sample in a step, ordered by index."""
    samples: dict[int, list[Piece]] = {}
    for piece in pieces:
        samples.setdefault(piece.index, []).append(piece)
    return sorted(samples.items())


def leaps(pieces: Sequence[Piece]) -> list[Mapping[str, Any]]:
    """Return the field ``leaps``: id, text, drafter (``source``) and decoding step of each token.

    ``source`` is null for a token that no drafter has drafted.
    """
    return [{"id": p.token_id, "text": p.text, "source": p.source, "step": p.step} for p in pieces]


class RunningUsage:
    """Token counts of a stream so far, per sample, with ``n`` samples per prompt."""

    def __init__(self, prompts: Sequence[list[int]], n: int) -> None:
        self._prompts = prompts
        self._n = n
        self._generated = Counter[int]()

    def add(self, pieces: Sequence[Piece], chunks: Sequence[dict[str, Any]]) -> None:
        """Count the new tokens of a step, and set the field ``usage`` of its chunks.

        The field of a chunk has the token counts of the chunk's sample so far.
        """
        self._generated.update(piece.index for piece in pieces)
        for chunk in chunks:
            for choice in chunk.get("choices", ()):
                prompt = len(self._prompts[choice["index"] // self._n])
                generated = self._generated[choice["index"]]
                chunk["usage"] = {
                    "prompt_tokens": prompt,
                    "completion_tokens": generated,
                    "total_tokens": prompt + generated,
                }


def usage(done: Sequence[Completion], n: int, num_thought_tokens: int = 0) -> dict[str, Any]:
    """Return the field ``usage``: token counts, decoding steps and draft tokens of all samples.

    The tokens of a prompt count once for its ``n`` samples. Rejected tokens of a prediction are not
    in the output, and are not counted as ``completion_tokens``.
    """
    stats = [completion.stats for completion in done]
    first_stats = stats[::n]  # statistics of the first sample of each prompt
    prompt = sum(each.prompt_tokens for each in first_stats)
    cached = sum(min(each.cached_tokens, each.prompt_tokens) for each in first_stats)
    generated = sum(each.generated_tokens for each in stats)
    predicted = sum(each.predicted_tokens for each in stats)
    found = sum(each.found_tokens for each in stats)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "reasoning_tokens": num_thought_tokens,
            "accepted_prediction_tokens": found,
            "rejected_prediction_tokens": predicted - found,
        },
        "steps": sum(each.target_steps for each in stats),
        "drafted": sum(each.drafted for each in stats),
        "accepted": sum(each.accepted for each in stats),
    }
