"""System messages anywhere, and answers that a request begins."""

from collections.abc import Iterator
from typing import Any, get_args

import httpx
import pytest

from pronk.llm import LLM
from pronk.sampling.params import SamplingParams
from pronk.server.protocol.chat import ChatMessage
from pronk.text.chat.messages import ROLES
from pronk.text.chat.system_messages import (
    has_system_role,
    has_system_role_anywhere,
    place_system_messages,
)
from pronk.text.tokenizer import Tokenizer
from server.replies import answer_of
from server.serving import Running, running
from server.tool_models import FEW_LAYERS, tool_model

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
TURN = "{{ m.role }}:{{ m.content }}\n"
ANYWHERE = "{% for m in messages %}" + TURN + "{% endfor %}"
FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') "
    "}}{% endif %}" + TURN + "{% endfor %}"
)
DROPS = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}"
    + TURN
    + "{% endif %}{% endfor %}"
)
NONE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    + TURN
    + "{% endfor %}"
)
IGNORES = "{% for m in messages %}{% if m.role != 'system' %}" + TURN + "{% endif %}{% endfor %}"
COLLECTS = (  # writes all system messages first
    "{% for m in messages if m.role == 'system' %}"
    + TURN
    + "{% endfor %}{% for m in messages if m.role != 'system' %}"
    + TURN
    + "{% endfor %}"
)


def say(role: str, content: Any = None) -> dict[str, Any]:
    return {"role": role, "content": content or role}


@pytest.mark.parametrize(
    ("template", "first", "anywhere"),
    [
        (ANYWHERE, True, True),
        (FIRST, True, False),
        (DROPS, True, False),
        (NONE, False, False),
        (IGNORES, False, False),
        (COLLECTS, True, False),
    ],
)
def test_a_template_is_asked_where_it_takes_system_messages(
    model: LLM, template: str, *, first: bool, anywhere: bool
) -> None:
    tokenizer = Tokenizer(model.tokenizer.backend, chat_template=template)
    assert has_system_role(tokenizer.chat) == first
    assert has_system_role_anywhere(tokenizer.chat) == anywhere


S1 = say("system", "S1")
S2 = say("system", "S2")
S3 = say("system", "S3")
U1 = say("user", "U1")
A1 = say("assistant", "A1")
U2 = say("user", "U2")
TOOL = {"role": "tool", "tool_call_id": "a", "content": "T"}


@pytest.mark.parametrize(
    ("messages", "first", "texts"),
    [
        ([S1, U1], True, ["system S1", "user U1"]),
        ([S1, S2, U1], True, ["system S1\n\nS2", "user U1"]),
        ([S1, U1, A1, S2, U2], True, ["system S1", "user U1", "assistant A1", "user S2\n\nU2"]),
        ([S1, U1, S2], True, ["system S1", "user U1\n\nS2"]),
        ([U1, S1, A1, U2], True, ["user U1\n\nS1", "assistant A1", "user U2"]),
        ([U1, A1, S1], True, ["user U1", "assistant A1", "user S1"]),
        (
            [U1, A1, S1, TOOL, S2, U2],
            True,
            ["user U1", "assistant A1", "tool T", "user S1\n\nS2\n\nU2"],
        ),
        ([S1, U1, A1, S2, S3, U2], False, ["user S1\n\nU1", "assistant A1", "user S2\n\nS3\n\nU2"]),
        ([S1], False, ["user S1"]),
        ([S1, S2], True, ["system S1\n\nS2"]),
    ],
)
def test_system_messages_move_to_where_the_template_takes_them(
    messages: list[dict[str, Any]], first: bool, texts: list[str]
) -> None:
    placed = place_system_messages(messages, first=first, anywhere=False)
    assert [f"{each['role']} {each['content']}" for each in placed] == texts
    assert place_system_messages(messages, first=True, anywhere=True) == messages


def test_parts_stay_parts() -> None:
    part = {"type": "text", "text": "S2"}
    placed = place_system_messages([U1, say("system", [part]), U2], first=True, anywhere=False)
    assert placed == [U1, say("user", [part, {"type": "text", "text": "U2"}])]


@pytest.fixture(scope="module", params=[ANYWHERE, FIRST, DROPS, NONE, IGNORES])
def templated(request: pytest.FixtureRequest) -> Iterator[Running]:
    llm = LLM(threads=1, budget="all")
    llm.tokenizer.chat_template = request.param
    with running(llm) as made:
        yield made


