"""HTTP client of an OpenAI-compatible server, for two routes: completions and chat."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from operator import call
from time import perf_counter
from typing import Any, Literal, Self

import httpx

from pronk import PronkError, SamplingParams
from pronk.base import describe_error
from pronk.serving import sampling_values

Route = Literal["completions", "chat"]
ROUTES: tuple[Route, ...] = ("completions", "chat")
_PATHS: Mapping[Route, str] = {"completions": "completions", "chat": "chat/completions"}
# Fields of a chat message that are texts, in the order of generation.
_TEXT_FIELDS = ("reasoning_content", "reasoning", "content")
_MAX_ANSWER = 160  # maximum number of characters of an error response to quote


class ServerUnreachableError(PronkError):
    """The server cannot be reached, refuses the API key, answers too late, or has no model."""


class UnsupportedError(Exception):
    """The server refuses a request, or its answer is incomplete; the message quotes the answer."""


class ServerFaultError(UnsupportedError):
    """The server answers with an HTTP status from 500 on."""


@dataclass(frozen=True)
class RemoteToken:
    """A token of an answer, with log-probabilities."""

    text: str
    logprob: float  # log-probability of this token
    top: tuple[float, ...]  # log-probabilities of the likeliest tokens at its position


@dataclass(frozen=True)
class Answer:
    """One choice of a server's answer."""

    text: str
    tokens: tuple[RemoteToken, ...] = ()  # empty if no log-probabilities were requested
    # Number of tokens of the prompt that the server had cached; ``None`` if it does not say.
    cached_tokens: int | None = None
    period: tuple[float, float] = (0.0, 0.0)  # times of the first and of the last text of a stream


