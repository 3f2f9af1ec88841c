"""A process that computes shares of another one's passes."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pronk.architecture.config import ModelConfig
from pronk.execution.model_runner import ModelRunner
from pronk.kernels.threads import lend_threads
from pronk.kv_cache.budget import BLOCK_SIZE
from pronk.kv_cache.paged import PagedCache
from pronk.models.decoder import Decoder
from pronk.models.fingerprint import Fingerprint
from pronk.models.kernels import choose_kernels
from pronk.models.loader import computed_in, load_decoder, read_config
from pronk.models.split import TensorSplit
from pronk.parallel.connection import ConnectionLostError, MessageKind, PeerConnection, PeerMessage, open_store
from pronk.parallel.split_cache import SplitCache
from pronk.parallel.tensor import AllReduceGroup, TensorParallelExecutor, serve_stages
from pronk.parallel.work_request import WorkRequest, WorkRows

__all__ = ["WorkerLoop", "WorkerSettings", "identity", "loaded_key", "serve"]


class WorkerSettings(dict[str, Any]):
    """What a worker is to load, as JSON.

    ``model``, ``dtype``, ``weights``, ``kernels``, ``kv_dtype``, ``threads``; ``parallel``: ``"tree"`` or ``"tensor"``;
    ``workers``.
    """

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        found: torch.dtype = getattr(torch, self["dtype"])
        return found

    def split(self, rank: int, config: ModelConfig) -> TensorSplit | None:
        """The part of a worker, if not every one has the whole model.

        Raises:
            OptionError: see :class:`~pronk.models.split.TensorSplit`.
        """
        return TensorSplit(config, rank, self["workers"]) if self["parallel"] == "tensor" else None

    def load(self, rank: int) -> WorkerModel:
        """The model, with a pool of one block until the other process says how large it is.

        Raises:
            PronkError: it cannot be loaded.
        """
        folder, device = Path(self["model"]), torch.device("cpu")
        config = read_config(folder)
        split = self.split(rank, config)
        kernels = choose_kernels(self["kernels"], device, config)
        decoder = load_decoder(
            folder, config, dtype=self.dtype, device=device, kernels=kernels, weights=self["weights"], split=split
        )
        cache = (PagedCache if split is None else SplitCache)(
            config if split is None else split.share,
            num_blocks=1,
            block_size=BLOCK_SIZE,
            dtype=computed_in(self.dtype, kernels),
            kv_dtype=torch.int8 if self["kv_dtype"] == "int8" else None,
            device=device,
            kernels=kernels,
        )
        return WorkerModel(decoder, cache, split)


class WorkerModel(NamedTuple):
    """A worker's model.

    Attributes:
        decoder: all of it or a part.
        cache: for its keys and values.
        split: which part it is.
    """

    decoder: Decoder
    cache: PagedCache
    split: TensorSplit | None


class _Owner:
    """Of a layer's outputs that are kept."""


class WorkerLoop:
    """The loop of a worker."""

    def __init__(self, peer: PeerConnection, runner: ModelRunner) -> None:
        """``runner`` has the whole model; ``peer`` gives the work."""
        self.peer, self.runner, self.cache = peer, runner, runner.cache
        self._owners: dict[int, _Owner] = {}
        self._turn, self._logits = 0, list[Tensor]()

    def run(self) -> None:
        """Until the other process says so, or is gone."""
        while True:
            message = self.peer.receive()
            if message.kind == MessageKind.STOP:
                return
            try:
                self._answer(message)
            except ConnectionLostError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever it is, the other process has to hear of it
                self.peer.send(MessageKind.FAILED, data=f"{type(error).__name__}: {error}".encode())

    def _answer(self, message: PeerMessage) -> None:
        if message.kind == MessageKind.WORK:
            self._work(WorkRequest.read(message.numbers, message.data))
        elif message.kind == MessageKind.ROWS:
            turn, *slots = message.numbers.tolist()
            self.peer.send(MessageKind.ROWS, [turn], self.cache.take(np.array(slots, np.int64)).flatten())
        elif message.kind == MessageKind.LOGITS:
            turn, of, piece, *places = message.numbers.tolist()
            if of != self._turn:
                msg = f"expected to be asked for logits of pass {self._turn}, found {of}"
                raise ValueError(msg)
            self.peer.send(MessageKind.LOGITS, [turn], _bytes(self._logits[piece][places].float()))
        elif message.kind == MessageKind.POOL:
            turn, blocks, *layers = message.numbers.tolist()
            self._resize(blocks, layers)
            self.peer.send(MessageKind.DONE, [turn])
        else:
            msg = f"expected work, found {message.kind.name}"
            raise ValueError(msg)

    def _resize(self, blocks: int, layers: Sequence[int]) -> None:
        """A pool of so many blocks, which keeps these layers' outputs and no others."""
        self._owners = {layer: _Owner() for layer in layers}
        for layer, owner in self._owners.items():
            self.cache.keep_hidden(layer, owner)
        self.cache.forget_hidden()
        self.cache.resize(blocks)

    def _work(self, work: WorkRequest) -> None:
        if work.moves:
            source, target = np.array(work.moves, np.int64).T
            self.cache.move(source, target)
        if work.slots is not None and work.kept is not None:
            self.cache.put(work.slots, work.kept)
        self._logits.clear()  # the last pass's, before there are those of the next one
        result = self.runner.forward([rows.job for rows in work.rows], work.collect)
        self._turn, self._logits = work.turn, [logits[:] for logits in result.logits]
        parts = [logits for rows, logits in zip(work.rows, self._logits, strict=True) if rows.job.whole]
        for layer in sorted(work.collect):
            made = result.hidden[layer]
            parts += [made[number][rows.own :] for number, rows in enumerate(work.rows)]
        chosen = [t for rows, logits in zip(work.rows, self._logits, strict=True) for t in self._choose(rows, logits)]
        said = [work.turn, round(1e9 * result.seconds), result.context, *chosen]
        self.peer.send(MessageKind.DONE, said, torch.cat([_bytes(part) for part in parts]) if parts else b"")

    def _choose(self, rows: WorkRows, logits: Tensor) -> list[int]:
        """The tokens after a request's wanted nodes, where they can be chosen here."""
        job, kernels = rows.job, self.runner.decoder.kernels
        if job.stateless_sampler is None or kernels is None:
            return []
        first, depths = job.segment.block_table.length + 1, job.segment.tree.depths
        places = [first + depths[node] for node in job.wanted]
        return [job.stateless_sampler.choose(kernels, row, place) for row, place in zip(logits, places, strict=True)]


