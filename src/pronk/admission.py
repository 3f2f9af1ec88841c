"""Limit on the samples (outputs of requests) in progress: accepted by an engine, not finished."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

from pronk.errors import OptionError, OverloadedError


class AdmissionLimit:
    """Thread-safe counter of samples in progress; it never exceeds ``limit``."""

    def __init__(self, limit: int) -> None:
        self.limit, self.num_admitted = limit, 0
        self._lock = threading.Lock()

    @contextmanager
    def hold(self, count: int) -> Generator[None]:
        """Add ``count`` samples to the samples in progress for the duration of a ``with`` block.

        Raises ``OptionError`` if ``count`` alone exceeds ``limit``, ``OverloadedError`` if ``count`` and the samples
        already in progress together exceed ``limit``.
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
