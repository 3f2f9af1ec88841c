"""``/v1/rerank``: the forms of Jina, Cohere and others; equal to ``LLM.score``."""

import asyncio
from typing import Any

import httpx
import pytest

from pronk.async_llm import AsyncLLM
from pronk.llm import LLM
from pronk.server.batch import BatchLine, answer_line
from pronk.server.service import Service
from pronk.server.settings import RequestLimits, ServerSettings
from server.serving import running

QUERY = "adding numbers"
TEXTS = ["def add(a, b):", "The quick brown fox. " * 20, "x", "x"]


def ranked(model: LLM, texts: list[str], **options: Any) -> list[tuple[int, float]]:
    scores = model.score(QUERY, texts, **options)
    return sorted(enumerate(scores), key=lambda pair: (-pair[1], pair[0]))


def results(reply: httpx.Response) -> list[tuple[int, float]]:
    assert reply.status_code == 200, reply.text
    return [(each["index"], each["relevance_score"]) for each in reply.json()["results"]]


def test_forms_of_several_apis(client: httpx.Client, model: LLM) -> None:
    want = ranked(model, TEXTS)
    assert len({score for _, score in want}) == 3, "equal texts have equal scores, others do not"
    body = {"model": "tiny", "query": QUERY, "documents": TEXTS}
    for path in ("/v1/rerank", "/rerank", "/v2/rerank", "/reranking"):
        reply = client.post(path, json=body)
        assert results(reply) == want
        assert all("document" not in each for each in reply.json()["results"])
    prompts = [model.request_factory.encode_relevance(QUERY, text) for text in TEXTS]
    num_tokens = sum(map(len, prompts))
    assert reply.json()["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    objects = [{"text": text} for text in TEXTS]
    more = {"documents": objects, "top_n": 2, "return_documents": True}
    reply = client.post("/v1/rerank", json=body | more)
    assert results(reply) == want[:2]
    shown = [each["document"]["text"] for each in reply.json()["results"]]
    assert shown == [TEXTS[index] for index, _ in want[:2]]
    other = {"query": QUERY, "texts": TEXTS, "top_k": 1, "instruct": "Find code."}
    assert (
        results(client.post("/rerank", json=other))
        == ranked(model, TEXTS, instruction="Find code.")[:1]
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"documents": []}, "documents: expected 1..2048 documents, found 0"),
        ({"documents": None}, "documents: expected a value, found null; give one"),
        ({"documents": [1]}, "documents.0"),
        ({"top_n": 0}, "top_n: "),
        ({"max_tokens_per_doc": 10}, "max_tokens_per_doc: expected -1, found 10"),
        ({"documents": ["a " * 5000]}, "prompt: expected at most"),
        ({"model": "other"}, "model: expected 'tiny', found 'other'"),
    ],
)
def test_what_is_refused(client: httpx.Client, fields: dict[str, Any], message: str) -> None:
    body = {"query": QUERY, "documents": TEXTS}
    error = client.post("/v1/rerank", json=body | fields).json()["error"]["message"]
    assert error.startswith(message)
    assert "\n" not in error


def test_groups_and_batch_files(model: LLM) -> None:
    """More documents than fit into the limits of one group, and one request of a batch file."""
    want = ranked(model, TEXTS)
    body = {"query": QUERY, "documents": TEXTS}
    limits = RequestLimits(requests=2, prompts=2)
    with running(model, limits=limits) as made, made.client() as client:
        assert results(client.post("/v1/rerank", json=body)) == want

    async def main() -> Any:
        async with AsyncLLM(model) as engine:
            service = Service(engine, ServerSettings(name="tiny"))
            return await answer_line(service, BatchLine("a", "/v1/rerank", body))

    status, reply = asyncio.run(main())
    assert status == 200
    assert [each["index"] for each in reply["results"]] == [index for index, _ in want]
