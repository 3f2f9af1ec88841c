"""Fingerprint of a checkpoint, by which a trained drafter recognizes its model.

The hash covers 4096 to 8191 evenly spaced values of every tensor (all of a smaller one), so that it is fast for any
model size. It does not depend on the distribution of the tensors over files.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from pronk.architecture.config import ModelConfig
from pronk.arrays import FLOAT32
from pronk.models.checkpoint import open_checkpoint
from pronk.models.loader import read_config
from pronk.quantization.gguf.checkpoint import GgufCheckpoint

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
            if isinstance(checkpoint, GgufCheckpoint):
                values = checkpoint.raw_bytes(name)  # without dequantization
            else:
                values = checkpoint.tensor(name).reshape(-1)
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
