"""Paths of clients with another base URL, and requests of web pages of other origins (CORS)."""

import httpx
import pytest

from pronk.errors import OptionError
from pronk.llm import LLM
from pronk.server.paths import API_PATHS, OTHER_PATHS, canonical_path, foreign_path, near_path
from pronk.server.settings import ServerSettings
from server.serving import Running, running

ORIGIN = "http://localhost:3000"
BODY = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "temperature": 0}


@pytest.mark.parametrize("path", API_PATHS)
def test_a_base_url_may_lack_the_version_or_repeat_it(path: str) -> None:
    short = path.removeprefix("/v1")
    for given in (path, short, f"/v1{path}", f"{path}/", f"{short}/", f"/v1/v1{path}"):
        assert canonical_path(given) == path


def test_other_paths_are_left_alone() -> None:
    for path in ("/", "/health", "/page.css", "/v2/models", "/v1", "/chat", "/models.json", "//models"):
        assert canonical_path(path) == path
    assert canonical_path("/models/a/b") == "/v1/models/a/b"


def test_answers_are_those_of_the_path(client: httpx.Client) -> None:
    want = client.post("/v1/chat/completions", json=BODY).json()["choices"][0]["message"]
    for path in ("/chat/completions", "/v1/v1/chat/completions", "/v1/chat/completions/"):
        assert client.post(path, json=BODY).json()["choices"][0]["message"] == want
    assert client.post("/messages", json=BODY).json()["type"] == "message"
    assert client.post("/messages", json={}).json()["type"] == "error"  # in Anthropic's format
    assert client.get("/models/tiny").json()["id"] == "tiny"
    assert client.head("/").status_code == 200


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/openai/deployments/x/chat/completions", "/v1/chat/completions"),
        ("/api/v1/responses", "/v1/responses"),
        ("/v1/message", "/v1/messages"),
        ("/tokenise", "/tokenize"),
        ("/v1/models2/", "/v1/models"),
        ("/zzz", None),
    ],
)
def test_unknown_paths_get_a_hint(client: httpx.Client, path: str, near: str | None) -> None:
    assert near_path(path) == near
    answer = client.post(path, json=BODY)
    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    assert message == f"path: expected one of this server, found {path!r}; " + (
        f"did you mean {near}?" if near else "see /openapi.json"
    )


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/api/chat", "/v1/chat/completions"),
        ("/api/generate", "/v1/completions"),
        ("/api/embed", "/v1/embeddings"),
        ("/api/tags", "/v1/models"),
        ("/api/pull", None),
        ("/api/blobs/sha256:0", None),
        ("/completion", "/v1/completions"),
        ("/embedding", "/v1/embeddings"),
        ("/apply-template", "/tokenize"),
        ("/infill", None),
        ("/embed", "/v1/embeddings"),
        ("/rerank", None),
        ("/v1/rerank", None),
        ("/v2/rerank", None),
        ("/v1/score", None),
        ("/classify", None),
        ("/ping", "/health"),
        ("/generate", "/v1/completions"),
        ("/v1/audio/speech", None),
        ("/v1/images/generations", None),
        ("/v1/files", None),
        ("/v1/batches", "/v1/chat/completions"),
        ("/v1/threads/thread_1/messages", None),
        ("/v1/engines/x/completions", "/v1/completions"),
        ("/v1/complete", "/v1/messages"),
    ],
)
def test_paths_of_other_servers_are_said_to_be_missing(client: httpx.Client, path: str, near: str | None) -> None:
    assert near_path(path) == near
    answer = client.post(path, json=BODY)
    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    assert message.startswith(f"path: pronk has no route {path!r}; ")
    assert (f"use {near} " if near else "no other route") in message
    assert "did you mean" not in message


@pytest.mark.parametrize("path", [*API_PATHS, *OTHER_PATHS])
def test_no_path_of_this_server_is_said_to_be_missing(path: str) -> None:
    assert foreign_path(path) is None
    assert near_path(f"/proxy{path}") == path


def test_keys_are_needed_on_every_spelling(served: Running) -> None:
    with served.client(headers={}) as client:
        for path in ("/chat/completions", "/v1/v1/chat/completions", "/models"):
            assert client.post(path, json=BODY).status_code == 401


@pytest.fixture(scope="module")
def open_to_a_page(model: LLM) -> Running:  # type: ignore[misc]
    with running(model, origins=(ORIGIN,)) as made:
        yield made


def preflight(client: httpx.Client, origin: str) -> httpx.Response:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
    }
    return client.options("/v1/chat/completions", headers=headers)


def test_pages_of_listed_origins_may_use_the_server(open_to_a_page: Running) -> None:
    with open_to_a_page.client() as client:
        allowed = preflight(client, ORIGIN)
        assert allowed.status_code == 200
        assert allowed.headers["Access-Control-Allow-Origin"] == ORIGIN
        assert "x-stainless-os" in allowed.headers["Access-Control-Allow-Headers"]
        answer = client.post("/v1/chat/completions", json={**BODY, "store": True}, headers={"Origin": ORIGIN})
        assert answer.status_code == 200
        assert answer.headers["Access-Control-Allow-Origin"] == ORIGIN
        assert "X-Pronk-Ignored" in answer.headers["Access-Control-Expose-Headers"]
        assert "Access-Control-Allow-Credentials" not in answer.headers
        refused = client.post("/v1/chat/completions", json={"x": 1}, headers={"Origin": ORIGIN})
        assert refused.headers["Access-Control-Allow-Origin"] == ORIGIN  # the page can read the error


@pytest.mark.parametrize(
    "origin",
    ["http://localhost:3001", "https://localhost:3000", "http://evil.example", "null", f"{ORIGIN}.evil.example"],
)
def test_pages_of_other_origins_get_no_header(open_to_a_page: Running, served: Running, origin: str) -> None:
    with open_to_a_page.client() as client:
        assert preflight(client, origin).status_code == 400
        answer = client.post("/v1/chat/completions", json=BODY, headers={"Origin": origin})
        assert "Access-Control-Allow-Origin" not in answer.headers
    with served.client() as client:  # without --allow-origin, for no origin
        for each in (origin, ORIGIN):
            assert preflight(client, each).status_code == 405
            answer = client.post("/v1/chat/completions", json=BODY, headers={"Origin": each})
            assert not [name for name in answer.headers if name.lower().startswith("access-control")]


@pytest.mark.parametrize("origin", ["*", "http://*", "null", "example.org", "http://x/path", "http://x, http://y", ""])
def test_origins_are_exact(origin: str) -> None:
    with pytest.raises(OptionError, match="allow-origin: expected an exact origin"):
        ServerSettings(name="x", origins=(origin,))
    for fine in ("http://localhost:3000", "https://a-b.example.org", "http://[::1]:80", "vscode-webview://abc"):
        ServerSettings(name="x", origins=(fine,))
