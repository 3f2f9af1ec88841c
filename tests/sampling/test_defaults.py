"""Sampling options that a model's files recommend."""

import json
from pathlib import Path
from typing import Any

import pytest

from checkpoints import MakeCheckpoint
from pronk.engine.request_factory import RequestFactory
from pronk.llm import LLM
from pronk.models.loader import read_config
from pronk.sampling.defaults import recommended_params, recommended_sampling
from pronk.sampling.params import SamplingParams


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {}),
        ({"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05, "x": 1},
         {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}),
        ({"top_k": -1, "temperature": None}, {"top_k": 0}),
        ({"do_sample": True, "top_p": 0.9}, {"temperature": 1.0, "top_p": 0.9}),
        ({"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1},
         {"temperature": 0.0, "repetition_penalty": 1.1}),
    ],
)  # fmt: skip
def test_recommendations(values: dict[str, Any], expected: dict[str, float]) -> None:
    assert recommended_sampling(values, "f") == expected


@pytest.mark.parametrize("values", [{"top_p": 0}, {"temperature": "hot"}, {"top_k": 50.5}])
def test_absurd_values_are_ignored_with_a_warning(values: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match=r"^f: its sampling options are ignored: "):
        assert recommended_sampling(values | {"min_p": 0.1}, "f") == {}


def test_conversations_use_them(
    checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in checkpoint("llama").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True, "top_k": 7}))
    config = read_config(tmp_path)
    assert recommended_params(config) == SamplingParams(temperature=1.0, top_k=7)
    assert config == read_config(checkpoint("llama"))  # a recommendation makes no other model
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "Hello"}))
    llm = LLM(tmp_path)
    used = list[SamplingParams]()
    create = RequestFactory.create_batch

    def record(self: RequestFactory, prompts: Any, params: Any, *rest: Any) -> Any:
        used.extend(params)
        return create(self, prompts, [SamplingParams(max_tokens=1)], *rest)

    monkeypatch.setattr(RequestFactory, "create_batch", record)
    for ask in (llm.chat, llm.stream_chat):
        ask([{"role": "user", "content": "x"}])
        ask([{"role": "user", "content": "x"}], SamplingParams(max_tokens=3))
    assert used == [SamplingParams(temperature=1.0, top_k=7), SamplingParams(max_tokens=3)] * 2
