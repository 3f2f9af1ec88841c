"""Lines of agents' prompts that differ in every request do not defeat the prefix cache."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pronk.llm import LLM
from pronk.server.volatile import drop_volatile_lines
from server.serving import Running, running

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
ROUTES = (CHAT, RESPONSES, MESSAGES)
NAME = "x-anthropic-billing-header"
RULES = "You are Claude Code. Answer in one word, and read every file first. " * 4
SAY = [{"role": "user", "content": "Hello."}]


def line(number: int) -> str:
    return f"{NAME}: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={number:05x};"


def body(route: str, system: list[str]) -> dict[str, Any]:
    """Return a request whose system prompt has ``system`` as its blocks."""
    if route in (MESSAGES, COUNT):
        blocks = [{"type": "text", "text": text} for text in system]
        limit = {"max_tokens": 2} if route == MESSAGES else {}
        return {"system": blocks, "messages": SAY, **limit}
    text = "\n".join(system)
    if route == RESPONSES:
        return {"instructions": text, "input": SAY, "max_output_tokens": 2}
    return {"messages": [{"role": "system", "content": text}, *SAY], "max_tokens": 2}


def post(client: httpx.Client, route: str, system: list[str]) -> tuple[dict[str, Any], str]:
    """Return the reply to a request, and the names of what the server ignored."""
    reply = client.post(route, json=body(route, system))
    assert reply.status_code == 200, reply.text
    return reply.json(), reply.headers.get("X-Pronk-Ignored", "")


def prompt_and_cached(route: str, usage: dict[str, Any]) -> tuple[int, int]:
    """Return the number of tokens of the prompt, and how many of them were in the prefix cache."""
    if route == CHAT:
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    if route == RESPONSES:
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + cached, cached


@pytest.fixture(scope="module")
def keeping(model: LLM) -> Iterator[Running]:
    with running(model, keep_volatile=True) as made:
        yield made


@pytest.mark.parametrize("route", ROUTES)
def test_the_next_request_finds_the_prompt_in_the_cache(client: httpx.Client, route: str) -> None:
    first, report = post(client, route, [line(1), RULES])
    assert report == f"system (volatile line {NAME})"
    second, _ = post(client, route, [line(2), RULES])
    num_prompt, num_cached = prompt_and_cached(route, second["usage"])
    assert num_cached >= num_prompt - 32 > 0
    plain, nothing = post(client, route, [RULES])
    assert nothing == ""
    assert prompt_and_cached(route, plain["usage"])[0] == num_prompt
    assert prompt_and_cached(route, first["usage"])[0] == num_prompt


@pytest.mark.parametrize("route", ROUTES)
def test_the_lines_are_kept_on_demand(keeping: Running, route: str) -> None:
    number = 10 * ROUTES.index(route)  # requests of the other routes have the same prompts
    with keeping.client() as client:
        with_line, report = post(client, route, [line(number + 3), RULES])
        other, _ = post(client, route, [line(number + 4), RULES])
        plain, _ = post(client, route, [RULES])
    assert report == ""
    num_prompt, num_cached = prompt_and_cached(route, other["usage"])
    assert num_prompt == prompt_and_cached(route, with_line["usage"])[0]
    assert num_prompt > prompt_and_cached(route, plain["usage"])[0]
    assert num_cached <= 32, "the line differs, so at most its beginning is cached"


def test_dropped_lines_are_not_counted(client: httpx.Client, keeping: Running) -> None:
    dropped, report = post(client, COUNT, [line(5), RULES])
    plain, _ = post(client, COUNT, [RULES])
    assert dropped == plain
    assert NAME in report
    with keeping.client() as other:
        kept, _ = post(other, COUNT, [line(5), RULES])
    assert kept["input_tokens"] > plain["input_tokens"]


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        (f"{line(1)}\nrest", "rest"),
        (f"{line(1)}\n{line(2)}\nrest", "rest"),
        (f"rest\n{line(1)}", None),  # only the beginning is searched
        (f"{NAME}: cc_version=2.1.37;\nrest", None),  # a line that does not differ
        ("x-anthropic-billing-header is a header\ncch=1", None),
    ],
)
def test_only_known_lines_at_the_beginning_are_dropped(text: str, rest: str | None) -> None:
    message = {"role": "system", "content": text}
    kept, names = drop_volatile_lines([message, *SAY])
    assert kept == [{"role": "system", "content": text if rest is None else rest}, *SAY]
    assert bool(names) == (rest is not None)


def test_a_message_with_the_line_alone_is_left_out() -> None:
    parts = [{"type": "text", "text": line(1)}]
    for content in (line(1), f"{line(1)}\n", parts):
        kept, names = drop_volatile_lines([{"role": "system", "content": content}, *SAY])
        assert (kept, names) == (SAY, [NAME])


def test_texts_of_users_are_not_searched() -> None:
    messages = [{"role": "user", "content": line(1)}]
    assert drop_volatile_lines(messages) == (messages, [])
    assert drop_volatile_lines([]) == ([], [])
