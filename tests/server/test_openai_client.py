"""OpenAI's client on every route; the answers equal those of LLM."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pronk.llm import LLM
from pronk.sampling.params import SamplingParams
from server.clients import openai
from server.serving import KEY, Running, running

PROMPT = "def add(a, b):\n    return a + b\n\ndef add(a, b):\n    return a +"
MESSAGES: Any = [{"role": "user", "content": "Say hello, please."}]


@pytest.fixture
def api(served: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


def test_models(api: openai.OpenAI) -> None:
    assert [model.id for model in api.models.list()] == ["tiny"]
    assert api.models.retrieve("tiny").owned_by == "pronk"
    with pytest.raises(openai.NotFoundError, match="expected 'tiny', found 'huge'"):
        api.models.retrieve("huge")


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_completions_equal_llm_generate(api: openai.OpenAI, model: LLM, temperature: float) -> None:
    own = SamplingParams(
        max_tokens=24, temperature=temperature, seed=3, logprobs=2, stop=("zq",), n=2
    )
    want = model.generate(PROMPT, own)
    options: Any = {
        "max_tokens": 24,
        "temperature": temperature,
        "seed": 3,
        "logprobs": 2,
        "stop": "zq",
        "n": 2,
    }
    got = api.completions.create(model="tiny", prompt=PROMPT, **options)
    assert [choice.text for choice in got.choices] == [want.text, want.others[0].text]
    assert [choice.finish_reason for choice in got.choices] == [
        want.finish_reason,
        want.others[0].finish_reason,
    ]
    reported = got.choices[0].logprobs
    assert reported is not None
    assert reported.token_logprobs == [
        report[t] for t, report in zip(want.token_ids, want.logprobs or (), strict=True)
    ]
    assert got.usage is not None
    assert got.usage.prompt_tokens == len(want.prompt_token_ids)
    assert got.usage.completion_tokens == len(want.token_ids) + len(want.others[0].token_ids)
    extra = got.usage.model_extra or {}
    assert extra["steps"] < got.usage.completion_tokens
    assert 0 < extra["accepted"] <= extra["drafted"]

    chunks = [*api.completions.create(model="tiny", prompt=PROMPT, stream=True, **options)]
    for index, whole in enumerate(got.choices):
        mine = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert "".join(choice.text for choice in mine) == whole.text
        assert mine[-1].finish_reason == whole.finish_reason
        assert all(choice.finish_reason is None for choice in mine[:-1])
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [each for choice in mine for each in getattr(choice.logprobs, name)]
            assert joined == getattr(whole.logprobs, name)


@pytest.mark.parametrize(
    "prompt", ["def f(x): é🙂", "a<|endoftext|>b", [0, 5, 0, 300 - 1], [200, 5, 0]], ids=str
)
@pytest.mark.parametrize("echo", [False, True])
def test_tokens_are_at_their_offsets(
    api: openai.OpenAI, model: LLM, prompt: Any, echo: bool
) -> None:
    """Also with special tokens: a prompt has their names if it is given so, an output has none."""
    likely = {str(token): 14 for token in model.tokenizer.special_ids}
    bias: Any = {"logit_bias": likely, "extra_body": {"ignore_eos": True}, "seed": 1}
    got = api.completions.create(
        model="tiny", prompt=prompt, max_tokens=40, temperature=2, echo=echo, logprobs=1, **bias
    )
    text = got.choices[0].text
    reported = got.choices[0].logprobs
    assert reported is not None
    assert reported.text_offset is not None
    assert reported.tokens is not None
    shown = [*zip(reported.tokens, reported.text_offset, strict=True)]
    assert len(shown) > 40 or not echo
    for token, offset in shown[:-40] if echo else []:
        assert text[offset:].startswith(token) or token.startswith("bytes:")
    for token, offset in shown[-40:]:
        assert text[offset:].startswith(token) or token.startswith(("bytes:", "<|"))
    assert any(token.startswith("<|") for token in reported.tokens[-40:])


def test_stop_strings_name_special_tokens(api: openai.OpenAI, model: LLM) -> None:
    """In all routes; the answer lacks the name."""
    names = [model.tokenizer.token_name(token) for token in sorted(model.tokenizer.special_ids)]
    likely = {str(token): 14 for token in model.tokenizer.special_ids}
    options: Any = {
        "logit_bias": likely,
        "temperature": 1,
        "seed": 1,
        "max_tokens": 100,
        "stop": names,
    }
    options["extra_body"] = {"ignore_eos": True}
    completion = api.completions.create(model="tiny", prompt=PROMPT, **options).choices[0]
    answer = api.chat.completions.create(model="tiny", messages=MESSAGES, **options).choices[0]
    for choice, text in ((completion, completion.text), (answer, answer.message.content)):
        assert choice.finish_reason == "stop"
        assert (choice.model_extra or {})["stop_reason"] in names
        assert not any(name in (text or "") for name in names)


def test_several_prompts_and_echo(api: openai.OpenAI, model: LLM) -> None:
    prompts = ["def f(x):", [5, 6, 7, 8]]
    for prompt in prompts:
        got = api.completions.create(
            model="tiny", prompt=prompt, max_tokens=8, temperature=0, echo=True, logprobs=1
        )
        want = model.generate(prompt, SamplingParams(max_tokens=8, logprobs=1, prompt_logprobs=1))
        text = (
            prompt
            if isinstance(prompt, str)
            else model.tokenizer.decode(prompt, skip_special_tokens=False)
        )
        assert got.choices[0].text == text + want.text
        reported = got.choices[0].logprobs
        assert reported is not None
        assert reported.token_logprobs is not None
        ids = [*want.prompt_token_ids, *want.token_ids]
        reports = [*(want.prompt_logprobs or ()), *(want.logprobs or ())]
        assert reported.token_logprobs[0] is None
        assert reported.token_logprobs[1:] == [
            r[t] for t, r in zip(ids[1:], reports[1:], strict=True) if r is not None
        ]
    texts = ["def f(x):", "def g(y):"]
    both = api.completions.create(
        model="tiny", prompt=texts, max_tokens=6, temperature=0, n=2, seed=1
    )
    alone = [model.generate(text, SamplingParams(max_tokens=6)).text for text in texts]
    assert [choice.text for choice in both.choices] == [alone[0], alone[0], alone[1], alone[1]]
    scored = api.completions.create(
        model="tiny", prompt="def f(x):", max_tokens=0, echo=True, logprobs=0
    )
    assert scored.choices[0].text == "def f(x):"
    assert scored.usage is not None
    assert scored.usage.completion_tokens == 0
    assert scored.choices[0].logprobs is not None
    assert len(scored.choices[0].logprobs.tokens or ()) == scored.usage.prompt_tokens


def test_chat_equals_llm_chat(api: openai.OpenAI, model: LLM) -> None:
    own = SamplingParams(max_tokens=24, temperature=0.7, seed=11, top_p=0.9, logprobs=3)
    want = model.chat(MESSAGES, own)
    options: Any = {
        "max_tokens": 24,
        "temperature": 0.7,
        "seed": 11,
        "top_p": 0.9,
        "logprobs": True,
        "top_logprobs": 3,
    }
    got = api.chat.completions.create(model="tiny", messages=MESSAGES, **options)
    choice = got.choices[0]
    assert choice.message.content == want.text
    assert choice.logprobs is not None
    assert [entry.logprob for entry in choice.logprobs.content or ()] == [
        report[token] for token, report in zip(want.token_ids, want.logprobs or (), strict=True)
    ]
    spelled = b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content or ())
    assert spelled.decode(errors="replace").startswith(want.text)
    assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content or ())

    extra: Any = {"leaps": True}
    usage: Any = {"include_usage": True}
    stream = api.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        stream=True,
        stream_options=usage,
        extra_body=extra,
        **options,
    )
    chunks = [*stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == want.text
    leaps = [
        leap
        for c in chunks
        if c.choices
        for leap in (c.choices[0].model_extra or {}).get("leaps", ())
    ]
    assert [leap["id"] for leap in leaps] == want.token_ids
    usage = chunks[-1].usage
    counted = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [getattr(usage, name) for name in counted] == [
        getattr(got.usage, name) for name in counted
    ]
    assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in chunks[:-1])
    # how many draft tokens are accepted depends on what the planner has measured by then
    figures: Any = usage.model_extra
    assert sum(leap["source"] is not None for leap in leaps) <= figures["accepted"]
    assert len({leap["step"] for leap in leaps}) == figures["steps"]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_each_chunk_has_the_usage_so_far(api: openai.OpenAI, path: str) -> None:
    """The load generators of vLLM and GuideLLM send ``continuous_usage_stats``."""
    prompt: Any = {"messages": MESSAGES} if path.startswith("chat") else {"prompt": [PROMPT, "x"]}
    options: Any = {
        "model": "tiny",
        "max_tokens": 16,
        "n": 2,
        "temperature": 0.9,
        "seed": 3,
        "stream": True,
        **prompt,
    }
    usage: Any = {"include_usage": True, "continuous_usage_stats": True}
    create: Any = api.chat.completions.create if path.startswith("chat") else api.completions.create
    *chunks, last = create(stream_options=usage, **options)
    counts: dict[int, list[tuple[int, int]]] = {}
    for chunk in (chunk for chunk in chunks if chunk.usage is not None):
        assert chunk.usage.total_tokens == chunk.usage.prompt_tokens + chunk.usage.completion_tokens
        pair = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
        counts.setdefault(chunk.choices[0].index, []).append(pair)
    assert all(own == sorted(own) for own in counts.values())
    assert sum(own[-1][1] for own in counts.values()) == last.usage.completion_tokens
    assert sum(own[-1][0] for own in counts.values()) == 2 * last.usage.prompt_tokens


def test_responses_equal_llm_chat(api: openai.OpenAI, model: LLM) -> None:
    # the client reads only answers that are complete
    bias = dict.fromkeys(model.config.eos_ids, 8.0)
    own = SamplingParams(max_tokens=20, temperature=0.5, logprobs=0, logit_bias=bias)
    asked: Any = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Say hello, please."},
    ]
    options: Any = {
        "max_output_tokens": 20,
        "temperature": 0.5,
        "extra_body": {"seed": 5, "logit_bias": bias},
    }
    want = model.chat(asked, SamplingParams(**{**own.__dict__, "seed": 5}))
    got = api.responses.create(
        model="tiny", input="Say hello, please.", instructions="Be kind.", **options
    )
    assert got.output_text == want.text
    assert got.status == ("incomplete" if want.finish_reason == "length" else "completed")
    assert got.usage is not None
    assert got.usage.output_tokens == len(want.token_ids)
    with api.responses.stream(
        model="tiny", input="Say hello, please.", instructions="Be kind.", **options
    ) as stream:
        events = [*stream]
        final = stream.get_final_response()
    assert final.output_text == want.text
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert (
        "".join(event.delta for event in events if event.type == "response.output_text.delta")
        == want.text
    )


def test_moderations(api: openai.OpenAI) -> None:
    got = api.moderations.create(model="tiny", input=["Hello there.", "How do I steal a car?"])
    assert len(got.results) == 2
    for result in got.results:
        scores = result.category_scores.model_extra or {}
        assert set(scores) == {"illegal", "hateful", "unqualified_advice"}
        assert 0.0 < sum(scores.values()) < 1.0


def test_errors_raise_exceptions_of_the_client(api: openai.OpenAI, served: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        api.chat.completions.create(model="tiny", messages=MESSAGES, temperature=200)
    functions: Any = [{"name": "f"}]
    with pytest.raises(
        openai.BadRequestError, match=r"functions: expected no such field, found .*use tools"
    ):
        api.chat.completions.create(model="tiny", messages=MESSAGES, functions=functions)
    with (
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="another-key", max_retries=0) as other,
        pytest.raises(openai.AuthenticationError),
    ):
        other.models.list()


def test_errors_within_a_stream(
    api: openai.OpenAI, served: Running, fail: Callable[[LLM], None]
) -> None:
    fail(served.llm)
    whole = {"ignore_eos": True}  # a longer text than the steps before the error
    events = [
        *api.responses.create(
            model="tiny", input="Hi", max_output_tokens=50, stream=True, extra_body=whole
        )
    ]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    last: Any = events[-1]
    assert (last.type, last.code, last.param) == ("error", "internal_error", None)
    assert "SECRET" not in last.message
    fail(served.llm)
    with pytest.raises(openai.APIError, match="internal server error"):
        list(
            api.chat.completions.create(
                model="tiny", messages=MESSAGES, max_tokens=50, stream=True, extra_body=whole
            )
        )


@pytest.mark.parametrize("page", ["openai", "anthropic"])
def test_first_example_of_the_documentation_runs(
    model: LLM, capsys: pytest.CaptureFixture[str], page: str
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "serving" / f"{page}.md").read_text(
        encoding="utf-8"
    )
    example, *_ = re.findall(r"```python\n(from .*?)```", text, re.DOTALL)
    with running(model, name="smollm2", keys=()) as made:
        exec(compile(example.replace("http://127.0.0.1:8000", made.url), f"{page}.md", "exec"), {})
    assert capsys.readouterr().out.strip()
