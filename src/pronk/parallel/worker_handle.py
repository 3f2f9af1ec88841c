"""The driver's record of one worker under tree parallelism: connection, KV pool and measured costs.

An *exchange* is the communication of one forward pass: a request to a worker and the worker's answer.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from pronk.parallel.connection import PeerConnection
from pronk.parallel.mirrored_cache import RemoteCopy
from pronk.speculation.cost_model import CostModel

__all__ = ["IDLE_HALF_LIFE", "MIN_TIMED_BYTES", "NUM_TIMINGS", "WorkerHandle"]

# Costs of communication before the first measurement: seconds per exchange, and seconds per byte.
_PRIOR_EXCHANGE, _PRIOR_BYTE = 1e-3, 1e-9

# Minimum message size in bytes for a measurement of seconds per byte; latency dominates smaller messages.
MIN_TIMED_BYTES = 2**18
# Costs of communication are estimated by the median of this number of recent measurements.
NUM_TIMINGS = 9
# The estimated exchange time of an unused worker halves after this number of forward passes, so that it is tried again.
IDLE_HALF_LIFE = 256


@dataclass(eq=False)
class WorkerHandle:
    """A worker with a copy of the model, as seen by the driver."""

    peer: PeerConnection
    copy: RemoteCopy  # record of the contents of the worker's KV pool
    cost_model: CostModel = field(default_factory=CostModel)  # measured durations of the worker's forward passes
    # Recent seconds of exchanges: the duration of a step minus the longest forward pass of any process in the step.
    exchange_times: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_TIMINGS))
    idle_steps: int = 0  # forward passes since the last one in which this worker computed nodes
    has_new_pool: bool = True  # whether no step has used the worker's pool yet; its first step is not measured
    byte_times: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_TIMINGS))  # recent seconds per sent byte

    @property
    def exchange_seconds(self) -> float:
        """Estimated seconds of an exchange, halved after every ``IDLE_HALF_LIFE`` steps without this worker."""
        measured = median(self.exchange_times) if self.exchange_times else _PRIOR_EXCHANGE
        return measured * 0.5 ** (self.idle_steps / IDLE_HALF_LIFE)

    @property
    def seconds_per_byte(self) -> float:
        """Estimated seconds to send a byte."""
        return median(self.byte_times) if self.byte_times else _PRIOR_BYTE

    def record_send(self, size: int, seconds: float) -> None:
        """Record that sending ``size`` bytes took ``seconds``."""
        if size >= MIN_TIMED_BYTES and not self.has_new_pool:
            self.byte_times.append(seconds / size)

    def record_step(self, seconds: float, longest: float) -> None:
        """Record the seconds of a step that used this worker, and of the ``longest`` forward pass in it."""
        if not self.has_new_pool:
            self.exchange_times.append(max(0.0, seconds - longest))
        self.has_new_pool, self.idle_steps = False, 0
