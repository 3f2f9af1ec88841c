"""Runner of a target on a GPU, behind the engine's :class:`ForwardBatch`.

Modules of drafters, such as draft models and EAGLE heads, run on the CPU: they read outputs of
layers that the runner copies to the machine's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from pronk.backends import (
    Decoder,
    Feature,
    ForwardBatch,
    ForwardResult,
    LayerExecutor,
    LayersResult,
    ModelRunner,
    Program,
    StatelessSampler,
)
from pronk.base.arrays import Array
from pronk.base.convert import to_array
from pronk.gpu.choose import Noise, choose, noise_of
from pronk.gpu.layout import RowLayout, is_walked, layout_of, measure, pack_layout
from pronk.gpu.model import GpuModel, ModelOutput
from pronk.gpu.steps import StepOutput, Steps
from pronk.gpu.walk import NOT_FINITE, verified_paths, walk


class DeviceLogits:
    """Logits of some rows of a pass, which are copied from the device when they are read.

    The next pass may overwrite them.
    """

    def __init__(self, logits: Tensor, rows: Sequence[int]) -> None:
        """Create a view.

        Args:
            logits: float32 ``[rows of the pass, vocab]`` on the device.
            rows: indices of the rows.
        """
        self._logits = logits
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rows: int | slice | list[int], /) -> Array:
        if isinstance(rows, int):
            return to_array(self._logits[self._rows[rows]])
        chosen = self._rows[rows] if isinstance(rows, slice) else [self._rows[row] for row in rows]
        if not chosen:
            return np.empty((0, self._logits.shape[1]), np.float32)
        return to_array(self._logits[torch.tensor(chosen, device=self._logits.device)])


class GpuExecutor(LayerExecutor):
    """Runs layers on the device, and saves the features that drafters read."""

    def __init__(self, decoder: Decoder, model: GpuModel) -> None:
        super().__init__(decoder, model.pool)
        self.model = model
        # by feature, for the version ``_feature_version`` of the pool
        self._feature_programs: dict[Feature, Program] = {}
        self._feature_version = model.pool.version

    def run(
        self, batch: ForwardBatch, num_layers: int, collect: Sequence[int] = ()
    ) -> LayersResult:
        """Implement :meth:`LayerExecutor.run`."""
        layers = self.with_features(collect, num_layers)
        has_logits = num_layers == self.model.config.num_layers
        layout = self.make_layout(batch)
        output = self.run_rows(batch, layout, num_layers, layers, has_logits=has_logits)
        hidden = self.save_features(batch, output)
        logits = None if output.logits is None else to_array(output.logits)
        return LayersResult({layer: hidden[layer] for layer in collect}, logits, None)

    def make_layout(self, batch: ForwardBatch) -> RowLayout:
        """Return the layout of any number of rows."""
        pool = self.model.pool
        size = measure(batch, pool)
        self.model.reserve_positions(size.pages * pool.block_size)
        numbers = torch.from_numpy(pack_layout(batch, pool, size, pool.free_slot))
        on_device = numbers.to(self.model.device)
        return layout_of(on_device, size, pool.block_size, batch.num_positions - 1)

    def run_rows(
        self,
        batch: ForwardBatch,
        layout: RowLayout,
        num_layers: int,
        collect: frozenset[int],
        *,
        has_logits: bool,
    ) -> ModelOutput:
        """Run any number of rows, without a graph."""
        rows = None
        if has_logits:
            rows = torch.tensor(list(batch.logits_rows), device=self.model.device)
        return self.model.forward(layout, num_layers=num_layers, collect=collect, logits_rows=rows)

    def with_features(self, collect: Sequence[int], num_layers: int) -> frozenset[int]:
        """Return the layers of ``collect``, and those whose outputs saved features need."""
        layers = set(collect)
        for feature in self.cache.features:
            needed = (feature,) if isinstance(feature, int) else feature.layers
            layers.update(layer for layer in needed if layer <= num_layers)
        return frozenset(layers)

    def save_features(self, batch: ForwardBatch, output: ModelOutput) -> dict[int, Array]:
        """Save the features of all rows; return the outputs of layers, ``[rows, hidden]``."""
        hidden = {layer: to_array(rows[: batch.num_rows]) for layer, rows in output.hidden.items()}
        if not self.cache.features:
            return hidden
        slots = batch.slots(self.cache)
        for feature, pool in self.cache.features.items():
            if not isinstance(feature, int):
                self._save_computed(feature, batch, hidden)
            elif feature in hidden:
                pool[0, slots] = hidden[feature]
        return hidden

    def _save_computed(
        self, feature: Feature, batch: ForwardBatch, hidden: Mapping[int, Array]
    ) -> None:
        """Compute a feature of several layers' outputs on the CPU, and save it."""
        last = max(feature.layers)
        if last not in hidden:
            return
        others = [layer for layer in feature.layers if layer < last]

        program = self._feature_program(feature, others)
        collected = np.stack([hidden[layer] for layer in others]) if others else None
        program.run(batch, hidden[last].copy(), None, collected)

    def _feature_program(self, feature: Feature, others: Sequence[int]) -> Program:
        """Return the program of a feature, compiled once per version of the pool.

        ``others`` are the layers that it reads besides the last one, in their order.
        """
        version = self.cache.version
        if version != self._feature_version:
            self._feature_programs = {}
            self._feature_version = version
        if feature not in self._feature_programs:
            size = self.decoder.config.hidden_size
            program = Program(self.decoder.kernels, size, self.cache.dtype, self.cache)
            feature.compile(program, {layer: index for index, layer in enumerate(others)})
            self._feature_programs[feature] = program
        return self._feature_programs[feature]


