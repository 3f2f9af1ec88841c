"""What a server allows, and to whom."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, fields
from pathlib import Path

from pronk.checks import check_integer, check_number
from pronk.errors import OptionError

__all__ = ["RequestLimits", "ServerSettings", "read_keys", "read_text"]


@dataclass(frozen=True)
class RequestLimits:
    """How much one client may ask for. What is more is refused with an answer in the range of 400.

    Attributes:
        body: bytes of a request's body (413).
        headers: bytes of its headers (431).
        prompts: texts or lists of ids in one request (400).
        max_tokens: tokens to generate; ``None`` is the model's context (400).
        n: samples of a prompt (400).
        stop: stop strings, stop ids, words to avoid (400).
        stop_length: characters of each (400).
        logprobs: likeliest tokens to report (400).
        logit_bias: tokens with a bias (400).
        requests: samples at a time, waiting ones included, of all clients (429).
        connections: open at a time (429); twice as many are not accepted at all.
        seconds: of a request, from its arrival to its end (408).
        receive_seconds: in which the head or the body of a request must come (408).
        send_seconds: in which a client must take what was sent before more is sent; then it is cut off.
    """

    body: int = 4 * 2**20
    headers: int = 16 * 2**10
    prompts: int = 64
    max_tokens: int | None = None
    n: int = 16
    stop: int = 16
    stop_length: int = 256
    logprobs: int = 20
    logit_bias: int = 1024
    requests: int = 256
    connections: int = 512
    seconds: float = 600.0
    receive_seconds: float = 30.0
    send_seconds: float = 60.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name.endswith("seconds"):
                check_number(each.name, value, 0.0, 1e6, above=True)
            elif value is not None:
                check_integer(each.name, value, 1, 2**31)


@dataclass(frozen=True)
class ServerSettings:
    """How a server presents itself.

    Attributes:
        name: of the model, as clients write it.
        keys: API keys, any of which opens it; none leaves it open to whoever can reach it.
        hosts: names by which clients may call it; ``None`` is any. A page of another site, whose name has been made to
            point here, calls by its own.
        limits: how much one client may ask for.
        drafters: besides those without files of their own, what a request may ask for, as it is written here.
        guardrails: a system prompt that goes in front of every conversation, or ``None``.
        page: whether there is a page for people at ``/``.
    """

    name: str
    keys: Collection[str] = field(default=(), repr=False)
    hosts: Collection[str] | None = None
    limits: RequestLimits = RequestLimits()
    drafters: Collection[str] = ()
    guardrails: str | None = None
    page: bool = True

    def __post_init__(self) -> None:
        for key in self.keys:
            if len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key:
                msg = f"api-key: expected at least 8 printable ASCII characters without spaces, found {len(key)}"
                raise OptionError(msg)


def read_keys(path: Path) -> tuple[str, ...]:
    """API keys of a file, one a line; lines that begin with # are none.

    Raises:
        OptionError: there is no such file, or no key in it.
    """
    lines = [line.strip() for line in read_text("api-key-file", path).splitlines()]
    found = tuple(line for line in lines if line and not line.startswith("#"))
    if not found:
        msg = f"api-key-file: expected keys, one a line, found none in {path}"
        raise OptionError(msg)
    return found


def read_text(option: str, path: Path) -> str:
    """The text of a file that an option names.

    Raises:
        OptionError: there is none.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        found = error.strerror if isinstance(error, OSError) else "bytes that are no UTF-8"
        msg = f"{option}: expected a text file, found {path}: {found}"
        raise OptionError(msg) from error
