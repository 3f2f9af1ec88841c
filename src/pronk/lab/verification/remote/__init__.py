"""Verification over HTTP that any OpenAI-compatible server is deterministic.

::

    with RemoteServer("http://127.0.0.1:8000") as server:
        *_, report = verify_server_steps(server, TEXTS, RemoteSettings())
        report.passed

Each check compares texts, or log-probabilities, of requests that differ only in circumstances such
as the batch or a cached prefix, which must not change an answer.
"""

from __future__ import annotations

from pronk.lab.verification.remote.checks import TEXTS, verify_server_steps
from pronk.lab.verification.remote.client import RemoteServer
from pronk.lab.verification.remote.report import RemoteReport, RemoteSettings

__all__ = ["TEXTS", "RemoteReport", "RemoteServer", "RemoteSettings", "verify_server_steps"]
