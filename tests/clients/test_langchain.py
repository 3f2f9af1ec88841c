"""LangChain at its newest version, on both of OpenAI's routes for conversations."""

import pytest

from clients.conftest import Greedy, Install
from clients.test_openai import MESSAGES
from pronk.llm import LLM
from pronk.sampling.params import SamplingParams
from server.serving import KEY

pytestmark = pytest.mark.slow


def test_langchain(installed: Install, url: str, library: LLM, greedy: Greedy) -> None:
    found = installed("langchain-openai").ask("langchain_client.py", url, KEY)
    text = greedy(MESSAGES, 12)
    for name in ("chat", "responses"):
        facts = found[name]
        assert facts["text"] == facts["streamed"] == text, name
        assert facts["batch"] == [text, text], name
        assert facts["chunks"] > 3, name
        assert facts["prompt tokens"] == len(library.chat_ids(MESSAGES)), name
        tool, arguments = facts["call"]
        assert tool == "weather", name
        assert arguments["city"] in ("Paris", "Oslo"), name
        assert facts["result"] == f"4 degrees in {arguments['city']}", name
        assert facts["after call"] == 12, name
        assert {facts["function"], facts["schema"]} <= {"Paris", "Oslo"}, name
    continued = library.generate("def f(x):", SamplingParams(max_tokens=12, temperature=0.0)).text
    assert found["completion"] == continued
    assert found["embedding"] == library.config.hidden_size
