"""How many samples are served at a time."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

from pronk.errors import OptionError, OverloadedError

__all__ = ["AdmissionQueue"]


class AdmissionQueue:
    """Lets so many samples in; event loops of several threads may share it.

    Attributes:
        most: at a time.
        taken: samples that are in.
    """

    def __init__(self, most: int) -> None:
        self.most, self.taken = most, 0
        self._lock = threading.Lock()

    @contextmanager
    def hold(self, count: int) -> Generator[None]:
        """Let ``count`` samples in, before anything is done for them, so that a crowd costs nothing.

        Raises:
            OptionError: there is never room for so many.
            OverloadedError: there is none at present.
        """
        if count > self.most:
            msg = f"n: expected at most {self.most} samples at a time, found {count}; ask for fewer"
            raise OptionError(msg)
        with self._lock:
            if self.taken + count > self.most:
                msg = f"expected at most {self.most} requests at a time, found {count} more; try again later"
                raise OverloadedError(msg)
            self.taken += count
        try:
            yield
        finally:
            with self._lock:
                self.taken -= count
