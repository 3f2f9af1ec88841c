"""``/api/pull``: downloads from a fake Hub, rights of keys, clients that leave, errors."""

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import constants

from fake_hub import FakeHub, hub_in_use
from pronk.base.errors import OptionError
from pronk.checkpoint.hub import download
from pronk.checkpoint.hub.cache import find_cached
from pronk.checkpoint.hub.names import HubModel
from pronk.server import pulls
from pronk.server.cli.serve import _pull_keys
from pronk.server.model_loader import ModelLoader
from pronk.server.model_pool import ModelPool, PooledModel
from pronk.server.names import AdapterNames
from pronk.server.pulls import Pulls, _Progress
from pronk.server.settings import ServerSettings
from server.serving import KEY, running_pool
from server.test_model_pool import OPTIONS
from server.tool_models import TINY
from waiting import HUNG, eventually

PULL_KEY = "a-key-that-may-pull"
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
SUCCESS = {"status": "success"}
QUESTION = {"messages": [{"role": "user", "content": "Count to three."}], "stream": False}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Serve a Hub with pronk-tiny as ``o/tiny``; the cache is empty."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    # A busy machine may need longer than these limits of time.
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", HUNG)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", HUNG)
    monkeypatch.setattr(download, "_ANSWER_SECONDS", HUNG)
    with hub_in_use() as made:
        made.repos["o/tiny"] = {name: (TINY / name).read_bytes() for name in FILES}
        yield made


@contextmanager
def pulling_server(
    keys: tuple[str, ...] = (), pull_keys: tuple[str, ...] = ()
) -> Iterator[tuple[ModelPool, httpx.Client]]:
    """Serve pronk-tiny as ``tiny``, with pulls; yield the pool and a client without a key."""
    settings = ServerSettings(name="", keys=(*keys, *pull_keys), pull_keys=pull_keys)

    def make_model(name: str, path: Path) -> PooledModel:
        loader = ModelLoader(path, OPTIONS, replace(settings, name=name))
        return PooledModel(AdapterNames(name, ()), loader)

    pool = ModelPool([make_model("tiny", TINY)], settings)
    pool.pulls = Pulls(pool, make_model)
    with (
        running_pool(pool) as (url, _, _),
        httpx.Client(base_url=url, timeout=HUNG) as client,
    ):
        yield pool, client


def lines(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in reply.text.splitlines()]


def names(client: httpx.Client) -> list[str]:
    return [each["name"] for each in client.get("/api/tags").json()["models"]]


def test_a_pulled_model_answers(hub: FakeHub) -> None:
    with pulling_server() as (_, client):
        reply = lines(client.post("/api/pull", json={"model": "o/tiny:latest"}))
        assert reply[0] == {"status": "pulling manifest"}
        assert reply[-1] == SUCCESS
        assert names(client) == ["tiny", "o/tiny"]
        greedy = {**QUESTION, "options": {"temperature": 0, "num_predict": 8}}
        answers = [
            client.post("/api/chat", json={"model": name, **greedy}).json()["message"]["content"]
            for name in names(client)
        ]
        assert len(answers[0]) > 5
        assert answers[0] == answers[1]
        whole = client.post("/api/pull", json={"name": "o/tiny", "stream": False})
        assert (whole.status_code, whole.json()) == (200, SUCCESS)
        assert names(client) == ["tiny", "o/tiny"]
    assert any("resolve" in path for _, path, _ in hub.requests)


