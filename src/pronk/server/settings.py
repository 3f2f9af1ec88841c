"""Settings and limits of a server."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, fields
from pathlib import Path

from pronk import OptionError
from pronk.base import read_text
from pronk.base.checks import check_integer, check_number
from pronk.server.origins import check_origin


@dataclass(frozen=True)
class RequestLimits:
    """Limits of requests to a server.

    In brackets after each limit stands the HTTP status of the response to a request that exceeds
    it.
    """

    body: int = 4 * 2**20  # bytes of the body (HTTP 413)
    values: int = 2**18  # number of texts, lists and objects in a body, keys included (HTTP 400)
    headers: int = 16 * 2**10  # bytes of path, query and headers together (HTTP 431)
    prompts: int = 64  # number of prompts in one request (HTTP 400)
    embeddings: int = 2048  # number of texts in one request for embeddings (HTTP 400)
    # Largest ``max_tokens`` that a request may ask for, per sample; ``None``: limited only by the
    # model's context. A larger number is refused (HTTP 400).
    max_tokens: int | None = None
    n: int = 16  # number of samples per prompt (HTTP 400)
    stop: int = 16  # number of stop strings, of stop token ids, and of bad words, each (HTTP 400)
    stop_length: int = 256  # characters of a stop string or bad word (HTTP 400)
    logprobs: int = 20  # number of likeliest tokens to report for each token (HTTP 400)
    logit_bias: int = 1024  # number of tokens with a bias (HTTP 400)
    # Number of running and waiting samples of all clients; each of several keys has a share
    # (HTTP 429).
    requests: int = 256
    # Number of open connections (HTTP 429). Beyond twice this number, new ones are closed at once.
    connections: int = 512
    seconds: float = 600.0  # seconds from the arrival of a request to its end (HTTP 408)
    # Seconds in which a request's head must arrive, else the connection is closed; and seconds in
    # which its body must arrive (HTTP 408).
    receive_seconds: float = 30.0
    # Seconds in which a client may read nothing; then its connection is closed.
    send_seconds: float = 60.0

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if limit.name.endswith("seconds"):
                check_number(limit.name, value, 0.0, 1e6, exclusive_min=True)
            elif value is not None:
                check_integer(limit.name, value, 1, 2**31)


@dataclass(frozen=True)
class ServerSettings:
    """Name, API keys, limits and features of a server."""

    name: str  # name of the model in requests and replies
    # Accepted API keys; without keys, every client is accepted.
    keys: Collection[str] = field(default=(), repr=False)
    # Keys whose clients may download models (/api/pull); empty: all clients; None: no client.
    pull_keys: Collection[str] | None = field(default=None, repr=False)
    # Accepted names in the Host header; None accepts every name. The check stops DNS rebinding: if
    # the name of another site resolves to this server's address, requests from the site's pages
    # have that name in the header.
    hosts: Collection[str] | None = None
    # Origins of web pages that may use the server, such as https://example.org.
    origins: Collection[str] = ()
    limits: RequestLimits = RequestLimits()
    # Drafters that read files, and that requests may select all the same.
    allowed_drafters: Collection[str] = ()
    guardrails: str | None = None  # system prompt to add to every conversation
    # Text that closes thoughts which have used up the budget of their request.
    thinking_message: str = ""
    serve_chat_page: bool = True  # whether to serve the chat page at /
    # Whether prompts keep the lines that pronk.server.volatile lists.
    keep_volatile: bool = False
    # Whether tools are described in the system message for models whose template has no tools.
    generic_tools: bool = True

    @property
    def is_shared(self) -> bool:
        """Whether the server has several API keys, so that each key has a share of the limits."""
        return len({*self.keys}) > 1

    def __post_init__(self) -> None:
        for key in self.keys:
            short = len(key) < 8
            is_plain = key.isascii() and key.isprintable() and " " not in key
            if short or not is_plain:
                expected = "at least 8 printable ASCII characters without spaces"
                found = f"{len(key)} characters" if short else "another character"
                msg = f"api-key: expected {expected}, found {found}; choose another key"
                raise OptionError(msg)
        for origin in self.origins:
            check_origin(origin)


def model_key(name: str) -> str:
    """Return the key by which names of models are compared.

    It has small letters, and neither ``.gguf`` nor Ollama's tag ``:latest`` at its end.
    """
    return name.casefold().removesuffix(":latest").removesuffix(".gguf")


def read_keys(path: Path) -> tuple[str, ...]:
    """Read API keys, one per line; blank lines and lines that begin with # are skipped.

    Raises:
        OptionError: the file cannot be read, or has no key.
    """
    lines = [line.strip() for line in read_text(path, "api-key-file").splitlines()]
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        msg = f"api-key-file: expected keys, one a line, found none in {path}; add one"
        raise OptionError(msg)
    return keys
