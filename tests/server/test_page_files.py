"""Files of the chat page."""

from importlib.resources import files

import httpx

from pronk.server.app import PAGE_HEADERS
from pronk.server.guard import PUBLIC_PATHS
from server.serving import Running


def test_page_files_need_no_key_and_have_security_headers(served: Running) -> None:
    folder = {each.name for each in (files("pronk.server") / "page").iterdir()}
    names = {"": "index.html", **{name: name for name in folder - {"index.html"}}}
    for path, name in names.items():
        assert f"/{path}" in PUBLIC_PATHS, f"{name}: expected the file among the public paths"
        reply = httpx.get(f"{served.url}/{path}")
        assert reply.status_code == 200
        assert reply.content == ((files("pronk.server") / "page") / name).read_bytes()
        assert (
            PAGE_HEADERS.items()
            <= {key.title(): value for key, value in reply.headers.items()}.items()
        )
    assert "unsafe" not in PAGE_HEADERS["Content-Security-Policy"]
