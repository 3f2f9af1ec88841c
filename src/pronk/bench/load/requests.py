"""What servers are asked: addresses, models and keys as users give them, prompts as bodies of requests."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal
from urllib.parse import urlsplit

from pronk.bench.prompts import Prompt
from pronk.errors import OptionError

__all__ = ["OPTIONAL", "Ask", "Job", "Server", "make_body", "make_jobs", "parse_servers"]

# Fields that some servers refuse, and without which they can be measured all the same.
OPTIONAL = ("stream_options", "ignore_eos", "seed")

_NAMED = re.compile(r"([^=/:]+)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Server:
    """A server to measure.

    Attributes:
        name: as figures show it.
        url: what the protocol's paths are appended to, ``http://localhost:8000/v1``.
        key: for its ``Authorization``; never shown.
        model: as it is asked for; ``None`` is the first that it lists.
        extra: fields that its requests have besides, in place of ours where they have the same name.
    """

    name: str
    url: str
    key: str | None = field(default=None, repr=False)
    model: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ask:
    """What is asked of every server.

    Attributes:
        endpoint: of the protocol.
        max_tokens: tokens of an answer.
        temperature: 0 is greedy; above it, requests have seeds.
        ignore_eos: go on after the model's end-of-text, where the server can.
        unique: begin every prompt with a number of its own, so that no server finds it among earlier ones.
    """

    endpoint: Literal["chat", "completions"] = "chat"
    max_tokens: int = 128
    temperature: float = 0.0
    ignore_eos: bool = False
    unique: bool = False


@dataclass(frozen=True)
class Job:
    """A request that every server gets: its prompt's id, what it says, and its seed."""

    id: str
    messages: tuple[Mapping[str, str], ...]
    seed: int


def parse_servers(
    servers: Sequence[str], keys: Sequence[str], models: Sequence[str], extras: Sequence[str]
) -> tuple[Server, ...]:
    """Servers of what the command line has.

    Args:
        servers: ``[NAME=]URL`` each.
        keys: ``KEY`` for all of them, or ``NAME=KEY`` for one.
        models: the same.
        extras: the same, objects in JSON.

    Raises:
        OptionError: one of them is malformed, or said twice.
    """
    urls: dict[str, str] = {}
    for text in servers:
        named = _NAMED.fullmatch(text)
        url = _address(named[2] if named else text)
        name = named[1].strip() if named else urlsplit(url).netloc
        if name in urls:
            msg = f"server: expected names that differ, found {name} twice; write NAME={text}"
            raise OptionError(msg)
        urls[name] = url
    options = (("api-key", keys), ("server-model", models), ("extra-body", extras))
    key, model, extra = (_assign(option, values, list(urls)) for option, values in options)
    for value in key.values():
        if not (value.isascii() and value.isprintable() and value):
            msg = "api-key: expected printable ASCII characters, found others"
            raise OptionError(msg)
    return tuple(
        Server(name, url, key.get(name), model.get(name), _fields(extra.get(name, "{}"))) for name, url in urls.items()
    )


def _address(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        msg = f"server: expected [NAME=]URL such as http://localhost:8000, found {text!r}"
        raise OptionError(msg)
    if "@" in parts.netloc:
        msg = f"server: expected an address without a password, found one for {parts.hostname}; --api-key takes a key"
        raise OptionError(msg)
    url = text.rstrip("/")
    return url if url.endswith("/v1") else f"{url}/v1"


def _assign(option: str, values: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """A value for each server: its own, else the one for all."""
    own: dict[str, str] = {}
    common: str | None = None
    for value in values:
        name, mark, rest = value.partition("=")
        if mark and name in names and name not in own:
            own[name] = rest
        elif not (mark and name in names) and common is None:
            common = value
        else:
            msg = f"{option}: expected it once for each server ({', '.join(names)}), found it twice"
            raise OptionError(msg)
    return ({} if common is None else dict.fromkeys(names, common)) | own


def _fields(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        msg = f"extra-body: expected [NAME=]JSON with an object such as '{{\"top_k\": 40}}', found {text!r:.80}"
        raise OptionError(msg)
    return found


def make_jobs(prompts: Sequence[Prompt], count: int, seed: int, temperature: float) -> list[Job]:
    """``count`` requests: the prompts, in an order that the seed chooses, again and again.

    A conversation is asked its first turn. All levels and servers get the same jobs in the same order.
    """
    order = Random(seed).sample(list(prompts), len(prompts))  # noqa: S311 - no secret
    jobs = []
    for number in range(count):
        prompt = order[number % len(order)]
        said = prompt.text if prompt.text is not None else prompt.turns[0]
        messages = (*prompt.history, {"role": "user", "content": said})
        jobs.append(Job(f"{prompt.task}/{prompt.id}", messages, seed + number if temperature else seed))
    return jobs


def make_body(server: Server, model: str, ask: Ask, job: Job, mark: str = "", without: Collection[str] = ()) -> bytes:
    """A request as it is sent.

    Args:
        server: whose extra fields it gets.
        model: the model's name there.
        ask: what is asked of every server.
        job: the request.
        mark: what makes the prompt unique, written in front of it.
        without: fields of :data:`OPTIONAL` that the server refuses.
    """
    first, *others = job.messages
    messages = [{**first, "content": f"{mark}{first['content']}"}, *others]
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": ask.max_tokens,
        "temperature": ask.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if ask.endpoint == "chat":
        body["messages"] = messages
    else:
        body["prompt"] = "\n\n".join(message["content"] for message in messages)
    if ask.ignore_eos:
        body["ignore_eos"] = True
    if ask.temperature:
        body["seed"] = job.seed
    kept = {name: value for name, value in body.items() if name not in without}
    return json.dumps(kept | dict(server.extra)).encode()
