"""Codex at its newest version answers a message, and goes on with the conversation."""

import json
from pathlib import Path

import pytest

from clients.conftest import LONG_CONTEXT, InstallProgram
from server.serving import KEY

pytestmark = pytest.mark.slow

CONFIG = """
model = "tiny"
model_provider = "pronk"
model_context_window = {context}

[model_providers.pronk]
name = "pronk"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "PRONK_API_KEY"
"""
ASK = ("exec", "--json", "--skip-git-repo-check")


def test_two_turns(installed_program: InstallProgram, brief_url: str, tmp_path: Path) -> None:
    codex = installed_program("@openai/codex", "codex")
    home = tmp_path / "codex"
    home.mkdir()
    config = CONFIG.format(context=LONG_CONTEXT, url=brief_url)
    (home / "config.toml").write_text(config, encoding="utf-8")
    variables = {"CODEX_HOME": str(home), "PRONK_API_KEY": KEY}
    used = list[dict[str, int]]()
    for arguments in (ASK, (*ASK, "resume", "--last")):
        output = codex.run(*arguments, "Say hello.", variables=variables)
        events = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        kinds = [event["type"] for event in events]
        assert "turn.failed" not in kinds, output
        assert kinds[-1] == "turn.completed", output
        used.append(events[-1]["usage"])
    first, second = used
    assert first["output_tokens"] > 0
    assert second["input_tokens"] > first["input_tokens"]
    assert second["cached_input_tokens"] > first["input_tokens"] // 2
