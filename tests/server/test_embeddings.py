"""Embeddings over HTTP, with OpenAI's client: equal to ``LLM.embed``, beside streams, in batch
files.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest

from pronk.async_llm import AsyncLLM
from pronk.llm import LLM
from pronk.server.batch import BatchLine, answer_line
from pronk.server.service import Service
from pronk.server.settings import RequestLimits, ServerSettings
from server.clients import openai
from server.serving import KEY, Running, running
from waiting import HUNG, ShiftedClock

TEXTS = ["def add(a, b):", "The quick brown fox jumps over the lazy dog. " * 20, "x"]


@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_client_of_openai(served: Running, model: LLM, encoding: Any) -> None:
    """Without ``encoding_format`` the client asks for base64, and decodes the numbers itself."""
    options = {} if encoding is None else {"encoding_format": encoding}
    ids = [model.tokenizer.encode(text) for text in TEXTS]
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0) as api:
        inputs: list[Any] = [TEXTS, ids, TEXTS[0], ids[0]]
        for texts in inputs:
            single = texts in (TEXTS[0], ids[0])
            found = api.embeddings.create(model="tiny", input=texts, user="me", **options)
            want = model.embed([texts] if single else texts)
            vectors: list[Any] = [each.embedding for each in found.data]
            if encoding == "base64":
                vectors = [np.frombuffer(base64.b64decode(text), "<f4") for text in vectors]
            assert np.array(vectors, np.float32).tobytes() == want.tobytes()
            assert [each.index for each in found.data] == [*range(len(want))]
            assert (found.model, found.object, found.data[0].object) == (
                "tiny",
                "list",
                "embedding",
            )
            num_tokens = sum(map(len, ids[:1] if single else ids))
            assert (found.usage.prompt_tokens, found.usage.total_tokens) == (num_tokens, num_tokens)
        extra = {"pooling": "last", "normalize": False}
        found = api.embeddings.create(
            model="tiny", input=TEXTS, dimensions=12, extra_body=extra, **options
        )
        want = model.embed(TEXTS, pooling="last", dimensions=12, normalize=False)
        assert len(found.data) == len(TEXTS)
        if encoding != "base64":
            assert (
                np.array([each.embedding for each in found.data], np.float32).tobytes()
                == want.tobytes()
            )
        with pytest.raises(
            openai.BadRequestError, match="dimensions: expected at most 320, found 321"
        ):
            api.embeddings.create(model="tiny", input="x", dimensions=321)
        with pytest.raises(openai.NotFoundError, match="expected 'tiny'"):
            api.embeddings.create(model="other", input="x")
        with pytest.raises(openai.AuthenticationError):
            api.with_options(api_key="another-key").embeddings.create(model="tiny", input="x")


def test_streams_go_on(served: Running, model: LLM) -> None:
    """While 300 texts are embedded in groups, a stream continues, and has the text that it has
    alone.
    """
    texts = [f"text number {number}" for number in range(300)]
    want = model.embed(texts)
    body = {
        "model": "tiny",
        "prompt": "def f(x):",
        "max_tokens": 200,
        "temperature": 0,
        "ignore_eos": True,
    }

    async def main() -> None:
        async with httpx.AsyncClient(
            base_url=served.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=HUNG
        ) as http:
            alone = (await http.post("/v1/completions", json=body)).json()["choices"][0]["text"]
            pieces = list[str]()

            async def stream() -> None:
                async with http.stream(
                    "POST", "/v1/completions", json=body | {"stream": True}
                ) as chunks:
                    async for line in chunks.aiter_lines():
                        if line.startswith("data: {"):
                            pieces.append(json.loads(line[6:])["choices"][0]["text"])

            async def embed() -> Any:
                reply = await http.post("/v1/embeddings", json={"input": texts})
                return reply.json()

            _, found = await asyncio.gather(stream(), embed())
            assert "".join(pieces) == alone
            vectors = np.array([each["embedding"] for each in found["data"]], np.float32)
            assert vectors.tobytes() == want.tobytes()

    asyncio.run(main())
    assert served.drained
    text = httpx.get(f"{served.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
    assert 'finished_reason="embedding"' in text


def test_limits_of_requests_apply(model: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of one request are embedded in groups of at most the limits, and the time limit is
    that of all of them.
    """
    with (
        running(model, limits=RequestLimits(requests=3, prompts=2)) as made,
        made.client() as client,
    ):
        reply = client.post("/v1/embeddings", json={"input": ["a"] * 9})
        assert reply.status_code == 200, reply.text
        assert len(reply.json()["data"]) == 9
    clock = ShiftedClock()
    run = AsyncLLM._run

    async def run_slowly(*given: Any) -> AsyncIterator[Any]:
        async for step in run(*given):
            yield step
        clock.shift += HUNG

    monkeypatch.setattr(AsyncLLM, "_run", run_slowly)
    monkeypatch.setattr(model.engine.scheduler, "clock", clock)
    for module in ("pronk.server.service", "pronk.async_llm"):
        monkeypatch.setattr(f"{module}.perf_counter", clock)
    for num_texts, expected in ((6, 200), (9, 408)):
        clock.shift = 0.0
        with (
            running(model, limits=RequestLimits(requests=3, seconds=1.9 * HUNG)) as made,
            made.client() as client,
        ):
            assert (
                client.post("/v1/embeddings", json={"input": ["a"] * num_texts}).status_code
                == expected
            )


def test_batch_files(model: LLM) -> None:
    async def main() -> Any:
        async with AsyncLLM(model) as engine:
            service = Service(engine, ServerSettings(name="tiny"))
            return await answer_line(
                service, BatchLine("a", "/v1/embeddings", {"input": TEXTS, "dimensions": 5})
            )

    status, body = asyncio.run(main())
    assert status == 200
    vectors = np.array([each["embedding"] for each in body["data"]], np.float32)
    assert vectors.tobytes() == model.embed(TEXTS, dimensions=5).tobytes()
