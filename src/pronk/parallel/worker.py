"""The worker process: loads a model or shard and computes a part of the driver's forward passes."""

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
from pronk.kernels.threads import dedicate_threads
from pronk.kv_cache.budget import BLOCK_SIZE
from pronk.kv_cache.paged import PagedCache
from pronk.models.decoder import Decoder
from pronk.models.fingerprint import Fingerprint
from pronk.models.kernels import choose_kernels
from pronk.models.loader import compute_dtype, load_decoder, read_config
from pronk.models.split import TensorSplit
from pronk.parallel.connection import ConnectionLostError, MessageKind, PeerConnection, PeerMessage, open_store
from pronk.parallel.split_cache import SplitCache
from pronk.parallel.tensor import AllReduceGroup, TensorParallelExecutor, serve_layer_orders
from pronk.parallel.work_request import WorkRequest, WorkRows

__all__ = ["WorkerLoop", "WorkerSettings", "loaded_key", "model_properties", "serve"]


class WorkerSettings(dict[str, Any]):
    """Settings of a worker: options of :class:`~pronk.llm.LLM` as JSON values.

    Keys: ``model``, ``dtype``, ``weights``, ``kernels``, ``kv_dtype``, ``threads``, ``workers`` and ``parallel``.
    """

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the weights."""
        found: torch.dtype = getattr(torch, self["dtype"])
        return found

    def split(self, rank: int, config: ModelConfig) -> TensorSplit | None:
        """Return the shard of the model for ``rank``; ``None`` if each process has the whole model.

        Raises:
            OptionError: the model cannot be split, see :class:`~pronk.models.split.TensorSplit`.
        """
        return TensorSplit(config, rank, self["workers"]) if self["parallel"] == "tensor" else None

    def load(self, rank: int) -> WorkerModel:
        """Load the model, with a KV pool of one block until the driver sends the size of the pool.

        Raises:
            PronkError: the model cannot be loaded.
        """
        folder, device = Path(self["model"]), torch.device("cpu")
        config = read_config(folder)
        split = self.split(rank, config)
        kernels = choose_kernels(self["kernels"], device, config)
        decoder = load_decoder(
            folder, config, dtype=self.dtype, device=device, kernels=kernels, weights=self["weights"], split=split
        )
        cache = (PagedCache if split is None else SplitCache)(
            config if split is None else split.shard_config,
            num_blocks=1,
            block_size=BLOCK_SIZE,
            dtype=compute_dtype(self.dtype, kernels),
            kv_dtype=torch.int8 if self["kv_dtype"] == "int8" else None,
            device=device,
            kernels=kernels,
        )
        return WorkerModel(decoder, cache, split)


class WorkerModel(NamedTuple):
    """The model in a worker."""

    decoder: Decoder  # the whole model, or under tensor parallelism the worker's shard
    cache: PagedCache
    split: TensorSplit | None  # description of the shard; ``None`` for the whole model


class _HiddenOwner:
    """Owner of a layer's outputs: the pool keeps the outputs while this object exists."""


class WorkerLoop:
    """The message loop of a worker under tree parallelism."""

    def __init__(self, peer: PeerConnection, runner: ModelRunner) -> None:
        self.peer, self.runner, self.cache = peer, runner, runner.cache
        self._hidden_owners: dict[int, _HiddenOwner] = {}
        # Number of the last WORK request, and the logits of each of its tree shards.
        self._request_number, self._logits = 0, list[Tensor]()

    def run(self) -> None:
        """Answer messages until the driver sends ``STOP`` or the connection is lost.

        Raises:
            ConnectionLostError: the connection is lost.
        """
        while True:
            message = self.peer.receive()
            if message.kind == MessageKind.STOP:
                return
            try:
                self._answer(message)
            except ConnectionLostError:
                raise
            except Exception as error:  # noqa: BLE001 - the driver receives any error
                self.peer.send(MessageKind.FAILED, data=f"{type(error).__name__}: {error}".encode())

    def _answer(self, message: PeerMessage) -> None:
        if message.kind == MessageKind.WORK:
            self._run_request(WorkRequest.parse(message.numbers, message.data))
        elif message.kind == MessageKind.ROWS:
            number, *slots = message.numbers.tolist()
            self.peer.send(MessageKind.ROWS, [number], self.cache.export_slots(np.array(slots, np.int64)).flatten())
        elif message.kind == MessageKind.LOGITS:
            number, request_number, shard_index, *shard_rows = message.numbers.tolist()
            if request_number != self._request_number:
                msg = f"expected a request for logits of request {self._request_number}, found {request_number}"
                raise ValueError(msg)
            self.peer.send(MessageKind.LOGITS, [number], _as_bytes(self._logits[shard_index][shard_rows].float()))
        elif message.kind == MessageKind.POOL:
            number, blocks, *layers = message.numbers.tolist()
            self._resize(blocks, layers)
            self.peer.send(MessageKind.DONE, [number])
        else:
            msg = f"expected a request for work, found {message.kind.name}"
            raise ValueError(msg)

    def _resize(self, blocks: int, layers: Sequence[int]) -> None:
        """Resize the pool to ``blocks`` blocks; let it keep the outputs of ``layers`` and of no other layers."""
        self._hidden_owners = {layer: _HiddenOwner() for layer in layers}
        for layer, owner in self._hidden_owners.items():
            self.cache.keep_hidden(layer, owner)
        self.cache.drop_unused_hidden()
        self.cache.resize(blocks)

    def _run_request(self, request: WorkRequest) -> None:
        if request.moves:
            source, target = np.array(request.moves, np.int64).T
            self.cache.move(source, target)
        if request.slots is not None and request.kv_rows is not None:
            self.cache.import_slots(request.slots, request.kv_rows)
        self._logits.clear()  # free the memory before the forward pass allocates new logits
        result = self.runner.forward([rows.job for rows in request.rows], request.collect)
        self._request_number, self._logits = request.number, [logits[:] for logits in result.logits]
        parts = [logits for rows, logits in zip(request.rows, self._logits, strict=True) if rows.job.all_logits]
        for layer in sorted(request.collect):
            outputs = result.hidden[layer]
            parts += [outputs[number][rows.first_own :] for number, rows in enumerate(request.rows)]
        sampled = [
            token
            for rows, logits in zip(request.rows, self._logits, strict=True)
            for token in self._sample(rows, logits)
        ]
        numbers = [request.number, round(1e9 * result.seconds), result.context, *sampled]
        self.peer.send(MessageKind.DONE, numbers, torch.cat([_as_bytes(part) for part in parts]) if parts else b"")

    def _sample(self, rows: WorkRows, logits: Tensor) -> list[int]:
        """Sample a token from each logits row if the request's sampler is stateless; else return no tokens."""
        job, kernels = rows.job, self.runner.decoder.kernels
        if job.stateless_sampler is None or kernels is None:
            return []
        first, depths = job.segment.block_table.length + 1, job.segment.tree.depths
        positions = [first + depths[node] for node in job.logits_nodes]
        return [
            job.stateless_sampler.choose(kernels, row, position)
            for row, position in zip(logits, positions, strict=True)
        ]


