"""CUDA graphs: launches of kernels that are recorded once, and then repeated with other numbers.

A graph reads its inputs at the addresses at which it was recorded, so new numbers are copied there.
Without CUDA, functions are called as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

Output = TypeVar("Output")

# Inputs of a recorded function: numbers that the host sends. Their shapes and types, and all sizes
# that the function uses, follow from the key of the graph.
Inputs = Sequence[Tensor]


class Graphs(Generic[Output]):
    """Functions of device tensors, each recorded at its first call."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._recorded: dict[Hashable, _Recorded[Output]] = {}

    def clear(self) -> None:
        """Drop all graphs, because tensors that they read or write were replaced."""
        self._recorded.clear()

    def run(self, key: Hashable, function: Callable[[Inputs], Output], inputs: Inputs) -> Output:
        """Return ``function(inputs)``; the next run with this key overwrites the result.

        Args:
            key: names the function and all sizes that it uses.
            function: launches kernels, without waiting for the device.
            inputs: tensors in the machine's memory, which are copied to the device.
        """
        if self.device.type != "cuda":
            return function([part.to(self.device) for part in inputs])
        if key not in self._recorded:
            on_device = [part.to(self.device) for part in inputs]
            self._recorded[key] = _Recorded(function, on_device)
        return self._recorded[key].run(inputs)


class _Recorded(Generic[Output]):
    """A CUDA graph of a function."""

    def __init__(self, function: Callable[[Inputs], Output], inputs: Inputs) -> None:
        self._inputs = inputs
        # The first call compiles the kernels, which a recording cannot do.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function(inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._output = function(inputs)

    def run(self, inputs: Inputs) -> Output:
        for own, new in zip(self._inputs, inputs, strict=True):
            own.copy_(new)
        self._graph.replay()
        return self._output
