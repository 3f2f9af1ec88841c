"""Sampling options that are recommended for a model: those of the library are the server's, too."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from checkpoint.hub.test_recommendations import MESSAGES, MODELS
from checkpoints import MakeCheckpoint
from pronk.async_llm import AsyncLLM
from pronk.llm import LLM
from pronk.sampling.defaults import sampling_values
from pronk.sampling.params import SamplingParams
from pronk.server.model_pool import ModelPool
from pronk.server.protocol.chat import ChatRequest
from pronk.server.protocol.completions import CompletionRequest
from pronk.server.service import Service
from pronk.server.settings import ServerSettings


@pytest.mark.parametrize("case", MODELS)
def test_the_server_has_the_defaults_of_the_library(
    checkpoint: MakeCheckpoint, tmp_path: Path, case: str
) -> None:
    make, options = MODELS[case]
    llm = LLM(make(checkpoint, tmp_path), threads=1, kv_memory="16MiB")
    want = SamplingParams(**options)  # type: ignore[arg-type]
    service = Service(AsyncLLM(llm), ServerSettings(name="tiny"))
    (described,) = ModelPool.of(service).models[0].describe()
    assert described["sampling"] == sampling_values(want)
    for body in ({"prompt": "x"}, {"messages": MESSAGES}):
        request_class = CompletionRequest if "prompt" in body else ChatRequest
        prepared = asyncio.run(service.prepare(request_class.model_validate(body)))
        assert sampling_values(prepared.inputs.params) == sampling_values(want)
        prepared = asyncio.run(
            service.prepare(request_class.model_validate({**body, "temperature": 0.9}))
        )
        warmer = replace(want, temperature=0.9)
        assert sampling_values(prepared.inputs.params) == sampling_values(warmer)
    service.close()
