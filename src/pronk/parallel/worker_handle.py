"""The driver's record of one worker under tree parallelism: its KV pool and its measured costs."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from pronk.parallel.connection import PeerConnection
from pronk.parallel.mirrored_cache import RemoteCopy
from pronk.speculation.cost_model import CostModel

__all__ = ["DOUBT", "RECENT", "TELLING", "WorkerHandle"]

# Prior costs of communication: seconds per exchange, and seconds per byte.
_EXCHANGE, _BYTE = 1e-3, 1e-9

# Minimum message size in bytes for a measurement of seconds per byte; latency dominates smaller messages.
TELLING = 2**18
# Number of recent measurements in a median.
RECENT = 9
# Forward passes without this worker after which its estimated exchange time halves.
DOUBT = 256


@dataclass(eq=False)
class WorkerHandle:
    """A worker with a copy of the model.

    Attributes:
        peer: connection to the worker.
        copy: record of the worker's KV pool.
        times: cost model of the worker's forward passes.
        exchanges: recent seconds of steps beyond the longest forward pass of any process.
        idle: number of forward passes since the worker's last share.
        cold: whether the worker's pool is new, so that its next step is not measured.
        bytes_: recent seconds per sent byte.
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
        """Return the estimated seconds of an exchange; decays while idle, so that a slow worker is retried."""
        usual = median(self.exchanges) if self.exchanges else _EXCHANGE
        return usual * 0.5 ** (self.idle / DOUBT)

    @property
    def byte(self) -> float:
        """Return the estimated seconds per byte."""
        return median(self.bytes_) if self.bytes_ else _BYTE

    def sent(self, size: int, seconds: float) -> None:
        """Record the seconds of sending ``size`` bytes."""
        if size >= TELLING and not self.cold:
            self.bytes_.append(seconds / size)

    def took(self, seconds: float, longest: float) -> None:
        """Record a step with a share of the worker: its seconds, and those of its longest forward pass."""
        if not self.cold:
            self.exchanges.append(max(0.0, seconds - longest))
        self.cold, self.idle = False, 0