def _as_bytes(part: Tensor) -> Tensor:
    return part.contiguous().view(-1).view(torch.uint8)


def serve(store: Any, rank: int, settings: WorkerSettings, timeout: float) -> None:
    """Load the model, send its properties, and compute until the driver ends or stops this worker.

    Raises:
        ConnectionLostError: the driver does not connect within ``timeout`` seconds.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles the terminal's Ctrl-C
    torch.set_num_threads(settings["threads"])
    cause = b""
    try:
        loaded = settings.load(rank)
    except Exception as error:  # noqa: BLE001 - the driver receives any error
        lines = str(error).strip().splitlines()
        cause = (lines[0] if lines else type(error).__name__).encode()
    store.set(loaded_key(rank), b"")
    peer = PeerConnection(store, rank, driver=False, timeout=timeout)
    if cause:
        peer.send(MessageKind.FAILED, data=cause)
        return
    properties = model_properties(loaded.decoder, loaded.cache, settings)
    with suppress(ConnectionLostError):
        peer.send(MessageKind.HELLO, data=json.dumps(properties).encode())
        _compute(peer, loaded, store, timeout)


def loaded_key(rank: int) -> str:
    """Return the rendezvous store's key that a worker sets once its model is loaded or has failed to load."""
    return f"pronk/loaded/{rank}"


def _compute(peer: PeerConnection, loaded: WorkerModel, store: Any, timeout: float) -> None:
    """Compute the driver's requests until the driver stops this worker or the connection is lost."""
    decoder, cache, split = loaded
    if split is None:
        dedicate_threads()
        WorkerLoop(peer, ModelRunner(decoder, cache)).run()
        return
    assert decoder.kernels is not None, "expected kernels, found none"
    assert isinstance(cache, SplitCache), "expected a SplitCache, found another cache"
    all_reduce = AllReduceGroup(store, split.rank, split.workers, timeout=timeout)
    dedicate_threads()
    serve_layer_orders(peer, TensorParallelExecutor(decoder.kernels, decoder, cache, split, all_reduce))


def model_properties(decoder: Decoder, cache: PagedCache, settings: WorkerSettings) -> dict[str, str]:
    """Return the properties of a loaded model that must be equal in all processes."""
    from pronk import __version__  # noqa: PLC0415 - avoids an import cycle

    kernels = decoder.kernels
    return {
        "version": __version__,
        "model": str(Fingerprint.of(Path(settings["model"]))),
        "config": read_config(Path(settings["model"])).digest,
        "weights": settings["weights"],
        "kernels": "torch" if kernels is None else kernels.name,
        "dtype": f"{cache.dtype}, {cache.kv_dtype}",
        "parallel": settings["parallel"],
    }


def main() -> None:
    """Run a worker with ``host port rank processes timeout`` from the command line."""
    host, port, rank, world, timeout = sys.argv[1:6]

    def exit_with_driver() -> None:
        # The read returns when the driver ends, which closes the pipe. A blocked sys.stdin.read would hold a lock that
        # blocks the exit of this process.
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=exit_with_driver, daemon=True).start()
    try:
        store = open_store(host, int(port), int(world), master=False, timeout=float(timeout))
        serve(store, int(rank), WorkerSettings(json.loads(store.get("pronk/setting"))), float(timeout))
    except (ConnectionLostError, RuntimeError) as error:
        sys.exit(f"pronk: {error}")


if __name__ == "__main__":
    main()
