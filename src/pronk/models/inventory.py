"""Check that a checkpoint has exactly the tensors that a model needs, and read them.

A matrix is stored as one unquantized tensor, as several tensors of a quantized checkpoint (codes,
scales, …), or as one tensor of a GGUF file, quantized or not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from pronk.base.arrays import FLOAT32, UINT8, Array, as_bytes
from pronk.base.errors import CheckpointError, locate_error, refuse
from pronk.checkpoint.config import ModelConfig
from pronk.checkpoint.formats.matrix import QuantizedMatrix
from pronk.checkpoint.formats.scheme import (
    LinearModule,
    Scheme,
    StoredTensor,
    StoredWeight,
    parse_scheme,
)
from pronk.checkpoint.gguf.blocks import BlockMatrix
from pronk.checkpoint.gguf.checkpoint import GgufCheckpoint
from pronk.checkpoint.tensors import AnyCheckpoint
from pronk.models.families import get_architecture, get_family
from pronk.models.family import TensorNames
from pronk.models.tensor_plan import CheckpointTensor, DecoderPart

# Maximum number of MTP heads after the layers of a safetensors checkpoint.
_MAX_HEADS = 8
# number of bytes of a tied LM head that are compared with the embedding at a time
_COMPARED_BYTES = 1 << 20


def tensor_names(checkpoint: AnyCheckpoint, config: ModelConfig) -> TensorNames:
    """Return the tensor names to expect: those of GGUF files, or those of the model family.

    Alternatives are chosen by the tensors of the model itself: those of an MTP head in the same
    checkpoint may have other names.
    """
    names = family_names(checkpoint, config)
    if isinstance(checkpoint, GgufCheckpoint):
        _, architecture = get_architecture(checkpoint)
        if architecture.skips_heads:
            key = f"{checkpoint.header.get('general.architecture')}.nextn_predict_layers"
            names = _without_heads(names, config.num_layers, checkpoint.header.get(key) or 0)
    elif names.skips_heads:
        names = _without_heads(names, config.num_layers, _MAX_HEADS)
    canonical = map(names.canonical, checkpoint)
    return choose_alternatives(
        names, [name for name in canonical if not names.ignored.fullmatch(name)]
    )


def family_names(checkpoint: AnyCheckpoint, config: ModelConfig) -> TensorNames:
    """Return the usual tensor names of a checkpoint's format and family."""
    if isinstance(checkpoint, GgufCheckpoint):
        _, architecture = get_architecture(checkpoint)
        return architecture.names
    return get_family(config.family).names


def choose_alternatives(names: TensorNames, stored: Sequence[str]) -> TensorNames:
    """Replace names of layers' modules by alternatives that a checkpoint has.

    An alternative (``TensorNames.alternatives``) is used if all its tensors are among ``stored``,
    the names of the checkpoint's tensors without the family's prefix.
    """
    for alternative in names.alternatives:
        wanted = [name for modules in alternative.values() for name in modules]
        if all(_has_tensor(stored, name) for name in wanted):
            names = replace(names, layer={**names.layer, **alternative})
    return names


def _has_tensor(stored: Sequence[str], name: str) -> bool:
    """Return whether some layer has a tensor of this name within the layer.

    ``name`` may lack the suffix ``.weight``.
    """
    ends = (f".{name}", f".{name}.weight")
    return any(each.endswith(ends) for each in stored)


def _without_heads(names: TensorNames, num_layers: int, count: int) -> TensorNames:
    """Return names that ignore the tensors of MTP heads, ``count`` layers after the model's."""
    heads = "|".join(str(number) for number in range(num_layers, num_layers + count))
    if not heads:
        return names
    pattern = rf"{names.ignored.pattern}|{re.escape(names.layers)}\.({heads})\..*"
    return replace(names, ignored=re.compile(pattern))


