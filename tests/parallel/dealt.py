"""Tree parallelism with random partitions of the trees, and with threads instead of worker processes."""

import random
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any

import pytest
import torch.distributed as dist

from pronk.arrays import DType
from pronk.engine.engine import Engine
from pronk.errors import ConnectionLostError
from pronk.execution.model_runner import ModelRunner
from pronk.kv_cache.paged import PagedCache
from pronk.models.decoder import Decoder
from pronk.parallel import runner, tree_partition
from pronk.parallel.connection import MessageKind, PeerConnection
from pronk.parallel.mirrored_cache import MirroredCache
from pronk.parallel.runner import TreeRunner, WorkerHandle
from pronk.parallel.tree_partition import ProcessShard
from pronk.parallel.worker import WorkerLoop
from pronk.speculation.tree import TokenTree
from tiny_models import make_cache, make_engine
from waiting import HUNG

__all__ = ["partition_randomly", "tree_parallel_engine"]


class RandomPartition:
    """Replace ``partition_trees``: cut the sequence of all nodes at random places, for any costs."""

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
    monkeypatch.setattr(WorkerHandle, "seconds_per_byte", property(lambda _: partition.dice.choice((0.0, 1.0))))


@contextmanager
def tree_parallel_engine(
    decoder: Decoder, workers: int, *, kv_dtype: DType | None = None, **options: Any
) -> Generator[Engine]:
    """Yield an engine under tree parallelism of ``workers`` threads, the driver included."""
    store = dist.HashStore()
    packed, dtype = decoder.backend.exact, decoder.embedding.dtype

    def work(rank: int) -> None:
        peer = PeerConnection(store, rank, driver=False, timeout=HUNG)
        cache = make_cache(decoder.config, dtype, num_blocks=1, packed=packed, kv_dtype=kv_dtype)
        with suppress(ConnectionLostError):
            WorkerLoop(peer, ModelRunner(decoder, cache)).run()

    def make_runner(decoder: Decoder, cache: PagedCache) -> ModelRunner:
        assert isinstance(cache, MirroredCache)
        return TreeRunner(decoder, cache, peers, lambda _: True, lambda _: None)

    with ThreadPoolExecutor(workers) as threads:
        others = [threads.submit(work, rank) for rank in range(1, workers)]
        peers = [PeerConnection(store, rank, driver=True, timeout=HUNG) for rank in range(1, workers)]
        try:
            yield make_engine(decoder, kind=MirroredCache, runner=make_runner, kv_dtype=kv_dtype, **options)
        finally:
            for peer in peers:
                peer.send(MessageKind.STOP)
        for other in others:
            other.result()
