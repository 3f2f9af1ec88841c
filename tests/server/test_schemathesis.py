"""Generated requests, valid and invalid: every one is answered, and none causes a server error.

A JSON schema cannot say all that makes a body valid, for example that a result of a tool needs its
call. Therefore each valid body of the schema is sent as it is, and once more with its
contradictions repaired.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import pytest

from server.serving import KEY, Running, running
from server.tool_models import FEW_LAYERS, tool_model
from waiting import HUNG

# Kinds of generated requests: those that fit the schema, and those that do not.
Mode = Literal["positive", "negative"]
# Routes that generate text, and the field with the maximum number of tokens; without it an answer
# fills the context.
LIMITS = {
    "/v1/completions": "max_tokens",
    "/v1/chat/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}
ROUTES = [
    *LIMITS,
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/moderations",
    "/tokenize",
    "/detokenize",
    "/tokenizer_info",
    "/v1/models/{name}",
]
# A few invalid requests go to one route of each form of body; the slow test sends many to all
# routes. Any name is valid in /v1/models/{name}, so the route has none.
INVALID = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/detokenize")
QUICK = [
    *((route, "positive") for route in ROUTES),
    *((route, "negative") for route in INVALID),
]
# Fields with a restriction that the schema lacks: names, token ids, options of streams, forms of
# the answer, tools.
RESTRICTED = {
    *(
        "model",
        "drafter",
        "logit_bias",
        "stop_token_ids",
        "stream_options",
        "leaps",
        "n",
        "top_logprobs",
        "logprobs",
    ),
    *(
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "text",
    ),
    *(
        "text",
        "tools",
        "tool_choice",
        "output_config",
        "chat_template_kwargs",
        "max_completion_tokens",
        "min_tokens",
    ),
    *("dimensions", "do_sample", "format", "json_schema"),
    *(
        "stop",
        "stop_sequences",
        "bad_words",
        "best_of",
        "suffix",
        "echo",
        "prompt_logprobs",
        "include",
        "guide_mode",
    ),
}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL_FIELDS = ("tool_calls", "tool_call_id")


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Server of a model that thinks and calls tools."""
    with running(tool_model(tmp_path_factory.mktemp("qwen3"), "qwen3", FEW_LAYERS)) as made:
        yield made


def shortened(route: str, body: Any) -> Any:
    """Return a body with numbers that make a request quick, unless they are invalid."""
    if not isinstance(body, dict) or route not in LIMITS:
        return body
    quick = {LIMITS[route]: 2, **{name: 2 for name in LIMITS.values() if name in body}}
    quick |= {name: most for name, most in (("max_completion_tokens", 2), ("n", 1)) if name in body}
    numbers = {name: value for name, value in body.items() if name in quick}
    return {
        **body,
        **{name: most for name, most in quick.items() if _is_valid(numbers.get(name, most))},
    }


def _is_valid(number: Any) -> bool:
    return isinstance(number, (int, float)) and not isinstance(number, bool) and number >= 1


def repaired(route: str, body: Any) -> Any:
    """Return a valid body of the schema without what only the server knows to be invalid."""
    if not isinstance(body, dict):
        return body
    # To a schema, 2.0 is an integer.
    body = json.loads(
        json.dumps(body), parse_float=lambda text: int(x) if (x := float(text)).is_integer() else x
    )
    body = {name: value for name, value in body.items() if name not in RESTRICTED}
    if route == "/detokenize":
        return {"tokens": [token % 300 for token in body["tokens"]]}
    if route == "/v1/completions":
        return {**body, "prompt": "Hi"}
    if route == "/v1/embeddings":
        return {**body, "input": "Hi"}
    if route in ("/v1/chat/completions", "/tokenize") and (messages := body.get("messages")):
        body.pop("prompt", None)
        return {**body, "messages": [fixed for each in messages for fixed in _chat_messages(each)]}
    if route == "/tokenize":
        return {"prompt": "Hi"}
    if route.startswith("/v1/messages"):
        return {
            **body,
            "messages": [
                *map(_anthropic_message, body["messages"]),
                {"role": "user", "content": "Hi"},
            ],
        }
    if isinstance(items := body.get("input"), list) and route == "/v1/responses":
        return {**body, "input": [{"role": "user", "content": "Hi"}, *map(_item, items)]}
    return body


def _chat_messages(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    fixed = {name: value for name, value in message.items() if name not in TOOL_FIELDS}
    if message["role"] == "tool":
        yield {"role": "assistant", "tool_calls": [CALL]}
        fixed["tool_call_id"] = "a"
    yield fixed


def _anthropic_message(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, list):
        own = ("text",) if message["role"] == "user" else ("text", "thinking", "tool_use")
        content = [block for block in content if _block_type(block) in own] or "Hi"
    return {**message, "content": content}


def _block_type(block: Any) -> Any:
    """Return the type of a block; the schema also allows blocks without one."""
    return block.get("type") if isinstance(block, dict) else None


def _item(item: dict[str, Any]) -> dict[str, Any]:
    if item.get("type") == "function_call":
        return {**item, "arguments": "{}"}
    return {"role": "user", "content": "Hi"} if item.get("type") == "function_call_output" else item


def drive(served: Running, route: str, mode: Mode, examples: int) -> float:
    """Send generated requests to a route; return the share of answers with status 200."""
    # Imported here, because the imports take as long as that of torch, in each worker of the tests.
    import hypothesis
    import schemathesis
    from schemathesis.checks import not_a_server_error

    schema = schemathesis.openapi.from_url(
        f"{served.url}/openapi.json", headers={"Authorization": f"Bearer {KEY}"}
    )
    (operation,) = (found.ok() for found in schema.include(path=route).get_all_operations())
    statuses = list[int]()

    @hypothesis.given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    def run(case: schemathesis.Case) -> None:
        body = case.body
        bodies = [body] if mode == "negative" else [body, repaired(route, body)]
        for each in bodies:
            case.body = shortened(route, each)
            answer = case.call(headers={"Authorization": f"Bearer {KEY}"}, timeout=HUNG)
            case.validate_response(answer, checks=[not_a_server_error])
            statuses.append(answer.status_code)

    run()
    return statuses.count(200) / len(statuses)


@pytest.mark.long
@pytest.mark.few(6)
@pytest.mark.parametrize(("route", "mode"), QUICK, ids=str)
def test_generated_requests_cause_no_server_error(
    thinking: Running, route: str, mode: Mode
) -> None:
    fine = drive(thinking, route, mode, 5)
    assert fine > 0 or mode == "negative" or route == ROUTES[-1]
    assert thinking.drained


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES[:-1])
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_many_generated_requests_cause_no_server_error(
    thinking: Running, route: str, mode: Mode
) -> None:
    fine = drive(thinking, route, mode, 600)
    assert fine > 0.4 or mode == "negative"
    assert thinking.drained
