"""CUDA graphs: launches of kernels that are recorded once, and then repeated with other numbers.

A graph reads its inputs at the addresses at which it was recorded, so new numbers are copied there.
Without CUDA, functions are called as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Generic, TypeVar

import torch
from torch import Tensor

Output = TypeVar("Output")

# Inputs of a recorded function: numbers that the host sends. Their shapes and types, and all sizes
# that the function uses, follow from the key of the graph.
Inputs = Sequence[Tensor]

# Maximum number of graphs of a :class:`Graphs`. Each keeps its result, which is 64 MB for the
# logits of 128 rows and 128,000 tokens. At least 2: CUDA frees the shared memory of graphs with the
# last one.
_MAX_GRAPHS = 32


class GraphClock:
    """A clock that stands still while graphs are recorded.

    A recording compiles kernels, which takes seconds. Later runs of the graph do not, so durations
    and costs that are measured by this clock are those of later runs.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        """Create a clock from another one, which returns the time in seconds."""
        self._clock = clock
        self._paused = 0.0

    def __call__(self) -> float:
        """Return the time in seconds, without recordings."""
        return self._clock() - self._paused

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let the clock stand still."""
        began = self._clock()
        try:
            yield
        finally:
            self._paused += self._clock() - began


class Graphs(Generic[Output]):
    """Functions of device tensors, each recorded at its first call.

    Attributes:
        records: whether functions are recorded; on a CPU, only tests want that.
    """

    def __init__(
        self, device: torch.device, version: Callable[[], Hashable], clock: GraphClock
    ) -> None:
        """Create an empty set of graphs.

        Args:
            device: the device of all tensors.
            version: returns a value that changes when a tensor that a function reads or writes is
                replaced by another one. All graphs are then dropped, as they have its old address.
            clock: stands still during recordings.
        """
        self.device = device
        self.records = device.type == "cuda"
        self._version = version
        self._clock = clock
        self._recorder: _Recorder | None = None
        # value of ``version`` when the graphs were recorded
        self._recorded_version: Hashable = None
        # the graph that was used last is the last one
        self._recorded = dict[Hashable, _Recorded[Output]]()

    def run(self, key: Hashable, function: Callable[[Inputs], Output], inputs: Inputs) -> Output:
        """Return ``function(inputs)``; the next run overwrites the result.

        Args:
            key: names the function and all sizes that it uses.
            function: launches kernels, without waiting for the device.
            inputs: tensors in the machine's memory, which are copied to the device.
        """
        if not self.records:
            return function([part.to(self.device) for part in inputs])
        version = self._version()
        if version != self._recorded_version:
            self._recorded.clear()
            # The memory that the dropped graphs shared is freed, and new ones need their own.
            self._recorder = None
            self._recorded_version = version
        recorded = self._recorded.pop(key, None)
        if recorded is None:
            recorded = self._record(function, inputs)
        self._recorded[key] = recorded
        return recorded.replay(inputs)

    def _record(self, function: Callable[[Inputs], Output], inputs: Inputs) -> _Recorded[Output]:
        if len(self._recorded) >= _MAX_GRAPHS:
            least_recent = next(iter(self._recorded))
            del self._recorded[least_recent]
        on_device = [part.to(self.device) for part in inputs]
        if self._recorder is None:
            self._recorder = _Recorder()
        with self._clock.paused():
            return self._recorder.record(function, on_device)


class _Recorder:
    """Records CUDA graphs that share the memory of their temporary tensors.

    So a replay of one graph may overwrite the result of another.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # Memory is shared among recordings on the same stream.
        self._stream = torch.cuda.Stream()

    def record(self, function: Callable[[Inputs], Output], inputs: Inputs) -> _Recorded[Output]:
        """Return the graph of a function of ``inputs``, which are on the device."""
        # The first call compiles the kernels, which a recording cannot do.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            function(inputs)
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as one that copies numbers of another model, may use CUDA meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            output = function(inputs)
        return _Recorded(graph, inputs, output)


class _Recorded(Generic[Output]):
    """A CUDA graph of a function, with its inputs and its result."""

    def __init__(self, graph: torch.cuda.CUDAGraph, inputs: Inputs, output: Output) -> None:
        self._graph = graph
        self._inputs = inputs
        self._output = output

    def replay(self, inputs: Inputs) -> Output:
        """Run the graph with other numbers, and return its result."""
        for own, new in zip(self._inputs, inputs, strict=True):
            own.copy_(new)
        self._graph.replay()
        return self._output