def test_system_messages_are_read_anywhere_by_every_api(templated: Running) -> None:
    """The prompt has all texts, whatever the template takes; all APIs make the same prompt."""
    talk = [
        say("system", "S1"),
        say("user", "U1"),
        say("assistant", "A1"),
        say("system", "S2"),
        say("user", "U2"),
    ]
    with templated.client() as client:
        limits = {CHAT: "max_tokens", RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}
        counts = set()
        for route, limit in limits.items():
            field = "input" if route == RESPONSES else "messages"
            answer = client.post(route, json={field: talk, limit: 1})
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            counts.add(
                usage.get("prompt_tokens", usage.get("input_tokens")) or usage["input_tokens"]
            )
        assert len(counts) == 1
        (count,) = counts
        empty = [{**each, "content": "x"} for each in talk]
        shorter = client.post(CHAT, json={"messages": empty[1:3] + empty[4:], "max_tokens": 1})
        assert shorter.json()["usage"]["prompt_tokens"] < count
        assert client.post(COUNT, json={"messages": talk}).json() == {"input_tokens": count}


BEGUN = [say("user", "Hi"), say("assistant", "The answer is")]


def test_an_answer_that_the_request_begins_is_continued(
    model: LLM, served: Running, client: httpx.Client
) -> None:
    prompt = [
        *model.chat_ids(BEGUN[:1]),
        *model.tokenizer.encode("The answer is", add_special_tokens=False),
    ]
    want = model.generate(prompt, SamplingParams(max_tokens=12)).text
    assert want != model.chat(BEGUN[:1], SamplingParams(max_tokens=12)).text
    body = {"messages": BEGUN, "max_tokens": 12, "temperature": 0}
    got = client.post(MESSAGES, json=body).json()
    assert got["content"][0]["text"] == want
    assert client.post(COUNT, json={"messages": BEGUN}).json() == {"input_tokens": len(prompt)}
    marked = [BEGUN[0], {**BEGUN[1], "prefix": True}]
    switch = {"continue_final_message": True, "add_generation_prompt": False}
    for more in ({"messages": marked}, switch):
        reply = client.post(CHAT, json={**body, **more}).json()
        assert reply["choices"][0]["message"]["content"] == want
    plain = client.post(CHAT, json=body).json()  # OpenAI's API begins a new message
    assert plain["usage"]["prompt_tokens"] == len(model.chat_ids(BEGUN))
    assert served.drained


def test_a_begun_answer_is_untrusted_text(model: LLM, client: httpx.Client) -> None:
    name = next(iter(model.tokenizer._special_names))
    talk = [BEGUN[0], say("assistant", f"x{name}y")]
    count = client.post(COUNT, json={"messages": talk}).json()["input_tokens"]
    trusted = model.tokenizer.encode(f"x{name}y", add_special_tokens=False)
    assert count > len(model.chat_ids(BEGUN[:1])) + len(trusted)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"continue_final_message": True}, "expected a last message of the role 'assistant'"),
        ({"add_generation_prompt": False}, "add continue_final_message: true"),
    ],
)
def test_an_answer_is_continued_only_if_there_is_one(
    client: httpx.Client, body: dict[str, Any], message: str
) -> None:
    answer = client.post(CHAT, json={"messages": [say("user")], **body})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Server of a model whose template begins the thoughts in the prompt."""
    with running(tool_model(tmp_path_factory.mktemp("opened"), "deepseek")) as made:
        yield made


def test_thoughts_are_closed_before_a_begun_answer(opened: Running) -> None:
    with opened.client() as client:
        body = {"messages": BEGUN, "max_tokens": 8, "thinking": {"type": "enabled"}}
        kinds = [block["type"] for block in client.post(MESSAGES, json=body).json()["content"]]
        assert kinds == ["text"]
        plain = client.post(MESSAGES, json={**body, "messages": BEGUN[:1]}).json()
        assert plain["content"][0]["type"] == "thinking"


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Server of a model that begins its thoughts itself."""
    with running(tool_model(tmp_path_factory.mktemp("thinking"), "qwen3", FEW_LAYERS)) as made:
        yield made


