"""Guides by every field that clients have for them; an invalid guide fails its own request only."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from pronk.llm import LLM
from pronk.sampling.params import SamplingParams
from pronk.server.settings import RequestLimits
from pronk.text.guide import Guide
from server.clients import openai
from server.serving import KEY, Running, running
from waiting import processor_limit

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
MESSAGES: Any = [{"role": "user", "content": "Where to?"}]
CHAT = {"messages": MESSAGES, "max_tokens": 60, "temperature": 0.9, "seed": 3}
TEXT = {"prompt": "Where to? ", "max_tokens": 60, "temperature": 0.9, "seed": 3}
JSON = Guide(json=SCHEMA)
NAMED = {"name": "trip", "schema": SCHEMA, "strict": True}


@pytest.fixture
def api(served: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("asked", "guide"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, JSON),
        (
            {
                "response_format": {"type": "json_schema", "json_schema": NAMED},
                "guide_mode": "plain",
            },
            JSON,
        ),
        ({"guided_json": SCHEMA}, JSON),
        ({"guided_json": json.dumps(SCHEMA)}, JSON),
        ({"structured_outputs": {"json": SCHEMA}}, JSON),
        ({"guided_regex": "[a-c]{3}-[0-9]+"}, Guide(regex="[a-c]{3}-[0-9]+")),
        ({"structured_outputs": {"regex": "[a-c]{3}"}}, Guide(regex="[a-c]{3}")),
        ({"guided_choice": ["Paris", "Oslo"]}, Guide(choice=["Paris", "Oslo"])),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, Guide(choice=["yes", "no"])),
        (
            {"guided_grammar": 'start: "a" start "b" | "c"'},
            Guide(grammar='start: "a" start "b" | "c"'),
        ),
        ({"structured_outputs": {"grammar": 'start: "x"'}}, Guide(grammar='start: "x"')),
        (
            {"response_format": {"type": "json_object"}, "max_tokens": 20},
            Guide(json={"type": "object"}),
        ),
        (
            {"structured_outputs": {"json_object": True}, "max_tokens": 20},
            Guide(json={"type": "object"}),
        ),
        ({"response_format": {"type": "text"}, "max_tokens": 5}, None),
        (
            {"structured_outputs": {"json_object": False}, "max_tokens": 5, "guided_json": None},
            None,
        ),
    ],
)
def test_guided_answers_equal_those_of_llm(
    client: httpx.Client, model: LLM, asked: Any, guide: Guide | None
) -> None:
    params = SamplingParams(
        max_tokens=asked.get("max_tokens", 60), temperature=0.9, seed=3, guide=guide
    )
    texts = {
        "/v1/chat/completions": (CHAT, model.chat(MESSAGES, params).text),
        "/v1/completions": (TEXT, model.generate(TEXT["prompt"], params).text),  # type: ignore[arg-type]
    }
    for route, (base, want) in texts.items():
        answer = client.post(route, json=base | asked)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        assert (choice["message"]["content"] if "message" in choice else choice["text"]) == want
        assert guide != JSON or json.loads(want)["city"] in ("Paris", "Oslo")


def test_guide_mode_jump_equals_llm(client: httpx.Client, model: LLM) -> None:
    answer = client.post(
        "/v1/chat/completions", json=CHAT | {"guided_json": SCHEMA, "guide_mode": "jump"}
    )
    params = SamplingParams(max_tokens=60, temperature=0.9, seed=3, guide=JSON, guide_mode="jump")
    assert answer.json()["choices"][0]["message"]["content"] == model.chat(MESSAGES, params).text


def test_text_format_of_responses(api: openai.OpenAI) -> None:
    form: Any = {
        "format": {"type": "json_schema", "name": "trip", "schema": SCHEMA, "strict": True}
    }
    got = api.responses.create(model="tiny", input="Where to?", max_output_tokens=60, text=form)
    assert json.loads(got.output_text)["city"] in ("Paris", "Oslo")
    assert got.text is not None
    assert got.text.format is not None
    assert got.text.format.type == "json_schema"
    any_object: Any = {"format": {"type": "json_object"}}
    cut = api.responses.create(
        model="tiny", input="Where to?", max_output_tokens=4, text=any_object
    )
    assert cut.output_text.startswith("{")
    assert cut.status in ("incomplete", "completed")


def test_streamed_answers_follow_the_schema(api: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": NAMED}
    stream = api.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=60,
        temperature=1.5,
        response_format=form,
        stream=True,
        n=2,
    )
    texts = {0: "", 1: ""}
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert all(json.loads(text)["days"] in range(1, 10) for text in texts.values())


DEEP: Any = {"type": "string"}
for _ in range(80):
    DEEP = {"type": "array", "items": DEEP}
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_json": {"not": {}}}, "guided_json", ("expected keywords that can be checked from left to right, "
        "found 'n")),
    ({"guided_json": {"$ref": "http://elsewhere/"}}, "guided_json", ("guided_json: $ref: expected a reference to "
        "a")),
    ({"guided_json": DEEP}, "guided_json", "expected a schema of at most 64 levels"),
    ({"guided_json": "{"}, "guided_json", "expected a schema, found a mistake at line 1, column 2"),
    ({"guided_json": "5"}, "guided_json", "expected a schema, an object or true, found 5"),
    ({"guided_json": 5}, "guided_json", "expected a valid dictionary, found 5"),
    ({"guided_json": {"items": {"format": 3}}}, "guided_json", ("guided_json: items.format: expected the name "
        "of")),
    ({"guided_json": {"multipleOf": 1e-30}}, "guided_json", "expected"),
    (
        {"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"type": "array"}]}}}},
        "guided_json",
        ("$defs.a.allOf.0: expected a schema that is simpler, and that some value matches, found "
        "'$ref'; remove it"),
    ),
    ({"guided_regex": "(" * 5000}, "guided_regex", "expected one that can be followed"),
    ({"guided_regex": "(?=a)b"}, "guided_regex", "expected one that can be followed"),
    ({"guided_regex": ""}, "guided_regex", "expected a text that is not empty"),
    ({"guided_regex": "a" * 2**19}, "guided_regex", "expected at most 262144 characters"),
    ({"guided_choice": []}, "guided_choice", "expected 1..1024 texts, found 0"),
    ({"guided_choice": ["a", "a"]}, "guided_choice", "expected distinct texts, found a duplicate"),
    ({"guided_choice": ["a", 5]}, "guided_choice.1", "expected a valid string"),
    ({"guided_grammar": "root ::= x"}, "guided_grammar", "expected one that can be followed"),
    ({"guided_grammar": 'start: "a' + "b" * 10**7}, "guided_grammar", ("expected at most 262144 "
        "characters")),
    ({"guided_whitespace_pattern": "[ ]*"}, "guided_whitespace_pattern", "expected no such field"),
    ({"guided_jsn": SCHEMA}, "guided_jsn", ("expected only known fields, found an unknown one; "
        "use guided_json")),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "expected no such field"),
    ({"structured_outputs": {"jsn": {"a": 1}}}, "structured_outputs.jsn", "expected only known fields"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice", "and structured_out"),
    ({"response_format": {"type": "xml"}}, "response_format.type", ("expected 'text', 'json_object' or "
        "'json_schema'")),
    ({"response_format": {"type": "json_schema"}}, "response_format", ("expected json_schema with the "
        "type")),
    ({"response_format": {"type": "text", "json_schema": NAMED}}, "response_format", "expected json_schema with"),
    ({"response_format": {"type": "json_schema", "json_schema": NAMED, "schema": {"type": "object"}}},
     "response_format", "expected one schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {**NAMED, "schema": {"not": {}}}}},
     "response_format", ("expected keywords that can be checked from left to right, found 'not'; "
         "remove it")),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "response_format and guided"),
    ({"guided_json": {}, "guided_choice": ["a"]}, "guided_choice", ("found guided_json and "
        "guided_choice")),
    ({"guided_json": SCHEMA, "ignore_eos": True}, "ignore_eos", "expected False with a guide"),
    ({"guided_json": SCHEMA, "guide_mode": "fast"}, "guide_mode", ("expected 'forced', 'plain' or "
        "'jump'")),
]  # fmt: skip


@pytest.fixture(scope="module")
def large_bodies(model: LLM) -> Iterator[Running]:
    with running(model, limits=RequestLimits(body=2**25)) as made:
        yield made


NEIGHBOUR: dict[str, Any] = {"max_tokens": 24, "temperature": 0.8, "seed": 5}
PROMPT_OF_NEIGHBOUR = "def add(a, b):\n    return"


@pytest.fixture(scope="module")
def text_of_neighbour(model: LLM) -> str:
    """Return the text of a request beside which others are refused."""
    return model.generate(PROMPT_OF_NEIGHBOUR, SamplingParams(**NEIGHBOUR)).text


@pytest.mark.parametrize(("asked", "param", "message"), BAD, ids=range(len(BAD)))
def test_invalid_guide_is_refused_alone(
    large_bodies: Running, text_of_neighbour: str, asked: Any, param: str, message: str
) -> None:
    neighbour = {"prompt": PROMPT_OF_NEIGHBOUR, **NEIGHBOUR}
    with large_bodies.client() as client, ThreadPoolExecutor(2) as threads:
        beside = threads.submit(client.post, "/v1/completions", json=neighbour)
        with processor_limit(20):
            answer = threads.submit(client.post, "/v1/chat/completions", json=CHAT | asked).result()
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert (error["param"], error["type"]) == (param, "invalid_request_error")
        assert message in error["message"]
        assert error["message"].startswith(f"{param}: ")
        assert "\n" not in error["message"]
        assert beside.result().json()["choices"][0]["text"] == text_of_neighbour
    assert large_bodies.drained


def test_regular_expressions_that_backtrack_in_other_engines(client: httpx.Client) -> None:
    for expression in ("(a+)+b", "(a|a)*b", "(x*)*y"):
        answer = client.post(
            "/v1/completions", json=TEXT | {"guided_regex": expression, "temperature": 0.0}
        )
        assert answer.status_code == 200, answer.text
        text = answer.json()["choices"][0]["text"]
        assert len(text) > 50 or re.fullmatch(expression, text)


def test_guide_beyond_the_work_limit_of_decoding(client: httpx.Client) -> None:
    ask = {"guided_regex": "((a{1,1000}){1,1000}){1,1000}", "logit_bias": {"3": -100}}
    answer = client.post("/v1/completions", json=TEXT | ask)
    assert answer.status_code == 200 or answer.json()["error"]["param"] == "guided_regex", (
        answer.text
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "guide",
    [
        {"guided_regex": r"abcdefghij(\w+\s?){1,100}(?:[^a]{1,50}){1,50}"},
        {
            "guided_grammar": 'start: "abcdefghij" rest\nrest: '
            + " ".join(f"(/a{{0,{n}}}b?/)?" for n in range(300))
        },
    ],
    ids=str,
)
def test_a_limit_that_is_reached_in_the_text_is_the_clients_and_not_logged(
    client: httpx.Client,
    guide: dict[str, str],
    stream: bool,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    answer = client.post(
        "/v1/completions", json={**TEXT, **guide, "max_tokens": 60, "stream": stream}
    )
    assert "expected a grammar that can be followed to the end, found" in answer.text
    assert caplog.messages == []
    assert capfd.readouterr() == ("", "")


def test_body_beyond_the_limit_is_refused(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", json=TEXT | {"guided_grammar": "x" * 10**7})
    assert answer.status_code == 413


def test_invalid_text_format_names_its_field(client: httpx.Client) -> None:
    for form, param in (
        ({"type": "json_schema", "name": "a"}, "text.format.schema"),
        ({"type": "json_object", "schema": {}}, "text.format.schema"),
        ({"type": "json_schema", "name": "a", "schema": {"not": {}}}, "text.format"),
        ({"type": "grammar"}, "text.format.type"),
    ):
        answer = client.post(
            "/v1/responses", json={"input": "x", "text": {"format": form}, "max_output_tokens": 4}
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def chain(length: int) -> dict[str, Any]:
    """Return a schema of chained references; compiling it crashes a process (here the trial
    process).
    """
    defs: dict[str, Any] = {
        f"d{i}": {
            "type": "object",
            "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}},
            "required": ["a"],
        }
        for i in range(length)
    }
    return {"$ref": "#/$defs/d0", "$defs": defs | {f"d{length}": {"type": "integer"}}}


def test_schemas_that_crash_the_compiler_fail_alone(served: Running) -> None:
    """The server, requests without a guide and later guides are unaffected."""

    def ask(more: dict[str, Any]) -> httpx.Response:
        with served.client() as client:
            return client.post("/v1/completions", json={"prompt": "x", "max_tokens": 4} | more)

    with ThreadPoolExecutor(5) as pool:
        crashing = [pool.submit(ask, {"guided_json": chain(1000 + number)}) for number in range(3)]
        waiting = pool.submit(ask, {"guided_choice": ["later"]})
        assert pool.submit(ask, {}).result().status_code == 200
        for each in crashing:
            assert each.result().status_code == 400
            assert each.result().json()["error"]["param"] == "guided_json"
        assert waiting.result().status_code == 200
    assert served.drained
