"""Settings and limits of a server."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, fields
from pathlib import Path

from pronk.checks import check_integer, check_number
from pronk.errors import OptionError

__all__ = ["RequestLimits", "ServerSettings", "read_keys", "read_text"]


@dataclass(frozen=True)
class RequestLimits:
    """Maximum values. A request beyond a limit gets a response with the HTTP status behind the limit."""

    body: int = 4 * 2**20  # bytes of the body (HTTP 413)
    headers: int = 16 * 2**10  # bytes of path, query and headers together (HTTP 431)
    prompts: int = 64  # number of prompts in one request (HTTP 400)
    max_tokens: int | None = None  # number of tokens to generate per sample; None is the model's context (HTTP 400)
    n: int = 16  # number of samples per prompt (HTTP 400)
    stop: int = 16  # number of stop strings; also of stop token ids, and of bad words (HTTP 400)
    stop_length: int = 256  # characters of a stop string or bad word (HTTP 400)
    logprobs: int = 20  # number of likeliest tokens to report for each token (HTTP 400)
    logit_bias: int = 1024  # number of tokens with a bias (HTTP 400)
    requests: int = 256  # number of running and waiting samples of all clients (HTTP 429)
    connections: int = 512  # number of open connections (HTTP 429); above twice this, closed without a response
    seconds: float = 600.0  # seconds from the arrival of a request to its end (HTTP 408)
    receive_seconds: float = 30.0  # seconds until the head of a request is complete, then until its body is (HTTP 408)
    send_seconds: float = 60.0  # seconds in which a client reads nothing; then its connection is closed

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if limit.name.endswith("seconds"):
                check_number(limit.name, value, 0.0, 1e6, above=True)
            elif value is not None:
                check_integer(limit.name, value, 1, 2**31)


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server."""

    name: str  # name of the model in requests and replies
    keys: Collection[str] = field(default=(), repr=False)  # accepted API keys; empty accepts every client
    # Accepted names in the Host header; None accepts every name. The check stops DNS rebinding: if the name of another
    # site resolves to this server's address, requests from the site's pages have that name in the header.
    hosts: Collection[str] | None = None
    limits: RequestLimits = RequestLimits()
    drafters: Collection[str] = ()  # drafters that requests may select although the drafters read files
    guardrails: str | None = None  # system prompt to add to every conversation
    page: bool = True  # whether to serve the chat page at /

    def __post_init__(self) -> None:
        for key in self.keys:
            if len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key:
                expected = "at least 8 printable ASCII characters without spaces"
                msg = f"api-key: expected {expected}, found {len(key)} characters; choose another key"
                raise OptionError(msg)


def read_keys(path: Path) -> tuple[str, ...]:
    """Read API keys from a file, one per line; lines that begin with # are comments.

    Raises:
        OptionError: the file cannot be read or has no key.
    """
    lines = [line.strip() for line in read_text("api-key-file", path).splitlines()]
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        msg = f"api-key-file: expected keys, one a line, found none in {path}; add one"
        raise OptionError(msg)
    return keys


def read_text(option: str, path: Path) -> str:
    """Return the text of a file; ``option`` is the name of the option with the path, for error messages.

    Raises:
        OptionError: the file cannot be read or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "bytes that are not UTF-8"
        msg = f"{option}: expected a text file, found {path}: {problem}; choose another file"
        raise OptionError(msg) from error
