"""Measurements of the device that torch computes on: bandwidth, peak memory and name."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["buffer_reader", "peak_memory", "product_name", "reset_peak_memory"]


def buffer_reader(num_bytes: int, device: str) -> Callable[[], None]:
    """Return a function that reads ``num_bytes`` bytes of the device's memory, always the same ones."""
    buffer = torch.zeros(num_bytes // 4, dtype=torch.float32, device=device)

    def read() -> None:
        buffer.sum()
        if device != "cpu":
            torch.accelerator.synchronize(device)

    return read


def reset_peak_memory(device: str) -> None:
    """Set the peak memory of a CUDA device to the memory in use now."""
    torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: str) -> int:
    """Return the largest number of bytes that tensors on a CUDA device took since the last reset."""
    return torch.cuda.max_memory_allocated(device)


def product_name(device: str) -> str:
    """Return the name of a CUDA device, such as ``NVIDIA H100``."""
    return torch.cuda.get_device_name(device)
