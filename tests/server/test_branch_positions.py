"""Routes with conversations tell the engine where the next prompt may part; others do not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from pronk.checkpoint.config import RecurrentConfig
from pronk.engine.request import Request
from pronk.llm import LLM
from pronk.text.tokenizer import Tokenizer
from server.serving import Running, running

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
QUESTION = {"role": "user", "content": "Hi there?"}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [QUESTION], "max_tokens": 2, "n": 2},
    "/v1/responses": {"input": [QUESTION], "max_output_tokens": 2},
    "/v1/messages": {"messages": [QUESTION], "max_tokens": 2, "model": "tiny"},
}
CONTINUED = {"role": "assistant", "content": "Well", "prefix": True}


@pytest.fixture(scope="module")
def recurrent(model: LLM) -> Iterator[Running]:
    """Serve a model whose config says that its layers are recurrent, for the factory alone."""
    layers = (True,) * model.config.num_layers
    config = replace(model.config, recurrent=RecurrentConfig(layers, 1, 1, 8, 8, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.request_factory, "config", config)
        patch.setattr(model.request_factory, "share_prefixes", True)
        patch.setattr(model.tokenizer, "chat_template", TEMPLATE)
        with running(model) as made:
            yield made


@pytest.fixture
def requests(model: LLM, monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """Return a list to which each request of the engine is appended."""
    added = list[Request]()
    add = model.engine.add

    def record(request: Request) -> None:
        added.append(request)
        add(request)

    monkeypatch.setattr(model.engine, "add", record)
    return added


def texts(model: LLM, request: Request) -> list[str]:
    """Return the text of the prompt after each branch position."""
    prompt = [*request.prompt]
    positions = request.branch_positions
    return [model.tokenizer.decode(prompt[at:], skip_special_tokens=False) for at in positions]


@pytest.mark.parametrize("route", CONVERSATIONS)
def test_conversations_have_branch_positions(
    recurrent: Running, requests: list[Request], route: str
) -> None:
    body = CONVERSATIONS[route]
    with recurrent.client() as client:
        assert client.post(route, json=body).status_code == httpx.codes.OK
    assert len(requests) == body.get("n", 1)
    for request in requests:
        after_content, after_header = texts(recurrent.llm, request)
        assert after_content.startswith("Hi there?")
        assert after_header == "<think>\n"


def test_an_answer_that_is_continued_has_those_of_its_prompt(
    recurrent: Running, requests: list[Request]
) -> None:
    body = {"messages": [QUESTION, CONTINUED], "max_tokens": 2}
    with recurrent.client() as client:
        assert client.post("/v1/chat/completions", json=body).status_code == httpx.codes.OK
    _, after_header = texts(recurrent.llm, requests[0])
    assert after_header == "<think>\nWell"


def test_other_texts_have_none(recurrent: Running, requests: list[Request]) -> None:
    with recurrent.client() as client:
        bodies = {
            "/v1/completions": {"prompt": ["Hi", "there"], "max_tokens": 2},
            "/v1/moderations": {"input": "Hi"},
            "/v1/embeddings": {"input": "Hi"},
        }
        for route, body in bodies.items():
            assert client.post(route, json=body).status_code == httpx.codes.OK
    assert len(requests) == 4
    assert {request.branch_positions for request in requests} == {()}


def test_a_model_without_recurrent_layers_renders_once(
    model: LLM, requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.request_factory, "config", model.config)
    monkeypatch.setattr(Tokenizer, "chat_prompt", lambda *_, **__: pytest.fail("rendered again"))
    with running(model) as made, made.client() as client:
        for route, body in CONVERSATIONS.items():
            assert client.post(route, json=body).status_code == httpx.codes.OK
    assert {request.branch_positions for request in requests} == {()}
