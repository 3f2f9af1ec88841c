"""LiteLLM at its newest version, with the drivers that users choose for a server of their own."""

import json

import jsonschema
import pytest

from clients.conftest import Greedy, Install
from clients.test_openai import CITY, MESSAGES
from pronk.llm import LLM
from server.serving import KEY

pytestmark = pytest.mark.slow


def test_litellm(installed: Install, url: str, library: LLM, greedy: Greedy) -> None:
    found = installed("litellm").ask("litellm_client.py", url, KEY)
    text = greedy(MESSAGES, 16)  # LiteLLM asks for at least 16 tokens on /v1/responses
    for name in ("openai", "hosted_vllm", "lm_studio", "llamafile", "anthropic"):
        facts = found[name]
        assert facts["text"] == facts["streamed"] == text, name
        assert facts["chunks"] > 3, name
        assert facts["prompt tokens"] == len(library.chat_ids(MESSAGES)), name
        tool, arguments = facts["call"]
        assert (tool, facts["reason"]) == ("weather", "tool_calls"), name
        jsonschema.validate(json.loads(arguments), CITY)
        assert facts["after call"] == 5, name
        jsonschema.validate(json.loads(facts["formed"]), CITY)
    assert found["response"] == text
    assert found["messages"] == [text] * 3
    assert found["embedding"] == library.config.hidden_size
