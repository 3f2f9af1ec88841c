"""Limit on the number of samples (outputs of requests) that an engine works on at the same time."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

from pronk.errors import OptionError, OverloadedError

__all__ = ["AdmissionQueue"]


class AdmissionQueue:
    """Thread-safe counter of samples in progress, which refuses samples above ``limit``."""

    def __init__(self, limit: int) -> None:
        self.limit, self.num_admitted = limit, 0
        self._lock = threading.Lock()

    @contextmanager
    def hold(self, count: int) -> Generator[None]:
        """Count ``count`` more samples as in progress for the duration of the block.

        Raises:
            OptionError: ``count`` alone exceeds the limit.
            OverloadedError: ``count`` and the samples in progress together exceed the limit.
        """
        if count > self.limit:
            msg = f"n: expected at most {self.limit} samples at a time, found {count}; ask for fewer"
            raise OptionError(msg)
        with self._lock:
            if self.num_admitted + count > self.limit:
                msg = f"expected at most {self.limit} requests at a time, found {count} more; try again later"
                raise OverloadedError(msg)
            self.num_admitted += count
        try:
            yield
        finally:
            with self._lock:
                self.num_admitted -= count
