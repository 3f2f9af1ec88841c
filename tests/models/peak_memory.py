"""Peak memory of loading a model in a new process, including pages of the memory-mapped file."""

import subprocess
import sys
from pathlib import Path

import pytest

from waiting import HUNG

NEEDS_LINUX = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs Linux's high-water mark of memory"
)

# Code around a script that defines ``write(path, **sizes)``, ``load(path)``, ``size(made,
# written)`` and ``large``.
_BEGIN = """
import ctypes, gc, json, re, sys
from pathlib import Path
import numpy as np
from safetensors.numpy import save_file
from pronk.base.arrays import BFLOAT16, DTYPES
from pronk.kernels.threads import set_threads
from pronk.models import loader
from pronk.models.tensor_plan import plan_tensors
from pronk.models.kernels import load_kernels
from pronk.models.decoder import forward_weights
from pronk.checkpoint.formats.matrix import QuantizedMatrix

folder = Path(sys.argv[1])
set_threads(1, 1)

def kilobytes(key):
    return int(re.search(key + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def begin(path, **values):
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "num_attention_heads": 8, **values}))
    return [(part, piece) for part in plan_tensors(loader.read_config(path)) for piece in part.tensors]

def write_plain(path, make, **sizes):
    tensors = {piece.name: make(piece.shape) for _, piece in begin(path, **sizes)}
    save_file(tensors, path / "model.safetensors")
    return sum(tensor.size for tensor in tensors.values())
"""
_END = """
write(folder / "small", vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=1)
written = write(folder / "large", **large)
load(folder / "small")
gc.collect()
ctypes.CDLL(None).malloc_trim(0)  # free memory left from writing would hide memory of loading
Path("/proc/self/clear_refs").write_text("5")  # reset the peak
before = kilobytes("VmRSS")
made = load(folder / "large")
print((kilobytes("VmHWM") - before) * 1024 / size(made, written))
"""


def peak(script: str, *arguments: object) -> float:
    """Return the peak memory of loading a model of sizes ``large``, divided by ``size(made,
    written)``.
    """
    command = [sys.executable, "-c", _BEGIN + script + _END, *map(str, arguments)]
    return float(
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=HUNG).stdout
    )
