"""Tensor parallelism: each process computes some heads and MLP columns; an all-reduce adds results.

Sums are in the order of ranks, independent of timing and of the number of rows. Therefore the bits
of a row depend only on the row's token, the tokens before it and the number of processes:
speculation does not change them. A single process sums in another order, so that its logits differ
in the last digits.

All processes have the hidden states of all rows. Each computes a layer in four steps:

1. the norm, and the attention of its own heads,
2. an all-reduce, and the residual,
3. the norm, and its own MLP columns,
4. an all-reduce, and the residual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pronk.backends import (
    Decoder,
    ForwardBatch,
    LayerExecutor,
    LayersProgram,
    LayersResult,
    Linear,
    LinearOutput,
    PagedCache,
    Program,
    TensorSplit,
)
from pronk.base import ConnectionLostError, describe_error, uninterrupted
from pronk.base.arrays import FLOAT32, Array
from pronk.parallel.connection import MessageKind, PeerConnection, detect_loss, open_group
from pronk.parallel.wire_format import LayerCommand, Moves

# Seconds to wait for the other processes in an all-reduce, or in the transfer of logits.
_TIMEOUT = 20.0
# Name in errors, because an all-reduce does not tell which process is lost.
_ANY_PROCESS = "one of the processes of the model"
_ERROR_TIMEOUT = 0.5  # seconds to wait for a worker's error message after a failure of any process


class SplitCache(PagedCache):
    """The KV pool of the heads of one process.

    A token has the same slot in the pools of all processes.
    """

    can_compute_features = False

    def __init__(self, *args: Any, **options: Any) -> None:
        # Number of resizes, which each command contains: a worker that receives another number
        # than before resizes its own pool.
        self.num_resizes = 0
        # In the driver: copies of KV slots that the workers must repeat before they compute more
        # layers.
        self.moves = list[Moves]()
        super().__init__(*args, **options)

    def resize(self, num_blocks: int) -> None:
        """Resize the pool; after the driver's next command, each worker resizes its own pool."""
        self.num_resizes = self.num_resizes + 1
        self.moves = []
        super().resize(num_blocks)

    def move(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """Copy slots of the pool; after the driver's next command, each worker copies them, too."""
        self.moves.append((source, target))
        super().move(source, target)

    def _copy(self, old: int, new: int) -> None:
        super()._copy(old, new)
        offsets = np.arange(self.block_size, dtype=np.int64)
        self.moves.append((old * self.block_size + offsets, new * self.block_size + offsets))


class AllReduceGroup:
    """All-reduce over all processes of a model, with a fixed order of summation.

    Attributes:
        rank: rank of this process.
        workers: number of processes.
        communication_seconds: total time of communication, with the waiting for other processes.
    """

    def __init__(self, store: Any, rank: int, workers: int, *, timeout: float) -> None:
        """Connect to all processes.

        Raises:
            ConnectionLostError: a process does not join within ``timeout`` seconds.
        """
        self.rank = rank
        self.workers = workers
        self.communication_seconds = 0.0
        with detect_loss(_ANY_PROCESS):
            self._group = open_group(store, "all", rank, workers, timeout=timeout)

    def sum(self, partial: Array) -> Array:
        """Return the sum of the float32 arrays of all processes, added in the order of ranks.

        Raises:
            ConnectionLostError: a process has ended or does not answer.
        """
        partials = [np.empty_like(partial) for _ in range(self.workers)]
        tensors = [torch.from_numpy(array) for array in partials]
        self._wait(lambda: self._group.allgather([tensors], [torch.from_numpy(partial)]))
        total = partials[0]
        for rank_partial in partials[1:]:
            total += rank_partial
        return total

    def send(self, array: Array) -> None:
        """Send a float32 array to rank 0; raise the errors of :meth:`sum`."""
        self._wait(lambda: self._group.send([torch.from_numpy(array)], 0, 0))

    def receive(self, rank: int, array: Array) -> None:
        """Receive a float32 array from ``rank`` into ``array``; raise the errors of :meth:`sum`."""
        self._wait(lambda: self._group.recv([torch.from_numpy(array)], rank, 0))

    def close(self) -> None:
        """Close the connections for good, so that processes waiting for this one fail at once."""
        del self._group

    def _wait(self, start_operation: Callable[[], Any]) -> None:
        start_time = perf_counter()
        with detect_loss(_ANY_PROCESS):
            start_operation().wait(timedelta(seconds=_TIMEOUT))
        self.communication_seconds += perf_counter() - start_time


class TensorParallelExecutor(LayerExecutor):
    """Executor that computes the heads and MLP columns of this process in each layer.

    ``peers`` are the driver's connections to the workers; a worker has none. ``on_lost`` is called
    after the first failure of a process, which makes the executor unusable.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: SplitCache,
        split: TensorSplit,
        all_reduce: AllReduceGroup,
        *,
        peers: Sequence[PeerConnection] = (),
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(decoder, cache)
        self.split_cache = cache
        self.split = split
        self.all_reduce = all_reduce
        self._peers = peers
        self._on_lost = on_lost
        self._error: ConnectionLostError | None = None

    @property
    def is_usable(self) -> bool:  # type: ignore[override]
        """Whether no process of the model has failed."""
        return self._error is None

    def run(
        self, batch: ForwardBatch, num_layers: int, collect: Sequence[int] = ()
    ) -> LayersResult:
        """Run the first layers, as :meth:`LayerExecutor.run` does, together with the workers.

        Raises:
            ConnectionLostError: a process is lost, in this call or in an earlier one.
        """
        if self._error is not None:
            raise self._error.with_traceback(None)
        try:
            # An interrupt in the middle would leave the workers waiting for this process.
            with uninterrupted():
                start_time = perf_counter()
                seconds_before = self.all_reduce.communication_seconds
                self._send_command(batch, num_layers)
                self.communication_seconds += perf_counter() - start_time
                result = self._run(batch, num_layers, collect)
                self.communication_seconds += self.all_reduce.communication_seconds - seconds_before
                return result
        except Exception as error:
            cause = "; ".join([*self._worker_errors(), str(error)])
            self._error = ConnectionLostError(f"{cause}; load the model again")
            self._on_lost()
            raise self._error from error

    def _worker_errors(self) -> list[str]:
        errors = list[str]()
        for peer in self._peers:
            with suppress(ConnectionLostError):
                message = peer.receive(_ERROR_TIMEOUT)
                if message.kind == MessageKind.FAILED:
                    errors.append(f"worker {peer.rank} has failed: {message.text}")
        return errors

    def _send_command(self, batch: ForwardBatch, num_layers: int) -> None:
        if not self._peers:
            return
        cache = self.split_cache
        moves = cache.moves
        cache.moves = []
        pool = cache.num_resizes, cache.allocator.num_blocks
        values = LayerCommand(pool, moves, batch.entries, num_layers).serialize()
        for peer in self._peers:
            peer.send(MessageKind.WORK, values)

    def _run(self, batch: ForwardBatch, num_layers: int, collect: Sequence[int]) -> LayersResult:
        size = self.decoder.config.hidden_size
        states = np.empty((batch.num_rows, size), self.cache.dtype)
        self._stage_program("embed").run(batch, states)
        collected = dict[int, Array]()
        for index in range(num_layers):
            for half in ("attention", "mlp"):
                partial = np.empty((batch.num_rows, size), FLOAT32)
                self._stage_program(half, index).run(batch, states, partial)
                states[:] = self.all_reduce.sum(partial) + states.astype(FLOAT32, copy=False)
            if index + 1 in self.cache.features:
                self._stage_program("keep", index).run(batch, states)
            if index + 1 in collect:
                collected[index + 1] = states.copy()
        if num_layers < len(self.decoder.layers):
            return LayersResult(collected, None, None)
        num_rows = len(batch.logits_rows)
        own_tokens = self.split.tokens(self.split.rank)
        own_logits = np.empty((num_rows, len(own_tokens)), FLOAT32)
        if len(own_logits):
            self._stage_program("head").run(batch, states, own_logits)
        return LayersResult(collected, self._gather_logits(own_logits), None)

    def _gather_logits(self, own_logits: Array) -> Array:
        """Collect the logits of all processes in rank 0, float32 ``[rows, vocab]``.

        Other ranks send their ``own_logits`` ``[rows, own tokens]``, and return them.
        """
        all_reduce = self.all_reduce
        split = self.split
        if split.rank:
            if len(own_logits):
                all_reduce.send(own_logits)
            return own_logits
        logits = np.empty((len(own_logits), split.config.vocab_size), FLOAT32)
        for rank in range(split.workers if len(own_logits) else 0):
            tokens = split.tokens(rank)
            rank_logits = (
                own_logits if rank == 0 else np.empty((len(own_logits), len(tokens)), FLOAT32)
            )
            if rank and tokens:
                all_reduce.receive(rank, rank_logits)
            logits[:, tokens.start : tokens.stop] = rank_logits
        return logits

    def _stage_program(self, stage: str, index: int = 0) -> Program:
        """Return the cached program of a stage of the forward pass.

        ``stage`` is ``embed`` (the token embeddings), ``attention`` or ``mlp`` (the halves of a
        layer), ``keep`` (saves the output of a layer as a feature) or ``head`` (the logits).
        ``index`` is the number of the layer, from 0.
        """

        def make() -> LayersProgram:
            decoder = self.decoder
            hidden = decoder.config.hidden_size
            program = Program(decoder.kernels, hidden, self.cache.dtype, self.cache)
            if stage == "embed":
                program.embed(decoder)
            elif stage == "attention":
                program.attention(decoder.layers[index], index, partial=True)
            elif stage == "mlp":
                program.mlp(decoder.layers[index], partial=True)
            elif stage == "keep":
                program.store_feature(index + 1)
            else:
                output = LinearOutput(decoder.config.logits_scale, decoder.config.logits_cap or 0.0)
                program.linear(
                    self._own_head,
                    norm=decoder.norm,
                    to="logits",
                    only_logits_rows=True,
                    output=output,
                )
            return LayersProgram(program)

        return self._cached_program((stage, index), make).program

    @cached_property
    def _own_head(self) -> Linear:
        head = self.decoder.head
        tokens = self.split.tokens(self.split.rank)
        whole = head.out_features == self.split.config.vocab_size
        return head.slice_outputs(tokens.start, tokens.stop) if whole else head


def serve_layer_commands(peer: PeerConnection, executor: TensorParallelExecutor) -> None:
    """Execute the driver's commands until the driver stops this worker, or an error occurs.

    The error is sent to the driver.

    Raises:
        ConnectionLostError: the driver or another process has ended.
    """
    cache = executor.split_cache
    num_resizes = 0
    try:
        while (message := peer.receive()).kind == MessageKind.WORK:
            command = LayerCommand.parse(message.values)
            if command.pool[0] != num_resizes:
                num_resizes, num_blocks = command.pool
                cache.resize(num_blocks)
            for source, target in command.moves:
                cache.move(source, target)
            cache.moves.clear()
            executor.run(
                ForwardBatch(command.entries), command.num_layers
            )  # sends this worker's logits to rank 0
    except ConnectionLostError:
        raise
    except Exception as error:  # noqa: BLE001 - the driver receives any error
        executor.all_reduce.close()  # so that processes waiting for this one fail at once
        peer.send(
            MessageKind.FAILED, data=f"{type(error).__name__}: {describe_error(error)}".encode()
        )