class Inventory:
    """The tensors of a checkpoint, after a check that none is missing or unexpected."""

    def __init__(
        self,
        checkpoint: AnyCheckpoint,
        config: ModelConfig,
        parts: Sequence[DecoderPart],
        names: TensorNames | None = None,
    ) -> None:
        """Compare the checkpoint's tensors with those of ``parts``, by name, shape and dtype.

        ``names`` are by default those of the config's family. Raises ``CheckpointError`` if tensors
        are missing, unexpected, or have another shape or dtype.
        """
        self.checkpoint = checkpoint
        names = names or tensor_names(checkpoint, config)
        self._scheme = None if config.quantization is None else parse_scheme(config.quantization)
        # Warnings, each of one line, about ignored quantization settings of the checkpoint.
        self.notes: Sequence[str] = () if self._scheme is None else self._scheme.notes
        # Maps each tensor's name without the family's prefix (the names used below) to its name in
        # the file.
        self._stored_name = _stored_names(checkpoint, names)
        if config.tied:
            _check_tied(checkpoint, names, self._stored_name)
        plain = {
            source.name: StoredTensor(self._allowed_shapes(source))
            for part in parts
            for source in part.tensors
        }
        self._quantized = (
            {}
            if self._scheme is None
            else _quantized_weights(checkpoint, names, self._scheme, parts)
        )
        expected = {name: stored for name, stored in plain.items() if name not in self._quantized}
        # Names of the tensors of each quantized weight: {"….up_proj.weight": {"qweight":
        # "….up_proj.qweight", …}}.
        self._tensors_of_weight: dict[str, dict[str, str]] = {}
        for name, weight in self._quantized.items():
            weight_tensors = self._tensors_of_weight[name] = {}
            for key, stored in weight.tensors.items():
                tensor = f"{_module_of(name)}.{key}"
                # `expected` already has the bias that the decoder needs. Some formats list the
                # bias, too.
                if tensor not in expected and (stored.required or tensor in self._stored_name):
                    expected[tensor] = stored
                    weight_tensors[key] = tensor
        self._check_complete(expected, names)

    def nbytes(self, part: DecoderPart) -> int:
        """Return the size of all tensors of a part in the file, in bytes."""
        total = 0
        for source in part.tensors:
            names = self._tensors_of_weight.get(source.name, {"": source.name}).values()
            size = sum(self.checkpoint.nbytes(self._stored_name[name]) for name in names)
            total += size * math.prod(source.part_shape) // math.prod(source.shape)
        return total

    def tensor(self, source: CheckpointTensor) -> Array:
        """Return an unquantized tensor.

        The array is a view of the mapped file, unless rows are selected. With a factor, the result
        is in float32.
        """
        name = self._stored_name[source.name]
        found = self.checkpoint.tensor(name).reshape(source.shape)
        if source.expert is not None:
            found = found[source.expert]
        if source.rows is not None:
            found = found[source.rows.order(len(found))]
        return _scaled(found, source.factor)

    def is_quantized(self, source: CheckpointTensor) -> bool:
        """Return whether a matrix is quantized in the checkpoint."""
        if isinstance(self.checkpoint, GgufCheckpoint):
            return self.checkpoint.has_blocks(self._stored_name[source.name])
        return source.name in self._quantized

    def blocks(self, source: CheckpointTensor) -> BlockMatrix | None:
        """Return a quantized matrix of a GGUF file in its blocks.

        ``None`` if kernels cannot pack them.
        """
        if not isinstance(self.checkpoint, GgufCheckpoint) or not self.is_quantized(source):
            return None
        name = self._stored_name[source.name]
        return self.checkpoint.blocks(name, source.expert, source.rows)

    def weight(self, source: CheckpointTensor, codes: Array) -> Array | QuantizedMatrix:
        """Read a matrix that is quantized in the checkpoint, and multiply it by its factor.

        The integer codes are written to ``codes``, uint8 ``[outputs, inputs]``, which the result
        uses. A format without integer codes (FP8) is dequantized to an array. Raises
        ``CheckpointError`` for invalid values.
        """
        stored = self._stored_weight(source, codes)
        if isinstance(stored, np.ndarray):
            return _scaled(stored, source.factor)
        return stored if source.factor == 1.0 else stored.scaled(source.factor)

    def _stored_weight(self, source: CheckpointTensor, codes: Array) -> Array | QuantizedMatrix:
        if isinstance(self.checkpoint, GgufCheckpoint):
            name = self._stored_name[source.name]
            return self.checkpoint.weight(name, codes, source.expert, source.rows)
        stored = {
            key: self._stored_name[name]
            for key, name in self._tensors_of_weight[source.name].items()
        }
        tensors = {key: self.checkpoint.tensor(name) for key, name in stored.items()}
        if source.expert is not None:
            tensors = {key: tensor[source.expert] for key, tensor in tensors.items()}
        module = _module_of(next(iter(stored.values())))
        stored_weight = self._quantized[source.name]
        with locate_error(f"{self.checkpoint.folder}: {module}", CheckpointError):
            if source.rows is None:
                return stored_weight.read(tensors, codes)
            whole = stored_weight.read(tensors, np.empty(source.shape, UINT8))
        order = source.rows.order(source.shape[0])
        if isinstance(whole, np.ndarray):
            return whole[order]
        taken = whole.take_outputs(order)
        codes[:] = taken.codes
        return replace(taken, codes=codes)

    def _allowed_shapes(self, source: CheckpointTensor) -> tuple[tuple[int, ...], ...]:
        """Return the shapes that a tensor may have in the file.

        GGUF files may lack dimensions of size 1.
        """
        if not isinstance(self.checkpoint, GgufCheckpoint) or source.expert is not None:
            return (source.shape,)
        if source.heads:
            return ((source.heads, source.shape[0] // source.heads, *source.shape[1:]),)
        flat = tuple(size for size in source.shape if size > 1)
        shapes = (source.shape, flat, source.gguf_shape or source.shape)
        return tuple(dict.fromkeys(shapes))

    def _check_complete(self, expected: Mapping[str, StoredTensor], names: TensorNames) -> None:
        folder = self.checkpoint.folder
        stored = self._stored_name
        ignored = [names.ignored] + ([] if self._scheme is None else [self._scheme.ignored])
        used = [name for name in stored if not any(pattern.fullmatch(name) for pattern in ignored)]
        unexpected = [stored[name] for name in used if name not in expected]
        missing = [names.in_file(name) for name in expected if name not in stored]
        for kind, tensors in (("missing", missing), ("unexpected", unexpected)):
            if tensors:
                listed = ", ".join(tensors[:3])
                if len(tensors) > 3:
                    listed += f" and {len(tensors) - 3} more"
                source = self.checkpoint.config_source
                wanted = f"the {len(expected)} tensors that {source} asks for"
                remedy = "check that the files are complete and belong together"
                found = f"{len(used)}; {remedy}"
                refuse(folder, f"{kind} tensors: {listed}; expected {wanted}, found {found}")
        for name, tensor in expected.items():
            _check_shape_and_dtype(self.checkpoint, stored[name], tensor)


def _scaled(array: Array, factor: float) -> Array:
    return array if factor == 1.0 else array.astype(FLOAT32) * FLOAT32.type(factor)


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


def _stored_names(checkpoint: AnyCheckpoint, names: TensorNames) -> dict[str, str]:
    """Return the names of all tensors in the file, by their names without the family's prefix."""
    stored: dict[str, str] = {}
    for name in checkpoint:
        plain = names.canonical(name)
        if plain in stored:
            refuse(
                checkpoint.folder,
                f"expected one tensor {plain}, found two: {stored[plain]} and {name}",
            )
        stored[plain] = name
    return stored


def _quantized_weights(
    checkpoint: AnyCheckpoint, names: TensorNames, scheme: Scheme, parts: Sequence[DecoderPart]
) -> dict[str, StoredWeight]:
    """Return, for each quantized weight, the tensors in which it is stored.

    The keys are names of weights without the family's prefix.
    """
    # The names of a checkpoint may have a prefix that canonical names lack, such as
    # ``model.language_model.``. Patterns of modules in quantization_config are written for names
    # with the prefix.
    layers = (name for name in checkpoint if names.canonical(name).startswith(f"{names.layers}."))
    prefix = next((name.removesuffix(names.canonical(name)) for name in layers), "")
    weights = {}
    tensors = [(part, tensor) for part in parts if part.kind == "linear" for tensor in part.weight]
    for part, tensor in tensors:
        if tensor.expert is not None and scheme.name != "mxfp4":
            # only MXFP4 quantizes tensors ``[experts, outputs, inputs]``; others have a matrix per
            # expert
            continue
        with locate_error(checkpoint.folder, CheckpointError):
            weight = scheme.weight(_linear_module(names, part, tensor, prefix))
        if weight is not None:
            weights[tensor.name] = weight
    return weights


def _linear_module(
    names: TensorNames, part: DecoderPart, tensor: CheckpointTensor, prefix: str
) -> LinearModule:
    outputs, inputs = tensor.shape[-2:]
    if part.transposed:
        outputs, inputs = inputs, outputs
    if tensor.expert is not None:
        name = prefix + tensor.name
        return LinearModule(
            name, outputs, inputs, transposed=part.transposed, experts=tensor.shape[0]
        )
    name = _module_of(tensor.name)
    is_head = name == names.head
    return LinearModule(
        name if is_head else prefix + name, outputs, inputs, is_head, part.transposed
    )


def _check_shape_and_dtype(checkpoint: AnyCheckpoint, name: str, stored: StoredTensor) -> None:
    found = checkpoint.shape(name)
    if stored.shapes is not None and found not in stored.shapes:
        source = checkpoint.config_source
        expected = f"shape {' or '.join(str(list(shape)) for shape in stored.shapes)} from {source}"
        remedy = f"check that {source} and the weights belong together"
        refuse(
            checkpoint.folder, f"tensor {name}: expected {expected}, found {list(found)}; {remedy}"
        )
    checkpoint.check_dtype(name, stored.dtypes)


def _check_tied(checkpoint: AnyCheckpoint, names: TensorNames, stored: dict[str, str]) -> None:
    """Remove a tied LM head from ``stored``.

    Raise a CheckpointError if it differs from the embedding.
    """
    head = stored.pop(f"{names.head}.weight", None)
    embedding = stored.get(f"{names.embedding}.weight")
    if head is None or embedding is None:
        return
    _check_shape_and_dtype(checkpoint, head, StoredTensor((checkpoint.shape(embedding),)))
    if not _have_equal_bytes(checkpoint.tensor(head), checkpoint.tensor(embedding)):
        expected = (
            f"expected {head} to equal {embedding}, as tie_word_embeddings in config.json says"
        )
        remedy = "set tie_word_embeddings to false to use both"
        refuse(checkpoint.folder, f"{expected}, found different values; {remedy}")


def _have_equal_bytes(one: Array, other: Array) -> bool:
    if one.dtype != other.dtype:
        return False
    one = as_bytes(one)
    other = as_bytes(other)
    # a comparison needs memory for its result, so it is made in slices
    slices = [
        slice(start, start + _COMPARED_BYTES) for start in range(0, len(one), _COMPARED_BYTES)
    ]
    return all(np.array_equal(one[part], other[part]) for part in slices)
