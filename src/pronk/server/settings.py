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
    """Limits of requests, with the HTTP status that refuses a request beyond each."""

    body: int = 4 * 2**20  # bytes of the body (413)
    headers: int = 16 * 2**10  # bytes of path, query and headers (431)
    prompts: int = 64  # prompts in one request (400)
    max_tokens: int | None = None  # tokens to generate per sample; None is the context of the model (400)
    n: int = 16  # samples per prompt (400)
    stop: int = 16  # number of stop strings, of stop token ids and of bad words (400)
    stop_length: int = 256  # characters of a stop string or bad word (400)
    logprobs: int = 20  # most likely tokens to report (400)
    logit_bias: int = 1024  # tokens with a bias (400)
    requests: int = 256  # running and waiting samples of all clients (429)
    connections: int = 512  # open connections (429); twice as many are closed without an answer
    seconds: float = 600.0  # time from the arrival of a request to its end (408)
    receive_seconds: float = 30.0  # time for the head and for the body of a request to arrive (408)
    send_seconds: float = 60.0  # time for which a client may read nothing; then its connection is closed

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

    name: str  # of the model in requests
    keys: Collection[str] = field(default=(), repr=False)  # accepted API keys; empty accepts every client
    # Accepted values of the Host header, or None for any. The check stops DNS rebinding: a page of another site whose
    # name resolves to this server sends its own name.
    hosts: Collection[str] | None = None
    limits: RequestLimits = RequestLimits()
    drafters: Collection[str] = ()  # drafters that requests may select besides those without files
    guardrails: str | None = None  # system prompt in front of every conversation
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
