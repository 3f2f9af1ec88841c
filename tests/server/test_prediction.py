"""The field ``prediction`` on the routes that have it: same answers, fewer passes, token counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from server.clients import openai
from server.serving import KEY, Running

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ASK: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Say hello."}]},
    COMPLETIONS: {"prompt": "def add(a, b):\n"},
}


@pytest.fixture
def api(served: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


def text_of(reply: dict[str, Any]) -> str:
    (choice, *_) = reply["choices"]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def counts(reply: dict[str, Any]) -> tuple[int, int]:
    details = reply["usage"]["completion_tokens_details"]
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


@pytest.mark.parametrize("route", ASK)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_right_prediction_saves_passes_and_changes_nothing(
    client: httpx.Client, route: str, temperature: float
) -> None:
    body = {**ASK[route], "max_tokens": 40, "temperature": temperature, "seed": 3}
    body["drafter"] = "prediction"
    plain = client.post(route, json=body).json()
    assert counts(plain) == (0, 0)
    assert plain["usage"]["steps"] == 40
    for content in (text_of(plain), [{"type": "text", "text": text_of(plain)}]):
        prediction = {"type": "content", "content": content}
        got = client.post(route, json={**body, "prediction": prediction})
        assert "prediction" not in got.headers.get("X-Pronk-Ignored", "")
        assert text_of(got.json()) == text_of(plain)
        assert got.json()["usage"]["completion_tokens"] == 40
        assert got.json()["usage"]["steps"] < 30
        accepted, rejected = counts(got.json())
        assert accepted > 30
        assert rejected < 10


def test_a_wrong_prediction_is_rejected(client: httpx.Client) -> None:
    body = {**ASK[CHAT], "max_tokens": 8, "temperature": 0}
    plain = client.post(CHAT, json=body).json()
    prediction = {"type": "content", "content": "0 1 2 3 4 5 6 7 8 9 " * 3}
    got = client.post(CHAT, json={**body, "prediction": prediction}).json()
    assert text_of(got) == text_of(plain)
    accepted, rejected = counts(got)
    assert rejected > 10 * accepted
    assert got["usage"]["completion_tokens"] == 8


def test_openais_client_reads_the_counts_of_a_stream(api: openai.OpenAI) -> None:
    """Together with samples and log-probabilities, which OpenAI's server refuses here."""
    options: Any = {
        "n": 2,
        "logprobs": True,
        "presence_penalty": 0.5,
        "seed": 3,
        "temperature": 0.8,
    }
    chunks = [
        *api.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Say hello."}],
            max_tokens=12,
            prediction={"type": "content", "content": "Hello, world"},
            stream=True,
            stream_options={"include_usage": True},
            **options,
        )
    ]
    usage = chunks[-1].usage
    assert usage is not None
    details = usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens is not None
    assert details.rejected_prediction_tokens is not None
    total = details.accepted_prediction_tokens + details.rejected_prediction_tokens
    assert total > 0
    assert total % 2 == 0  # the tokens of the prediction, once for each sample


@pytest.mark.parametrize(
    ("prediction", "found"),
    [
        ("Hello", "prediction"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "text", "content": "x"}, "prediction.type"),
        ({"type": "content", "content": 7}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content"),
    ],
)
@pytest.mark.parametrize("route", ASK)
def test_bad_predictions_are_refused_in_one_line(
    client: httpx.Client, route: str, prediction: Any, found: str
) -> None:
    answer = client.post(route, json={**ASK[route], "prediction": prediction})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"].startswith(found)
    assert "\n" not in error["message"]


def test_an_empty_prediction_is_no_prediction(client: httpx.Client) -> None:
    for prediction in (None, {}, {"type": "content", "content": ""}):
        body = {**ASK[CHAT], "max_tokens": 4, "prediction": prediction}
        assert counts(client.post(CHAT, json=body).json()) == (0, 0)
