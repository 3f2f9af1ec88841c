"""A checkpoint read without torch: the shape of a Llama-like decoder, and its weights as numpy arrays.

The converters write what they find: bfloat16 stays bfloat16, bit by bit. It is handed out as ``uint16``, because numpy
has no such type.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .contract import Unsupported

__all__ = ["ArrayCheckpoint", "Shape", "cached", "convert_type"]

# Changes whenever what the converters write does, so that no model of an older version is taken from the cache.
_CACHE_FORMAT = 2

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_NUMPY = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}
_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True)
class Shape:
    """What both converters need to know of ``config.json``. ``inv_freq`` has one rotation per pair of dimensions."""

    family: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    eps: float
    theta: float
    inv_freq: NDArray[np.float64]
    tied: bool


class ArrayCheckpoint:
    """The folder of a Llama, Mistral, Qwen2 or Qwen3 model."""

    def __init__(self, folder: Path) -> None:
        self.shape = _read_shape(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        self._tensors = dict(_index(folder))

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str, dtype: str) -> NDArray[Any]:
        """A weight as ``dtype``; ``uint16`` stands for bfloat16."""
        if name not in self._tensors:
            msg = f"the checkpoint has no tensor {name}"
            raise Unsupported(msg)
        file, start, stored, shape = self._tensors[name]
        array = np.memmap(file, dtype=_NUMPY[stored], mode="r", offset=start, shape=shape)
        return convert_type(array, stored, _NAMES[dtype])


def convert_type(array: NDArray[Any], stored: str, wanted: str) -> NDArray[Any]:
    """From one of ``BF16``, ``F16`` and ``F32`` to another, rounding to the nearest even."""
    if stored == wanted:
        return np.ascontiguousarray(array)
    wide = (array.astype(np.uint32) << 16).view(np.float32) if stored == "BF16" else array.astype(np.float32)
    if wanted != "BF16":
        return wide.astype(_NUMPY[wanted])
    bits = wide.view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def cached(cache: Path, source: Path, kind: str, write: Callable[[Path], None]) -> Path:
    """The folder of a converted model: written once, and whole or not at all.

    The key is the source's path with the time and size of its files, so that a checkpoint that was trained on is
    converted again.
    """
    stamps = [(f.name, f.stat().st_mtime_ns, f.stat().st_size) for f in sorted(source.iterdir()) if f.is_file()]
    key = sha256(json.dumps([_CACHE_FORMAT, str(source), stamps]).encode()).hexdigest()[:16]
    target = cache / f"{source.name}-{kind}-{key}"
    if not target.exists():
        with _temporary(cache) as folder:
            write(folder)
            # Another process may have been faster; what it wrote is the same.
            if not target.exists():
                folder.rename(target)
    return target


@contextmanager
def _temporary(cache: Path) -> Iterator[Path]:
    cache.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{os.getpid()}-", dir=cache))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _index(folder: Path) -> Iterator[tuple[str, tuple[Path, int, str, tuple[int, ...]]]]:
    """Where each tensor lies: the file, the offset of its first byte, the stored type and the shape."""
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size))
        for name, info in header.items():
            if name == "__metadata__":
                continue
            if info["dtype"] not in _NUMPY:
                msg = f"{name} is stored as {info['dtype']}; expected one of {', '.join(_NUMPY)}"
                raise Unsupported(msg)
            yield name, (file, 8 + size + info["data_offsets"][0], info["dtype"], tuple(info["shape"]))


def _read_shape(raw: dict[str, Any]) -> Shape:
    family = raw.get("model_type")
    if family not in _FAMILIES:
        msg = f"cannot convert a {family} model; expected one of {', '.join(_FAMILIES)}"
        raise Unsupported(msg)
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        msg = f"cannot convert the activation {raw['hidden_act']}; expected silu"
        raise Unsupported(msg)
    slides = raw.get("use_sliding_window", False) if family.startswith("qwen") else True
    if slides and raw.get("sliding_window"):
        msg = "cannot convert a model with a sliding window"
        raise Unsupported(msg)
    heads = int(raw["num_attention_heads"])
    head_dim = int(raw.get("head_dim") or (128 if family == "qwen3" else raw["hidden_size"] // heads))
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    return Shape(
        family=family,
        vocab=int(raw["vocab_size"]),
        hidden=int(raw["hidden_size"]),
        intermediate=int(raw["intermediate_size"]),
        layers=int(raw["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        context=int(raw.get("max_position_embeddings", 2048)),
        eps=float(raw.get("rms_norm_eps", 1e-6)),
        theta=theta,
        inv_freq=_frequencies(rope, theta, head_dim),
        tied=bool(raw.get("tie_word_embeddings", False)),
    )


def _frequencies(rope: dict[str, Any], theta: float, head_dim: int) -> NDArray[np.float64]:
    """The rotations per position that transformers would use for *default*, *linear* and *llama3*."""
    base = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return base
    if kind == "linear":
        return base / float(rope["factor"])
    if kind != "llama3":
        msg = f"cannot convert {kind} rotary embeddings; expected default, linear or llama3"
        raise Unsupported(msg)
    low, high, factor = (float(rope[key]) for key in ("low_freq_factor", "high_freq_factor", "factor"))
    turns = float(rope["original_max_position_embeddings"]) * base / (2 * math.pi)
    # 0 = scaled in full, 1 = not at all, for those between `low` and `high` turns in the original context.
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return base * (kept + (1 - kept) / factor)
