"""Misspelt keywords of the public classes and methods."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from typing import Any

import pytest

import pronk
from pronk import LLM, AsyncLLM, Guide, OptionError, SamplingParams
from pronk.drafting import REGISTRY


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("pronk-tiny", threads=1, drafter="autoregressive")


CLASSES = [LLM, AsyncLLM, SamplingParams, Guide, *REGISTRY.values()]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_misspelt_keyword_of_a_constructor_is_named_with_the_closest_one(cls: Any) -> None:
    names = [*inspect.signature(LLM if cls is AsyncLLM else cls).parameters]
    for name in names:
        wrong = f"{name}x"
        with pytest.raises(
            OptionError,
            match=f"^{wrong}: expected an option of {cls.__name__}, .*did you mean .*{name}",
        ):
            cls(**{wrong: 1})
    with pytest.raises(TypeError, match=r"^qqqq: expected an option of"):  # as Python itself raises
        cls(qqqq=1)


@pytest.mark.parametrize(
    ("cls", "args", "options", "message"),
    [
        (
            LLM,
            ("pronk-tiny",),
            {"model": "x"},
            "model: expected it once, found it by position and by name",
        ),
        (
            AsyncLLM,
            ("pronk-tiny",),
            {"model": "x"},
            "model: expected one model, found 'pronk-tiny' and 'x'; leave one",
        ),
        (
            AsyncLLM,
            ("pronk-tiny",),
            {"max_request": 1},
            "max_request: .* did you mean max_requests",
        ),
        (SamplingParams, (5,), {"max_tokens": 5}, "max_tokens: expected it once"),
    ],
)
def test_a_keyword_given_twice_is_named(
    cls: Any, args: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=f"^{message}"):
        cls(*args, **options)


METHODS = ("generate", "stream", "chat", "stream_chat", "choose", "embed")


@pytest.mark.parametrize("method", METHODS)
def test_methods_name_misspelt_keywords(llm: LLM, method: str) -> None:
    with pytest.raises(
        OptionError, match=rf"^adaptor: expected an option of LLM\.{method}, .*did you mean adapter"
    ):
        getattr(llm, method)("x", adaptor=None)


@pytest.mark.parametrize("method", ["generate", "stream", "chat", "stream_chat"])
@pytest.mark.parametrize("wrong", [{"max_tokens": 3}, {}, 3, "x", [3], ()], ids=repr)
def test_params_of_another_type_are_named(llm: LLM, method: str, wrong: Any) -> None:
    prompt: Any = [{"role": "user", "content": "x"}] if "chat" in method else "x"
    with pytest.raises(OptionError, match=r"^params: expected "):
        getattr(llm, method)(prompt, wrong)
    with pytest.raises(
        OptionError, match=r"^max_tokens: .*options of SamplingParams are given as params="
    ):
        getattr(llm, method)(prompt, max_tokens=3)

    async def run() -> None:
        made = AsyncLLM(llm)
        try:
            answer = getattr(made, method)(prompt, wrong)
            async for _ in answer if "stream" in method else _once(answer):
                pass
        finally:
            await made.close()

    with pytest.raises(OptionError, match=r"^params: expected "):
        asyncio.run(run())


async def _once(answer: Any) -> Any:
    yield await answer


def test_the_check_changes_nothing_else() -> None:
    assert inspect.iscoroutinefunction(AsyncLLM.generate)
    assert "drafter" in inspect.signature(LLM).parameters
    assert dataclasses.replace(SamplingParams(max_tokens=3), seed=1) == SamplingParams(
        max_tokens=3, seed=1
    )
    assert pronk.Suffix() == pronk.Suffix()
