"""Answers of every dialect in three APIs, whole and streamed, from an engine with a script.

The engine delivers the tokens of a given answer. Everything else is a server's: the checks of the
request, its prompt and grammar, the parser of the answer, and the events of the stream.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from covering import covering
from pronk.base import FairExecutor
from pronk.checkpoint.config import ModelConfig
from pronk.engine.outputs import Completion, Piece
from pronk.engine.request_factory import RequestFactory
from pronk.engine.stats import Stats
from pronk.llm import LLM
from pronk.sampling.params import SamplingParams
from pronk.server.app import make_app
from pronk.server.model_pool import ModelPool
from pronk.server.service import Service
from pronk.server.settings import ServerSettings
from pronk.text.stream import TextStream
from pronk.text.tokenizer import Tokenizer
from server.replies import CHAT, MESSAGES, RESPONSES, answer_of, results
from text.chat.test_tools import ADD, TOOLS, Form
from text.chat.tool_templates import PLAIN, SPECIAL, TEMPLATES, tool_tokenizer

ONE = ("add", '{"a": 1, "b": "x}"}')
MORE = ("add_more", "{}")
FAMILIES = [*TEMPLATES, "generic"]
ONE_CALL = ("llama", "channels")  # dialects whose answers have one call at most
ROUTES = (CHAT, RESPONSES, MESSAGES)
USER = {"role": "user", "content": "What is 1 + 1?"}


def tokenizer_of(family: str) -> Tokenizer:
    if family != "generic":
        return tool_tokenizer(family)
    backend = tool_tokenizer("hermes", tokens=False).backend
    return Tokenizer(backend, chat_template=PLAIN, special_tokens=SPECIAL)


class ScriptedEngine:
    """Engine whose only answer is given: one piece for each token."""

    num_requests = 0
    alive = True

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer) -> None:
        self.llm = SimpleNamespace(
            path=Path("scripted"),
            config=config,
            tokenizer=tokenizer,
            request_factory=RequestFactory(config, tokenizer, None),
            adapters={},
            bits="portable",
            kernels="portable",
            get_proposer=lambda: SimpleNamespace(name="none"),
        )
        self.executor = FairExecutor(1, "scripted")
        self.answer: Sequence[int] = ()
        self.prompts = list[list[int]]()

    async def steps(
        self, prompts: Sequence[list[int]], params: SamplingParams, **_: Any
    ) -> AsyncGenerator[list[Piece]]:
        self.prompts.append(prompts[0])
        stream = TextStream(self.llm.tokenizer, prompts[0], [])
        pieces = list[Piece]()
        for step, token in enumerate(self.answer):
            text, _ = stream.push(token)
            pieces.append(Piece(token, text, step=step))
        text = "".join(piece.text for piece in pieces)
        done = Completion(text, [*self.answer], "stop", None, 0, [*prompts[0]], None, None, Stats())
        pieces[-1] = replace(pieces[-1], completion=done)
        for piece in pieces:
            yield [piece]

    def stop(self) -> None:
        """Do nothing: the engine has no thread."""


def body_of(route: str, messages: list[Any], *, stream: bool) -> dict[str, Any]:
    """Return a request with the tools ``add`` and ``add_more``."""
    functions = [{"parameters": {}, **tool["function"]} for tool in TOOLS]
    body: dict[str, Any] = {"stream": stream}
    if route == CHAT:
        tools = [{"type": "function", "function": each} for each in functions]
        return {**body, "messages": messages, "tools": tools}
    if route == RESPONSES:
        return {**body, "input": messages, "tools": [{"type": "function", **f} for f in functions]}
    tools = [
        {"name": each["name"], "description": each["description"], "input_schema": ADD}
        for each in functions
    ]
    return {**body, "messages": messages, "tools": tools, "max_tokens": 500}


def calls_of(route: str, answer: list[Any]) -> list[tuple[str, Any]]:
    """Return name and arguments of each call in an answer."""
    if route == CHAT:
        functions = [call["function"] for call in answer[0]["tool_calls"] or ()]
        return [(each["name"], json.loads(each["arguments"])) for each in functions]
    if route == RESPONSES:
        items = [item for item in answer if item["type"] == "function_call"]
        return [(item["name"], json.loads(item["arguments"])) for item in items]
    blocks = [block for block in answer[0]["content"] if block["type"] == "tool_use"]
    return [(block["name"], block["input"]) for block in blocks]


def ids_of(tokenizer: Tokenizer, pieces: Sequence[tuple[str, int | None]]) -> list[int]:
    """Return the token ids of an answer in pieces: texts, and ids of special tokens."""
    ids = list[int]()
    for text, token in pieces:
        ids += tokenizer.encode(text, add_special_tokens=False) if token is None else [token]
    return ids


async def talk(config: ModelConfig, family: str, route: str, *, stream: bool) -> None:
    tokenizer = tokenizer_of(family)
    config = replace(config, vocab_size=tokenizer.vocab_size, context=8192)
    engine = ScriptedEngine(config, tokenizer)
    calls = [ONE] if family in ONE_CALL else [ONE, MORE]
    engine.answer = ids_of(tokenizer, Form(tokenizer).written(*calls))
    service = Service(engine, ServerSettings(name="tiny"))  # type: ignore[arg-type]
    transport = httpx.ASGITransport(make_app(ModelPool.of(service)))
    want = [(name, json.loads(arguments)) for name, arguments in calls]
    async with httpx.AsyncClient(transport=transport, base_url="http://tiny") as client:
        reply = await client.post(route, json=body_of(route, [USER], stream=stream))
        assert reply.status_code == 200, reply.text
        answer = answer_of(route, reply, stream=stream)
        assert calls_of(route, answer) == want
        # The next request has the answer as its history, and the results of the calls.
        again = [USER, *answer, *results(route, answer)]
        reply = await client.post(route, json=body_of(route, again, stream=stream))
        assert reply.status_code == 200, reply.text
        assert calls_of(route, answer_of(route, reply, stream=stream)) == want
    engine.executor.shutdown()
    first, second = engine.prompts
    assert len(second) > len(first)
    read = tokenizer.decode(second, skip_special_tokens=False)
    for name, _ in calls:
        assert read.count(name) > tokenizer.decode(first, skip_special_tokens=False).count(name)


@pytest.mark.few(15)
@pytest.mark.parametrize(
    ("family", "route", "stream"), covering(FAMILIES, ROUTES, [False, True], strength=2)
)
def test_calls_are_delivered_and_read_again(
    model: LLM, family: str, route: str, stream: bool
) -> None:
    asyncio.run(talk(model.config, family, route, stream=stream))
