"""The driver's record of one worker under tree parallelism: connection, KV pool and measured costs.

A *step* is one forward pass of the model, in which each process computes its shard of the token trees. An *exchange* is
the communication with one worker in a step: a request to the worker, and its answer.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from pronk.parallel.connection import PeerConnection
from pronk.parallel.mirrored_cache import RemotePool
from pronk.speculation.cost_model import CostModel

_PRIOR_EXCHANGE_SECONDS = 1e-3  # estimated seconds of an exchange before the first measurement
_PRIOR_SECONDS_PER_BYTE = 1e-9  # estimated seconds to send a byte before the first measurement
MIN_TIMED_BYTES = 2**18  # messages with fewer bytes are not measured, because their time is mostly latency
NUM_TIMINGS = 9  # an estimate is the median of this number of recent measurements
# The estimated exchange time of an unused worker halves after this number of steps, so that it is used again.
IDLE_HALF_LIFE = 256


@dataclass(eq=False)
class WorkerHandle:
    """A worker with a copy of the model, as seen by the driver."""

    peer: PeerConnection
    pool: RemotePool  # record of the contents of the worker's KV pool
    cost_model: CostModel = field(default_factory=CostModel)  # measured durations of the worker's forward passes
    # Seconds of recent exchanges: seconds of the step minus seconds of the slowest process's computation.
    exchange_times: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_TIMINGS))
    idle_steps: int = 0  # number of steps since the last one in which this worker computed nodes
    has_new_pool: bool = True  # whether the pool was resized and not used since; its first step is not measured
    # Seconds per byte of recent messages to the worker.
    byte_times: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_TIMINGS))

    @property
    def exchange_seconds(self) -> float:
        """Estimated seconds of an exchange, halved after every ``IDLE_HALF_LIFE`` steps without this worker."""
        measured = median(self.exchange_times) if self.exchange_times else _PRIOR_EXCHANGE_SECONDS
        return measured * 0.5 ** (self.idle_steps / IDLE_HALF_LIFE)

    @property
    def seconds_per_byte(self) -> float:
        """Estimated seconds per byte to send a large message to the worker."""
        return median(self.byte_times) if self.byte_times else _PRIOR_SECONDS_PER_BYTE

    def record_send(self, size: int, seconds: float) -> None:
        """Record that sending ``size`` bytes took ``seconds``; small messages are ignored."""
        if size >= MIN_TIMED_BYTES and not self.has_new_pool:
            self.byte_times.append(seconds / size)

    def record_step(self, seconds: float, longest_pass: float) -> None:
        """Record a step with this worker: its seconds, and the computing time of its slowest process."""
        if not self.has_new_pool:
            self.exchange_times.append(max(0.0, seconds - longest_pass))
        self.has_new_pool, self.idle_steps = False, 0
