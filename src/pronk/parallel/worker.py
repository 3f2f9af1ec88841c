"""The worker process: it loads the model or a shard of it, and computes parts of forward passes."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from pronk.backends import (
    BLOCK_SIZE,
    Decoder,
    ForwardBatch,
    ModelRunner,
    PagedCache,
    TensorSplit,
    choose_kernels,
    compute_dtype,
    set_threads,
)
from pronk.base import ConnectionLostError, describe_error
from pronk.base.arrays import DTYPES, KV_DTYPES, Array, as_bytes
from pronk.checkpoint import Fingerprint, ModelConfig, load_decoder, read_config
from pronk.parallel.connection import MessageKind, PeerConnection, PeerMessage, open_store
from pronk.parallel.tensor import (
    AllReduceGroup,
    SplitCache,
    TensorParallelExecutor,
    serve_layer_commands,
)
from pronk.parallel.wire_format import WorkRequest, WorkRows


class WorkerSettings(dict[str, Any]):
    """Settings of a worker: options of :class:`~pronk.llm.LLM` as JSON values.

    Keys: ``model``, ``dtype``, ``weights``, ``kernels``, ``bits``, ``kv_dtype``, ``context``,
    ``threads``, ``workers`` and ``parallel``.
    """

    def read_config(self) -> ModelConfig:
        """Return the configuration of the model."""
        return read_config(Path(self["model"]), context=self.get("context"))

    def split(self, rank: int, config: ModelConfig) -> TensorSplit | None:
        """Return the shard of the model in the process with a rank.

        Returns ``None`` under tree parallelism, where each process has the whole model.

        Raises:
            OptionError: the model cannot be split; see :class:`~pronk.models.split.TensorSplit`.
        """
        return TensorSplit(config, rank, self["workers"]) if self["parallel"] == "tensor" else None

    def load(self, rank: int) -> tuple[Decoder, PagedCache, TensorSplit | None]:
        """Return the model or its shard, a KV pool of one block, and the description of the shard.

        The driver sends the size of the pool later.

        Raises:
            PronkError: the model cannot be loaded.
        """
        folder = Path(self["model"])
        config = self.read_config()
        dtype = DTYPES[self["dtype"]]
        split = self.split(rank, config)
        kernels = choose_kernels(self["kernels"], self["bits"])
        decoder = load_decoder(
            folder, config, dtype=dtype, kernels=kernels, weights=self["weights"], split=split
        )
        cache = (PagedCache if split is None else SplitCache)(
            config if split is None else split.shard_config,
            num_blocks=1,
            block_size=BLOCK_SIZE,
            dtype=compute_dtype(dtype),
            kv_dtype=KV_DTYPES[self["kv_dtype"]],
            kernels=kernels,
        )
        return decoder, cache, split


class _FeatureOwner:
    """Owner of the features that a worker asks its KV pool to save.

    The pool saves the outputs of the requested layers as long as this object exists.
    """


class WorkerLoop:
    """The message loop of a worker under tree parallelism."""

    def __init__(self, peer: PeerConnection, runner: ModelRunner) -> None:
        self.peer = peer
        self.runner = runner
        self.cache = runner.cache
        self._feature_owner = _FeatureOwner()
        self._request_number = 0  # number of the last WORK request
        self._logits = list[Array]()  # logits of the last WORK request, per tree shard

    def run(self) -> None:
        """Answer messages until ``STOP``.

        Raises:
            ConnectionLostError: the connection to the driver is lost.
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
                self.peer.send(
                    MessageKind.FAILED,
                    data=f"{type(error).__name__}: {describe_error(error)}".encode(),
                )

    def _answer(self, message: PeerMessage) -> None:
        if message.kind == MessageKind.WORK:
            self._run_request(WorkRequest.parse(message.values, message.data))
        elif message.kind == MessageKind.ROWS:
            number, *slots = message.values
            self.peer.send(
                MessageKind.ROWS,
                [number],
                self.cache.export_slots(np.array(slots, np.int64)).reshape(-1),
            )
        elif message.kind == MessageKind.LOGITS:
            number, request_number, shard_index, *shard_rows = message.values
            if request_number != self._request_number:
                msg = (
                    f"expected a request for logits of request {self._request_number}, found "
                    f"{request_number}"
                )
                raise ValueError(msg)
            self.peer.send(
                MessageKind.LOGITS, [number], as_bytes(self._logits[shard_index][shard_rows])
            )
        elif message.kind == MessageKind.POOL:
            number, num_blocks, *layers = message.values
            self._resize(num_blocks, layers)
            self.peer.send(MessageKind.DONE, [number])
        else:
            msg = f"expected a request for work, found {message.kind.name}"
            raise ValueError(msg)

    def _resize(self, num_blocks: int, layers: Sequence[int]) -> None:
        """Resize the KV pool, and let it save the outputs of ``layers`` and of no other layers."""
        self._feature_owner = _FeatureOwner()
        for layer in layers:
            self.cache.save_feature(layer, self._feature_owner)
        self.cache.drop_unused_features()
        self.cache.resize(num_blocks)

    def _run_request(self, request: WorkRequest) -> None:
        if request.moves:
            source, target = np.array(request.moves, np.int64).T
            self.cache.move(source, target)
        if request.kv_rows is not None:
            self.cache.import_slots(request.slots, request.kv_rows)
        self._logits.clear()  # free the memory before the forward pass allocates new logits
        batch = ForwardBatch([rows.entry for rows in request.rows])
        result = self.runner.forward(batch, request.collect)
        self._request_number = request.number
        self._logits = [logits[:] for logits in result.logits]
        arrays = [
            logits
            for rows, logits in zip(request.rows, self._logits, strict=True)
            if rows.entry.all_logits
        ]
        for layer in sorted(request.collect):
            outputs = result.hidden[layer]
            arrays += [
                outputs[shard_index][rows.first_own :]
                for shard_index, rows in enumerate(request.rows)
            ]
        sampled = chain.from_iterable(map(self._sample, request.rows, self._logits))
        values = [request.number, round(1e9 * result.seconds), batch.num_committed, *sampled]
        data = np.concatenate([as_bytes(array) for array in arrays]) if arrays else b""
        self.peer.send(MessageKind.DONE, values, data)

    def _sample(self, rows: WorkRows, logits: Array) -> list[int]:
        """Return a token for each logits row, or an empty list if the driver has to sample."""
        entry = rows.entry
        kernels = self.runner.decoder.kernels
        if entry.stateless_sampler is None:
            return []
        first = entry.block_table.length + 1
        depths = entry.tree.depths
        rows_and_nodes = zip(logits, entry.logits_nodes, strict=True)
        return [
            entry.stateless_sampler.choose(kernels, row, first + depths[node])
            for row, node in rows_and_nodes
        ]


