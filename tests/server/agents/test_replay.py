"""Requests of agents are answered, in events that their libraries read; so is the next turn."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import httpx
import jsonschema
import pytest

from covering import covering
from pronk.llm import LLM
from pronk.text.tokenizer import Tokenizer
from server.agents import recorded
from server.agents.recorded import Recorded
from server.agents.talk import (
    COMPLETIONS,
    COUNT,
    MESSAGES,
    ONE_CALL,
    calls,
    next_turn,
    num_prompt,
    parse_events,
    streamed_text,
    type_of_answer,
    whole_text,
)
from server.serving import Running
from server.tool_models import END_THOUGHT

Fields = dict[str, Any]
FAMILIES = ["hermes", "qwen3"]  # the second one also writes thoughts
ANSWERED = [each for each in recorded.ALL if each.route != COUNT]
CALLING = [each for each in ANSWERED if each.functions()]
CONVERSATIONS = [each for each in ANSWERED if each.route == MESSAGES]
# Forms of the answer, which a minimum number of tokens may contradict.
FORMS = ("output_config", "text", "response_format")


def has_system_message(request: Recorded) -> bool:
    return any(message["role"] == "system" for message in request.body["messages"])


def named(requests: list[Recorded]) -> pytest.MarkDecorator:
    """Run a test with each request; the families of models take turns, all other combinations
    are slow tests.
    """
    cases = covering(FAMILIES, requests, strength=1)
    return pytest.mark.parametrize(("served", "request_"), cases, indirect=["served"], ids=case_id)


def case_id(value: str | Recorded) -> str:
    return value if isinstance(value, str) else value.name


@pytest.fixture
def client(served: Running) -> Iterator[httpx.Client]:
    with served.client() as made:
        yield made


@pytest.fixture
def short(served: Running) -> Fields:
    """Return fields that end each answer soon: a bias for ends of thoughts, JSON, schemes of
    URIs and answers.
    """
    return fields_of_short_answers(served.llm)


@cache
def fields_of_short_answers(llm: LLM) -> Fields:
    tokenizer = llm.tokenizer
    bias = {str(token): 50.0 for token in _closing(tokenizer)}
    bias |= {str(token): 40.0 for token in tokenizer.encode(":", add_special_tokens=False)}
    bias |= {str(token): 100.0 for token in llm.config.eos_ids}
    if tokenizer.backend.id_to_token(END_THOUGHT) == "</think>":
        bias[str(END_THOUGHT)] = 80.0
    return {"logit_bias": bias, "temperature": 0.0, "do_sample": None}


def _closing(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that close texts, lists and objects in JSON."""
    texts = {token: tokenizer.token_text(token) for token in range(tokenizer.vocab_size)}
    return [token for token, text in texts.items() if text and set(text) <= set('"]}')]


def post(client: httpx.Client, request: Recorded, body: Mapping[str, Any]) -> httpx.Response:
    answer = client.post(request.path, json=dict(body), headers=dict(request.headers))
    assert answer.status_code == 200, f"{request.name}: {answer.text}"
    return answer


def whole(client: httpx.Client, request: Recorded, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer without a stream; it must have the type of the client's library."""
    asked = {name: value for name, value in body.items() if name != "stream_options"}
    answer: dict[str, Any] = post(client, request, asked | {"stream": False}).json()
    type_of_answer(request.route).validate_python(answer)
    return answer


@pytest.mark.few(13)
@named(ANSWERED)
def test_answer_and_next_turn(client: httpx.Client, short: Fields, request_: Recorded) -> None:
    body = {**request_.body, **short}
    if not any(name in body for name in FORMS) and body.get("max_tokens") != 1:
        body["min_tokens"] = 3
    text = post(client, request_, body | {"stream": True}).text
    events = parse_events(request_.route, text)
    answer = whole(client, request_, body)
    assert streamed_text(request_.route, events) == whole_text(request_.route, answer)
    if request_.route == COMPLETIONS:
        return
    again = whole(client, request_, next_turn(request_.route, body, answer))
    assert num_prompt(request_.route, again) > num_prompt(request_.route, answer)


@pytest.mark.few(9)
@named(CALLING)
def test_call_and_its_result(client: httpx.Client, short: Fields, request_: Recorded) -> None:
    body = {**request_.body, **short, **ONE_CALL[request_.route]}
    answer = whole(client, request_, body)
    (call,) = calls(request_.route, answer)
    assert isinstance(call.arguments, dict)
    schema = request_.functions().get(call.name)
    if schema is not None:  # a name in a namespace may differ
        jsonschema.validate(call.arguments, schema)
    parse_events(request_.route, post(client, request_, body | {"stream": True}).text)
    turn = next_turn(request_.route, {**request_.body, **short}, answer)
    again = whole(client, request_, turn)
    assert num_prompt(request_.route, again) > num_prompt(request_.route, answer)


@named(CONVERSATIONS)
def test_count_tokens(client: httpx.Client, short: Fields, request_: Recorded) -> None:
    """``count_tokens`` accepts every conversation of ``/v1/messages``, and counts its tokens."""
    answer = whole(client, request_, {**request_.body, **short})
    unused = (
        "max_tokens",
        "stream",
        "temperature",
        "stop_sequences",
        "service_tier",
        "metadata",
        "top_k",
    )
    counted = {name: value for name, value in request_.body.items() if name not in unused}
    found = client.post(COUNT, json=counted, headers=dict(request_.headers))
    assert found.status_code == 200, found.text
    assert found.json()["input_tokens"] == num_prompt(MESSAGES, answer)


@named([each for each in recorded.ALL if each.route == COUNT])
def test_counts_of_claude_code(client: httpx.Client, request_: Recorded) -> None:
    found = post(client, request_, request_.body).json()["input_tokens"]
    one_less = {**request_.body, "messages": request_.body["messages"][:-1]}
    if one_less["messages"]:
        assert post(client, request_, one_less).json()["input_tokens"] < found


@named([each for each in CONVERSATIONS if has_system_message(each)])
def test_system_messages_are_read(client: httpx.Client, request_: Recorded) -> None:
    counted = {name: request_.body[name] for name in ("system", "tools")}
    turns = request_.body["messages"]
    without = [turn for turn in turns if turn["role"] != "system"]
    counts = []
    for messages in (turns, without):
        answer = client.post(COUNT, json={**counted, "messages": messages})
        assert answer.status_code == 200, answer.text
        counts.append(answer.json()["input_tokens"])
    assert counts[0] > counts[1]


def test_every_body_says_where_it_comes_from() -> None:
    assert len(recorded.ALL) > 40
    assert len({each.name for each in recorded.ALL}) == len(recorded.ALL)
