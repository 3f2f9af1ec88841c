"""Anthropic's client at its newest version."""

import jsonschema
import pytest

from clients.conftest import Greedy, Install
from clients.test_openai import CITY, MESSAGES
from pronk.llm import LLM
from server.serving import KEY

pytestmark = pytest.mark.slow


def test_anthropic(installed: Install, url: str, library: LLM, greedy: Greedy) -> None:
    found = installed("anthropic").ask("anthropic_client.py", url, KEY)
    assert found["text"] == found["streamed"] == greedy(MESSAGES, 12)
    assert (found["events"][0], found["events"][-1]) == ("message_start", "message_stop")
    assert found["events"].count("text") > 1
    prompt = len(library.chat_ids(MESSAGES))
    usage = found["usage"]
    assert usage["input_tokens"] + (usage["cache_read_input_tokens"] or 0) == prompt
    assert usage["output_tokens"] == 12
    assert found["counted"] == prompt
    name, arguments = found["call"]
    assert (name, found["stop"]) == ("weather", "tool_use")
    jsonschema.validate(arguments, CITY)
    assert found["counted after call"] == found["after call"] > prompt
