"""Messages between two processes over torch's gloo backend: a kind, JSON values, and bytes.

Each pair of processes has its own process group, so that a failed process does not affect other
pairs. A message is a header of three integers (kind, and the numbers of bytes of the two parts),
then the JSON text and the bytes. Messages carry only data, never code, and receivers validate them.
"""

from __future__ import annotations

import json
import operator
import socket
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from pronk.base import ConnectionLostError, describe_error
from pronk.base.arrays import Array

_c10d: Any = dist  # Any, because the type stubs of torch.distributed lack some names

# Maximum duration of one send or receive. A worker waits for the driver without limit: for the next
# message, and until the driver receives the answer. The driver sends with _MESSAGE_TIMEOUT, because
# an idle worker always waits for a message. Both parts are received with _MESSAGE_TIMEOUT, because
# the sender sends them right after the header.
_NO_TIMEOUT = timedelta(days=365)
_MESSAGE_TIMEOUT = timedelta(seconds=10)


def open_store(host: str, port: int, processes: int, *, master: bool, timeout: float) -> Any:
    """Open the rendezvous store of ``processes`` processes.

    With port 0 the master listens on a free port.

    Raises ``OSError`` if the port is in use, ``RuntimeError`` if the master does not answer within
    ``timeout`` seconds.
    """
    limit = timedelta(seconds=timeout)
    if not master:
        return _c10d.TCPStore(host, port, processes, is_master=False, timeout=limit)
    # torch's own socket would listen on all interfaces
    listener = socket.create_server((host, port))
    port = listener.getsockname()[1]
    options = {"wait_for_workers": False, "timeout": limit, "master_listen_fd": listener.detach()}
    return _c10d.TCPStore(host, port, processes, is_master=True, **options)


def join_launched(timeout: float) -> tuple[Any, int, int]:
    """Return the rendezvous store of ``torchrun``, this process's rank, and the number of processes.

    Raises ``RuntimeError`` or ``ValueError`` if ``torchrun`` did not launch this process, or the
    others are missing.
    """
    store, rank, world_size = next(_c10d.rendezvous("env://", timeout=timedelta(seconds=timeout)))
    return store, rank, world_size


def open_group(store: Any, name: str, rank: int, size: int, *, timeout: float) -> Any:
    """Open a gloo group of ``size`` processes, on the loopback interface unless launched by ``torchrun``.

    Raises ``RuntimeError`` if a process does not join within ``timeout`` seconds.
    """
    gloo = _c10d.ProcessGroupGloo
    options = gloo._Options()  # noqa: SLF001 - the only way to set the interface
    options._timeout = timedelta(seconds=timeout)  # noqa: SLF001
    is_local = not dist.is_torchelastic_launched()
    options._devices = [  # noqa: SLF001
        gloo.create_device(hostname="127.0.0.1") if is_local else gloo.create_default_device()
    ]
    return gloo(_c10d.PrefixStore(f"pronk/{name}", store), rank, size, options)


class MessageKind(IntEnum):
    """Kinds of messages, and the contents of each."""

    HELLO = 0  # worker to driver: properties of the loaded model, as JSON
    # driver to worker: new number of blocks of the KV pool, and the layers whose outputs it has to
    # keep
    POOL = 1
    # driver to worker: compute these nodes (tree parallelism), or run layers (tensor parallelism)
    WORK = 2
    # worker to driver: the pool is resized, or the result of WORK: seconds, sampled tokens, logits,
    # outputs
    DONE = 3
    # driver to worker: request for logits that DONE left out; worker to driver: these logits
    LOGITS = 4
    # driver to worker: request for the contents of KV slots; worker to driver: these contents
    ROWS = 5
    FAILED = 6  # worker to driver: error message
    STOP = 7  # driver to worker: end the process


class PeerMessage(NamedTuple):
    """A message between two processes."""

    kind: MessageKind
    values: list[Any]  # JSON values; the meaning depends on ``kind``
    data: NDArray[np.uint8]  # ``[bytes]``

    @property
    def text(self) -> str:
        """The bytes of ``data``, decoded from UTF-8."""
        return self.data.tobytes().decode(errors="replace")


@contextmanager
def detect_loss(other: str) -> Generator[None]:
    """Raise ``ConnectionLostError`` if the ``with`` block, an exchange with ``other``, fails."""
    try:
        yield
    except (RuntimeError, ValueError, MemoryError) as error:  # the last two: a malformed message
        msg = f"{other} is gone, or does not answer: {describe_error(error)[-160:]}"
        raise ConnectionLostError(msg) from error


class PeerConnection:
    """A connection to one other process.

    ``rank`` is its rank. 0 is the driver, which has the requests.
    """

    def __init__(self, store: Any, rank: int, *, driver: bool, timeout: float) -> None:
        """Connect the driver with the worker ``rank``; both processes have to make this call.

        ``store`` is the rendezvous store of ``torch.distributed``. Raises ``ConnectionLostError``
        if the other process does not join within ``timeout`` seconds.
        """
        # In the process group of these two processes, the driver has rank 0 and the worker has rank
        # 1.
        self.rank, self._other_rank = (rank, 1) if driver else (0, 0)
        self._other = f"worker {rank}" if driver else "the driver process"
        with detect_loss(self._other):
            self._group = open_group(store, str(rank), 1 - self._other_rank, 2, timeout=timeout)

    def send(
        self, kind: MessageKind, values: Sequence[Any] = (), data: Array | bytes = b""
    ) -> None:
        """Send a message; ``values`` are JSON values, and an array ``data`` is uint8 ``[bytes]``.

        Raises ``ConnectionLostError`` if the other process has ended, or does not receive in time.
        """
        # ``default`` converts integers of NumPy
        text = json.dumps(values, default=operator.index).encode()
        # A bytearray, because torch wants writable memory.
        parts = [
            np.frombuffer(bytearray(part), np.uint8) if isinstance(part, bytes) else part
            for part in (text, data)
        ]
        arrays = [np.array([kind, *map(len, parts)], np.int64), *parts]
        timeout = _MESSAGE_TIMEOUT if self.rank else _NO_TIMEOUT
        with detect_loss(self._other):
            for array in arrays:
                if len(array):
                    self._group.send([torch.from_numpy(array)], self._other_rank, 0).wait(timeout)

    def receive(self, timeout: float | None = None) -> PeerMessage:
        """Receive the next message.

        Wait for it at most ``timeout`` seconds, or without limit if ``None``.

        Raises ``ConnectionLostError`` if the other process has ended or sends nothing in time, or
        the message is malformed.
        """
        header = np.zeros(3, np.int64)
        header_timeout = _NO_TIMEOUT if timeout is None else timedelta(seconds=timeout)
        with detect_loss(self._other):
            self._group.recv([torch.from_numpy(header)], self._other_rank, 0).wait(header_timeout)
            kind, *sizes = header.tolist()
            text, data = (np.empty(size, np.uint8) for size in sizes)
            for array in (text, data):
                if len(array):
                    self._group.recv([torch.from_numpy(array)], self._other_rank, 0).wait(
                        _MESSAGE_TIMEOUT
                    )
            return PeerMessage(MessageKind(kind), json.loads(text.tobytes()), data)
