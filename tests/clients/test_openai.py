"""OpenAI's client at its newest version, on every route."""

import json

import jsonschema
import pytest

from clients.conftest import Greedy, Install
from pronk.llm import LLM
from pronk.sampling.params import SamplingParams
from server.serving import KEY

pytestmark = pytest.mark.slow
MESSAGES = [{"role": "user", "content": "Say hello, please."}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Oslo"]}}, "required": ["city"]}


def test_openai(installed: Install, url: str, library: LLM, greedy: Greedy) -> None:
    found = installed("openai").ask("openai_client.py", url, KEY)
    text = greedy(MESSAGES, 12)
    continued = library.generate("def f(x):", SamplingParams(max_tokens=12, temperature=0.0)).text
    assert found["models"] == ["tiny"]
    assert found["completion"] == continued
    for name in ("chat", "chat stream", "response", "response streamed"):
        assert found[name] == text, name
    assert found["usage"]["prompt_tokens"] == len(library.chat_ids(MESSAGES))
    assert found["usage"]["completion_tokens"] == 12
    assert found["stream usage"]["total_tokens"] == found["usage"]["total_tokens"]
    assert found["chunks"] > 3
    kinds = found["response stream"]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ("response.incomplete", "response.completed")
    for name, arguments in (found["call"], found["response call"]):
        assert name == "weather"
        jsonschema.validate(json.loads(arguments), CITY)
    assert found["after call"] > found["usage"]["prompt_tokens"]
    assert found["response after call"] in ("completed", "incomplete")
    if found["parsed reason"] == "stop":
        assert found["parsed"].keys() == {"name", "inhabitants"}
    assert found["embeddings"] == [library.config.hidden_size] * 2
