"""Groups of a checkpoint's tensors by their use: attention, MLP, experts, norms and others.

``pronk info`` states the types and the size of each group.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from pronk.checkpoint.config import ModelConfig
from pronk.checkpoint.tensors import AnyCheckpoint
from pronk.models.family import TensorNames
from pronk.models.inventory import tensor_names

# Name of the group of tensors that the model itself does not use: MTP heads, the encoders of images
# of a multimodal model, and keys of layers that read those of another layer.
OTHER = "other"
# All groups, in the order of a forward pass.
GROUPS = (
    "embedding",
    "attention",
    "recurrence",
    "convolution",
    "MLP",
    "experts",
    "norms",
    "output",
    OTHER,
)
# Groups of a layer's modules (the keys of ``TensorNames.layer``), by the beginnings of their names.
# All other modules belong to attention.
_MODULES = {
    "MLP": ("up", "down"),
    "experts": ("experts", "expert_", "shared_", "router", "correction"),
    "recurrence": ("mixer_", "decay_", "skip"),
    "convolution": ("gates", "filter", "convolution_"),
    "embedding": ("input_",),
}
# Ends of the names of experts' tensors that are no parts of the module's name, in gpt-oss.
_ENDS = re.compile(r"(?<=_proj)_(bias|blocks|scales)$")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # number of an expert in a tensor's name


def tensor_groups(checkpoint: AnyCheckpoint, config: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield the name of each tensor in the file, and the group that it belongs to.

    Args:
        checkpoint: the tensors; only their names are read.
        config: config of the model.
    """
    names = tensor_names(checkpoint, config)
    groups = _groups_by_name(names)
    for name in checkpoint:
        plain = names.canonical(name)
        if names.ignored.fullmatch(plain):
            yield name, OTHER
            continue
        match = re.match(rf"{re.escape(names.layers)}\.\d+\.", plain)
        module = plain if match is None else f"layer.{plain[match.end() :]}"
        yield name, _find(groups, _NUMBER.sub("{}", _ENDS.sub("", module)))


def _groups_by_name(names: TensorNames) -> dict[str, str]:
    """Return the groups of modules by their names; those of layers begin with ``layer.``."""
    groups = {names.embedding: "embedding", names.norm: "norms", names.head: "output"}
    if names.positions is not None:
        groups[names.positions] = "embedding"
    for role, name in names.layer_inputs.items():
        groups[name] = "norms" if role == "norm" else "embedding"
    for role, modules in names.layer.items():
        # The first module of a name counts: ``attn_qkv`` belongs to attention, unless the family's
        # attention has other names.
        for name in modules:
            groups.setdefault(f"layer.{name.removesuffix('.weight')}", _group_of_module(role))
    return groups


def _group_of_module(role: str) -> str:
    """Return the group of a module of a layer, such as ``norms`` for ``mlp_norm``."""
    if role.endswith("norm"):
        return "norms"
    for group, beginnings in _MODULES.items():
        if role.startswith(beginnings):
            return group
    return "attention"


def _find(groups: dict[str, str], name: str) -> str:
    """Return the group of the module to which a tensor belongs, by the beginning of its name."""
    while name:
        if name in groups:
            return groups[name]
        name, _, _ = name.rpartition(".")
    return OTHER
