"""promptfoo at its newest version compares the answers of two routes with the library's."""

import json
from pathlib import Path
from typing import Any

import pytest

from clients.conftest import Greedy, InstallProgram
from server.serving import KEY

pytestmark = pytest.mark.slow

MESSAGES = [{"role": "user", "content": "Say hello, please."}]


def test_eval(installed_program: InstallProgram, url: str, greedy: Greedy, tmp_path: Path) -> None:
    promptfoo = installed_program("promptfoo", "promptfoo")
    server = {"apiBaseUrl": f"{url}/v1", "apiKey": KEY, "temperature": 0}
    routes = {
        "openai:chat:tiny": {**server, "max_tokens": 12},
        "openai:responses:tiny": {**server, "max_output_tokens": 12},
    }
    config: dict[str, Any] = {
        "prompts": ["Say {{word}}, please."],
        "providers": [{"id": name, "config": options} for name, options in routes.items()],
        "tests": [
            {
                "vars": {"word": "hello"},
                "assert": [{"type": "equals", "value": greedy(MESSAGES, 12)}],
            }
        ],
    }
    (tmp_path / "promptfooconfig.json").write_text(json.dumps(config), encoding="utf-8")
    variables = {
        "PROMPTFOO_CONFIG_DIR": str(tmp_path / "state"),
        "PROMPTFOO_DISABLE_TELEMETRY": "1",
        "PROMPTFOO_DISABLE_UPDATE": "1",
        "PROMPTFOO_DISABLE_REMOTE_GENERATION": "1",
    }
    arguments = ("eval", "-c", "promptfooconfig.json", "-o", "out.json", "--no-cache")
    promptfoo.run(*arguments, variables=variables)
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["results"]["results"]
    assert {each["provider"]["id"] for each in found} == {*routes}
    assert all(each["success"] for each in found), found
