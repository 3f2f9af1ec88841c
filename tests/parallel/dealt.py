"""Tree parallelism with random partitions of the trees, and with threads instead of worker
processes.
"""

import random
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import pairwise
from queue import SimpleQueue as Messages
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pronk.base.arrays import DType
from pronk.base.errors import ConnectionLostError
from pronk.cache.paged import PagedCache
from pronk.engine.engine import Engine
from pronk.models.decoder import Decoder
from pronk.models.model_runner import ModelRunner
from pronk.parallel import connection, runner, tree_partition
from pronk.parallel.connection import MessageKind, PeerConnection
from pronk.parallel.mirrored_cache import MirroredCache
from pronk.parallel.runner import TreeRunner, WorkerHandle
from pronk.parallel.tree_partition import ProcessShard
from pronk.parallel.worker import WorkerLoop
from pronk.sampling.tree import TokenTree
from tiny_models import make_cache, make_engine
from waiting import HUNG

__all__ = ["partition_randomly", "thread_groups", "tree_parallel_engine"]


class RandomPartition:
    """Replace ``partition_trees``: cut the sequence of all nodes at random places, for any
    costs.
    """

    def __init__(self) -> None:
        self.dice = random.Random(0)

    def __call__(
        self, trees: Sequence[TokenTree], costs: Sequence[Any], extra: Sequence[float] | None = None
    ) -> list[ProcessShard]:
        nodes = tree_partition._NodeSequence(trees)
        cuts = sorted(self.dice.randint(1, len(nodes)) for _ in range(len(costs) - 1))
        return [nodes.shard(begin, end) for begin, end in pairwise([0, *cuts, len(nodes)])]


def partition_randomly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Partition trees at random; send or recompute at random the KV rows that a worker lacks."""
    partition = RandomPartition()
    monkeypatch.setattr(runner, "partition_trees", partition)
    monkeypatch.setattr(
        WorkerHandle, "seconds_per_byte", property(lambda _: partition.dice.choice((0.0, 1.0)))
    )


class Exchange:
    """A message that :meth:`wait` sends or receives."""

    def __init__(self, exchange: Callable[[float], None]) -> None:
        self.exchange = exchange

    def wait(self, timeout: timedelta) -> None:
        self.exchange(timeout.total_seconds())


class ThreadGroup:
    """What :class:`PeerConnection` uses of a gloo group of two processes, here for two threads.

    Its messages take microseconds. Those of gloo take milliseconds, in which threads wait for the
    interpreter's lock; the tests with worker processes use gloo.
    """

    def __init__(self, inbox: Messages, outbox: Messages) -> None:
        self.inbox = inbox
        self.outbox = outbox

    def send(self, tensors: Sequence[torch.Tensor], rank: int, tag: int) -> Exchange:
        (sent,) = tensors
        return Exchange(lambda _: self.outbox.put(sent.clone()))

    def recv(self, tensors: Sequence[torch.Tensor], rank: int, tag: int) -> Exchange:
        (target,) = tensors

        def receive(seconds: float) -> None:
            message = self.inbox.get(timeout=min(seconds, HUNG))
            assert message.shape == target.shape
            target.copy_(message)

        return Exchange(receive)


@contextmanager
def thread_groups(workers: int) -> Generator[None]:
    """Connect the driver and its workers, which are threads, by :class:`ThreadGroup`."""
    queues = {str(rank): (Messages(), Messages()) for rank in range(1, workers)}

    def open_group(_: object, name: str, rank: int, *__: object, timeout: float) -> ThreadGroup:
        to_driver, to_worker = queues[name]
        return ThreadGroup(to_driver, to_worker) if rank == 0 else ThreadGroup(to_worker, to_driver)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection, "open_group", open_group)
        yield


@contextmanager
def tree_parallel_engine(
    decoder: Decoder, workers: int, *, kv_dtype: DType | None = None, **options: Any
) -> Generator[Engine]:
    """Yield an engine under tree parallelism of ``workers`` threads, the driver included."""
    store = dist.HashStore()
    dtype = decoder.embedding.dtype

    def work(rank: int) -> None:
        peer = PeerConnection(store, rank, driver=False, timeout=HUNG)
        cache = make_cache(decoder.config, dtype, num_blocks=1, kv_dtype=kv_dtype)
        with suppress(ConnectionLostError):
            WorkerLoop(peer, ModelRunner(decoder, cache)).run()

    def make_runner(decoder: Decoder, cache: PagedCache) -> ModelRunner:
        assert isinstance(cache, MirroredCache)
        return TreeRunner(decoder, cache, peers, lambda _: True, lambda _: None)

    with thread_groups(workers), ThreadPoolExecutor(workers) as threads:
        others = [threads.submit(work, rank) for rank in range(1, workers)]
        peers = [
            PeerConnection(store, rank, driver=True, timeout=HUNG) for rank in range(1, workers)
        ]
        try:
            yield make_engine(
                decoder, kind=MirroredCache, runner=make_runner, kv_dtype=kv_dtype, **options
            )
        finally:
            for peer in peers:
                peer.send(MessageKind.STOP)
        for other in others:
            other.result()
