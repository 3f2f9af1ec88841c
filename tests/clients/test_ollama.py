"""Ollama's client at its newest version: lists, chats, streams, calls, embeds and pulls."""

from pathlib import Path

import pytest

from clients.conftest import Greedy, Install, served
from clients.test_openai import MESSAGES
from fake_hub import fake_hub
from pronk.llm import LLM
from server.serving import KEY
from server.tool_models import TINY

pytestmark = pytest.mark.slow

FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def test_ollama(
    installed: Install,
    folder: Path,
    library: LLM,
    greedy: Greedy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment = installed("ollama")
    # Each client of the Hub would read the certificates of all authorities, for seconds.
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
    with fake_hub() as hub:
        hub.repos["o/tiny"] = {name: (TINY / name).read_bytes() for name in FILES}
        variables = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "hub")}
        options = ("--allow-pull", "--pull-key", KEY)
        with served(folder, *options, variables=variables) as url:
            found = environment.ask("ollama_client.py", url, KEY)
    text = greedy(MESSAGES, 12)
    assert found["chat"] == found["streamed"] == found["generated"] == text
    assert found["chunks"] > 3
    assert found["last"] == [True, 12]
    assert found["listed"] == found["loaded"] == ["tiny"]
    assert "tools" in found["capabilities"]
    assert all(name == "get_weather" for name, _ in found["calls"])
    assert found["embeddings"] == [library.config.hidden_size] * 2
    assert found["pulled"] == "success"
    assert found["statuses"][0] == "pulling manifest"
    assert found["statuses"][-1] == "success"
    assert found["listed after"] == ["tiny", "o/tiny"]
    assert found["of the pulled model"]
    assert found["refused"].startswith("o/absent: found neither such a folder")
