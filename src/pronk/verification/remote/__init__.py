"""Verification over HTTP that any OpenAI-compatible server is deterministic.

::

    with RemoteServer("http://127.0.0.1:8000") as server:
        verify_server(server, TEXTS, RemoteSettings()).passed

Each check compares texts, or log-probabilities, of requests that differ only in circumstances that should not matter.
"""

from __future__ import annotations

from pronk.verification.remote.checks import verify_server
from pronk.verification.remote.client import RemoteServer
from pronk.verification.remote.prompts import TEXTS
from pronk.verification.remote.report import RemoteReport, RemoteSettings

__all__ = ["TEXTS", "RemoteReport", "RemoteServer", "RemoteSettings", "verify_server"]
