"""The processes that a model is computed by: started here, or found where ``torchrun`` has started them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import finalize

from pronk.cache.paged import PagedCache
from pronk.errors import OptionError
from pronk.kernels.library import Kernels
from pronk.kernels.threads import num_threads
from pronk.model.decoder import Decoder
from pronk.parallel.mirrored import MirroredCache
from pronk.parallel.peer import Kind, Peer, PeerError, open_store
from pronk.parallel.runner import TreeRunner
from pronk.parallel.worker import Setting, identity

__all__ = ["Team"]

# Seconds until all have come, and have loaded the model.
_PATIENCE = 600.0


class Team:
    """The other processes of a model.

    Attributes:
        workers: how many processes there are, this one included.
        peers: the others, once they have come.
    """

    def __init__(self, workers: int, setting: Setting) -> None:
        """Start them; they load the model while this process does."""
        self.workers, self.setting, self.peers = workers, setting, list[Peer]()
        self._store = open_store("127.0.0.1", 0, workers, master=True, patience=_PATIENCE)
        self._store.set("pronk/setting", json.dumps(setting))
        self.processes = [self._start(rank) for rank in range(1, workers)]
        self._end = finalize(self, _end, self.processes)

    @classmethod
    def of(cls, workers: int, kernels: Kernels | None, **setting: Any) -> Team | None:
        """Those of a model, if it is to have some; ``setting`` as the worker's, with the objects that LLM has.

        Raises:
            OptionError: without kernels, where equal bits are not to be had.
        """
        if workers == 1:
            return None
        if kernels is None:
            msg = f"workers: expected 1 where torch computes, as rows have other bits in other company, found {workers}"
            raise OptionError(msg)
        kind = str(setting["dtype"]).removeprefix("torch.")
        own = {"model": str(setting["model"]), "dtype": kind, "kernels": kernels.name, "threads": num_threads()}
        return cls(workers, Setting(setting | own))

    def runner(self, decoder: Decoder, cache: PagedCache) -> TreeRunner:
        """What makes the model's passes, once all have come; errors are those of :meth:`meet`."""
        assert isinstance(cache, MirroredCache)
        mine = identity(decoder, cache, Path(self.setting["model"]))
        return TreeRunner(decoder, cache, self.meet(mine), self.alive, self.dismiss)

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", _PROGRAM, "127.0.0.1", self._store.port, rank, self.workers, _PATIENCE]
        return subprocess.Popen([str(each) for each in command], stdin=subprocess.PIPE)  # noqa: S603 - ourselves

    def meet(self, identity: dict[str, str]) -> Sequence[Peer]:
        """Wait for them.

        Args:
            identity: what has to be the same in all of them.

        Raises:
            OptionError: one does not come, cannot load the model, or has another one.
        """
        try:
            for rank in range(1, self.workers):
                self.peers.append(self._meet(rank, identity))
        except BaseException:
            self.close()
            raise
        return self.peers

    def _meet(self, rank: int, identity: dict[str, str]) -> Peer:
        try:
            peer = Peer(self._store, rank, driver=True, patience=_PATIENCE)
            message = peer.receive(_PATIENCE)
        except PeerError as error:
            msg = f"workers: expected {self.workers} processes, found that {error}"
            raise OptionError(msg) from error
        if message.kind == Kind.FAILED:
            msg = f"workers: worker {rank} cannot load the model: {message.text}"
            raise OptionError(msg)
        theirs: dict[str, Any] = json.loads(message.text)
        for what, own in identity.items():
            if theirs.get(what) != own:
                msg = f"workers: expected the same {what} in all, {own}; found {theirs.get(what)} in worker {rank}"
                raise OptionError(msg)
        return peer

    def alive(self, rank: int) -> bool:
        """Whether one of them has not ended."""
        return self.processes[rank - 1].poll() is None

    def dismiss(self, rank: int) -> None:
        """End one of them."""
        _end(self.processes[rank - 1 : rank])

    def close(self) -> None:
        """End them."""
        self._end()


# The path of modules is handed on, so that a worker is of this very pronk.
_PROGRAM = f"import sys; sys.path[:] = {sys.path!r}; from pronk.parallel.worker import main; main()"


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
        if process.stdin is not None:
            process.stdin.close()
        process.wait()
