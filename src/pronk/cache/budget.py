"""How large the KV pool is."""

from __future__ import annotations

import os
import re

import torch

from pronk.errors import OptionError
from pronk.model.config import ModelConfig

__all__ = ["BLOCK_SIZE", "num_blocks", "parse_memory"]

# Tokens per block: small enough that a short request wastes little, large enough that tables stay short.
BLOCK_SIZE = 32

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}

# Share of the machine's memory that the pool may take when nobody says how much.
_DEFAULT_SHARE = 0.25


def parse_memory(value: str | int) -> int:
    """Bytes of ``"2GiB"``, ``"500MB"``, ``"64k"`` or a plain number."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]I?)?B?\s*", str(value).upper())
    if match is None or float(match[1]) == 0:
        msg = f'kv_memory: expected a positive number of bytes, or text such as "2GiB" or "500MB"; found {value!r}'
        raise OptionError(msg)
    return int(float(match[1]) * _UNITS[match[2] or ""])


def num_blocks(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, kv_memory: str | int | None, max_requests: int
) -> int:
    """Blocks of the pool: as many as ``kv_memory`` holds.

    The default is enough for ``max_requests`` full contexts, within a quarter of the memory.

    Raises:
        OptionError: the budget does not hold a single block.
    """
    block_bytes = config.kv_bytes_per_token(dtype.itemsize) * BLOCK_SIZE
    if kv_memory is None:
        wanted = max_requests * (-(-config.context // BLOCK_SIZE) + 1)
        return max(1, min(wanted, int(_memory(device) * _DEFAULT_SHARE) // block_bytes))
    count = parse_memory(kv_memory) // block_bytes
    if not count:
        msg = f"kv_memory: expected at least {block_bytes} bytes, one block of {BLOCK_SIZE} tokens; found {kv_memory!r}"
        raise OptionError(msg)
    return count


def _memory(device: torch.device) -> int:
    """Bytes: all of the machine's, or what is free on an accelerator once the weights are there."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
