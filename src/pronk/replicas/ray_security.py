"""A cluster that is begun for one command, on one machine, and for nobody else there or on its network."""

from __future__ import annotations

import os
import sys
from secrets import token_hex

__all__ = ["be_private", "is_private"]


def be_private() -> None:
    """Let the cluster that this process begins listen to this machine alone, and to who has its token.

    Ray listens on every interface otherwise, and runs what it is told to by whoever comes. It reads its environment
    when it is imported, so this has to come before that; its processes have it from this one. What was drawn stays, as
    Ray keeps it.

    Raises:
        RuntimeError: Ray has been imported already.
    """
    if is_private():
        return
    if "ray" in sys.modules:
        msg = "expected to be called before Ray is imported"
        raise RuntimeError(msg)
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # whatever its name says, without it there is no loopback
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = token_hex(32)


def is_private() -> bool:
    """Whether that has been said, here or by whoever has begun this process."""
    said = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN")
    return [os.environ.get(name) for name in said[:2]] == ["0", "token"] and bool(os.environ.get(said[2]))
