"""A process that computes shares of another one's passes: ``python -m pronk.parallel.worker``."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pronk.cache.budget import BLOCK_SIZE
from pronk.cache.paged import PagedCache
from pronk.errors import PronkError
from pronk.kernels.threads import lend_threads
from pronk.model.decoder import Decoder
from pronk.model.fingerprint import Fingerprint
from pronk.model.kernels import choose_kernels
from pronk.model.loader import computed_in, load_decoder, read_config
from pronk.parallel.peer import Kind, Message, Peer, PeerError, open_store
from pronk.parallel.work import Work
from pronk.passes.runner import Runner

__all__ = ["Setting", "serve"]


class Setting(dict[str, Any]):
    """What a worker is to load, as JSON: ``model``, ``dtype``, ``weights``, ``kernels``, ``kv_dtype``, ``threads``."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        found: torch.dtype = getattr(torch, self["dtype"])
        return found

    def load(self) -> Runner:
        """The model, with a pool of one block until the other process says how large it is.

        Raises:
            PronkError: it cannot be loaded.
        """
        folder, device = Path(self["model"]), torch.device("cpu")
        config = read_config(folder)
        kernels = choose_kernels(self["kernels"], device, config)
        decoder = load_decoder(
            folder, config, dtype=self.dtype, device=device, kernels=kernels, weights=self["weights"]
        )
        cache = PagedCache(
            config,
            num_blocks=1,
            block_size=BLOCK_SIZE,
            dtype=computed_in(self.dtype, kernels),
            kv_dtype=torch.int8 if self["kv_dtype"] == "int8" else None,
            device=device,
            kernels=kernels,
        )
        return Runner(decoder, cache)


class _Owner:
    """Of a layer's outputs that are kept."""


class _Serving:
    """The loop of a worker."""

    def __init__(self, peer: Peer, runner: Runner) -> None:
        self.peer, self.runner, self.cache = peer, runner, runner.cache
        self._owners: dict[int, _Owner] = {}

    def run(self) -> None:
        """Until the other process says so, or is gone."""
        while True:
            message = self.peer.receive()
            if message.kind == Kind.STOP:
                return
            try:
                self._answer(message)
            except PeerError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever it is, the other process has to hear of it
                self.peer.send(Kind.FAILED, data=f"{type(error).__name__}: {error}".encode())

    def _answer(self, message: Message) -> None:
        if message.kind == Kind.WORK:
            self._work(Work.read(message.numbers, message.data))
        elif message.kind == Kind.ROWS:
            turn, *slots = message.numbers.tolist()
            self.peer.send(Kind.ROWS, [turn], self.cache.take(np.array(slots, np.int64)).flatten())
        elif message.kind == Kind.POOL:
            turn, blocks, *layers = message.numbers.tolist()
            self._resize(blocks, layers)
            self.peer.send(Kind.DONE, [turn])
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

    def _work(self, work: Work) -> None:
        if work.moves:
            source, target = np.array(work.moves, np.int64).T
            self.cache.move(source, target)
        if work.slots is not None and work.kept is not None:
            self.cache.put(work.slots, work.kept)
        result = self.runner.forward([rows.job for rows in work.rows], work.collect)
        parts = list(result.logits)
        for layer in sorted(work.collect):
            made = result.hidden[layer]
            parts += [made[number][rows.own :] for number, rows in enumerate(work.rows)]
        said = [work.turn, round(1e9 * result.seconds), result.context]
        self.peer.send(Kind.DONE, said, torch.cat([_bytes(part) for part in parts]))


def _bytes(part: Tensor) -> Tensor:
    return part.contiguous().view(-1).view(torch.uint8)


def serve(store: Any, rank: int, setting: Setting, patience: float) -> None:
    """Load the model, say who one is, and compute.

    Args:
        store: where processes find each other.
        rank: from 1 on.
        setting: what to load.
        patience: seconds to wait for the other process.

    Raises:
        PeerError: the other process is gone.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is for the other process
    peer = Peer(store, rank, driver=False, patience=patience)
    try:
        torch.set_num_threads(setting["threads"])
        runner = setting.load()
    except (PronkError, OSError, MemoryError) as error:
        peer.send(Kind.FAILED, data=str(error).encode())
        return
    peer.send(Kind.HELLO, data=json.dumps(identity(runner.decoder, runner.cache, Path(setting["model"]))).encode())
    lend_threads()
    _Serving(peer, runner).run()


def identity(decoder: Decoder, cache: PagedCache, folder: Path) -> dict[str, str]:
    """What has to be the same in all workers."""
    from pronk import __version__  # noqa: PLC0415 - the package is above its rooms

    kernels = decoder.kernels
    return {
        "version": __version__,
        "model": str(Fingerprint.of(folder)),
        "kernels": "torch" if kernels is None else kernels.name,
        "dtype": f"{cache.dtype}, {cache.kv_dtype}",
    }


def main() -> None:
    """What the other process starts: the address of its store and a rank."""
    host, port, rank, world, patience = sys.argv[1:6]

    def watch() -> None:
        sys.stdin.buffer.read()  # ends with the other process, however that ends
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        store = open_store(host, int(port), int(world), master=False, patience=float(patience))
        serve(store, int(rank), Setting(json.loads(store.get("pronk/setting"))), float(patience))
    except (PeerError, RuntimeError) as error:
        sys.exit(f"pronk: {error}")


if __name__ == "__main__":
    main()
