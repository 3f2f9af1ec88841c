"""Ollama's API: answers equal to those of ``/v1``, streams equal to whole answers, refusals."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from pronk.checkpoint import weight_files
from pronk.llm import LLM
from server.serving import Running, running
from server.tool_models import tool_model

QUESTION = {"messages": [{"role": "user", "content": "Count to three."}]}
GREEDY = {"temperature": 0, "num_predict": 12, "num_ctx": 64, "repeat_penalty": 1.1}
COUNTS = (
    "total_duration load_duration prompt_eval_count prompt_eval_duration eval_count eval_duration"
).split()


def lines(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in reply.text.splitlines()]


def test_chat_equals_that_of_v1(client: httpx.Client) -> None:
    own = {"temperature": 0, "max_tokens": 12, "repetition_penalty": 1.1}
    want = client.post("/v1/chat/completions", json={"model": "tiny", **QUESTION, **own}).json()
    body = {"model": "tiny:latest", **QUESTION, "options": GREEDY, "keep_alive": "5m"}
    parts = lines(client.post("/api/chat", json=body))
    text = want["choices"][0]["message"]["content"]
    assert len(text) > 5
    assert "".join(part["message"]["content"] for part in parts) == text
    *others, last = parts
    assert len(others) > 1, "the answer came in one piece"
    assert not any(part["done"] for part in others)
    assert all(part["model"] == "tiny" for part in parts)
    assert (last["done"], last["done_reason"]) == (True, want["choices"][0]["finish_reason"])
    assert all(last[name] >= 0 for name in COUNTS)
    assert last["prompt_eval_count"] == want["usage"]["prompt_tokens"]
    assert last["eval_count"] == want["usage"]["completion_tokens"]
    reply = client.post("/api/chat", json={**body, "stream": False})
    whole = reply.json()
    assert whole["message"] == {"role": "assistant", "content": text}
    assert whole["done_reason"] == last["done_reason"]
    assert "options.num_ctx" in reply.headers["X-Pronk-Ignored"]


def test_generate(client: httpx.Client) -> None:
    body = {"model": "tiny", "prompt": "Count to three.", "options": GREEDY}
    chat = client.post("/api/chat", json={**QUESTION, "options": GREEDY, "stream": False}).json()
    parts = lines(client.post("/api/generate", json=body))
    assert "".join(part["response"] for part in parts) == chat["message"]["content"]
    told = {"role": "system", "content": "Be brief."}
    messages = {"messages": [told, *QUESTION["messages"]]}
    chat = client.post("/api/chat", json={**messages, "options": GREEDY, "stream": False}).json()
    whole = client.post(
        "/api/generate", json={**body, "system": "Be brief.", "stream": False}
    ).json()
    assert whole["response"] == chat["message"]["content"]
    assert whole["prompt_eval_count"] == chat["prompt_eval_count"]


def test_formats_stops_seeds_and_logprobs(client: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    body = {**QUESTION, "format": schema, "options": {"seed": 3, "num_predict": 40}}
    first, second = (
        "".join(part["message"]["content"] for part in lines(client.post("/api/chat", json=body)))
        for _ in range(2)
    )
    assert first == second
    whole = client.post("/api/chat", json={**body, "stream": False}).json()
    assert whole["message"]["content"] == first
    assert first.startswith('{"n"')
    more = {"logprobs": True, "top_logprobs": 2, "options": {"num_predict": 4, "temperature": 0}}
    whole = client.post("/api/chat", json={**QUESTION, **more, "stream": False}).json()
    parts = lines(client.post("/api/chat", json={**QUESTION, **more}))
    streamed = [entry for part in parts for entry in part.get("logprobs", ())]
    assert streamed == whole["logprobs"]
    assert len(streamed) == whole["eval_count"]
    text = whole["message"]["content"]
    stop = {**GREEDY, "stop": [text[3:6]]}
    cut = client.post("/api/chat", json={**QUESTION, "options": stop, "stream": False}).json()
    assert cut["message"]["content"] == text[: text.index(text[3:6])]
    assert cut["done_reason"] == "stop"


def test_embeddings(client: httpx.Client, model: LLM) -> None:
    want = model.embed(["a", "b c"], dimensions=8)
    reply = client.post("/api/embed", json={"input": ["a", "b c"], "dimensions": 8}).json()
    assert np.array(reply["embeddings"], np.float32).tobytes() == want.tobytes()
    tokens = sum(len(model.tokenizer.encode(text)) for text in ("a", "b c"))
    assert (reply["model"], reply["prompt_eval_count"]) == ("tiny", tokens)
    older = client.post("/api/embeddings", json={"model": "tiny", "prompt": "a"}).json()
    assert np.array(older["embedding"], np.float32).tobytes() == model.embed(["a"]).tobytes()


def test_models(client: httpx.Client, model: LLM) -> None:
    (entry,) = client.get("/api/tags").json()["models"]
    assert (entry["name"], entry["model"]) == ("tiny", "tiny")
    assert entry["details"]["family"] == model.config.family
    assert entry["size"] == sum(file.stat().st_size for file in weight_files(model.path))
    (loaded,) = client.get("/api/ps").json()["models"]
    assert loaded["context_length"] == model.config.context
    assert loaded["expires_at"].startswith("9999")
    for body in ({"model": "tiny"}, {"name": "tiny:latest", "verbose": True}):
        shown = client.post("/api/show", json=body).json()
        assert shown["template"] == model.tokenizer.chat_template
        info = shown["model_info"]
        assert info[f"{info['general.architecture']}.context_length"] == model.config.context
        assert {"completion", "embedding"} <= set(shown["capabilities"])
    assert client.get("/api/version").json()["version"].count(".") == 2


def test_requests_that_only_load_a_model(client: httpx.Client) -> None:
    for path, body, field in (
        ("/api/chat", {"model": "tiny", "messages": []}, "message"),
        ("/api/generate", {"model": "tiny"}, "response"),
    ):
        reply = client.post(path, json=body).json()
        assert (reply["done"], reply["done_reason"]) == (True, "load")
        assert field in reply


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("/api/chat", {"model": "other"}, "model: expected 'tiny', found 'other'"),
        ("/api/chat", {"options": {"mirostat": 2}}, "options.mirostat: expected 0, found 2"),
        ("/api/chat", {"options": {"top_p": 3}}, "options.top_p: "),
        ("/api/chat", {"n": 2}, "n: expected 1, found 2"),
        ("/api/chat", {"template": "x"}, "template: expected no such field"),
        (
            "/api/chat",
            {"messages": [{"role": "user", "content": "", "images": ["aGk="]}]},
            "messages.0.images: ",
        ),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, "suffix: expected a model with tokens"),
        ("/api/generate", {"prompt": "a", "suffix": "b", "system": "c"}, "system: expected no"),
        ("/api/generate", {"prompt": "a", "suffix": "b", "logprobs": True}, "logprobs: expected"),
        ("/api/generate", {"prompt": "a", "raw": True}, "raw: expected no such field"),
        ("/api/generate", {"prompt": "a", "context": [1]}, "context: expected no such field"),
        ("/api/generate", {"prompt": "a", "images": ["aGk="]}, "images: expected no such field"),
        ("/api/generate", {"prompt": "a", "tools": [{}]}, "tools: expected no such field"),
        ("/api/pull", {"model": "llama3"}, "path: pronk has no route '/api/pull'; run `pronk pull"),
        ("/api/show", {"model": "other"}, "model: expected 'tiny'"),
    ],
)
def test_refusals_in_one_line(
    client: httpx.Client, path: str, fields: dict[str, Any], message: str
) -> None:
    chat = QUESTION if path == "/api/chat" else {}
    reply = client.post(path, json={**chat, **fields})
    assert reply.status_code in (400, 404)
    (error,) = reply.json().values()
    assert error.startswith(message)
    assert "\n" not in error


def test_an_error_in_a_stream_is_its_last_line(model: LLM, fail: Any) -> None:
    with running(model) as made, made.client() as client:
        fail(model)
        *parts, last = lines(client.post("/api/chat", json={**QUESTION, "options": GREEDY}))
    assert parts
    assert last == {"error": "internal server error; the cause is in the log of the server"}


def test_llama_servers_state(client: httpx.Client, model: LLM) -> None:
    props = client.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == model.config.context
    assert props["chat_template"] == model.tokenizer.chat_template
    slots = client.get("/slots").json()
    assert len(slots) == props["total_slots"]
    assert not any(slot["is_processing"] for slot in slots)
    assert client.get("/props", headers={"Authorization": "Bearer another-key"}).status_code == 401


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 4}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    llm = tool_model(tmp_path_factory.mktemp("tools"), "hermes")
    with running(llm) as made:
        yield made


def test_tool_calls(with_tools: Running) -> None:
    """A call that is required comes as one message with an object, in a stream and whole."""
    body = {
        **QUESTION,
        "tools": [TOOL],
        "tool_choice": "required",
        "options": {"seed": 1, "num_predict": 200},
    }
    with with_tools.client() as client:
        whole = client.post("/api/chat", json={**body, "stream": False}).json()
        parts = lines(client.post("/api/chat", json=body))
        calls = whole["message"]["tool_calls"]
        streamed = [call for part in parts for call in part["message"].get("tool_calls", ())]
        assert streamed == calls
        assert calls
        assert all(call["function"]["name"] == "get_weather" for call in calls)
        assert all(isinstance(call["function"]["arguments"]["city"], str) for call in calls)
        result = {"role": "tool", "tool_name": "get_weather", "content": "18 degrees"}
        history = [*QUESTION["messages"], whole["message"], result]
        again = client.post(
            "/api/chat", json={"messages": history, "options": {"num_predict": 3}, "stream": False}
        )
        assert again.status_code == 200, again.text
        assert "tools" in client.post("/api/show", json={}).json()["capabilities"]
