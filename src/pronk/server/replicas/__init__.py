"""Replicas of a model in processes of Ray, behind one server; each replica has the whole model."""

from __future__ import annotations

import os
import sys
from secrets import token_hex


def be_private() -> None:
    """Restrict the Ray cluster of this process to the loopback interface, with a random token.

    By default Ray listens on every interface and executes the code that any client sends. Ray reads
    its environment variables when it is imported, and the processes of the cluster inherit them.
    The token stays the same for the life of the process, because Ray caches the token.

    Raises:
        RuntimeError: Ray is imported already.
    """
    if is_private():
        return
    if "ray" in sys.modules:
        msg = "expected be_private() before the import of Ray, found Ray imported; call it first"
        raise RuntimeError(msg)
    # With this value, Ray listens on the loopback interface only, on Linux too.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = token_hex(32)


def is_private() -> bool:
    """Return whether :func:`be_private` was called in this process or in a parent process."""
    get = os.environ.get
    loopback = get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER") == "0"
    token = get("RAY_AUTH_MODE") == "token"
    return loopback and token and bool(get("RAY_AUTH_TOKEN"))
