"""The end of a process with its parent process, also if the parent was killed."""

from __future__ import annotations

import os
import threading
from time import sleep

__all__ = ["end_with_parent"]

_PERIOD = 0.5  # seconds between two checks


def end_with_parent() -> None:
    """End this process soon after its parent, ``torchrun``, also if the parent was killed.

    The end of another rank needs no check: it closes its connections, which the collective operations report.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            sleep(_PERIOD)
        os._exit(1)

    threading.Thread(target=watch, name="pronk-parent", daemon=True).start()
