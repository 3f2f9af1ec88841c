"""Limit on the number of concurrent samples."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

from pronk.errors import OptionError, OverloadedError

__all__ = ["AdmissionQueue"]


class AdmissionQueue:
    """Thread-safe counter that admits at most ``most`` samples at a time."""

    def __init__(self, most: int) -> None:
        self.most, self.taken = most, 0
        self._lock = threading.Lock()

    @contextmanager
    def hold(self, count: int) -> Generator[None]:
        """Admit ``count`` samples for the duration of the block.

        Raises:
            OptionError: ``count`` exceeds the limit.
            OverloadedError: too many samples are admitted at present.
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
