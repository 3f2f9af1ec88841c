"""Several processes that train one model, each on its share of a step's passes.

They are started, on one machine or over a shared folder, by::

    torchrun --nproc-per-node 4 --no-python pronk train …

Every process has the whole module and the whole optimizer. It computes every ``count``-th pass of a step; the gradients
are summed, so that all of them make the step that one process would have made. The first process alone prints,
evaluates and writes.
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

__all__ = ["ProcessGroup", "join_processes", "local_device"]

# The others wait for the first while the target writes its text; a process that dies takes all with it in any case.
_PATIENCE = timedelta(days=7)

T = TypeVar("T")


@dataclass(frozen=True)
class ProcessGroup:
    """This process, number ``rank`` of ``count``; by default it is alone, and nothing here costs anything."""

    rank: int = 0
    count: int = 1

    @property
    def main(self) -> bool:
        """Whether this is the one that prints, evaluates and writes."""
        return self.rank == 0

    def from_main(self, compute: Callable[[], T]) -> T:
        """What ``compute`` returns in the first process; the others wait for it."""
        if self.count == 1:
            return compute()
        box = [compute() if self.main else None]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]  # type: ignore[return-value]  # the first process has put it there

    def agree(self, value: T) -> T:
        """The first process's value."""
        return self.from_main(lambda: value)

    def any(self, flag: bool) -> bool:
        """Whether it is so in any process."""
        if self.count == 1:
            return flag
        flags = torch.tensor(int(flag))
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        return bool(flags)

    def share(self, passes: int) -> range:
        """The numbers of the passes that this process makes; ``count`` divides ``passes``."""
        return range(self.rank, passes, self.count)

    def gather(self, rows: Sequence[Sequence[float]]) -> list[list[float]]:
        """The figures of all passes in their order, of which every process has those of its :meth:`share`."""
        if self.count == 1:
            return [list(row) for row in rows]
        own = torch.tensor(rows, dtype=torch.float64)
        parts = [torch.empty_like(own) for _ in range(self.count)]
        dist.all_gather(parts, own)
        return torch.stack(parts, dim=1).flatten(0, 1).tolist()

    def sum_gradients(self, module: nn.Module) -> None:
        """Give every process the sum of all gradients; a parameter that has none anywhere is left without."""
        if self.count == 1:
            return
        parameters = [p for p in module.parameters() if p.requires_grad]
        found = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        chosen = [p for p, some in zip(parameters, found.tolist(), strict=True) if some]
        if not chosen:
            return
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in chosen]
        # One large message is much faster than many small ones.
        every = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(every)
        for parameter, grad in zip(chosen, every.split([p.numel() for p in chosen]), strict=True):
            parameter.grad = grad.view_as(parameter).clone()


def local_device(name: str) -> str:
    """``cuda`` is one GPU for each process of a machine; any other name stays."""
    several = name == "cuda" and dist.is_available() and dist.is_torchelastic_launched()
    return f"cuda:{dist.get_node_local_rank()}" if several else name


@contextmanager
def join_processes(device: str) -> Iterator[ProcessGroup]:
    """The processes that ``torchrun`` has started, or this one alone.

    Args:
        device: where it is trained; gradients on a GPU are summed by NCCL, everything else by Gloo.
    """
    if not (dist.is_available() and dist.is_torchelastic_launched()):
        yield ProcessGroup()
        return
    gpu = torch.device(local_device(device))
    if gpu.type == "cuda":
        torch.cuda.set_device(gpu)
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu.type == "cuda" else "gloo", timeout=_PATIENCE)
    try:
        yield ProcessGroup(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()
