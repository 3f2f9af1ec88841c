"""A server on loopback that answers as the Hugging Face Hub does to requests for models."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from huggingface_hub import constants

from waiting import HUNG

__all__ = ["FakeHub", "fake_hub", "hub_in_use"]


class FakeHub:
    """Content of a fake Hub, and the faults that its server makes.

    Attributes:
        url: address of the server.
        repos: files of each repository, by name.
        gated: repositories whose files need a token.
        cut: number of bytes of a file after which the server closes the connection, if any.
        damaged: whether the server changes a byte of every file.
        held: event for which the server waits after the first half of every file, if any.
        requests: method, path and header ``Range`` of each request.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.repos: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.cut: int | None = None
        self.damaged = False
        self.held: threading.Event | None = None
        self.requests: list[tuple[str, str, str]] = []

    def commit(self, repo: str) -> str:
        """Return the commit of a repository: a hash of its files."""
        files = [(name, sha256(data)) for name, data in sorted(self.repos[repo].items())]
        return hashlib.sha1(repr(files).encode(), usedforsecurity=False).hexdigest()


@lru_cache(maxsize=16)
def sha256(data: bytes) -> str:
    """Return the hash of a file, which each request for a model of 20 MB needs again."""
    return hashlib.sha256(data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        self.hub.requests.append((self.command, path, self.headers.get("Range", "")))
        match = re.fullmatch(
            r"(?:/api/models)?/([^/]+/[^/]+)(?:/(revision|tree|resolve)/([^/]+)(?:/(.+))?)?", path
        )
        repo = "" if match is None else match[1]
        if match is None or repo not in self.hub.repos:
            self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif (
            match[2] == "resolve" and repo in self.hub.gated and "Authorization" not in self.headers
        ):
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif match[3] not in (None, "main", self.hub.commit(repo)):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif match[2] == "resolve":
            self._send_file(repo, match[4])
        elif match[2] == "tree":
            files = self.hub.repos[repo].items()
            entries = [
                {
                    "type": "file",
                    "path": name,
                    "size": len(data),
                    "oid": "0" * 40,
                    "lfs": self._lfs(data),
                }
                for name, data in files
            ]
            self._send(200, json.dumps(entries).encode())
        else:
            info = {
                "id": repo,
                "sha": self.hub.commit(repo),
                "siblings": [{"rfilename": n} for n in self.hub.repos[repo]],
            }
            self._send(
                200, json.dumps(info | {"private": False, "tags": [], "downloads": 0}).encode()
            )

    def _lfs(self, data: bytes) -> dict[str, Any]:
        return {"oid": sha256(data), "size": len(data), "pointerSize": 100}

    def _send_file(self, repo: str, name: str) -> None:
        data = self.hub.repos[repo].get(name)
        if data is None:
            self._send(
                404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": self.hub.commit(repo)}
            )
            return
        headers = {
            "X-Repo-Commit": self.hub.commit(repo),
            "ETag": f'"{sha256(data)}"',
            "X-Linked-ETag": f'"{sha256(data)}"',
            "X-Linked-Size": str(len(data)),
            "Accept-Ranges": "bytes",
        }
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        first = int(asked[1]) if asked else 0
        if self.hub.damaged:
            data = data[:-1] + bytes([data[-1] ^ 1])
        if asked:
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        self._send(
            206 if asked else 200,
            data[first:],
            headers,
            self.hub.cut and max(0, self.hub.cut - first),
            held=self.hub.held,
        )

    def _send(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        cut: int | None = None,
        held: threading.Event | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in ({"Content-Type": "application/json"} | (headers or {})).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "GET":
            return
        half = len(body) // 2 if held else 0
        self.wfile.write(body[:half])
        self.wfile.flush()
        if held:
            assert held.wait(HUNG)
        self.wfile.write(body[half:cut])
        if cut is not None and cut < len(body):
            self.close_connection = True


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Run the server."""
    handler = type("Handler", (_Handler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    handler.hub = hub = FakeHub(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def hub_in_use() -> Iterator[FakeHub]:
    """Serve a fake Hub from which pronk downloads."""
    with fake_hub() as server, pytest.MonkeyPatch.context() as patch:
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(constants, "ENDPOINT", server.url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield server