def test_progress(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the file arrives, and is reported, before the other half is sent."""
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    hub.repos["o/file"] = {"m.gguf": os.urandom(50_000)}
    hub.held = threading.Event()
    with (
        pulling_server() as (_, client),
        client.stream("POST", "/api/pull", json={"model": "o/file"}) as reply,
    ):
        seen = list[dict[str, Any]]()
        for line in reply.iter_lines():
            seen.append(json.loads(line))
            if seen[-1].get("completed", 0) > 0:
                hub.held.set()
    progress = [line for line in seen if "completed" in line]
    assert progress[0]["total"] == 50_000
    assert 0 < progress[0]["completed"] <= 25_000
    assert [line["completed"] for line in progress] == sorted(
        line["completed"] for line in progress
    )
    assert len({line["digest"] for line in progress}) == 1
    assert seen[-1] == SUCCESS


def test_a_client_that_leaves_stops_its_download(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    hub.repos["o/file"] = {"m.gguf": os.urandom(50_000)}
    hub.held = threading.Event()
    made = list[_Progress]()

    class Observed(_Progress):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(pulls, "_Progress", Observed)
    with pulling_server() as (_, client):
        with client.stream("POST", "/api/pull", json={"model": "o/file"}) as reply:
            for line in reply.iter_lines():
                if "completed" in line:
                    break
        assert eventually(lambda: made[0].is_stopped)
        hub.held.set()
        # the next download begins when the thread of the first one has ended
        assert lines(client.post("/api/pull", json={"model": "o/tiny"}))[-1] == SUCCESS
        assert find_cached(HubModel("o/file")) is None
        assert names(client) == ["tiny", "o/tiny"]
        hub.requests.clear()
        assert lines(client.post("/api/pull", json={"model": "o/file"}))[-1] == SUCCESS
        assert any(sent.startswith("bytes=") for _, _, sent in hub.requests)


def test_rights_of_keys(hub: FakeHub) -> None:
    with pulling_server((KEY,), (PULL_KEY,)) as (_, client):
        statuses = list[int]()
        for key in (None, KEY, PULL_KEY):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            body = {"model": "o/tiny", "stream": False}
            reply = client.post("/api/pull", json=body, headers=headers)
            statuses.append(reply.status_code)
            if key == KEY:
                assert hub.requests == []
                (message,) = reply.json().values()
                assert message.startswith("Authorization: expected a key that may download")
        assert statuses == [401, 403, 200]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"model": "o/absent"}, "o/absent: found neither such a folder nor such a model"),
        ({"model": "./tiny"}, "model: expected a short name or owner/name"),
        ({"model": "/etc/passwd"}, "model: expected a short name or owner/name"),
        ({"model": "https://example.org/o/m"}, "model: expected a model of huggingface.co"),
        ({"model": "o/tiny", "username": "a"}, "username: expected no such field"),
        ({}, "model: "),
    ],
)
def test_errors_in_one_line(hub: FakeHub, body: dict[str, Any], message: str) -> None:
    del hub
    with pulling_server() as (_, client):
        whole = client.post("/api/pull", json={**body, "stream": False})
        assert whole.status_code == 400
        (error,) = whole.json().values()
        assert error.startswith(message)
        assert "\n" not in error
        streamed = client.post("/api/pull", json=body)
        if streamed.status_code == 200:
            assert lines(streamed)[-1] == {"error": error}
        assert names(client) == ["tiny"]


def test_a_server_that_ends_pulls_nothing(hub: FakeHub) -> None:
    with pulling_server() as (pool, client):
        pool.draining = True
        assert client.post("/api/pull", json={"model": "o/tiny"}).status_code == 503
    assert hub.requests == []


@pytest.mark.parametrize(
    ("allow", "keys", "needs", "found"),
    [
        (False, (), True, None),
        (True, (), False, ()),
        (True, (PULL_KEY,), True, (PULL_KEY,)),
        (False, (PULL_KEY,), False, "pull-key: expected --allow-pull"),
        (True, (), True, "allow-pull: expected --pull-key on a server with API keys"),
    ],
)
def test_keys_of_the_command(allow: bool, keys: tuple[str, ...], needs: bool, found: Any) -> None:
    if isinstance(found, str):
        with pytest.raises(OptionError, match=f"^{found}"):
            _pull_keys(allow, keys, needs_keys=needs)
    else:
        assert _pull_keys(allow, keys, needs_keys=needs) == found
