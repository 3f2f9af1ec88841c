"""Folder of a drafter that ``pronk train`` has trained on a target: format and reader.

The folder has three files::

    drafter.json        {"format": "pronk-drafter-1", "kind": "medusa",
                         "shape": {"num_heads": 4, …},
                         "target": {"architecture": …, "weights": …}, …}
    model.safetensors   the weights of the module
    README.md           the model card

``target`` is the fingerprint of the target. For another target the drafter is refused; see
``Target.matches``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from pronk import CheckpointError, OptionError
from pronk.backends import Attention, Kernels, Layer, Linear, Norm, WeightLayout
from pronk.base import is_file
from pronk.base.arrays import FLOAT32, Array, DType
from pronk.checkpoint import (
    Checkpoint,
    Fingerprint,
    ModelConfig,
    clone_model,
    read_json,
    resolve_model,
)
from pronk.drafting import Target

TRAINED_FORMAT = "pronk-drafter-1"
_CONFIG_FILE = "drafter.json"

# Arguments of ``pronk train`` that train a drafter, by the drafter's name; by default its name is
# the argument.
_TRAIN_ARGUMENTS = {"multi_token": "heads", "vanilla": "glide --vanilla"}

Made = TypeVar("Made")
Shape = TypeVar("Shape")


@dataclass(frozen=True)
class TrainedDrafter:
    """The folder of a trained drafter, and the content of its ``drafter.json``.

    Attributes:
        folder: the folder.
        kind: name of the drafter in the registry, such as ``"medusa"``.
        shape: sizes of the module: the fields of its dataclass, such as ``MedusaShape``.
        target_fingerprint: fingerprint of the target that the drafter was trained on.
    """

    folder: Path
    kind: str
    shape: Mapping[str, Any]
    target_fingerprint: Fingerprint

    @classmethod
    def read(cls, folder: Path) -> TrainedDrafter:
        """Read ``drafter.json``; raise CheckpointError if the file is missing or damaged."""
        path = folder / _CONFIG_FILE
        if not is_file(path):
            msg = (
                f"{folder}: expected a folder that pronk train has written, with {_CONFIG_FILE}; "
                "found none there"
            )
            raise CheckpointError(msg)
        document = read_json(path)
        target = document.get("target")
        shape = document.get("shape")
        kind = document.get("kind")
        if not (
            document.get("format") == TRAINED_FORMAT
            and isinstance(kind, str)
            and isinstance(shape, dict)
            and isinstance(target, dict)
            and {"architecture", "weights"} <= target.keys()
        ):
            found = f"{document.get('format')!r:.80}"
            msg = (
                f"{path}: expected a drafter of format {TRAINED_FORMAT}, found {found}; "
                "train it again"
            )
            raise CheckpointError(msg)
        fingerprint = Fingerprint(str(target["architecture"]), str(target["weights"]))
        return cls(folder, kind, shape, fingerprint)

    def make_shape(self, dataclass_type: type[Shape]) -> Shape:
        """Return ``shape`` as an object of a dataclass.

        Raises CheckpointError if fields are missing, unknown or invalid.
        """
        names = {dataclass_field.name for dataclass_field in fields(dataclass_type)}  # type: ignore[arg-type]
        if names != self.shape.keys():
            expected = ", ".join(sorted(names))
            found = ", ".join(sorted(self.shape))
            msg = (
                f"{self.folder / _CONFIG_FILE}: expected a shape with {expected}, found {found}; "
                "train it again"
            )
            raise CheckpointError(msg)
        values = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in self.shape.items()
        }
        return self.make_checked(lambda: dataclass_type(**values))

    def make_checked(self, make: Callable[[], Made]) -> Made:
        """Return ``make()``; its OptionError or TypeError becomes a CheckpointError of the file."""
        try:
            return make()
        except (OptionError, TypeError) as error:
            msg = f"{self.folder / _CONFIG_FILE}: {error}; train it again"
            raise CheckpointError(msg) from error

    def load(
        self,
        target: Target,
        shape: Shape,
        make: Callable[[Shape, ModelConfig, DrafterWeights], Made],
    ) -> Made:
        """Return a module of this shape with the file's weights, in the target's dtype and kernels.

        ``make`` builds the module from its shape, the target's configuration and the weights.
        Raises CheckpointError if the file is damaged, or its tensors are not exactly those that
        ``make`` reads.
        """
        checkpoint = Checkpoint(self.folder, remedy="train it again")
        weights = DrafterWeights(checkpoint, target.decoder.kernels, target.cache.dtype)
        module = self.make_checked(lambda: make(shape, target.decoder.config, weights))
        weights.check_all_read()
        return module


class DrafterWeights:
    """The weights file of a trained drafter, from which a module reads its parts by name."""

    def __init__(self, checkpoint: Checkpoint, kernels: Kernels, dtype: DType) -> None:
        self._checkpoint = checkpoint
        self.kernels = kernels
        self._dtype = dtype
        self._unread = set(checkpoint)

    def array(self, name: str, *shape: int) -> Array:
        """Return a tensor in the dtype of the target; raise CheckpointError for another shape."""
        found = self._checkpoint.shape(name) if name in self._checkpoint else None
        if found != shape:
            msg = (
                f"{self._checkpoint.folder}: tensor {name}: expected shape {shape}, found {found}; "
                "train it again"
            )
            raise CheckpointError(msg)
        self._checkpoint.check_dtype(name)
        self._unread.discard(name)
        return self._checkpoint.tensor(name).astype(self._dtype)

    def linear(
        self,
        name: str,
        outputs: int,
        inputs: int,
        layout: WeightLayout | None = None,
        *,
        bias: bool = False,
    ) -> Linear:
        """Return the linear layer ``name`` ``[outputs, inputs]``."""
        weight = self.array(f"{name}.weight", outputs, inputs)
        biases = self.array(f"{name}.bias", outputs) if bias else None
        return Linear(self.kernels, weight, biases, layout or WeightLayout(), None)

    def norm(self, name: str, config: ModelConfig, size: int) -> Norm:
        """Return the norm ``name`` over ``size`` features, of the type in the configuration."""
        bias = self.array(f"{name}.bias", size) if config.norm == "layer" else None
        return Norm.of(config, self.array(f"{name}.weight", size), bias)

    def attention(self, layer: Attention, name: str) -> Attention:
        """Set the attention weights of ``layer`` to those of layer ``name``; return ``layer``."""
        config = layer.config
        size = layer.config.hidden_size
        layer.attention_norm = self.norm(f"{name}.attention_norm", config, size)
        qkv = f"{name}.qkv"
        bias = config.qkv_bias
        layer.qkv = self.linear(qkv, sum(config.qkv_sizes), size, layer.layout("qkv"), bias=bias)
        if config.qk_norm:
            for norm in ("q_norm", "k_norm"):
                weight = self.array(f"{name}.{norm}.weight", config.head_dim)
                setattr(layer, norm, Norm(weight.astype(FLOAT32), None, config.norm_eps))
        layer.out = self.linear(
            f"{name}.out", size, config.num_heads * config.head_dim, bias=config.out_bias
        )
        return layer

    def layer(self, layer: Layer, name: str) -> Layer:
        """Set the weights of ``layer`` to those of the decoder layer ``name``; return ``layer``."""
        config = layer.config
        size = layer.config.hidden_size
        width = layer.config.intermediate_size
        self.attention(layer, name)
        layer.mlp_norm = self.norm(f"{name}.mlp_norm", config, size)
        outputs = width * (2 if config.gated else 1)
        layer.up = self.linear(
            f"{name}.up", outputs, size, layer.layout("up"), bias=config.mlp_bias
        )
        layer.down = self.linear(f"{name}.down", size, width, bias=config.mlp_bias)
        return layer

    def check_all_read(self) -> None:
        """Raise CheckpointError if the file has tensors that the module has not read."""
        for name in sorted(self._unread):
            found = self._checkpoint.shape(name)
            msg = (
                f"{self._checkpoint.folder}: tensor {name}: expected none, found shape {found}; "
                "train it again"
            )
            raise CheckpointError(msg)


def read_trained_drafter(
    drafter: str, model: str | None, default_folder: str, target: Target
) -> TrainedDrafter:
    """Read ``drafter.json`` of a drafter that was trained on the target.

    Args:
        drafter: name of the drafter in the registry.
        model: folder or Hub id. ``None`` is the folder ``models/<default_folder>`` of a clone of
            the repository.
        default_folder: see ``model``.
        target: the model whose text is generated.

    Raises CheckpointError if the folder is missing or damaged. Raises OptionError if the folder has
    another drafter, if the drafter was trained on another target, or if there is no clone for
    ``None``.
    """
    folder = clone_model(default_folder) if model is None else resolve_model(model).absolute()
    command = f"pronk train {_TRAIN_ARGUMENTS.get(drafter, drafter)} --target …"
    if folder is None:
        msg = (
            f'{drafter}: expected model="…", a folder or a Hub id of a trained drafter, found '
            f"none; use {command}"
        )
        raise OptionError(msg)
    trained = TrainedDrafter.read(folder)
    if trained.kind != drafter:
        msg = (
            f"{drafter}: expected a folder of this kind of drafter, "
            f"found {trained.kind} in {folder}"
        )
        raise OptionError(msg)
    if not target.matches(trained.target_fingerprint):
        name = default_folder if model is None else folder
        msg = (
            f"{drafter}: expected the target that {name} was trained on "
            f"({trained.target_fingerprint}), found another ({target.fingerprint}); train one for "
            f"it: {command}"
        )
        raise OptionError(msg)
    return trained
