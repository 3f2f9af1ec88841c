"""Runner of a model on a GPU, behind the engine's :class:`ForwardBatch`.

Draft models and EAGLE heads have runners of their own on the same device. Other modules of drafters
run on the CPU: they read outputs of layers that are copied to the machine's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pronk.backends import (
    ChainJob,
    Decoder,
    ForwardBatch,
    ForwardResult,
    HeadRunner,
    LayerExecutor,
    LayersResult,
    LinearFactory,
    ModelConfig,
    ModelRunner,
    PagedCache,
    StatelessSampler,
)
from pronk.base.arrays import Array, DType
from pronk.base.convert import to_array
from pronk.checkpoint import load_decoder
from pronk.drafting import Sampler
from pronk.gpu.chains import MAX_FIRST_ROWS, Chains, split_jobs
from pronk.gpu.choose import Noise, choose, noise_of
from pronk.gpu.graphs import GraphClock
from pronk.gpu.head import GpuHead
from pronk.gpu.layout import RowLayout, is_walked, layout_of, measure, pack_layout
from pronk.gpu.model import GpuModel, ModelOutput, check_supported, load_model
from pronk.gpu.pool import GpuPool
from pronk.gpu.steps import StepOutput, Steps
from pronk.gpu.walk import NOT_FINITE, verified_paths, walk
from pronk.gpu.weights import gpu_linear


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
    """Runs layers on the device, without a graph."""

    def __init__(self, decoder: Decoder, model: GpuModel, clock: GraphClock) -> None:
        super().__init__(decoder, model.pool)
        self.model = model
        self.chains = Chains(
            model.pool,
            self._forward_tokens,
            model.reserve_positions,
            lambda: model.version,
            clock,
        )

    def _forward_tokens(
        self, layout: RowLayout, features: Tensor | None, rows: Tensor
    ) -> tuple[None, Tensor]:
        """Run rows of a draft model, which reads no features; see :mod:`pronk.gpu.chains`."""
        assert features is None, "expected a model that reads tokens alone"
        output = self.model.forward(
            layout, num_layers=self.model.config.num_layers, logits_rows=rows
        )
        assert output.logits is not None
        return None, output.logits

    def run(
        self, batch: ForwardBatch, num_layers: int, collect: Sequence[int] = ()
    ) -> LayersResult:
        """Implement :meth:`LayerExecutor.run`."""
        has_logits = num_layers == self.model.config.num_layers and len(batch.logits_rows) > 0
        layout = self.make_layout(batch)
        layers = frozenset(collect)
        output = self.run_rows(batch, layout, num_layers, layers, has_logits=has_logits)
        logits = None if output.logits is None else to_array(output.logits)
        return LayersResult(_hidden_arrays(output, batch), logits, None)

    def make_layout(self, batch: ForwardBatch) -> RowLayout:
        """Return the layout of any number of rows."""
        pool = self.model.pool
        size = measure(batch, pool)
        self.model.reserve_positions(size.pages * pool.block_size)
        numbers = torch.from_numpy(pack_layout(batch, pool, size, pool.free_slot))
        on_device = numbers.to(self.model.device)
        return layout_of(on_device, size, pool.block_size, batch.num_positions - 1)

    def draft_chains(self, jobs: Sequence[ChainJob]) -> list[int]:
        """Implement :meth:`ModelRunner.draft_chains` by one graph."""
        early, jobs = split_jobs(jobs)
        if early:
            self.run(ForwardBatch(early), self.model.config.num_layers)
        return self.chains.draft(jobs)

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


class GpuRunner(ModelRunner):
    """Runs a model on a GPU: steps of few rows by captured graphs, prompts without.

    The device verifies the token trees of requests whose options allow it; logits are copied to the
    host where other options read them.
    """

    max_chains = MAX_FIRST_ROWS

    def __init__(
        self,
        decoder: Decoder,
        model: GpuModel,
        *,
        clock: GraphClock | None = None,
    ) -> None:
        """Create a runner.

        Args:
            decoder: the model, packed for the CPU, which drafters read.
            model: the model on the device.
            clock: measures durations, without recordings of graphs; by default a new one.
        """
        self._graph_clock = clock or GraphClock()
        self.device_executor = GpuExecutor(decoder, model, self._graph_clock)
        super().__init__(
            decoder, model.pool, executor=self.device_executor, clock=self._graph_clock
        )
        self.steps = Steps(model, self._graph_clock)

    def supports_draft_chain(self, sampler: Sampler) -> bool:
        return sampler.stateless_sampler is not None

    def draft_pool(self, config: ModelConfig) -> Callable[..., PagedCache]:
        device = self.steps.model.device
        check_supported(config, str(device))
        return partial(GpuPool, device=device)

    def load_draft_model(
        self, folder: Path, cache: PagedCache, dtype: DType, weights: str
    ) -> ModelRunner:
        assert isinstance(cache, GpuPool), "expected the pool of this device"
        kernels = self.decoder.kernels
        decoder = load_decoder(folder, cache.config, dtype=dtype, kernels=kernels, weights=weights)
        on_device = load_model(folder, cache, kernels, weights)
        return GpuRunner(decoder, on_device, clock=self._graph_clock)

    def forward(self, batch: ForwardBatch, collect: frozenset[int] = frozenset()) -> ForwardResult:
        start_time = self.clock()
        walks = any(map(is_walked, batch.entries))
        # rows of the step's logits that the batch asks for
        rows: Sequence[int] = batch.logits_rows
        step = self.steps.run(batch, collect, partial(_noise_of_rows, batch) if walks else None)
        if step is None:
            step = self._run_large(batch, collect, walks=walks)
            rows = range(len(rows))
        hidden = _hidden_arrays(step.output, batch)
        logits = step.output.logits
        if logits is None:
            logits = torch.empty(0, self.decoder.config.vocab_size)
        walked = None if step.walked is None else step.walked.tolist()
        wait_for_device(self.steps.model.device)
        seconds = self.clock() - start_time
        return ForwardResult(
            _split_logits(logits, rows, batch.logits_counts),
            {layer: batch.split_rows(rows) for layer, rows in hidden.items()},
            seconds,
            paths=None if walked is None else verified_paths(batch, walked),
        )

    @property
    def module_decoder(self) -> Decoder:
        return self.steps.model.decoder

    def module_weights(self, weights: str) -> LinearFactory:
        pool = self.steps.model.pool
        linear: Any = gpu_linear(self.decoder.kernels, weights, pool.dtype, pool.device)
        factory: LinearFactory = linear
        return factory

    def open_head(
        self,
        head: Decoder,
        compile_pass: Callable[..., None],
        cache: PagedCache,
        ids: Array | None,
    ) -> HeadRunner:
        return GpuHead(head, compile_pass, cache, ids, self.steps.model, self._graph_clock)

    def _run_large(self, batch: ForwardBatch, layers: frozenset[int], *, walks: bool) -> StepOutput:
        """Run a batch without a graph, as a step whose logits are those of ``batch.logits_rows``.

        Chunks of prompts have many rows, and logits of few of them.
        """
        executor = self.device_executor
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


def wait_for_device(device: torch.device) -> None:
    """Wait for the end of all launched kernels; a launch itself returns at once."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _hidden_arrays(output: ModelOutput, batch: ForwardBatch) -> dict[int, Array]:
    """Return the outputs of layers, ``[rows, hidden]``, without unused rows."""
    return {layer: to_array(rows[: batch.num_rows]) for layer, rows in output.hidden.items()}


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
