"""Replicas of a model on Ray, behind one server. Each replica has the whole model."""

from __future__ import annotations

import os
import sys
from secrets import token_hex


def be_private() -> None:
    """Restrict this process's Ray cluster to the loopback interface and to clients with a random token.

    By default Ray listens on every interface and executes the code that any client sends. Ray reads
    its environment when it is imported, and its processes inherit the environment of this one. The
    token stays the same for the life of the process, because Ray caches it.

    Raises:
        RuntimeError: Ray is imported already.
    """
    if is_private():
        return
    if "ray" in sys.modules:
        msg = "expected be_private() before the import of Ray, found Ray imported; call it first"
        raise RuntimeError(msg)
    # only the loopback interface; on Linux too
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = token_hex(32)


def is_private() -> bool:
    """Return whether :func:`be_private` was called in this process or in a parent process."""
    get = os.environ.get
    loopback = get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER") == "0"
    token = get("RAY_AUTH_MODE") == "token"
    return loopback and token and bool(get("RAY_AUTH_TOKEN"))
