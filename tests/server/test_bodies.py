"""Generated bodies of the three APIs: no server error, one-line refusals, and answers that are
accepted again.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Iterator

import pytest

from server.bodies import COMPLETIONS, LIMIT, RESPONSES, ROUTES, Bodies, shrink
from server.replies import answer_of, results
from server.serving import Running, running
from server.tool_models import FEW_LAYERS, tool_model


@pytest.fixture(scope="module", params=["qwen3", "mistral list"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    with running(tool_model(tmp_path_factory.mktemp("model"), request.param, FEW_LAYERS)) as made:
        yield made


@pytest.mark.few(2)
@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("route", ROUTES)
def test_generated_bodies(server: Running, route: str, count: int) -> None:
    """Of 1,000 bodies (two models and three routes), each is answered or refused in one line."""
    statuses = Counter[int]()
    sent_back = Counter[str]()
    field = "input" if route == RESPONSES else "messages"
    with server.client() as client:
        for seed in range(count):
            body = Bodies(random.Random(f"{route} {seed}")).body(route)
            answer = client.post(route, json=body)
            statuses[answer.status_code] += 1
            if answer.status_code >= 500:
                small = shrink(body, lambda each: client.post(route, json=each).status_code >= 500)
                pytest.fail(
                    f"seed {seed}: {answer.status_code} {answer.text} for {json.dumps(small)}"
                )
            if answer.status_code != 200:
                error = answer.json()["error"]
                assert error["message"], seed
                assert "\n" not in error["message"], seed
                continue
            assert "internal server error" not in answer.text, (seed, body)
            if body.get("stream") and re.search(
                '^(event: error|data: {"error")', answer.text, re.MULTILINE
            ):
                continue
            talk = (
                body[field]
                if isinstance(body[field], list)
                else [{"role": "user", "content": body[field]}]
            )
            own = answer_of(route, answer, stream=bool(body.get("stream")))
            following = {**body, field: [*talk, *own, *results(route, own)], LIMIT[route]: 1}
            again = client.post(
                route,
                json={
                    **following,
                    "stop": None,
                    "stop_sequences": None,
                    "continue_final_message": None,
                },
            )
            if again.status_code != 200:
                code = again.json()["error"].get("code")
                assert code == "context_length_exceeded", (seed, again.text, json.dumps(following))
            sent_back["stream" if body.get("stream") else "whole"] += again.status_code == 200
    assert server.drained
    assert statuses[200] > count // 4
    assert statuses[400] > count // 20
    assert min(sent_back["stream"], sent_back["whole"]) > count // 40


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_generated_completions(server: Running, count: int) -> None:
    """Bodies of ``/v1/completions``; the text of an answer is accepted as a prompt."""
    statuses = Counter[int]()
    with server.client() as client:
        for seed in range(count):
            body = Bodies(random.Random(f"completions {seed}")).body(COMPLETIONS)
            answer = client.post(COMPLETIONS, json=body)
            statuses[answer.status_code] += 1
            assert answer.status_code < 500, (seed, answer.text, json.dumps(body))
            if answer.status_code == 200 and not body.get("stream"):
                again = client.post(
                    COMPLETIONS, json={**body, "prompt": "x" + answer.json()["choices"][0]["text"]}
                )
                assert again.status_code == 200, (seed, again.text, json.dumps(body))
    assert statuses[200] > count // 4
    assert statuses[400] > count // 20
