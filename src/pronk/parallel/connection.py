"""Messages between two processes, over torch's gloo: a kind, some numbers, some bytes.

Each pair of processes has a group of its own, so that one that fails leaves the others alone. A message is a header of
three numbers, then the numbers and the bytes, if there are any. Nothing of it is code: what comes from a peer is
numbers that are looked at.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pronk.errors import PronkError

__all__ = ["ConnectionLostError", "MessageKind", "PeerConnection", "PeerMessage", "open_group", "open_store"]

_c10d: Any = dist  # of whose names the type stubs know a part

_NONE = torch.empty(0, dtype=torch.uint8)

# A worker waits for its work, and to be heard, as long as it takes, or until the other process is gone. The other way
# round whoever is told something listens already, or is gone.
_EVER, _TELLING = timedelta(days=365), timedelta(seconds=10)


def open_store(host: str, port: int, processes: int, *, master: bool, patience: float) -> Any:
    """Where processes find each other; port 0 is a free one, for the one that begins.

    Raises:
        OSError: the port is in use.
        RuntimeError: nobody has begun in time.
    """
    seconds = timedelta(seconds=patience)
    if not master:
        return _c10d.TCPStore(host, port, processes, False, timeout=seconds)
    listening = socket.create_server((host, port))  # torch's own would listen on every interface
    port = listening.getsockname()[1]
    options = {"wait_for_workers": False, "timeout": seconds, "master_listen_fd": listening.detach()}
    return _c10d.TCPStore(host, port, processes, True, **options)


def open_group(store: Any, name: str, rank: int, size: int, *, patience: float) -> Any:
    """A group of processes that find each other by a name: on this machine, or wherever ``torchrun`` has put them.

    Raises:
        RuntimeError: they do not come.
    """
    gloo = _c10d.ProcessGroupGloo
    options = gloo._Options()  # noqa: SLF001 - it has no other way to say which interface
    options._timeout = timedelta(seconds=patience)  # noqa: SLF001
    near = not dist.is_torchelastic_launched()
    options._devices = [gloo.create_device(hostname="127.0.0.1") if near else gloo.create_default_device()]  # noqa: SLF001
    return gloo(_c10d.PrefixStore(f"pronk/{name}", store), rank, size, options)


class ConnectionLostError(PronkError):
    """The other process is gone, or does not answer in time."""


class MessageKind(IntEnum):
    """What a message is."""

    HELLO = 0  # who one is, as JSON
    POOL = 1  # how large the pool is, and which layers' outputs it keeps
    WORK = 2  # a share of a pass
    DONE = 3  # it is computed: seconds, choices, logits that are looked at for sure, and the collected layers' outputs
    LOGITS = 4  # some rows of the last pass's other logits are wanted, or are these
    ROWS = 5  # what is at some slots is wanted, or is this
    FAILED = 6  # what went wrong, as text
    STOP = 7


class PeerMessage(NamedTuple):
    """What one process tells another.

    Attributes:
        kind: of the message.
        numbers: int64 ``[n]``.
        data: uint8 ``[bytes]``.
    """

    kind: MessageKind
    numbers: Tensor
    data: Tensor

    @property
    def text(self) -> str:
        """The bytes as text."""
        return self.data.numpy().tobytes().decode(errors="replace")


class PeerConnection:
    """The other one of two processes.

    Attributes:
        rank: its number among all; 0 is the one that the requests come to.
        sent: bytes that were sent to it.
        received: bytes that came from it.
    """

    def __init__(self, store: Any, rank: int, *, driver: bool, patience: float) -> None:
        """Meet it; both have to.

        Args:
            store: where processes find each other, a ``torch.distributed`` store.
            rank: of the worker of the two.
            driver: whether this process is the other one.
            patience: seconds to wait for it.

        Raises:
            ConnectionLostError: it does not come.
        """
        self.rank, self._other = rank if driver else 0, 1 if driver else 0
        self.sent = self.received = 0
        try:
            self._group = open_group(store, str(rank), 1 - self._other, 2, patience=patience)
        except RuntimeError as error:
            raise self._lost(error) from error

    def send(self, kind: MessageKind, numbers: Sequence[int] | Tensor = (), data: Tensor | bytes = _NONE) -> None:
        """Tell it something.

        Raises:
            ConnectionLostError: it is gone, or does not listen in time.
        """
        numbers = torch.as_tensor(numbers, dtype=torch.int64)
        if isinstance(data, bytes):
            data = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else _NONE
        parts = [torch.tensor([kind, len(numbers), len(data)], dtype=torch.int64), numbers, data]
        try:
            for part in parts:
                if len(part):
                    self._group.send([part], self._other, 0).wait(_TELLING if self.rank else _EVER)
        except RuntimeError as error:
            raise self._lost(error) from error
        self.sent += sum(part.nbytes for part in parts)

    def receive(self, patience: float | None = None) -> PeerMessage:
        """What it says next.

        Args:
            patience: seconds to wait for it; ``None`` is for ever.

        Raises:
            ConnectionLostError: it is gone, says nothing in time, or what it says is none of ours.
        """
        header = torch.zeros(3, dtype=torch.int64)
        try:
            self._group.recv([header], self._other, 0).wait(_EVER if patience is None else timedelta(seconds=patience))
            kind, count, size = header.tolist()
            numbers, data = torch.empty(count, dtype=torch.int64), torch.empty(size, dtype=torch.uint8)
            for part in (numbers, data):
                if len(part):
                    self._group.recv([part], self._other, 0).wait(_TELLING)
            message = PeerMessage(MessageKind(kind), numbers, data)
        except (RuntimeError, ValueError) as error:
            raise self._lost(error) from error
        self.received += header.nbytes + numbers.nbytes + data.nbytes
        return message

    def _lost(self, error: Exception) -> ConnectionLostError:
        who = f"worker {self.rank}" if self.rank else "the process that gives the work"
        return ConnectionLostError(f"{who} is gone, or does not answer: {str(error).splitlines()[0][-160:]}")
