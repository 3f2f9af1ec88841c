"""``llm`` at its newest version: questions, streams, schemas and tools on both routes."""

import json
from pathlib import Path

import jsonschema
import pytest

from clients.conftest import Greedy, Install
from server.serving import KEY

pytestmark = pytest.mark.slow

QUESTION = "Say hello, please."
MESSAGES = [{"role": "user", "content": QUESTION}]
SYSTEM = {"role": "system", "content": "Be brief."}
GREEDY = ["-o", "temperature", "0", "-o", "max_tokens", "12"]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}},
    "required": ["city"],
}
EXTRA = """
- model_id: tiny
  model_name: tiny
  api_base: {url}/v1
  api_key_name: pronk
  supports_schema: true
  supports_tools: true
"""


@pytest.mark.parametrize("route", [[], ["--responses"]])
@pytest.mark.parametrize("stream", [[], ["--no-stream"]])
def test_endpoint(
    installed: Install, url: str, greedy: Greedy, route: list[str], stream: list[str]
) -> None:
    llm = installed("llm")
    ask = ["openai", "endpoint", f"{url}/v1", "--key", KEY, *route]
    assert llm.run("llm", *ask, "--models").split() == ["tiny"]
    asked = [*ask, "-m", "tiny", *GREEDY, *stream]
    assert llm.run("llm", *asked, QUESTION) == greedy(MESSAGES, 12) + "\n"
    answer = llm.run("llm", *asked, "-s", SYSTEM["content"], QUESTION)
    assert answer == greedy([SYSTEM, *MESSAGES], 12) + "\n"
    forced = ["-o", "max_tokens", "60", "--schema", json.dumps(SCHEMA)]
    form = llm.run("llm", *asked, *forced, QUESTION)
    jsonschema.validate(json.loads(form), SCHEMA)
    tool = 'def weather(city: str) -> str:\n    "Weather of a city."\n    return "4 degrees"\n'
    assert llm.run("llm", *asked, "--functions", tool, QUESTION)


def test_extra_model(installed: Install, url: str, greedy: Greedy, tmp_path: Path) -> None:
    llm = installed("llm")
    user = tmp_path / "user"
    user.mkdir()
    (user / "extra-openai-models.yaml").write_text(EXTRA.format(url=url))
    variables = {"LLM_USER_PATH": str(user)}
    llm.run("llm", "keys", "set", "pronk", "--value", KEY, variables=variables)
    first = greedy(MESSAGES, 12)
    assert llm.run("llm", "-m", "tiny", *GREEDY, QUESTION, variables=variables) == first + "\n"
    again = llm.run("llm", "-m", "tiny", *GREEDY, "--continue", "And now?", variables=variables)
    talk = [
        *MESSAGES,
        {"role": "assistant", "content": first},
        {"role": "user", "content": "And now?"},
    ]
    assert again == greedy(talk, 12) + "\n"
    (logged, _) = json.loads(llm.run("llm", "logs", "--json", variables=variables))
    assert (logged["response"], logged["output_tokens"]) == (first, 12)
    typed = f"{QUESTION}\nquit\n"
    chat = llm.run("llm", "chat", "-m", "tiny", *GREEDY, text=typed, variables=variables)
    assert first in chat
