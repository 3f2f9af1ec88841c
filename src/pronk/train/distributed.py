"""Training of one model by several processes, on one machine or on several with a shared folder.

::

    torchrun --nproc-per-node 4 --no-python pronk train …

Each process has the whole module and optimizer, and computes every ``count``-th forward pass of a
step. Gradients are summed, so each process makes the step of a single process. Only the first
process prints, evaluates and writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from pronk.base import end_with_parent

# Maximum time that a process waits for the others. All other processes wait while the first one
# generates the target's own text, which may take days. If a process dies, torchrun ends all
# processes; if torchrun dies, each process ends itself.
_TIMEOUT = timedelta(days=7)

T = TypeVar("T")


@dataclass(frozen=True)
class ProcessGroup:
    """Process number ``rank`` (from 0) of the ``count`` processes that train one model.

    If ``count`` is 1, the methods do not communicate.
    """

    rank: int = 0
    count: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that prints, evaluates and writes."""
        return self.rank == 0

    def from_main(self, compute: Callable[[], T]) -> T:
        """Call ``compute`` in the first process only; return its result in all processes."""
        if self.count == 1:
            return compute()
        results = [compute() if self.is_main else None]
        dist.broadcast_object_list(results, src=0, device=torch.device("cpu"))
        return results[0]  # type: ignore[return-value]  # set by the first process

    def agree(self, value: T) -> T:
        """Return the ``value`` that the first process passed, in all processes."""
        return self.from_main(lambda: value)

    def is_any_true(self, flag: bool) -> bool:
        """Return, in all processes, whether ``flag`` is True in at least one of them."""
        if self.count == 1:
            return flag
        flags = torch.tensor(int(flag))
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        return bool(flags)

    def own_passes(self, passes: int) -> range:
        """Return the numbers of the forward passes of a step that this process computes.

        The step has the passes ``0 .. passes - 1``.
        """
        return range(self.rank, passes, self.count)

    def gather(self, rows: Sequence[Sequence[float]]) -> list[list[float]]:
        """Return the figures of all forward passes of a step, a row per pass, in order.

        ``rows`` has the rows of the passes that this process has computed.
        """
        if self.count == 1:
            return [list(row) for row in rows]
        own = torch.tensor(rows, dtype=torch.float64)
        parts = [torch.empty_like(own) for _ in range(self.count)]
        dist.all_gather(parts, own)
        return torch.stack(parts, dim=1).flatten(0, 1).tolist()

    def sum_gradients(self, module: nn.Module) -> None:
        """Replace each gradient of ``module`` by its sum over the processes.

        The gradient of a parameter stays ``None`` if no process has one.
        """
        if self.count == 1:
            return
        parameters = [p for p in module.parameters() if p.requires_grad]
        has_grad = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
        dist.all_reduce(has_grad, dist.ReduceOp.MAX)
        parameters = [p for p, has in zip(parameters, has_grad.tolist(), strict=True) if has]
        if not parameters:
            return
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        # One large message between processes is much faster than many small ones.
        all_grads = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(all_grads)
        sums = all_grads.split([p.numel() for p in parameters])
        for parameter, grad in zip(parameters, sums, strict=True):
            parameter.grad = grad.view_as(parameter).clone()


def local_device(name: str) -> str:
    """Return the name of this process's device: under ``torchrun``, each one has its own GPU.

    Names other than ``cuda`` are returned unchanged.
    """
    has_own_gpu = name == "cuda" and dist.is_available() and dist.is_torchelastic_launched()
    return f"cuda:{dist.get_node_local_rank()}" if has_own_gpu else name


@contextmanager
def join_processes(device: str) -> Iterator[ProcessGroup]:
    """Join the processes that ``torchrun`` has started; without it there is only this one.

    NCCL sums the gradients if ``device`` is a GPU; Gloo does all other communication.
    """
    if not (dist.is_available() and dist.is_torchelastic_launched()):
        yield ProcessGroup()
        return
    end_with_parent()
    gpu = torch.device(local_device(device))
    if gpu.type == "cuda":
        torch.cuda.set_device(gpu)
    backends = "cpu:gloo,cuda:nccl" if gpu.type == "cuda" else "gloo"
    dist.init_process_group(backends, timeout=_TIMEOUT)
    try:
        yield ProcessGroup(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()