@dataclass
class RemoteServer:
    """Connection to one model of a server; thread-safe."""

    url: str  # address of the server, with or without ``/v1``
    model: str | None = None  # name of the model; by default the first of ``/v1/models``
    key: str | None = field(default=None, repr=False)  # API key
    timeout: float = 120.0  # seconds to wait for an answer
    software: str = ""  # header ``Server`` of the last answer: name and version of its software
    num_requests: int = 0
    # Options that turn off penalties and other defaults, which a server lists as ``sampling`` of
    # its model. The checks compare greedy tokens with log-probabilities before penalties.
    neutral_options: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        base = self.url.rstrip("/").removesuffix("/v1") + "/v1"
        headers = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        # Each request has a connection of its own, because a server may close an idle connection at
        # the moment of the next request.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        try:
            self._client = httpx.Client(
                base_url=base, headers=headers, timeout=self.timeout, limits=limits
            )
            self._client.event_hooks = {"response": [self._check]}
            if self._client.base_url.scheme not in {"http", "https"}:
                msg = f"it has no http:// or https://; write http://{self.url}"
                raise httpx.UnsupportedProtocol(msg)  # noqa: TRY301 - one message for all wrong addresses
        except (httpx.InvalidURL, httpx.UnsupportedProtocol, UnicodeEncodeError) as error:
            msg = (
                f"url: expected an address such as http://127.0.0.1:8000, found {self.url!r}: "
                f"{error}"
            )
            raise ServerUnreachableError(msg) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def connect(self) -> str:
        """Return the name of the model; read the server's defaults, if the server lists them.

        Raises ServerUnreachableError if there is no server, or the server names no model.
        """
        try:
            listed = self._send("GET", "models", None)["data"]
            models = {str(each["id"]): each.get("sampling") for each in listed}
            name = next(iter(models)) if self.model is None else self.model
        except (UnsupportedError, LookupError, TypeError, AttributeError, StopIteration) as error:
            if self.model is not None:
                return self.model
            msg = (
                f"model: expected a list of models at {self.url}, found none ({error}); "
                "give --model"
            )
            raise ServerUnreachableError(msg) from error
        recommended = models.get(name)
        if isinstance(recommended, Mapping):
            neutral = sampling_values(SamplingParams())
            self.neutral_options = {
                option: neutral[option] for option in recommended if option in neutral
            }
        self.model = name
        return name

    def ask(self, route: Route, prompt: str, max_tokens: int, **options: Any) -> list[Answer]:
        """Return the choices of an answer without stream.

        ``options`` are ``temperature`` (default 0), ``seed``, ``n``, and ``top``: the number of
        likeliest tokens whose log-probabilities to report. Raises UnsupportedError if the server
        refuses the request or answers in another form.
        """
        body = self._body(route, prompt, max_tokens, options)
        reply = self._send("POST", _PATHS[route], body)
        try:
            usage = reply.get("usage") or {}
            details = usage.get("prompt_tokens_details") or {}
            cached = details.get("cached_tokens")
            choices = sorted(reply["choices"], key=lambda choice: int(choice.get("index") or 0))
            answers = [Answer(_text(route, each), _tokens(route, each), cached) for each in choices]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            msg = f"expected choices with texts, found {json.dumps(reply)[:_MAX_ANSWER]}"
            raise UnsupportedError(msg) from error
        return answers

    def stream(self, route: Route, prompt: str, max_tokens: int, **options: Any) -> Answer:
        """Return the joined text of a streamed answer; see :meth:`ask` for arguments and errors."""
        body = self._body(route, prompt, max_tokens, options) | {"stream": True}
        texts = list[str]()
        times = list[float]()
        num_choices = 0
        for event in self._events(_PATHS[route], body):
            if isinstance(error := event.get("error"), Mapping):
                msg = f"the stream ended with {json.dumps(error)[:_MAX_ANSWER]}"
                raise UnsupportedError(msg)
            for choice in event.get("choices") or ():
                num_choices += 1
                text = _text(route, choice, streamed=True)
                if text:
                    texts.append(text)
                    times.append(perf_counter())
        if not num_choices:
            msg = "the stream has no choices"
            raise UnsupportedError(msg)
        period = (times[0], times[-1]) if times else (0.0, 0.0)
        return Answer("".join(texts), period=period)

    def together(self, calls: Sequence[Callable[[], Answer]]) -> list[Answer]:
        """Run calls at the same time and return their results in order; raise the first error."""
        with ThreadPoolExecutor(len(calls)) as pool:
            return list(pool.map(call, calls))

    def _body(
        self, route: Route, prompt: str, max_tokens: int, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens, "temperature": 0.0}
        body |= {**self.neutral_options, **options}
        top = body.pop("top", None)
        if route == "completions":
            return body | {"prompt": prompt} | ({} if top is None else {"logprobs": top})
        body |= {"messages": [{"role": "user", "content": prompt}]}
        return body if top is None else body | {"logprobs": True, "top_logprobs": top}

    def _send(self, method: str, path: str, body: Any) -> Any:
        with self._errors():
            response = self._client.request(method, path, json=body)
        try:
            return response.json()
        except ValueError as error:
            msg = f"expected JSON, found {response.text[:_MAX_ANSWER]!r}"
            raise UnsupportedError(msg) from error

    def _events(self, path: str, body: Any) -> Iterator[Mapping[str, Any]]:
        with self._errors(), self._client.stream("POST", path, json=body) as response:
            for line in response.iter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                try:
                    event = json.loads(data)
                except ValueError as error:
                    msg = f"expected events in JSON, found {data[:_MAX_ANSWER]!r}"
                    raise UnsupportedError(msg) from error
                if isinstance(event, Mapping):
                    yield event

    def _check(self, response: httpx.Response) -> None:
        """Raise the error of a response whose status is not 200."""
        self.software = response.headers.get("server", self.software)
        self.num_requests += 1
        status = response.status_code
        if status == HTTPStatus.OK:
            return
        response.read()
        answer = f"HTTP {status}: {' '.join(response.text.split())[:_MAX_ANSWER]}"
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            msg = (
                f"api-key-file: expected an API key that {self.url} accepts, "
                f"found none or another ({answer})"
            )
            raise ServerUnreachableError(msg)
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise ServerFaultError(answer)
        raise UnsupportedError(answer)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise ServerUnreachableError for the HTTP client's errors in the block."""
        try:
            yield
        except httpx.TimeoutException as error:
            expected = f"expected an answer of {self.url} within {self.timeout:g} s"
            msg = f"timeout: {expected}, found none; raise --timeout"
            raise ServerUnreachableError(msg) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            found = f"none ({describe_error(error)})"
            msg = (
                f"url: expected a server at {self.url}, found {found}; start it, "
                "or check the address"
            )
            raise ServerUnreachableError(msg) from error


def _text(route: Route, choice: Mapping[str, Any], *, streamed: bool = False) -> str:
    """Return the text of a choice; a chunk of a stream may have none."""
    if route == "completions":
        text = choice.get("text") if streamed else choice["text"]
        return str(text or "")
    parts = (choice.get("delta") or {}) if streamed else choice["message"]
    return "".join(str(parts.get(name) or "") for name in _TEXT_FIELDS)


def _tokens(route: Route, choice: Mapping[str, Any]) -> tuple[RemoteToken, ...]:
    """Return the tokens of a choice, in either of two forms: that of completions or of chat."""
    report = choice.get("logprobs")
    if not report:
        return ()
    tokens: list[RemoteToken] = []
    if route == "completions" and "tokens" in report:
        tops = report.get("top_logprobs") or [{}] * len(report["tokens"])
        rows = zip(report["tokens"], report["token_logprobs"], tops, strict=True)
        for text, logprob, top in rows:
            likeliest = tuple((top or {}).values())
            tokens.append(RemoteToken(str(text), float(logprob), likeliest))
        return tuple(tokens)
    for each in report["content"]:
        likeliest = tuple(top["logprob"] for top in each.get("top_logprobs") or ())
        tokens.append(RemoteToken(str(each["token"]), float(each["logprob"]), likeliest))
    return tuple(tokens)
