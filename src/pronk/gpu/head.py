"""A drafter's trained head (EAGLE-3, MTP) on a device: the chains of a step are one graph.

The features that a head reads are in the target's pool on the device, where the target's step has
saved them, so that chains need nothing of the host but their rows and noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pronk.backends import ChainJob, Decoder, ForwardBatch, PagedCache, SavedFeature
from pronk.base.arrays import Array
from pronk.base.convert import to_array, to_tensor, torch_dtype
from pronk.drafting import Sampler
from pronk.gpu.chains import MAX_FIRST_ROWS, Chains, split_jobs
from pronk.gpu.graphs import GraphClock, Graphs, Inputs
from pronk.gpu.layout import LayoutSize, RowLayout, layout_of, measure, pack_layout
from pronk.gpu.model import GpuModel, check_supported
from pronk.gpu.pool import GpuPool
from pronk.gpu.program import DeviceProgram, Uploads
from pronk.gpu.rotations import LayerRotations
from pronk.gpu.steps import bucket_of
from pronk.gpu.weights import GpuLinear


class GpuHead:
    """A :class:`~pronk.backends.HeadRunner` on the device of the target.

    Attributes:
        chains: the recorded chains.
        graphs: the recorded passes.
    """

    max_chains = MAX_FIRST_ROWS

    def __init__(
        self,
        head: Decoder,
        compile_pass: Callable[..., None],
        pool: PagedCache,
        ids: Array | None,
        target: GpuModel,
        clock: GraphClock,
    ) -> None:
        """Create a runner.

        Args:
            head: the head, with layers on the device.
            compile_pass: appends the operations of a pass to a program; with ``logits=True`` also
                the LM head of the rows with logits.
            pool: the head's KV pool.
            ids: int32 ``[vocab of the head]``: the target's token of each logit; ``None``: 0, 1, ….
            target: the target on the device.
            clock: stands still while graphs are recorded.

        Raises:
            OptionError: the device does not compute layers of this kind.
        """
        assert isinstance(pool, GpuPool), "expected the pool of this device"
        check_supported(head.config, str(pool.device))
        self._compile_pass = compile_pass
        modules = (head, *head.layers)
        self._linears = [
            each
            for module in modules
            for each in vars(module).values()
            if isinstance(each, GpuLinear)
        ]
        self._pool = pool
        self._target = target
        self._rotations = LayerRotations(pool)
        self._uploads = Uploads(pool.device)
        self._uploads.add(target.decoder.embedding, target.embedding)
        own_ids = None if ids is None else to_tensor(ids).to(pool.device)
        self.chains = Chains(
            pool, self._forward, self._rotations.reserve, self._version, clock, own_ids
        )
        self.graphs = Graphs[tuple[Tensor, Tensor]](pool.device, self._version, clock)

    @property
    def nbytes(self) -> int:
        """Implement :attr:`HeadRunner.nbytes`."""
        return sum(linear.matrix.nbytes for linear in self._linears)

    def supports_draft_chain(self, sampler: Sampler) -> bool:
        """Implement :meth:`HeadRunner.supports_draft_chain`."""
        return sampler.stateless_sampler is not None

    def run(self, batch: ForwardBatch, features: Array) -> tuple[Array, Array]:
        """Implement :meth:`HeadRunner.run`."""
        pool = self._pool
        needed = measure(batch, pool)
        bucket = bucket_of(needed, pool.block_size)
        size = bucket if bucket is not None and self.chains.pads else needed
        self._rotations.reserve(size.pages * pool.block_size)
        has_logits = len(batch.logits_rows) > 0
        rows = np.zeros(size.rows if has_logits else 0, np.int64)
        rows[: len(batch.logits_rows)] = batch.logits_rows
        padded = np.zeros((size.rows, features.shape[1]), features.dtype)
        padded[: len(features)] = features
        numbers = torch.from_numpy(pack_layout(batch, pool, size, pool.free_slot))
        inputs = [numbers, torch.from_numpy(rows), to_tensor(padded)]
        function = partial(self._run_rows, size)
        if bucket is None:
            outputs, logits = function([part.to(pool.device) for part in inputs])
        else:
            outputs, logits = self.graphs.run((size, has_logits), function, inputs)
        return to_array(outputs[: batch.num_rows]), to_array(logits[: len(batch.logits_rows)])

    def draft_chains(
        self, jobs: Sequence[ChainJob], feature: SavedFeature, slots: Sequence[NDArray[np.int64]]
    ) -> list[int]:
        """Implement :meth:`HeadRunner.draft_chains`."""
        pool = self._target.pool.feature_tensor(feature)
        early, rest = split_jobs(jobs)
        num_early = [job.entry.num_computed for job in rest]
        if early:
            rows = [own[:count] for own, count in zip(slots, num_early, strict=True)]
            self.run(ForwardBatch(early), to_array(pool[torch.from_numpy(np.concatenate(rows))]))
        slots = [own[count:] for own, count in zip(slots, num_early, strict=True)]
        return self.chains.draft(rest, pool, slots)

    def _version(self) -> tuple[int, int, int]:
        """Return the versions of the tensors that a recorded pass uses."""
        return self._pool.version, self._rotations.version, self._target.pool.version

    @torch.inference_mode()
    def _run_rows(self, size: LayoutSize, inputs: Inputs) -> tuple[Tensor, Tensor]:
        numbers, rows, features = inputs
        last = size.pages * self._pool.block_size - 1
        layout = layout_of(numbers, size, self._pool.block_size, last)
        program = self._pass(layout, features, rows)
        return program.stream, program.logits

    def _forward(
        self, layout: RowLayout, features: Tensor | None, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run rows and return their outputs and logits; see :mod:`pronk.gpu.chains`."""
        assert features is not None, "expected features of the rows"
        program = self._pass(layout, features, rows)
        return program.stream[rows], program.logits

    def _pass(self, layout: RowLayout, features: Tensor, rows: Tensor) -> DeviceProgram:
        program = DeviceProgram(
            self._uploads,
            self._pool,
            layout,
            features.to(torch_dtype(self._pool.dtype)),
            rotations=self._rotations,
            logits_rows=rows,
        )
        self._compile_pass(program, logits=len(rows) > 0)
        return program
