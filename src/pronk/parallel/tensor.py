"""Tensor parallelism: every process computes its heads and columns of each layer, and all of them add up.

Sums are in the order of the ranks, whoever is asked first and however many rows there are. So a row's bits depend on
its own text and on the number of processes, and on nothing else: guessing changes nothing. Against one process the
order of the sums is another one, and logits differ in their last digits.

All processes hold the stream of rows, and go through each stage of a pass side by side::

    first       norm, its heads   ┐   + sum   norm, its columns   ┐   + sum   …
    second      norm, its heads   ┘           norm, its columns   ┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cached_property, partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from pronk.execution.forward_job import LayerRange
from pronk.execution.kernel_executor import KernelExecutor
from pronk.interrupts import uninterrupted
from pronk.kernels.library import Kernels
from pronk.kernels.weights import Packed
from pronk.models.decoder import Decoder
from pronk.models.linear import KernelLinear
from pronk.models.program import Program
from pronk.models.split import TensorSplit
from pronk.parallel.connection import ConnectionLostError, MessageKind, PeerConnection, open_group
from pronk.parallel.split_cache import LayerOrder, SplitCache

__all__ = ["AllReduceGroup", "TensorParallelExecutor", "serve_stages"]

# Seconds that one may wait for another within a stage.
_PATIENCE = 20.0
# And for what the other has to say, if nothing has come of that.
_LAST_WORDS = 0.5


class AllReduceGroup:
    """All processes of a model, who add up what each of them has.

    Attributes:
        rank: of this one.
        workers: how many there are.
        waited: seconds that exchanges have taken so far, until all had come included.
    """

    def __init__(self, store: Any, rank: int, workers: int, *, patience: float) -> None:
        """Meet them.

        Raises:
            ConnectionLostError: one does not come within ``patience`` seconds.
        """
        self.rank, self.workers, self.waited = rank, workers, 0.0
        try:
            self._group = open_group(store, "all", rank, workers, patience=patience)
        except RuntimeError as error:
            raise _lost(error) from error

    def sum(self, part: Tensor) -> Tensor:
        """The parts of all, added up in the order of their ranks, float32.

        Raises:
            ConnectionLostError: one is gone, or does not answer.
        """
        parts = [torch.empty_like(part) for _ in range(self.workers)]
        self._wait(lambda: self._group.allgather([parts], [part]))
        total = parts[0]
        for other in parts[1:]:
            total += other
        return total

    def send(self, part: Tensor) -> None:
        """To the first one; errors are those of :meth:`sum`."""
        self._wait(lambda: self._group.send([part], 0, 0))

    def receive(self, rank: int, part: Tensor) -> None:
        """What one :meth:`send` s, into ``part``."""
        self._wait(lambda: self._group.recv([part], rank, 0))

    def leave(self) -> None:
        """Close the connections; whoever waits for this process is told, and nothing can be added up any more."""
        del self._group

    def _wait(self, begin: Callable[[], Any]) -> None:
        began = perf_counter()
        try:
            begin().wait(timedelta(seconds=_PATIENCE))
            self.waited += perf_counter() - began
        except RuntimeError as error:
            raise _lost(error) from error


def _lost(error: Exception) -> ConnectionLostError:
    cause = str(error).splitlines()[0][-160:]
    return ConnectionLostError(f"one of the processes of the model is gone, or does not answer: {cause}")


class TensorParallelExecutor(KernelExecutor):
    """Stages of which this process computes its part.

    Args:
        kernels: who computes.
        decoder: this process's part of the model.
        cache: its heads.
        split: which part it is.
        everybody: who has the others.
        peers: the others, who are told of each stage; where there are none, this process is told.
        lost: called once when one of them is gone.
    """

    def __init__(
        self,
        kernels: Kernels,
        decoder: Decoder,
        cache: SplitCache,
        split: TensorSplit,
        everybody: AllReduceGroup,
        *,
        peers: Sequence[PeerConnection] = (),
        lost: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(kernels, decoder, cache, None)
        self.split_cache, self.split, self.everybody = cache, split, everybody
        self._peers, self._lost = peers, lost
        self._error: ConnectionLostError | None = None

    @property
    def usable(self) -> bool:  # type: ignore[override]
        """Whether all processes are there."""
        return self._error is None

    def run(self, layer_range: LayerRange, rows: Tensor | None) -> tuple[Tensor, dict[int, Tensor], Tensor | None]:
        """Rows ``[rows, hidden]`` through a stage; ``None`` where they begin as embeddings.

        Raises:
            ConnectionLostError: one of the processes is gone; then nothing more can be computed.
        """
        if self._error is not None:
            raise self._error.with_traceback(None)
        try:
            with uninterrupted():  # a stage that others are told of has to be gone through
                began, before = perf_counter(), self.everybody.waited
                self._tell(layer_range, rows)
                self.waited += perf_counter() - began
                result = self._run(layer_range, rows)
                self.waited += self.everybody.waited - before
                return result
        except Exception as error:
            cause = "; ".join([*self._causes(), str(error)])
            self._error = ConnectionLostError(f"{cause}; load the model again")
            self._lost()
            raise self._error from error

    def _causes(self) -> list[str]:
        """What has failed elsewhere, as far as anybody says so."""
        found = list[str]()
        for peer in self._peers:
            with suppress(ConnectionLostError):
                message = peer.receive(_LAST_WORDS)
                if message.kind == MessageKind.FAILED:
                    found.append(f"worker {peer.rank} has failed: {message.text}")
        return found

    def _tell(self, layer_range: LayerRange, rows: Tensor | None) -> None:
        """What the others are to do; what they keep is moved as it was moved here."""
        if not self._peers:
            return
        cache = self.split_cache
        moves, cache.moves = cache.moves, []
        numbers = LayerOrder((cache.sizes, cache.allocator.num_blocks), moves, layer_range, rows is not None).numbers()
        data = torch.empty(0, dtype=torch.uint8) if rows is None else rows.contiguous().view(-1).view(torch.uint8)
        for peer in self._peers:
            peer.send(MessageKind.WORK, numbers, data)

    def _run(self, layer_range: LayerRange, rows: Tensor | None) -> tuple[Tensor, dict[int, Tensor], Tensor | None]:
        packed, size = self._pack(layer_range, embedded=rows is not None), self.decoder.config.hidden_size
        x = torch.empty(packed.count, size, dtype=self.cache.dtype) if rows is None else rows.contiguous()
        if rows is None:
            self._known(("embed",), self._embed).run(packed, x)
        collected = dict[int, Tensor]()
        for index in range(layer_range.start, layer_range.stop):
            for number, half in enumerate((self._attention, self._mlp)):
                part = torch.empty(packed.count, size)
                self._known((number, index), partial(half, index)).run(packed, x, part)
                x.copy_(self.everybody.sum(part).add_(x))
            if index + 1 in self.cache.hidden:
                self._known(("keep", index), partial(self._keep, index + 1)).run(packed, x)
            if index + 1 in layer_range.collect:
                collected[index + 1] = x.clone()
        if layer_range.wanted is None:
            return x, collected, None
        own = torch.empty(packed.want(layer_range.wanted), len(self.split.tokens(self.split.rank)))
        if len(own):
            self._known(("head",), self._head).run(packed, x, own)
        return x, collected, self._together(own)

    def _together(self, own: Tensor) -> Tensor:
        """Logits of all tokens, for the first process; the others have theirs."""
        everybody, split = self.everybody, self.split
        if split.rank:
            if len(own):
                everybody.send(own)
            return own
        logits = torch.empty(len(own), split.config.vocab_size)
        for rank in range(split.workers if len(own) else 0):
            tokens = split.tokens(rank)
            part = own if rank == 0 else torch.empty(len(own), len(tokens))
            if rank and tokens:
                everybody.receive(rank, part)
            logits[:, tokens.start : tokens.stop] = part
        return logits

    def _begin(self) -> Program:
        return Program(self.kernels, self.decoder.config.hidden_size, self.cache.dtype, self.cache)

    def _embed(self) -> Program:
        program = self._begin()
        program.embed(self.decoder)
        return program

    def _attention(self, index: int) -> Program:
        program = self._begin()
        program.attention(self.decoder.layers[index], index, partial=True)
        return program

    def _mlp(self, index: int) -> Program:
        program = self._begin()
        program.mlp(self.decoder.layers[index], partial=True)
        return program

    def _keep(self, layer: int) -> Program:
        program = self._begin()
        program.keep(layer)
        return program

    def _head(self) -> Program:
        program = self._begin()
        program.linear(self._own_head, norm=self.decoder.norm, to="logits", wanted=True)
        return program

    @cached_property
    def _own_head(self) -> Packed:
        head, tokens = self.decoder.head, self.split.tokens(self.split.rank)
        assert isinstance(head, KernelLinear), "expected weights packed for the kernels, found others"
        whole = head.out_features == self.split.config.vocab_size
        return head.packed.part(tokens.start, tokens.stop) if whole else head.packed


def serve_stages(peer: PeerConnection, passes: TensorParallelExecutor) -> None:
    """Compute stages until the first process is gone, or says so, or until something fails.

    Raises:
        ConnectionLostError: it is gone, or another one is.
    """
    cache, number = passes.split_cache, 0
    try:
        while (message := peer.receive()).kind == MessageKind.WORK:
            order = LayerOrder.read(message.numbers)
            if order.size[0] != number:
                number, blocks = order.size
                cache.resize(blocks)
            for source, target in order.moves:
                cache.move(source, target)
            cache.moves.clear()
            size = passes.decoder.config.hidden_size
            passes.run(order.layer_range, message.data.view(cache.dtype).view(-1, size) if order.embedded else None)
    except ConnectionLostError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, the first process has to hear of it
        passes.everybody.leave()  # whoever waits there for this process
        peer.send(MessageKind.FAILED, data=f"{type(error).__name__}: {error}".encode())
