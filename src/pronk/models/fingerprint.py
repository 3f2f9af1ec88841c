"""What tells a checkpoint from others: its architecture and its weights.

A drafter that was trained on a model is of no use for another one, so it carries the fingerprint of its own. The
weights are told apart by samples of every tensor, which takes milliseconds for any size; files may be split otherwise.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from pronk.models.checkpoint import AnyCheckpoint, open_checkpoint
from pronk.models.loader import read_config
from pronk.quantization.gguf.checkpoint import GgufCheckpoint

__all__ = ["Fingerprint"]

_SAMPLES = 4096  # numbers of a tensor, evenly spread


@dataclass(frozen=True)
class Fingerprint:
    """Of one checkpoint.

    Attributes:
        architecture: its shape, readable.
        weights: hexadecimal digits.
    """

    architecture: str
    weights: str

    @classmethod
    def of(cls, folder: Path) -> Fingerprint:
        """The fingerprint of a model folder, or of a GGUF file.

        Raises:
            CheckpointError: it is not one.
        """
        c = read_config(folder)
        architecture = (
            f"{c.family} of {c.num_layers} layers, hidden size {c.hidden_size}, {c.num_heads} heads of {c.head_dim} "
            f"over {c.num_kv_heads}, vocabulary {c.vocab_size}"
        )
        checkpoint, digest = open_checkpoint(folder), hashlib.sha256(architecture.encode())
        for name in sorted(checkpoint):
            values = _numbers(checkpoint, name)
            sample = values[:: max(1, len(values) // _SAMPLES)].float().contiguous()
            digest.update(f"{name} {checkpoint.shape(name)}".encode())
            digest.update(sample.numpy().tobytes())
            checkpoint.release()
        return cls(architecture, digest.hexdigest()[:16])

    def __str__(self) -> str:
        return f"{self.architecture}, weights {self.weights}"


def _numbers(checkpoint: AnyCheckpoint, name: str) -> Tensor:
    """The numbers of a tensor in a row; of blocks the bytes, which need not be taken apart for it."""
    return checkpoint.stored(name) if isinstance(checkpoint, GgufCheckpoint) else checkpoint.tensor(name).flatten()
