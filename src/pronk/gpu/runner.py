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
from pronk.gpu.layout import layout_of, measure, pack_layout
from pronk.gpu.model import GpuModel, ModelOutput
from pronk.gpu.steps import Steps


class DeviceLogits:
    """Rows of logits on a device, which are copied when they are read."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rows: int | slice | list[int], /) -> Array:
        return to_array(self._rows[rows])


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
        output = self.run_rows(batch, num_layers, layers, has_logits=has_logits)
        hidden = self.save_features(batch, output)
        logits = None if output.logits is None else to_array(output.logits)
        return LayersResult({layer: hidden[layer] for layer in collect}, logits, None)

    def run_rows(
        self,
        batch: ForwardBatch,
        num_layers: int,
        collect: frozenset[int],
        *,
        has_logits: bool,
    ) -> ModelOutput:
        """Run any number of rows, without a graph."""
        pool = self.model.pool
        size = measure(batch, pool)
        self.model.reserve_positions(size.pages * pool.block_size)
        numbers = torch.from_numpy(pack_layout(batch, pool, size, pool.free_slot))
        layout = layout_of(
            numbers.to(self.model.device), size, pool.block_size, batch.num_positions - 1
        )
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

    The target's tokens are chosen on the device for requests whose options allow it; logits are
    copied to the host where other options read them.
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
        rows = list(batch.logits_rows)
        chooses = any(entry.stateless_sampler is not None for entry in batch.entries)
        make_noise = partial(_noise_of_rows, batch) if chooses else None
        step = self.steps.run(batch, layers, make_noise)
        tokens: Tensor | None = None
        if step is None:
            output = executor.run_rows(batch, self._num_layers, layers, has_logits=bool(rows))
            logits = output.logits
            if logits is not None and chooses:
                tokens = self._choose(batch, logits)
        else:
            output = step.output
            assert output.logits is not None
            index = torch.tensor(rows, dtype=torch.int64)
            logits = output.logits[index.to(output.logits.device)]
            tokens = None if step.tokens is None else step.tokens.cpu()[index]
        hidden = executor.save_features(batch, output)
        if logits is None:
            logits = torch.empty(0, self.decoder.config.vocab_size)
        return ForwardResult(
            [DeviceLogits(part) for part in logits.split(batch.logits_counts)],
            {layer: batch.split_rows(hidden[layer]) for layer in collect},
            self.clock() - start_time,
            None if tokens is None else _sampled(batch, tokens.tolist()),
        )

    def _choose(self, batch: ForwardBatch, logits: Tensor) -> Tensor:
        """Return the tokens after the rows with logits."""
        samplers, positions = _row_samplers(batch)
        rows = list(batch.logits_rows)
        noise = noise_of(
            [samplers[row] for row in rows], [positions[row] for row in rows], len(rows)
        )
        keys, temperatures = (torch.from_numpy(part).to(logits.device) for part in noise)
        return choose(logits, keys, temperatures).cpu()


def _row_samplers(batch: ForwardBatch) -> tuple[list[StatelessSampler | None], list[int]]:
    """Return the sampler of each row, and the index in the text of the token after the row."""
    samplers = list[StatelessSampler | None]()
    for entry in batch.entries:
        samplers += [entry.stateless_sampler] * entry.num_rows
    return samplers, (batch.positions + 1).tolist()


def _noise_of_rows(batch: ForwardBatch, count: int) -> Noise:
    return noise_of(*_row_samplers(batch), count)


def _sampled(batch: ForwardBatch, tokens: Sequence[int]) -> list[dict[int, int]]:
    """Return the chosen tokens of each entry, by the index of their row of logits.

    Rows with logits that are not finite are left out; the host reads and refuses them.
    """
    found = list[dict[int, int]]()
    start = 0
    for entry, count in zip(batch.entries, batch.logits_counts, strict=True):
        own = tokens[start : start + count]
        start += count
        if entry.stateless_sampler is None:
            found.append({})
        else:
            found.append({index: token for index, token in enumerate(own) if token >= 0})
    return found
