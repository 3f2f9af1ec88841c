"""What is known of a process that has the same model: what it holds, and what asking it takes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from pronk.parallel.connection import PeerConnection
from pronk.parallel.mirrored_cache import RemoteCopy
from pronk.speculation.cost_model import CostModel

__all__ = ["DOUBT", "RECENT", "TELLING", "WorkerHandle"]

# What sending is believed to take before it is known: seconds at all, and for each byte.
_EXCHANGE, _BYTE = 1e-3, 1e-9

# Bytes from which on the time of sending them tells what each one takes; of fewer it tells what it takes at all.
TELLING = 2**18
# Exchanges that are remembered.
RECENT = 9
# Passes without a worker after which its exchanges are believed to take half as long.
DOUBT = 256


@dataclass(eq=False)
class WorkerHandle:
    """Another process with the same model.

    Attributes:
        peer: it.
        copy: what its pool holds.
        times: what its passes have taken.
        exchanges: seconds that a step took beyond the longer of both passes.
        idle: passes since it had a part of one.
        cold: whether its pool is new, so that what it does next takes longer than usual.
        bytes_: seconds for each byte that was sent to it.
    """

    peer: PeerConnection
    copy: RemoteCopy
    times: CostModel = field(default_factory=CostModel)
    exchanges: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    idle: int = 0
    cold: bool = True
    bytes_: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    @property
    def exchange(self) -> float:
        """Seconds of an exchange, usually; what was long ago is doubted, or one bad time would be the last one."""
        usual = median(self.exchanges) if self.exchanges else _EXCHANGE
        return usual * 0.5 ** (self.idle / DOUBT)

    @property
    def byte(self) -> float:
        """Seconds for each byte."""
        return median(self.bytes_) if self.bytes_ else _BYTE

    def sent(self, size: int, seconds: float) -> None:
        """So many bytes have taken so long."""
        if size >= TELLING and not self.cold:
            self.bytes_.append(seconds / size)

    def took(self, seconds: float, longest: float) -> None:
        """A step that it had a part of has taken so long, and the longer of both passes so long."""
        if not self.cold:
            self.exchanges.append(max(0.0, seconds - longest))
        self.cold, self.idle = False, 0
