"""An event loop whose clock jumps to the next timer: waiting takes no time, and nothing depends on the machine."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _Selector(selectors.SelectSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        self.now += timeout or 0.0
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def run_virtually(main: Coroutine[Any, Any, None]) -> None:
    with asyncio.ModelRunner(loop_factory=VirtualLoop) as runner:
        runner.run(main)


def now() -> float:
    return asyncio.get_running_loop().time()
