"""Claude Code at its newest version asks a question; the prompt of its second request is cached."""

import json

import pytest

from clients.conftest import InstallProgram
from server.serving import KEY

pytestmark = pytest.mark.slow

END = 0  # id of a token that ends the texts of pronk-tiny
# Four tokens, and no call: the model of the test writes texts without an end.
EXTRA = {"min_tokens": 4, "logit_bias": {str(END): 100}, "tool_choice": {"type": "none"}}


def test_print_mode(installed_program: InstallProgram, long_url: str) -> None:
    variables = {
        "ANTHROPIC_BASE_URL": long_url,
        "ANTHROPIC_API_KEY": KEY,
        "ANTHROPIC_MODEL": "tiny",
        "ANTHROPIC_SMALL_FAST_MODEL": "tiny",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_EXTRA_BODY": json.dumps(EXTRA),
    }
    claude = installed_program("@anthropic-ai/claude-code", "claude")
    output = claude.run("-p", "Say hello.", "--output-format", "json", variables=variables)
    result = json.loads(output)
    assert result["is_error"] is False
    assert result["stop_reason"] == "end_turn"
    assert result["usage"]["output_tokens"] > 0
