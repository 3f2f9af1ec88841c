"""A server that is started again finds the prompts of the server before on disk."""

from pathlib import Path
from typing import Any

import pytest

from pronk.cache.prompt_cache import PromptCache
from pronk.llm import LLM
from server.serving import KEY, running
from server.test_metrics import scraped

PROMPT = "def add(a, b):\n    return a + b\n\n\n" * 12


def test_a_restart_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptCache, "_pays", lambda *_: True)
    answers = list[dict[str, Any]]()
    found = list[dict[tuple[str, ...], float]]()
    for salt in (None, None, "another"):
        llm = LLM(prompt_cache=tmp_path, max_batch=8, threads=1)
        with running(llm) as server, server.client() as client:
            body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "cache_salt": salt}
            answers.append(client.post("/v1/completions", json=body).json())
            assert llm.engine.cache.prompt_cache is not None
            llm.engine.cache.prompt_cache.store.flush()
            found.append(scraped(client))
        llm.close()
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached[0] == cached[2] == 0
    assert cached[1] > 100
    assert cached[1] % 32 == 0
    hits = [
        [each["pronk:prompt_cache_hits",], each["pronk:prompt_cache_blocks_read",]]
        for each in found
    ]
    assert hits == [[0, 0], [1, cached[1] // 32], [0, 0]]
    assert [each["pronk:prompt_cache_bytes_read",] > 0 for each in found] == [False, True, False]
    written = [each["pronk:prompt_cache_blocks_written",] for each in found]
    assert written[0] == written[2] >= cached[1] // 32
    assert written[1] == 0
    assert found[0]["pronk:prompt_cache_bytes_written",] > 0
    assert [each["pronk:prompt_cache_blocks_evicted",] for each in found] == [0, 0, 0]
    assert KEY.encode() not in (tmp_path / "blocks.sqlite3").read_bytes()
    assert b"return a + b" not in (tmp_path / "blocks.sqlite3").read_bytes()
