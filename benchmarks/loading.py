"""Cost of loading a checkpoint: seconds, and peak memory relative to the weights in the loaded dtype.

    python benchmarks/loading.py FOLDER [--dtype bfloat16] [--kernels torch]

Linux only: the peak is the high-water mark of the operating system, pages of the mapped file included. Prints one line
of JSON.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from time import perf_counter

import torch

from pronk.kernels.library import CHOICES
from pronk.models.kernels import load_kernels
from pronk.models.loader import load_decoder, parse_dtype, read_config, resolve_model


def resident(key: str) -> int:
    """Return bytes of this process: ``VmRSS`` is the current size, ``VmHWM`` the peak."""
    found = re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found is not None
    return int(found[1]) * 1024


def main() -> None:
    """Load once, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kernels", default="auto", choices=CHOICES, help="instruction set to pack weights for")
    args = parser.parse_args()
    folder = resolve_model(args.model)
    config = read_config(folder)
    dtype = parse_dtype(args.dtype, config)
    kernels = None if args.kernels == "torch" else load_kernels(args.kernels)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before, began = resident("VmRSS"), perf_counter()
    decoder = load_decoder(folder, config, dtype=dtype, device=torch.device("cpu"), kernels=kernels)
    seconds = perf_counter() - began
    c = config
    layer = c.hidden_size * (sum(c.qkv_sizes) + c.num_heads * c.head_dim + c.intermediate_size * (3 if c.gated else 2))
    weights = len(decoder.layers) * layer + c.vocab_size * c.hidden_size * (1 if c.tied else 2)
    figures = {
        "model": folder.name,
        "dtype": str(dtype).removeprefix("torch."),
        "kernels": "torch" if kernels is None else kernels.name,
        "seconds": round(seconds, 2),
        "weights_gb": round(weights * dtype.itemsize / 1e9, 3),
        "peak_over_weights": round((resident("VmHWM") - before) / (weights * dtype.itemsize), 3),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
