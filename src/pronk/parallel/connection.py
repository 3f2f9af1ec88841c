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

# Time limits of one send or receive. A worker waits for the driver without limit: for the next
# message, and until the driver receives the answer. The driver sends within _MESSAGE_TIMEOUT,
# because an idle worker always waits for a message. The JSON text and the bytes are received within
# _MESSAGE_TIMEOUT, because they are sent right after the header.
_NO_TIMEOUT = timedelta(days=365)
_MESSAGE_TIMEOUT = timedelta(seconds=10)


def open_store(host: str, port: int, processes: int, *, master: bool, timeout: float) -> Any:
    """Open the rendezvous store of ``torch.distributed`` for a number of processes.

    Args:
        host: address of the master, the process that serves the store.
        port: port of the master; with 0 the master listens on a free port.
        processes: number of processes.
        master: whether this process is the master.
        timeout: seconds to wait for the master's answer.

    Raises:
        OSError: the port is in use.
        RuntimeError: the master does not answer in time.
    """
    limit = timedelta(seconds=timeout)
    if not master:
        return _c10d.TCPStore(host, port, processes, is_master=False, timeout=limit)
    # The socket is opened here, because torch's own would listen on all interfaces.
    listener = socket.create_server((host, port))
    port = listener.getsockname()[1]
    options = {"wait_for_workers": False, "timeout": limit, "master_listen_fd": listener.detach()}
    return _c10d.TCPStore(host, port, processes, is_master=True, **options)


def join_launched(timeout: float) -> tuple[Any, int, int]:
    """Return the rendezvous store of ``torchrun``, this process's rank, and the process count.

    Raises:
        RuntimeError, ValueError: ``torchrun`` did not launch this process, or another process has
            not joined within ``timeout`` seconds.
    """
    store, rank, world_size = next(_c10d.rendezvous("env://", timeout=timedelta(seconds=timeout)))
    return store, rank, world_size


def open_group(store: Any, name: str, rank: int, size: int, *, timeout: float) -> Any:
    """Open a gloo group of ``size`` processes.

    Processes that ``torchrun`` did not launch use the loopback interface only.

    Raises:
        RuntimeError: a process does not join within ``timeout`` seconds.
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
    """Kinds of messages between the driver and a worker, and the contents of each."""

    HELLO = 0  # worker to driver: properties of the loaded model, as JSON
    # Driver to worker: the new number of blocks of the KV pool, and the layers whose outputs the
    # pool keeps.
    POOL = 1
    # Driver to worker: the nodes to compute (tree parallelism), or the layers to run (tensor
    # parallelism).
    WORK = 2
    # Worker to driver: the answer to POOL, or the result of WORK: seconds, sampled tokens, logits
    # and outputs of layers.
    DONE = 3
    # Driver to worker: request for logits that DONE left out. Worker to driver: these logits.
    LOGITS = 4
    # Driver to worker: request for the contents of KV slots. Worker to driver: these contents.
    ROWS = 5
    FAILED = 6  # worker to driver: error message
    STOP = 7  # driver to worker: end the process


class PeerMessage(NamedTuple):
    """A message between two processes."""

    kind: MessageKind
    values: list[Any]  # JSON values; the meaning depends on ``kind``
    data: NDArray[np.uint8]  # raw bytes, uint8 ``[bytes]``

    @property
    def text(self) -> str:
        """The bytes of ``data``, decoded from UTF-8."""
        return self.data.tobytes().decode(errors="replace")


@contextmanager
def detect_loss(other: str) -> Generator[None]:
    """Raise ``ConnectionLostError`` if an exchange with another process, the block, fails.

    ``other`` names the other process in the error.
    """
    try:
        yield
    # A malformed message raises ValueError or MemoryError.
    except (RuntimeError, ValueError, MemoryError) as error:
        msg = f"{other} is gone, or does not answer: {describe_error(error)[-160:]}"
        raise ConnectionLostError(msg) from error


class PeerConnection:
    """A connection to one other process.

    Attributes:
        rank: rank of the other process; 0 is the driver.
    """

    def __init__(self, store: Any, rank: int, *, driver: bool, timeout: float) -> None:
        """Connect the driver with a worker; both processes must make this call.

        Args:
            store: rendezvous store of ``torch.distributed``.
            rank: rank of the worker.
            driver: whether this process is the driver.
            timeout: seconds to wait for the other process.

        Raises:
            ConnectionLostError: the other process does not join in time.
        """
        # In the process group of these two processes, the driver has rank 0, and the worker rank 1.
        self.rank, self._other_rank = (rank, 1) if driver else (0, 0)
        self._other = f"worker {rank}" if driver else "the driver process"
        with detect_loss(self._other):
            self._group = open_group(store, str(rank), 1 - self._other_rank, 2, timeout=timeout)

    def send(
        self, kind: MessageKind, values: Sequence[Any] = (), data: Array | bytes = b""
    ) -> None:
        """Send a message.

        Args:
            kind: kind of the message.
            values: JSON values.
            data: bytes, or uint8 ``[bytes]``.

        Raises:
            ConnectionLostError: the other process has ended, or does not receive in time.
        """
        # ``default`` converts NumPy's integers.
        text = json.dumps(values, default=operator.index).encode()
        # A bytearray, because torch needs writable memory.
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
        """Receive the next message, within ``timeout`` seconds, or without limit if ``None``.

        Raises:
            ConnectionLostError: the other process has ended or sends nothing in time, or the
                message is malformed.
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
