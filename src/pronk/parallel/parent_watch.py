"""End a process when its parent has ended, even if the parent was killed."""

from __future__ import annotations

import os
import threading
from time import sleep

_PERIOD = 0.5  # seconds between two checks


def end_with_parent() -> None:
    """End this process soon after its parent, ``torchrun``, also if the parent was killed.

    Other ranks are not watched: if one ends, its closed connections make the collective operations fail.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent != 1:  # 1: the parent has ended before this call
            sleep(_PERIOD)
        os._exit(1)

    threading.Thread(target=watch, name="pronk-parent", daemon=True).start()
