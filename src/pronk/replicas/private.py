"""A cluster that is begun for one command, on one machine, and for nobody else there or on its network."""

from __future__ import annotations

import os
from secrets import token_hex

__all__ = ["be_private"]


def be_private() -> None:
    """Let the cluster that this process begins listen to this machine alone, and to who has its token.

    Ray listens on every interface otherwise, and runs what it is told to by whoever comes. It reads its environment
    when it is imported, so this has to come before that; its processes have it from this one.
    """
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # whatever its name says, without it there is no loopback
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = token_hex(32)
