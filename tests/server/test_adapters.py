"""Adapters in the server: a name for ``model``, beside requests of the model alone."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from adapters import write_adapter
from pronk.async_llm import AsyncLLM
from pronk.base.errors import OptionError
from pronk.checkpoint.hub.clone_models import TINY_MODEL, clone_model
from pronk.llm import LLM
from pronk.sampling.params import SamplingParams
from pronk.server.service import Service
from pronk.server.settings import ServerSettings
from server.clients import openai
from server.serving import KEY, Running, running

PROMPT = "def add(a, b):\n    return a + b\n\ndef add(a, b):\n    return a +"
NAMES = (None, "sql", "Chat", "tiny", "SQL")
PARAMS = SamplingParams(max_tokens=16, logprobs=2)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("adapters")
    model = clone_model(TINY_MODEL)
    assert model is not None
    targets = {"sql": ("q_proj", "v_proj"), "Chat": ("down_proj", "up_proj")}
    adapters = {
        name: write_adapter(folder / name, model, targets=each, rank=8)
        for name, each in targets.items()
    }
    llm = LLM(
        adapters=adapters, prefix_cache=True, max_batch=8, threads=1, budget="all", drafter="suffix"
    )
    with running(llm) as made:
        yield made


@pytest.fixture
def api(served: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


def test_models_lists_the_adapters(api: openai.OpenAI) -> None:
    listed = [(model.id, (model.model_extra or {})["parent"]) for model in api.models.list()]
    assert listed == [("tiny", None), ("sql", "tiny"), ("Chat", "tiny")]
    assert api.models.retrieve("chat").id == "Chat"
    with pytest.raises(
        openai.NotFoundError, match="expected 'tiny' or 'sql' or 'Chat', found 'huge'"
    ):
        api.completions.create(model="huge", prompt=PROMPT)


def test_requests_of_several_adapters_at_once(api: openai.OpenAI, served: Running) -> None:
    """Answers equal those of LLM, also from the prefix cache, and texts differ among adapters."""
    adapters = (None, "sql", "Chat", None, "sql")
    want = [
        served.llm.generate(PROMPT, PARAMS, drafter="autoregressive", adapter=adapter)
        for adapter in adapters
    ]

    def ask(name: str | None) -> tuple[str, list[float], str, int]:
        extra = {} if name is None else {"model": name}
        given = {"model": "tiny", "prompt": PROMPT, "max_tokens": 16, "logprobs": 2} | extra
        got = api.completions.create(**given)  # type: ignore[call-overload]
        reported = got.choices[0].logprobs.token_logprobs
        return got.choices[0].text, reported, got.model, (got.usage.model_extra or {})["drafted"]

    for _ in range(2):
        with ThreadPoolExecutor(5) as pool:
            answers = [*pool.map(ask, NAMES)]
        assert [answer[0] for answer in answers] == [each.text for each in want]
        assert [answer[2] for answer in answers] == ["tiny", "sql", "Chat", "tiny", "sql"]
        for answer, one in zip(answers, want, strict=True):
            tokens = zip(one.token_ids, one.logprobs or (), strict=True)
            assert answer[1] == [report[token] for token, report in tokens]
    assert len({each.text for each in want}) == 3
    assert any(answer[3] for answer in answers)
    assert served.drained


def test_every_route_takes_the_name(api: openai.OpenAI, served: Running) -> None:
    messages = [{"role": "user", "content": "Say hello, please."}]
    prompt = served.llm.chat_ids(messages)
    params = SamplingParams(max_tokens=12)
    want = {name: served.llm.generate(prompt, params, adapter=name).text for name in (None, "sql")}
    assert want[None] != want["sql"]
    for name in ("tiny", "sql"):
        own = want[None if name == "tiny" else name]
        options = {"model": name, "max_tokens": 12, "temperature": 0.0, "top_p": 1.0}
        chat = api.chat.completions.create(messages=messages, **options)  # type: ignore[call-overload]
        assert (chat.choices[0].message.content, chat.model) == (own, name)
        stream = api.chat.completions.create(messages=messages, stream=True, **options)  # type: ignore[call-overload]
        assert (
            "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
            == own
        )
    with served.client() as client:
        scores = [
            client.post("/v1/moderations", json={"input": "some text", "model": name}).json()[
                "results"
            ][0]
            for name in ("tiny", "sql")
        ]
        assert scores[0]["category_scores"] != scores[1]["category_scores"]
        assert client.post("/tokenize", json={"prompt": "a", "model": "sql"}).status_code == 200
    for name in ("tiny", "sql"):
        own = served.llm.embed(["some text"], adapter=None if name == "tiny" else name)
        reply = api.embeddings.create(model=name, input="some text")
        assert (reply.model, reply.data[0].embedding) == (name, [float(value) for value in own[0]])
    assert not np.array_equal(
        served.llm.embed(["some text"]), served.llm.embed(["some text"], adapter="sql")
    )


def test_drafters_of_also_keep_texts_of_adapters_apart(served: Running, tmp_path: Path) -> None:
    """Also a drafter with a file, which requests may select because the server allows it."""
    spec = f"suffix(store='{tmp_path / 'store'}')"
    service = Service(
        AsyncLLM(served.llm), ServerSettings(name="tiny", allowed_drafters=(spec, "prompt_lookup"))
    )
    found = [
        served.llm.get_proposer(service._select_drafter(spec), name)
        for name in (None, "sql", "Chat")
    ]
    assert len({*map(id, found)}) == 3
    assert found[0] is served.llm.get_proposer(spec)
    shared = [
        served.llm.get_proposer(service._select_drafter("prompt_lookup"), name)
        for name in (None, "sql")
    ]
    assert shared[0] is shared[1]


def test_names_must_differ(served: Running) -> None:
    with pytest.raises(
        OptionError, match="expected names other than the model's and each other's, found SQL, sql"
    ):
        Service(AsyncLLM(served.llm), ServerSettings(name="SQL"))
