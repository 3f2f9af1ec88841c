"""Paths of clients with another base URL, and requests of web pages of other origins (CORS)."""

import httpx
import pytest

from pronk.base.errors import OptionError
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
    for path in (
        "/",
        "/health",
        "/page.css",
        "/v2/models",
        "/v1",
        "/chat",
        "/models.json",
        "//models",
    ):
        assert canonical_path(path) == path
    assert canonical_path("/models/a/b") == "/v1/models/a/b"
    for path in ("/v2/rerank", "/reranking", "/v1/reranking"):
        assert canonical_path(path) == "/v1/rerank"


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
        ("/completion", "/v1/completions"),
        ("/embedding", "/v1/embeddings"),
        ("/apply-template", "/tokenize"),
        ("/embed", "/v1/embeddings"),
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
def test_paths_of_other_servers_are_said_to_be_missing(
    client: httpx.Client, path: str, near: str | None
) -> None:
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
        answer = client.post(
            "/v1/chat/completions", json={**BODY, "store": True}, headers={"Origin": ORIGIN}
        )
        assert answer.status_code == 200
        assert answer.headers["Access-Control-Allow-Origin"] == ORIGIN
        assert "X-Pronk-Ignored" in answer.headers["Access-Control-Expose-Headers"]
        assert "Access-Control-Allow-Credentials" not in answer.headers
        refused = client.post("/v1/chat/completions", json={"x": 1}, headers={"Origin": ORIGIN})
        # the page can read the error
        assert refused.headers["Access-Control-Allow-Origin"] == ORIGIN


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost:3001",
        "https://localhost:3000",
        "http://evil.example",
        "null",
        f"{ORIGIN}.evil.example",
    ],
)
def test_pages_of_other_origins_get_no_header(
    open_to_a_page: Running, served: Running, origin: str
) -> None:
    with open_to_a_page.client() as client:
        assert preflight(client, origin).status_code == 400
        answer = client.post("/v1/chat/completions", json=BODY, headers={"Origin": origin})
        assert "Access-Control-Allow-Origin" not in answer.headers
    with served.client() as client:  # without --allow-origin, for no origin
        for each in (origin, ORIGIN):
            assert preflight(client, each).status_code == 405
            answer = client.post("/v1/chat/completions", json=BODY, headers={"Origin": each})
            assert not [
                name for name in answer.headers if name.lower().startswith("access-control")
            ]


@pytest.mark.parametrize(
    ("host", "status", "code"),
    [("evil.example", 421, "unknown_host"), ("127.0.0.1", 431, "headers_too_large")],
)
def test_preflights_pass_the_checks_of_every_request(
    model: LLM, host: str, status: int, code: str
) -> None:
    """A preflight has no key, but its host and the size of its headers count."""
    with (
        running(model, origins=(ORIGIN,), hosts={"127.0.0.1"}) as made,
        made.client(headers={}) as client,
    ):
        assert preflight(client, ORIGIN).status_code == 200
        headers = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST", "Host": host}
        long = {"X-Long": "x" * 20_000} if status == 431 else {}
        answer = client.options("/v1/chat/completions", headers=headers | long)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert "Access-Control-Allow-Origin" not in answer.headers
        assert client.options("/v1/chat/completions", headers={"Origin": ORIGIN}).status_code == 401


def test_pages_can_read_the_errors_of_every_check(open_to_a_page: Running) -> None:
    with open_to_a_page.client() as client:
        for headers, status in (
            ({"Authorization": "Bearer x"}, 401),
            ({"X-Long": "x" * 20_000}, 431),
        ):
            answer = client.post(
                "/v1/chat/completions", json=BODY, headers={"Origin": ORIGIN, **headers}
            )
            assert answer.status_code == status
            assert answer.headers["Access-Control-Allow-Origin"] == ORIGIN


BAD_PARTS = (
    "http://a:99999",
    "http://a:0",
    "http://[::1",
    "http://[::g]",
    "http://a..b",
    "http://a b",
    "http://1.2.3.4.5",
)


@pytest.mark.parametrize(
    "origin",
    [
        "*",
        "http://*",
        "null",
        "example.org",
        "http://x, http://y",
        "",
        "://x",
        "http://",
        "file:///x",
        *BAD_PARTS,
    ],
)
def test_texts_that_are_no_origins_are_refused(origin: str) -> None:
    with pytest.raises(
        OptionError, match=r"allow-origin: expected an exact origin .*; name each origin"
    ):
        ServerSettings(name="x", origins=(origin,))


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://x/path", "http://x"),
        ("http://x/", "http://x"),
        ("http://x?q", "http://x"),
        ("http://x#f", "http://x"),
        ("http://user:secret@x:3000", "http://x:3000"),
        ("HTTP://Example.ORG", "http://example.org"),
        ("http://a:80", "http://a"),
        ("https://a:443", "https://a"),
        ("http://a:0443", "http://a:443"),
        ("http://a:", "http://a"),
        ("http://[0:0::1]:5", "http://[::1]:5"),
        ("http://127.1", "http://127.0.0.1"),
        ("http://bücher.example", "http://xn--bcher-kva.example"),
        (" http://x", "http://x"),
    ],
)
def test_urls_beyond_an_origin_are_refused_with_the_origin(url: str, origin: str) -> None:
    """Browsers send one form of each origin; another one would silently allow nothing."""
    with pytest.raises(OptionError) as caught:
        ServerSettings(name="x", origins=(url,))
    assert str(caught.value).endswith(f"; write {origin}")
    ServerSettings(name="x", origins=(origin,))


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost:3000",
        "https://a-b.example.org",
        "http://[::1]:8080",
        "http://10.0.0.7",
        "http://a:443",
        "https://a:80",
        "http://open_webui:8080",
        "http://a.example.",
        "vscode-webview://abc",
        "tauri://localhost",
    ],
)
def test_origins_of_browsers_are_accepted(origin: str) -> None:
    assert ServerSettings(name="x", origins=(origin,)).origins == (origin,)
