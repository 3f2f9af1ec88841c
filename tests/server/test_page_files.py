"""The files of the page, as anybody gets them."""

from importlib.resources import files

import httpx

from pronk.server.app import PAGE_HEADERS
from pronk.server.guard import OPEN
from server.serving import Running


def test_files_are_open_and_guarded(served: Running) -> None:
    """Everybody gets them, without a key, and with headers that forbid whatever is not theirs."""
    folder = {each.name for each in (files("pronk.server") / "page").iterdir()}
    names = {"": "index.html", **{name: name for name in folder - {"index.html"}}}
    for path, name in names.items():
        assert f"/{path}" in OPEN, f"{name}: expected it among the files that need no key"
        reply = httpx.get(f"{served.url}/{path}")
        assert reply.status_code == 200
        assert PAGE_HEADERS.items() <= {key.title(): value for key, value in reply.headers.items()}.items()
    assert "unsafe" not in PAGE_HEADERS["Content-Security-Policy"]
