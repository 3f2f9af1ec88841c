"""Claude Code at its newest version asks a question; the prompt of its second request is cached."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from clients.environments import OFFLINE, SECONDS
from server.serving import KEY

pytestmark = pytest.mark.slow

PACKAGE = "@anthropic-ai/claude-code"
END = 0  # id of a token that ends the texts of pronk-tiny
# Four tokens, and no call: the model of the test writes texts without an end.
EXTRA = {"min_tokens": 4, "logit_bias": {str(END): 100}, "tool_choice": {"type": "none"}}


@pytest.fixture
def claude(pytestconfig: pytest.Config) -> Path:
    """Return the command of the newest version; skip the test if npm cannot install it."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("expected npm, found none")
    assert pytestconfig.cache is not None
    folder = pytestconfig.cache.mkdir("clients") / "claude-code"
    install = [npm, "install", "--prefix", str(folder), PACKAGE]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"expected {PACKAGE} from the package index, found an error of npm")
    return folder / "node_modules" / ".bin" / "claude"


def test_print_mode(claude: Path, long_url: str, tmp_path: Path) -> None:
    variables = {
        **OFFLINE,
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "ANTHROPIC_BASE_URL": long_url,
        "ANTHROPIC_API_KEY": KEY,
        "ANTHROPIC_MODEL": "tiny",
        "ANTHROPIC_SMALL_FAST_MODEL": "tiny",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_EXTRA_BODY": json.dumps(EXTRA),
    }
    done = subprocess.run(
        [str(claude), "-p", "Say hello.", "--output-format", "json"],
        env=variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["is_error"] is False
    assert result["stop_reason"] == "end_turn"
    assert result["usage"]["output_tokens"] > 0
