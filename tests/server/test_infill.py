"""Filling in the middle by ``suffix`` of ``/v1/completions`` and by llama.cpp's ``/infill``."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pronk import AsyncLLM, Completion, Piece
from pronk.llm import LLM
from pronk.sampling.params import SamplingParams
from pronk.text.infill import ContextFile
from server.infill_models import write_coder
from server.serving import Running, running
from waiting import HUNG

COMPLETIONS = "/v1/completions"
INFILL = "/infill"
GENERATE = "/api/generate"
PREFIX = "def add(a, b):\n    return "
SUFFIX = "\n\nprint(add(1, 2))\nprint(add(1, 2))\n"
EXTRA = [{"filename": "one.py", "text": "def one():\n    return 1\n"}, {"text": "x = 1\n"}]
CONTEXT = [ContextFile("def one():\n    return 1\n", "one.py"), ContextFile("x = 1\n")]


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write_coder(tmp_path_factory.mktemp("coder"))
    return LLM(folder, prefix_cache=True, max_batch=8, threads=1, budget="all")


@pytest.fixture(scope="module")
def served_coder(coder: LLM) -> Iterator[Running]:
    with running(coder) as made:
        yield made


@pytest.fixture
def editor(served_coder: Running) -> Iterator[httpx.Client]:
    with served_coder.client() as made:
        yield made


def post(client: httpx.Client, route: str, **body: Any) -> dict[str, Any]:
    reply = client.post(route, json=body)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def error(client: httpx.Client, route: str, **body: Any) -> dict[str, Any]:
    reply = client.post(route, json=body)
    assert reply.status_code == 400, reply.text
    return dict(reply.json()["error"])


def events(client: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    reply = client.post(INFILL, json={**body, "stream": True})
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_both_routes_and_the_library_write_the_same_middle(
    coder: LLM, editor: httpx.Client
) -> None:
    done = coder.infill(PREFIX, SUFFIX, SamplingParams(max_tokens=12))
    by_suffix = post(
        editor, COMPLETIONS, prompt=PREFIX, suffix=SUFFIX, max_tokens=12, temperature=0
    )
    body = {"input_prefix": PREFIX[:-4], "prompt": PREFIX[-4:], "input_suffix": SUFFIX}
    by_route = post(editor, INFILL, **body, n_predict=12, temperature=0)
    assert done.text == by_suffix["choices"][0]["text"] == by_route["content"] != ""
    plain = post(editor, COMPLETIONS, prompt=PREFIX, max_tokens=12, temperature=0)
    assert plain["choices"][0]["text"] != done.text, "the suffix must matter"


def test_streams_equal_whole_replies(coder: LLM, editor: httpx.Client) -> None:
    body = {"input_prefix": PREFIX, "input_suffix": SUFFIX, "input_extra": EXTRA}
    options = {"n_predict": 12, "temperature": 1.0, "seed": 3}
    whole = post(editor, INFILL, **body, **options)
    *chunks, last = events(editor, **body, **options)
    assert "".join(chunk["content"] for chunk in chunks) == whole["content"]
    assert not any(chunk["stop"] for chunk in chunks)
    same = ("stop", "stop_type", "tokens_predicted", "tokens_evaluated", "stopping_word")
    assert {name: last[name] for name in same} == {name: whole[name] for name in same}
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3)
    pieces = coder.stream_infill(PREFIX, SUFFIX, params, context=CONTEXT)
    assert "".join(piece.text for piece in pieces) == whole["content"]


def test_ollama_generates_the_same_middle(coder: LLM, editor: httpx.Client) -> None:
    options = {"num_predict": 12, "temperature": 1.0, "seed": 3}
    body = {"prompt": PREFIX, "suffix": SUFFIX, "options": options}
    whole = post(editor, GENERATE, **body, stream=False)
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3)
    done = coder.infill(PREFIX, SUFFIX, params)
    assert whole["response"] == done.text != ""
    assert (whole["done"], whole["done_reason"]) == (True, done.finish_reason)
    assert (whole["prompt_eval_count"], whole["eval_count"]) == (len(done.prompt_token_ids), 12)
    reply = editor.post(GENERATE, json=body)
    *lines, last = [json.loads(line) for line in reply.text.splitlines()]
    assert "".join(line["response"] for line in lines) == whole["response"]
    assert not any(line["done"] for line in lines)
    assert (last["done_reason"], last["eval_count"]) == (whole["done_reason"], 12)
    without = post(editor, GENERATE, **{**body, "suffix": ""}, stream=False)
    assert without["response"] != whole["response"], "an empty suffix is the same as none"


def test_counts_and_reason_of_the_end_are_as_in_llama_cpp(editor: httpx.Client) -> None:
    body = {"input_prefix": PREFIX, "input_suffix": SUFFIX, "temperature": 0}
    reply = post(editor, INFILL, **body, n_predict=5)
    assert (reply["stop"], reply["stop_type"], reply["tokens_predicted"]) == (True, "limit", 5)
    assert reply["timings"]["cache_n"] + reply["timings"]["prompt_n"] == reply["tokens_evaluated"]
    stop = reply["content"][1:3]
    stopped = post(editor, INFILL, **body, n_predict=5, stop=[stop])
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", stop)
    assert stopped["content"] == reply["content"].partition(stop)[0]


def test_no_prediction_reads_the_prompt_into_the_cache(editor: httpx.Client) -> None:
    body = {"input_prefix": PREFIX * 8, "input_suffix": SUFFIX, "input_extra": EXTRA}
    warm = post(editor, INFILL, **body, n_predict=0)
    assert (warm["content"], warm["tokens_predicted"], warm["stop_type"]) == ("", 0, "limit")
    assert events(editor, **body, n_predict=0)[0]["stop"]
    reply = post(editor, INFILL, **body, n_predict=2)
    assert reply["tokens_cached"] > 0


def test_the_middle_ends_at_a_token_of_another_part(coder: LLM, editor: httpx.Client) -> None:
    for token in coder.request_factory.infill_format.stop_ids:
        bias = {str(token): 100.0}
        reply = post(editor, INFILL, input_prefix=PREFIX, input_suffix=SUFFIX, logit_bias=bias)
        assert (reply["content"], reply["stop_type"]) == ("", "eos")
        params = SamplingParams(logit_bias={token: 100.0})
        assert coder.infill(PREFIX, SUFFIX, params).finish_reason == "stop"


def test_an_empty_suffix_is_filled_by_infill_alone(coder: LLM, editor: httpx.Client) -> None:
    options = {"max_tokens": 8, "temperature": 0}
    plain = post(editor, COMPLETIONS, prompt=PREFIX, **options)["choices"][0]["text"]
    empty = post(editor, COMPLETIONS, prompt=PREFIX, suffix="", **options)["choices"][0]["text"]
    assert empty == plain
    filled = post(editor, INFILL, input_prefix=PREFIX, input_suffix="", **options)["content"]
    assert filled == coder.infill(PREFIX, "", SamplingParams(max_tokens=8)).text


def test_what_llama_vim_sends_is_accepted(editor: httpx.Client) -> None:
    body = {
        "id_slot": 0, "input_prefix": PREFIX, "input_suffix": SUFFIX, "input_extra": EXTRA,
        "prompt": "a", "n_predict": 4, "stop": ["\n\n"], "n_indent": 4, "top_k": 40, "top_p": 0.9,
        "samplers": ["top_k", "top_p", "infill"], "stream": False, "cache_prompt": True,
        "t_max_prompt_ms": 500, "t_max_predict_ms": 1000,
        "response_fields": ["content", "timings/prompt_n", "truncated", "tokens_cached"],
    }  # fmt: skip
    assert post(editor, INFILL, **body)["truncated"] is False


@pytest.mark.parametrize("drafter", ["prompt_lookup", "suffix(store_tokens=0)"])
@pytest.mark.parametrize("place", ["suffix", "context"])
def test_drafters_draft_from_suffix_and_context(coder: LLM, drafter: str, place: str) -> None:
    plain = coder.infill(PREFIX, SUFFIX, SamplingParams(max_tokens=16), drafter="autoregressive")
    text = f"{PREFIX}{plain.text}"  # the text that the drafter can find elsewhere in the prompt
    suffix = f"{SUFFIX}\n{text}" if place == "suffix" else SUFFIX
    context = [ContextFile(text)] if place == "context" else []
    params = SamplingParams(max_tokens=16)
    done = coder.infill(PREFIX, suffix, params, context=context, drafter=drafter)
    again = coder.infill(PREFIX, suffix, params, context=context, drafter="autoregressive")
    assert done.token_ids == again.token_ids
    assert done.stats.drafted > 0


def test_a_model_without_the_tokens_is_refused(client: httpx.Client) -> None:
    by_suffix = error(client, COMPLETIONS, prompt=PREFIX, suffix=SUFFIX)
    assert by_suffix["param"] == "suffix"
    assert by_suffix["message"].startswith("suffix: expected a model with tokens for filling in")
    by_route = error(client, INFILL, input_prefix=PREFIX, input_suffix=SUFFIX)
    assert by_route["param"] == "input_suffix"


@pytest.mark.parametrize(
    ("route", "field", "body"),
    [
        (COMPLETIONS, "echo", {"prompt": "a", "suffix": "b", "echo": True}),
        (COMPLETIONS, "input_prefix", {"prompt": "a", "input_prefix": "b"}),
        (COMPLETIONS, "input_extra", {"prompt": "a", "input_extra": [{"text": "b"}]}),
        (INFILL, "input_extra.0.text", {"input_extra": [{"filename": "b"}]}),
        (INFILL, "prompt", {"prompt": ["a"]}),
        (INFILL, "logprobs", {"logprobs": 1}),
        (INFILL, "n", {"n": 2}),
    ],
)
def test_wrong_fields_are_refused_by_name(
    editor: httpx.Client, route: str, field: str, body: dict[str, Any]
) -> None:
    assert error(editor, route, **body)["param"] == field


def test_a_long_prompt_is_refused(editor: httpx.Client) -> None:
    found = error(editor, INFILL, input_prefix="a b " * 4000, input_suffix="c")
    assert found["code"] == "context_length_exceeded"


def test_the_asyncio_api_writes_the_same_middle(coder: LLM) -> None:
    params = SamplingParams(max_tokens=12)
    expected = coder.infill(PREFIX, SUFFIX, params, context=CONTEXT)

    async def fill() -> tuple[Completion, list[Piece]]:
        llm = AsyncLLM(coder)
        whole = await llm.infill(PREFIX, SUFFIX, params, context=CONTEXT, deadline=HUNG)
        pieces = [
            piece async for piece in llm.stream_infill(PREFIX, SUFFIX, params, context=CONTEXT)
        ]
        return whole, pieces

    whole, pieces = asyncio.run(fill())
    assert whole.token_ids == expected.token_ids
    assert "".join(piece.text for piece in pieces) == expected.text