class GpuRunner(ModelRunner):
    """Runs a target on a GPU: steps of few rows by captured graphs, prompts without.

    The device verifies the token trees of requests whose options allow it; logits are copied to the
    host where other options read them.
    """

    def __init__(
        self,
        decoder: Decoder,
        model: GpuModel,
        *,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """Create a runner.

        Args:
            decoder: the target, packed for the CPU, which drafters read.
            model: the target on the device.
            clock: returns the time in seconds.
        """
        self._device_executor = GpuExecutor(decoder, model)
        super().__init__(decoder, model.pool, executor=self._device_executor, clock=clock)
        self.steps = Steps(model)

    def forward(self, batch: ForwardBatch, collect: frozenset[int] = frozenset()) -> ForwardResult:
        start_time = self.clock()
        executor = self._device_executor
        layers = executor.with_features(tuple(collect), self._num_layers)
        walks = any(map(is_walked, batch.entries))
        rows = batch.logits_rows
        step = self.steps.run(batch, layers, partial(_noise_of_rows, batch) if walks else None)
        if step is None:
            step = self._run_large(batch, layers, walks=walks)
            rows = range(len(rows))
        hidden = executor.save_features(batch, step.output)
        logits = step.output.logits
        if logits is None:
            logits = torch.empty(0, self.decoder.config.vocab_size)
        return ForwardResult(
            _split_logits(logits, rows, batch.logits_counts),
            {layer: batch.split_rows(hidden[layer]) for layer in collect},
            self.clock() - start_time,
            paths=None if step.walked is None else verified_paths(batch, step.walked.tolist()),
        )

    def _run_large(self, batch: ForwardBatch, layers: frozenset[int], *, walks: bool) -> StepOutput:
        """Run a batch without a graph, as a step whose logits are those of ``batch.logits_rows``.

        Chunks of prompts have many rows, and logits of few of them.
        """
        executor = self._device_executor
        rows = list(batch.logits_rows)
        layout = executor.make_layout(batch)
        output = executor.run_rows(batch, layout, self._num_layers, layers, has_logits=bool(rows))
        if output.logits is None or not walks:
            return StepOutput(output, None)
        samplers, positions = _row_samplers(batch)
        noise = noise_of(
            [samplers[row] for row in rows], [positions[row] for row in rows], len(rows)
        )
        device = self.steps.model.device
        chosen = torch.full((batch.num_rows,), NOT_FINITE, dtype=torch.int32, device=device)
        keys, temperatures = (torch.from_numpy(part).to(device) for part in noise)
        chosen[torch.tensor(rows, device=device)] = choose(output.logits, keys, temperatures)
        return StepOutput(output, walk(chosen, layout))


def _split_logits(logits: Tensor, rows: Sequence[int], counts: Sequence[int]) -> list[DeviceLogits]:
    """Return the logits of each entry; ``counts`` are their numbers of rows."""
    parts = list[DeviceLogits]()
    first = 0
    for count in counts:
        parts.append(DeviceLogits(logits, rows[first : first + count]))
        first += count
    return parts


def _row_samplers(batch: ForwardBatch) -> tuple[list[StatelessSampler | None], list[int]]:
    """Return the sampler of each row, and the index in the text of the token after the row."""
    samplers = list[StatelessSampler | None]()
    for entry in batch.entries:
        samplers += [entry.stateless_sampler] * entry.num_rows
    return samplers, (batch.positions + 1).tolist()


def _noise_of_rows(batch: ForwardBatch, count: int) -> Noise:
    return noise_of(*_row_samplers(batch), count)
