"""Fingerprint of a checkpoint, by which a trained drafter recognizes its model.

The hash covers 4096 to 8191 evenly spaced values of every tensor (all of a smaller one), so that it is fast for any
model size. It does not depend on the distribution of the tensors over files.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from pronk.architecture.config import ModelConfig
from pronk.arrays import FLOAT32, Array
from pronk.models.checkpoint import AnyCheckpoint, open_checkpoint
from pronk.models.loader import read_config
from pronk.quantization.gguf.checkpoint import GgufCheckpoint

__all__ = ["Fingerprint", "describe_architecture"]

_SAMPLES = 4096  # minimum number of values to hash per tensor; a smaller tensor is hashed whole


@dataclass(frozen=True)
class Fingerprint:
    """Identity of a checkpoint: family and sizes in words, and a hash of 16 hexadecimal digits."""

    architecture: str
    weights: str

    @classmethod
    def of(cls, folder: Path) -> Fingerprint:
        """Compute the fingerprint of a model folder or a GGUF file."""
        architecture = describe_architecture(read_config(folder))
        checkpoint, digest = open_checkpoint(folder), hashlib.sha256(architecture.encode())
        for name in sorted(checkpoint):
            values = _hashable_values(checkpoint, name)
            sample = values[:: max(1, len(values) // _SAMPLES)].astype(FLOAT32)
            digest.update(f"{name} {checkpoint.shape(name)}".encode())
            digest.update(sample.tobytes())
            checkpoint.release()
        return cls(architecture, digest.hexdigest()[:16])

    def __str__(self) -> str:
        return f"{self.architecture}, weights {self.weights}"


def describe_architecture(config: ModelConfig) -> str:
    """Return family and sizes of a model in words."""
    return (
        f"{config.family} of {config.num_layers} layers, hidden size {config.hidden_size}, {config.num_heads} "
        f"heads of {config.head_dim} over {config.num_kv_heads}, vocabulary {config.vocab_size}"
    )


def _hashable_values(checkpoint: AnyCheckpoint, name: str) -> Array:
    """Return a tensor's values, or in GGUF files its stored bytes (without dequantization), as a vector."""
    return checkpoint.raw_bytes(name) if isinstance(checkpoint, GgufCheckpoint) else checkpoint.tensor(name).reshape(-1)
