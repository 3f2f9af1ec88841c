"""LlamaIndex at its newest version: chats, streams, calls of a tool, embeddings."""

import pytest

from clients.conftest import Greedy, Install
from clients.test_openai import MESSAGES
from pronk.llm import LLM
from pronk.sampling.params import SamplingParams
from server.serving import KEY

pytestmark = pytest.mark.slow


def test_llama_index(installed: Install, url: str, library: LLM, greedy: Greedy) -> None:
    environment = installed("llama-index-llms-openai-like")
    found = environment.ask("llama_index_client.py", url, KEY)
    text = greedy(MESSAGES, 12)
    assert found["chat"] == found["streamed"] == text
    assert found["chunks"] > 3
    tool, arguments = found["call"]
    assert tool == "weather"
    assert isinstance(arguments["city"], str)
    continued = library.generate("def f(x):", SamplingParams(max_tokens=12, temperature=0.0)).text
    assert found["completion"] == continued