def serve(store: Any, rank: int, settings: WorkerSettings, timeout: float) -> None:
    """Load the model, send its properties, and work for the driver until it ends or sends ``STOP``.

    Raises:
        ConnectionLostError: the driver does not connect within ``timeout`` seconds.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles the terminal's Ctrl-C
    set_threads(settings["threads"], 1)
    failure = b""
    try:
        decoder, cache, split = settings.load(rank)
    except Exception as error:  # noqa: BLE001 - the driver receives any error
        failure = describe_error(error).encode()
    store.set(loaded_key(rank), b"")
    peer = PeerConnection(store, rank, driver=False, timeout=timeout)
    if failure:
        peer.send(MessageKind.FAILED, data=failure)
        return
    with suppress(ConnectionLostError):
        peer.send(
            MessageKind.HELLO, data=json.dumps(model_properties(decoder, cache, settings)).encode()
        )
        if split is None:
            WorkerLoop(peer, ModelRunner(decoder, cache)).run()
            return
        assert isinstance(cache, SplitCache), "expected a SplitCache, found another cache"
        all_reduce = AllReduceGroup(store, split.rank, split.workers, timeout=timeout)
        serve_layer_commands(peer, TensorParallelExecutor(decoder, cache, split, all_reduce))


def loaded_key(rank: int) -> str:
    """Return the key in the rendezvous store that a worker sets when its loading has ended."""
    return f"pronk/loaded/{rank}"


def model_properties(
    decoder: Decoder, cache: PagedCache, settings: WorkerSettings
) -> dict[str, str]:
    """Return the properties that must be equal in all processes, by name."""
    from pronk import __version__  # noqa: PLC0415 - avoids an import cycle

    return {
        "version": __version__,
        "model": str(Fingerprint.of(Path(settings["model"]))),
        "config": settings.read_config().digest,
        "weights": settings["weights"],
        "kernels": decoder.kernels.name,
        "bits": decoder.kernels.bits,
        "dtype": f"{cache.dtype}, {cache.kv_dtype}",
        "parallel": settings["parallel"],
    }


def main() -> None:
    """Run a worker.

    The arguments of the process are host and port of the rendezvous store, the worker's rank, the
    number of processes, and the time limit in seconds.
    """
    host, port, rank, num_processes, timeout = sys.argv[1:6]

    def exit_with_driver() -> None:
        # The end of the driver closes the pipe, so that os.read returns. A waiting sys.stdin.read
        # would hold a lock that blocks the exit of this process.
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=exit_with_driver, daemon=True).start()
    try:
        store = open_store(
            host, int(port), int(num_processes), master=False, timeout=float(timeout)
        )
        serve(
            store, int(rank), WorkerSettings(json.loads(store.get("pronk/setting"))), float(timeout)
        )
    except (ConnectionLostError, RuntimeError) as error:
        sys.exit(f"pronk: {error}")


if __name__ == "__main__":
    main()