def _bytes(part: Tensor) -> Tensor:
    return part.contiguous().view(-1).view(torch.uint8)


def serve(store: Any, rank: int, setting: WorkerSettings, patience: float) -> None:
    """Load the model, say who one is, and compute, until the other process is gone, or says so.

    Args:
        store: where processes find each other.
        rank: from 1 on.
        setting: what to load.
        patience: seconds to wait for the other process.

    Raises:
        ConnectionLostError: the other process does not come.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is for the other process
    torch.set_num_threads(setting["threads"])
    cause = b""
    try:
        loaded = setting.load(rank)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other process has to hear of it
        said = str(error).strip().splitlines()
        cause = (said[0] if said else type(error).__name__).encode()
    store.set(loaded_key(rank), b"")
    peer = PeerConnection(store, rank, driver=False, patience=patience)
    if cause:
        peer.send(MessageKind.FAILED, data=cause)
        return
    mine = identity(loaded.decoder, loaded.cache, setting)
    with suppress(ConnectionLostError):
        peer.send(MessageKind.HELLO, data=json.dumps(mine).encode())
        _compute(peer, loaded, store, patience)


def loaded_key(rank: int) -> str:
    """What of the store says that a worker has loaded its model, or cannot."""
    return f"pronk/loaded/{rank}"


def _compute(peer: PeerConnection, loaded: WorkerModel, store: Any, patience: float) -> None:
    """What is asked for, until the other process is gone."""
    decoder, cache, split = loaded
    if split is None:
        lend_threads()
        WorkerLoop(peer, ModelRunner(decoder, cache)).run()
        return
    assert decoder.kernels is not None, "expected kernels, found none"
    assert isinstance(cache, SplitCache), "expected a pool of some heads, found another"
    everybody = AllReduceGroup(store, split.rank, split.workers, patience=patience)
    lend_threads()
    serve_stages(peer, TensorParallelExecutor(decoder.kernels, decoder, cache, split, everybody))


def identity(decoder: Decoder, cache: PagedCache, setting: WorkerSettings) -> dict[str, str]:
    """What has to be the same in all workers."""
    from pronk import __version__  # noqa: PLC0415 - the package is above its rooms

    kernels = decoder.kernels
    return {
        "version": __version__,
        "model": str(Fingerprint.of(Path(setting["model"]))),
        "config": read_config(Path(setting["model"])).digest,
        "weights": setting["weights"],
        "kernels": "torch" if kernels is None else kernels.name,
        "dtype": f"{cache.dtype}, {cache.kv_dtype}",
        "parallel": setting["parallel"],
    }


def main() -> None:
    """What the other process starts: the address of its store and a rank."""
    host, port, rank, world, patience = sys.argv[1:6]

    def watch() -> None:
        # Ends with the other process, however that ends. Python's own stdin has a lock, which would outlive this.
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        store = open_store(host, int(port), int(world), master=False, patience=float(patience))
        serve(store, int(rank), WorkerSettings(json.loads(store.get("pronk/setting"))), float(patience))
    except (ConnectionLostError, RuntimeError) as error:
        sys.exit(f"pronk: {error}")


if __name__ == "__main__":
    main()
