"""Trees dealt by chance, to threads in the place of processes: what these tell each other is the same."""

import random
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pronk.engine.engine import Engine
from pronk.execution.model_runner import ModelRunner
from pronk.kv_cache.paged import PagedCache
from pronk.models.decoder import Decoder
from pronk.parallel import runner, tree_partition
from pronk.parallel.connection import ConnectionLostError, MessageKind, PeerConnection
from pronk.parallel.mirrored_cache import MirroredCache
from pronk.parallel.runner import TreeRunner
from pronk.parallel.tree_partition import WorkerShare
from pronk.parallel.worker import WorkerLoop
from pronk.parallel.worker_handle import WorkerHandle
from pronk.speculation.tree import TokenTree
from tiny_models import make_cache, make_engine

__all__ = ["deal_by_chance", "dealt"]


class Dealer:
    """Deals at random, so that everybody has something of everything sooner or later."""

    def __init__(self) -> None:
        self.dice = random.Random(0)

    def __call__(
        self, trees: Sequence[TokenTree], costs: Sequence[Any], extra: Sequence[float] | None = None
    ) -> list[WorkerShare]:
        row = tree_partition._NodeSequence(trees)
        cuts = sorted(self.dice.randint(1, len(row)) for _ in range(len(costs) - 1))
        return [row.share(begin, end) for begin, end in pairwise([0, *cuts, len(row)])]


def deal_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who computes what is chance, and whether what a worker lacks is sent or computed again."""
    dealer = Dealer()
    monkeypatch.setattr(runner, "partition_trees", dealer)
    monkeypatch.setattr(WorkerHandle, "seconds_per_byte", property(lambda _: dealer.dice.choice((0.0, 1.0))))


@contextmanager
def dealt(decoder: Decoder, workers: int, *, kv_dtype: torch.dtype | None = None, **options: Any) -> Generator[Engine]:
    """An engine whose other workers are threads."""
    store = dist.HashStore()
    packed, dtype = decoder.kernels is not None, decoder.embedding.dtype

    def work(rank: int) -> None:
        peer = PeerConnection(store, rank, driver=False, timeout=60.0)
        pool = make_cache(decoder.config, dtype, num_blocks=1, packed=packed, kv_dtype=kv_dtype)
        with suppress(ConnectionLostError):
            WorkerLoop(peer, ModelRunner(decoder, pool)).run()

    def made(decoder: Decoder, cache: PagedCache) -> ModelRunner:
        assert isinstance(cache, MirroredCache)
        return TreeRunner(decoder, cache, peers, lambda _: True, lambda _: None)

    with ThreadPoolExecutor(workers) as pool:
        others = [pool.submit(work, rank) for rank in range(1, workers)]
        peers = [PeerConnection(store, rank, driver=True, timeout=60.0) for rank in range(1, workers)]
        try:
            yield make_engine(decoder, kind=MirroredCache, runner=made, kv_dtype=kv_dtype, **options)
        finally:
            for peer in peers:
                peer.send(MessageKind.STOP)
        for other in others:
            other.result()