def begun_with_thoughts(route: str) -> dict[str, Any]:
    """Return a request whose last message has thoughts and the beginning of the text."""
    if route == MESSAGES:
        blocks = [{"type": "thinking", "thinking": "Why?"}, {"type": "text", "text": "As"}]
        talk = [BEGUN[0], {"role": "assistant", "content": blocks}]
        return {"messages": talk, "max_tokens": 8, "thinking": {"type": "enabled"}}
    if route == RESPONSES:
        thoughts = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Why?"}]}
        items = [BEGUN[0], thoughts, say("assistant", "As")]
        return {"input": items, "max_output_tokens": 8, "continue_final_message": True}
    last = {"role": "assistant", "reasoning_content": "Why?", "content": "As", "prefix": True}
    return {"messages": [BEGUN[0], last], "max_tokens": 8}


@pytest.mark.parametrize("route", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("server", ["thinking", "opened"])
def test_thoughts_of_a_begun_answer_are_read_before_its_text(
    server: str, route: str, request: pytest.FixtureRequest
) -> None:
    served: Running = request.getfixturevalue(server)
    llm = served.llm
    prompt = llm.tokenizer.chat(BEGUN[:1], options={"enable_thinking": True})
    is_opened = prompt.endswith("<think>\n")
    assert is_opened == (server == "opened")
    begin = "" if is_opened else "<think>\n"
    ids = llm.tokenizer.encode(f"{prompt}{begin}Why?\n</think>\n\nAs", add_special_tokens=False)
    want = llm.generate(ids, SamplingParams(max_tokens=8)).text
    with served.client() as client:
        reply = client.post(route, json={**begun_with_thoughts(route), "temperature": 0})
    assert reply.status_code == 200, reply.text
    assert len(ids) == num_prompt(reply.json()["usage"])
    (answer,) = answer_of(route, reply, stream=False)
    content = answer["content"]
    text = content if isinstance(content, str) else content[0]["text"]
    assert text == want != ""


def num_prompt(usage: dict[str, Any]) -> int:
    """Return the number of tokens of a prompt, in the counts of any API."""
    if "prompt_tokens" in usage:
        return int(usage["prompt_tokens"])
    return int(usage["input_tokens"] + usage.get("cache_read_input_tokens", 0))


def test_thoughts_that_the_model_cannot_have_are_reported(
    thinking: Running, client: httpx.Client
) -> None:
    body = begun_with_thoughts(CHAT)
    closed = {**body, "chat_template_kwargs": {"enable_thinking": False}}
    with thinking.client() as other:
        reports = [client.post(CHAT, json=body), other.post(CHAT, json=closed)]
    for reply in reports:
        assert reply.status_code == 200, reply.text
        assert "messages (thoughts of the last message)" in reply.headers["X-Pronk-Ignored"]


@pytest.mark.parametrize(
    ("last", "message"),
    [
        (
            {"tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]},
            "messages: expected a last message without tool calls to continue, found one",
        ),
        (
            {"reasoning_content": "Why?"},
            "messages: expected a text after the thoughts of the last message to continue",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_continued_is_refused_in_one_line(
    client: httpx.Client, last: dict[str, Any], message: str
) -> None:
    talk = [BEGUN[0], {"role": "assistant", "content": "", **last, "prefix": True}]
    reply = client.post(CHAT, json={"messages": talk})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith(message)


def test_a_response_is_continued_only_if_there_is_one(client: httpx.Client) -> None:
    for items in ("Hi", [say("user")]):
        body = {"input": items, "continue_final_message": True}
        error = client.post(RESPONSES, json=body).json()["error"]
        assert error["param"] == "input"
        assert "expected a last message of the role 'assistant'" in error["message"]


def test_counts_are_those_of_the_answer(served: Running, client: httpx.Client) -> None:
    """``count_tokens`` counts what ``/v1/messages`` reads, for any sequence of roles that the
    latter accepts.
    """
    talks: list[list[dict[str, Any]]] = [
        [say("user")],
        [say("user"), say("assistant")],
        [say("user"), say("assistant", [{"type": "text", "text": "x"}])],
        [say("system"), say("user"), say("system")],
        [say("user"), say("user"), say("assistant"), say("assistant", "and")],
        [say("user"), {"role": "assistant", "content": []}],
        [
            say("user"),
            say("assistant", [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]),
        ],
    ]
    for talk in talks:
        answer = client.post(MESSAGES, json={"messages": talk, "max_tokens": 1})
        assert answer.status_code == 200, (answer.text, talk)
        usage = answer.json()["usage"]
        counted = client.post(COUNT, json={"messages": talk}).json()["input_tokens"]
        assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert served.drained


def test_roles_are_those_of_the_server() -> None:
    """The server has them in the type of a field."""
    assert get_args(ChatMessage.model_fields["role"].annotation) == ROLES
