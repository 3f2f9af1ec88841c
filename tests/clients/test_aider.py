"""aider at its newest version edits a file.

The request forces the answer that a capable model would give, in aider's own formats of edits.
"""

import json
import re
from pathlib import Path

import pytest

from clients.conftest import CONTEXT, Install
from server.serving import KEY

pytestmark = pytest.mark.slow

BEFORE = "def greet():\n    return 'hello'\n"
AFTER = "def greet():\n    return 'goodbye'\n"
EDITS = {
    "whole": f"greet.py\n```\n{AFTER}```\n",
    "diff": f"greet.py\n```python\n<<<<<<< SEARCH\n{BEFORE}=======\n{AFTER}>>>>>>> REPLACE\n```\n",
}


@pytest.mark.parametrize("edit_format", EDITS)
@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_edit(installed: Install, url: str, tmp_path: Path, edit_format: str, stream: str) -> None:
    (tmp_path / "greet.py").write_text(BEFORE)
    forced = {"guided_regex": re.escape(EDITS[edit_format])}
    settings = [{"name": "openai/tiny", "extra_params": {"max_tokens": 200, "extra_body": forced}}]
    (tmp_path / "settings.yml").write_text(json.dumps(settings))
    limits = {"max_input_tokens": CONTEXT, "litellm_provider": "openai", "mode": "chat"}
    (tmp_path / "metadata.json").write_text(json.dumps({"openai/tiny": limits}))
    quiet = "no-git no-auto-lint no-check-update no-show-release-notes no-show-model-warnings"
    quiet += " no-analytics no-pretty yes-always"
    given = {
        "model": "openai/tiny",
        "openai-api-base": f"{url}/v1",
        "openai-api-key": KEY,
        "edit-format": edit_format,
        "map-tokens": "0",
        "model-settings-file": "settings.yml",
        "model-metadata-file": "metadata.json",
        "llm-history-file": "history.txt",
        "message": "Say goodbye.",
    }
    options = [f"--{name}" for name in quiet.split()]
    options += [word for name, value in given.items() for word in (f"--{name}", value)]
    output = installed("aider-chat").run("aider", *options, stream, "greet.py")
    assert (tmp_path / "greet.py").read_text() == AFTER, output
    assert "Applied edit to greet.py" in output
    history = (tmp_path / "history.txt").read_text()
    assert "USER Say goodbye." in history
    assert "ASSISTANT greet.py" in history
