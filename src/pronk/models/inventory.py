"""Matching of checkpoint tensors to the parts of a model, with a complete account of both.

A matrix is one plain tensor, several tensors in a quantized checkpoint (codes, scales, …), or one tensor of a GGUF
file, possibly in blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from pronk.architecture.config import ModelConfig
from pronk.errors import CheckpointError
from pronk.models.checkpoint import AnyCheckpoint
from pronk.models.families import FAMILY_NAMES, GGUF_NAMES, CheckpointTensor, DecoderPart, FamilyNames
from pronk.quantization.formats.formats import scheme_of
from pronk.quantization.formats.matrix import QuantizedMatrix
from pronk.quantization.formats.scheme import LinearModule, Scheme, StoredTensor, StoredWeight
from pronk.quantization.gguf.checkpoint import GgufCheckpoint

__all__ = ["Inventory", "tensor_names"]


def tensor_names(checkpoint: AnyCheckpoint, config: ModelConfig) -> FamilyNames:
    """Return the naming scheme of a checkpoint: that of GGUF files or of the model family."""
    return GGUF_NAMES if isinstance(checkpoint, GgufCheckpoint) else FAMILY_NAMES[config.family]


class Inventory:
    """The tensors of a checkpoint by their names in the model; any mismatch raises a CheckpointError."""

    def __init__(self, checkpoint: AnyCheckpoint, config: ModelConfig, parts: Sequence[DecoderPart]) -> None:
        self.checkpoint = checkpoint
        names = tensor_names(checkpoint, config)
        self._scheme = None if config.quantization is None else scheme_of(config.quantization)
        self._stored = _index(checkpoint, names)
        if config.tied:
            _check_tied(checkpoint, names, self._stored)
        plain = {piece.name: StoredTensor((piece.shape,)) for part in parts for piece in part.pieces}
        self._weights = {} if self._scheme is None else _weights(checkpoint, names, self._scheme, parts)
        expected = {name: stored for name, stored in plain.items() if name not in self._weights}
        self._tensors: dict[str, dict[str, str]] = {}
        for name, weight in self._weights.items():
            # A bias of the model is a separate piece and is already in ``expected``.
            tensors = {f"{_module(name)}.{key}": (key, stored) for key, stored in weight.tensors.items()}
            own = {
                full: pair
                for full, pair in tensors.items()
                if full not in expected and self._is_expected(full, pair[1])
            }
            expected |= {full: stored for full, (_, stored) in own.items()}
            self._tensors[name] = {key: full for full, (key, _) in own.items()}
        self._check_complete(expected, names)

    @property
    def notes(self) -> Sequence[str]:
        """Warnings where loading deviates from the checkpoint; one line each."""
        return () if self._scheme is None else self._scheme.notes

    def nbytes(self, part: DecoderPart) -> int:
        """Size of a part in the file, in bytes."""
        names = [name for piece in part.pieces for name in self._tensors.get(piece.name, {"": piece.name}).values()]
        return sum(self.checkpoint.nbytes(self._stored[name]) for name in names)

    def tensor(self, piece: CheckpointTensor) -> Tensor:
        """Return a plain tensor as a view of the mapped file."""
        return self.checkpoint.tensor(self._stored[piece.name])

    def is_quantized(self, piece: CheckpointTensor) -> bool:
        """Return whether a matrix is stored quantized."""
        if isinstance(self.checkpoint, GgufCheckpoint):
            return self.checkpoint.has_blocks(self._stored[piece.name])
        return piece.name in self._weights

    def weight(self, piece: CheckpointTensor, codes: Tensor) -> Tensor | QuantizedMatrix:
        """Read a quantized matrix; the result is plain if its format stores no integer codes.

        ``codes``, uint8 ``[outputs, inputs]``, receives the codes. Invalid values raise a CheckpointError.
        """
        if isinstance(self.checkpoint, GgufCheckpoint):
            return self.checkpoint.weight(self._stored[piece.name], codes)
        stored = {key: self._stored[name] for key, name in self._tensors[piece.name].items()}
        try:
            tensors = {key: self.checkpoint.tensor(name) for key, name in stored.items()}
            return self._weights[piece.name].read(tensors, codes)
        except CheckpointError as error:
            msg = f"{self.checkpoint.folder}: {_module(next(iter(stored.values())))}: {error}"
            raise CheckpointError(msg) from error

    def _is_expected(self, name: str, stored: StoredTensor) -> bool:
        return stored.required or name in self._stored

    def _check_complete(self, expected: Mapping[str, StoredTensor], names: FamilyNames) -> None:
        """Raise a :class:`CheckpointError` unless the file has exactly the expected tensors."""
        folder, stored = self.checkpoint.folder, self._stored
        ignored = [names.ignored] + ([] if self._scheme is None else [self._scheme.ignored])
        left = [name for name in stored if name not in expected]
        extra = [stored[name] for name in left if not any(pattern.fullmatch(name) for pattern in ignored)]
        missing = [name for name in expected if name not in stored]
        for kind, found in (("missing", missing), ("unexpected", extra)):
            if found:
                listed = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
                msg = (
                    f"{folder}: {kind} tensors: {listed}; expected the {len(expected)} tensors that "
                    f"{self.checkpoint.config_source} asks for, found {len(self.checkpoint)}; check that the files are "
                    "complete and belong together"
                )
                raise CheckpointError(msg)
        for name, each in expected.items():
            _check(self.checkpoint, stored[name], each)


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _index(checkpoint: AnyCheckpoint, names: FamilyNames) -> dict[str, str]:
    """Map names without prefix to names in the file."""
    stored: dict[str, str] = {}
    for name in checkpoint:
        plain = names.canonical(name)
        if plain in stored:
            msg = f"{checkpoint.folder}: expected one tensor {plain}, found two: {stored[plain]} and {name}"
            raise CheckpointError(msg)
        stored[plain] = name
    return stored


def _weights(
    checkpoint: AnyCheckpoint, names: FamilyNames, scheme: Scheme, parts: Sequence[DecoderPart]
) -> dict[str, StoredWeight]:
    # Patterns in quantization_config match full names, with the prefix.
    prefix = names.prefix if any(name.startswith(names.prefix) for name in checkpoint) else ""
    found = {}
    for module, piece in _modules(names, parts, prefix):
        try:
            weight = scheme.weight(module)
        except CheckpointError as error:
            msg = f"{checkpoint.folder}: {error}"
            raise CheckpointError(msg) from error
        if weight is not None:
            found[piece.name] = weight
    return found


def _modules(
    names: FamilyNames, parts: Sequence[DecoderPart], prefix: str
) -> Iterator[tuple[LinearModule, CheckpointTensor]]:
    for part in parts:
        for piece in part.weight if part.kind == "linear" else ():
            name, shape = _module(piece.name), piece.shape
            outputs, inputs = shape[::-1] if part.transposed else shape
            head = name == names.head
            yield LinearModule(name if head else prefix + name, outputs, inputs, head, part.transposed), piece


def _check(checkpoint: AnyCheckpoint, name: str, stored: StoredTensor) -> None:
    found = checkpoint.shape(name)
    if stored.shapes is not None and found not in stored.shapes:
        source = checkpoint.config_source
        msg = (
            f"{checkpoint.folder}: tensor {name}: expected shape {' or '.join(str(list(s)) for s in stored.shapes)} "
            f"from {source}, found {list(found)}; check that {source} and the weights belong together"
        )
        raise CheckpointError(msg)
    checkpoint.check_dtype(name, stored.dtypes)


def _check_tied(checkpoint: AnyCheckpoint, names: FamilyNames, stored: dict[str, str]) -> None:
    """Drop a head that equals the embedding; raise if a tied config comes with a different head."""
    head, embedding = stored.pop(f"{names.head}.weight", None), stored.get(f"{names.embedding}.weight")
    if head is None or embedding is None:
        return
    _check(checkpoint, head, StoredTensor((checkpoint.shape(embedding),)))
    if not torch.equal(checkpoint.tensor(head), checkpoint.tensor(embedding)):
        msg = (
            f"{checkpoint.folder}: expected {head} to equal {embedding}, as tie_word_embeddings in config.json says, "
            "found different values; set tie_word_embeddings to false to use both"
        )
        raise CheckpointError(msg)
