"""Tools of a model whose chat template has none, in requests to a server."""

import json
from typing import Any

import httpx

from pronk.llm import LLM
from server.serving import running

CHAT = "/v1/chat/completions"
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}
FUNCTION = {"name": "weather", "parameters": {**CITY, "additionalProperties": False}}
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "How is it in Oslo?"}],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": "required",
    "max_tokens": 60,
    "seed": 1,
}


def abilities(client: httpx.Client) -> list[str]:
    """Return what the server says of the model in Ollama's API."""
    return list(client.post("/api/show", json={"model": "tiny"}).json()["capabilities"])


def test_a_required_call(client: httpx.Client, model: LLM) -> None:
    (choice,) = client.post(CHAT, json=BODY).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
    reply = client.post(CHAT, json={**BODY, "max_tokens": 1}).json()
    tools = [{"type": "function", "function": FUNCTION}]
    expected = model.tokenizer.chat_ids(BODY["messages"], tools=tools)
    assert reply["usage"]["prompt_tokens"] == len(expected)
    assert "tools" in abilities(client)


def test_the_server_may_refuse_tools_of_such_models(model: LLM) -> None:
    with running(model, generic_tools=False) as made, made.client() as client:
        reply = client.post(CHAT, json=BODY)
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert error["param"] == "tools"
        expected = "tools: expected a model whose chat template has tools, found one without"
        assert error["message"].startswith(expected)
        without = client.post(CHAT, json={**BODY, "tool_choice": "none", "max_tokens": 2})
        assert without.status_code == 200
        assert "tools" not in abilities(client)
