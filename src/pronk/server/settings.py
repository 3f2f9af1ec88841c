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
    """Maximum values; the number in brackets is the HTTP status of a request beyond the limit."""

    body: int = 4 * 2**20  # bytes of the body (413)
    headers: int = 16 * 2**10  # bytes of path, query and headers together (431)
    prompts: int = 64  # number of prompts in one request (400)
    max_tokens: int | None = None  # number of tokens to generate per sample; None is the model's context (400)
    n: int = 16  # number of samples per prompt (400)
    stop: int = 16  # number of stop strings; also of stop token ids, and of bad words (400)
    stop_length: int = 256  # characters of a stop string or bad word (400)
    logprobs: int = 20  # number of likeliest tokens to report for each token (400)
    logit_bias: int = 1024  # number of tokens with a bias (400)
    requests: int = 256  # number of running and waiting samples of all clients (429)
    connections: int = 512  # number of open connections (429); beyond twice this number, closed without an answer
    seconds: float = 600.0  # seconds from the arrival of a request to its end (408)
    receive_seconds: float = 30.0  # seconds for the head, and again for the body, of a request to arrive (408)
    send_seconds: float = 60.0  # seconds without reading by the client before its connection is closed

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name.endswith("seconds"):
                check_number(each.name, value, 0.0, 1e6, above=True)
            elif value is not None:
                check_integer(each.name, value, 1, 2**31)


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server."""

    name: str  # name of the model in requests and replies
    keys: Collection[str] = field(default=(), repr=False)  # accepted API keys; empty accepts every client
    # Accepted host names in the Host header, or None for any. The check stops DNS rebinding: if another site lets its
    # name resolve to this server's address, requests from its pages carry that name.
    hosts: Collection[str] | None = None
    limits: RequestLimits = RequestLimits()
    drafters: Collection[str] = ()  # drafters that read files and that requests may select nevertheless
    guardrails: str | None = None  # system prompt to add before every conversation
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
    found = tuple(line for line in lines if line and not line.startswith("#"))
    if not found:
        msg = f"api-key-file: expected keys, one a line, found none in {path}; add one"
        raise OptionError(msg)
    return found


def read_text(option: str, path: Path) -> str:
    """Read the text file that an option names.

    Raises:
        OptionError: the file cannot be read or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        found = error.strerror if isinstance(error, OSError) else "bytes that are not UTF-8"
        msg = f"{option}: expected a text file, found {path}: {found}; choose another file"
        raise OptionError(msg) from error
