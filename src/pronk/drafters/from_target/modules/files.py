"""Folder of a drafter that ``pronk train`` has trained on a target: format and reader.

The folder has three files::

    drafter.json        {"format": "pronk-drafter-1", "kind": "medusa", "shape": {"num_heads": 4, …},
                         "target": {"architecture": …, "weights": …}, …}
    model.safetensors   the weights of the module
    README.md           the model card

``target`` is the fingerprint of the target. For another target the drafter is refused; see ``Target.matches``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from pronk.errors import CheckpointError, OptionError
from pronk.hub.resolve import resolve_model
from pronk.kv_cache.paged import PagedCache
from pronk.models.checkpoint import Checkpoint, read_json
from pronk.models.clone_models import clone_model
from pronk.models.decoder import pack_linears
from pronk.models.fingerprint import Fingerprint
from pronk.models.linear import choose_linear
from pronk.speculation.target import Target

__all__ = ["FORMAT", "TrainedDrafter", "read_trained_drafter"]

FORMAT = "pronk-drafter-1"
_CONFIG_FILE = "drafter.json"

# Arguments of ``pronk train`` that train a drafter, by the drafter's name; by default its name is the argument.
_TRAIN_ARGUMENTS = {"multi_token": "heads", "vanilla": "glide --vanilla"}

Checked = TypeVar("Checked")
Module = TypeVar("Module", bound=nn.Module)
Shape = TypeVar("Shape")


@dataclass(frozen=True)
class TrainedDrafter:
    """The folder of a trained drafter, and the content of its ``drafter.json``."""

    folder: Path
    kind: str  # name of the drafter in the registry, such as ``"medusa"``
    shape: Mapping[str, Any]  # sizes of the module: the fields of its dataclass, such as ``MedusaShape``
    target_fingerprint: Fingerprint  # fingerprint of the target that the drafter was trained on

    @classmethod
    def read(cls, folder: Path) -> TrainedDrafter:
        """Read ``drafter.json``; raise CheckpointError if the file is missing or damaged."""
        path = folder / _CONFIG_FILE
        if not path.is_file():
            msg = f"{folder}: expected a folder that pronk train has written, with {_CONFIG_FILE}; found none there"
            raise CheckpointError(msg)
        document = read_json(path)
        target, shape, kind = (document.get(key) for key in ("target", "shape", "kind"))
        if not (
            document.get("format") == FORMAT
            and isinstance(kind, str)
            and isinstance(shape, dict)
            and isinstance(target, dict)
            and {"architecture", "weights"} <= target.keys()
        ):
            msg = f"{path}: expected a drafter of format {FORMAT}, found {document.get('format')!r}; train it again"
            raise CheckpointError(msg)
        fingerprint = Fingerprint(str(target["architecture"]), str(target["weights"]))
        return cls(folder, kind, shape, fingerprint)

    def make_shape(self, dataclass_type: type[Shape]) -> Shape:
        """Convert ``shape`` to the dataclass; raise CheckpointError for missing, unknown or invalid fields."""
        names = {dataclass_field.name for dataclass_field in fields(dataclass_type)}  # type: ignore[arg-type]
        if names != self.shape.keys():
            expected, found = ", ".join(sorted(names)), ", ".join(sorted(self.shape))
            msg = f"{self.folder / _CONFIG_FILE}: expected a shape with {expected}, found {found}; train it again"
            raise CheckpointError(msg)
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in self.shape.items()}
        return self.make_checked(lambda: dataclass_type(**values))

    def make_checked(self, make: Callable[[], Checked]) -> Checked:
        """Return ``make()``; if it raises OptionError or TypeError, blame ``drafter.json``: CheckpointError."""
        try:
            return make()
        except (OptionError, TypeError) as error:
            msg = f"{self.folder / _CONFIG_FILE}: {error}; train it again"
            raise CheckpointError(msg) from error

    def open_weights(self, module: nn.Module) -> Checkpoint:
        """Open the weights file; raise CheckpointError unless its names and shapes are those of ``module``."""
        checkpoint = Checkpoint(self.folder, remedy="train it again")
        file_shapes = {name: checkpoint.shape(name) for name in checkpoint}
        shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        for name in sorted(shapes.keys() | file_shapes.keys()):
            expected, found = shapes.get(name), file_shapes.get(name)
            if expected != found:
                msg = f"{self.folder}: tensor {name}: expected shape {expected}, found {found}; train it again"
                raise CheckpointError(msg)
            checkpoint.check_dtype(name)
        return checkpoint

    def load_weights(self, module: Module, cache: PagedCache) -> Module:
        """Load frozen weights into ``module``, with the dtype, device and weight layout that suit ``cache``."""
        checkpoint = self.open_weights(module)
        tensors = {name: checkpoint.tensor(name).to(cache.device, cache.dtype, copy=True) for name in checkpoint}
        module.load_state_dict(tensors, assign=True)
        module.requires_grad_(False).eval()
        pack_linears(module, choose_linear(cache.kernels, cache.device))
        return module


def read_trained_drafter(drafter: str, model: str | None, default_folder: str, target: Target) -> TrainedDrafter:
    """Read ``drafter.json`` of a trained drafter and check that the drafter was trained on the target.

    ``drafter`` is the name in the registry. ``model`` is a folder or a Hub id; ``None`` is the folder
    ``models/<default_folder>`` of a clone of the repository.

    Raises:
        CheckpointError: the folder is missing or damaged.
        OptionError: the drafter in the folder is another one or for another target, or there is no clone for ``None``.
    """
    folder = clone_model(default_folder) if model is None else resolve_model(model).absolute()
    command = f"pronk train {_TRAIN_ARGUMENTS.get(drafter, drafter)} --target …"
    if folder is None:
        msg = f'{drafter}: expected model="…", a folder or a Hub id of a trained drafter, found none; use {command}'
        raise OptionError(msg)
    trained = TrainedDrafter.read(folder)
    if trained.kind != drafter:
        msg = f"{drafter}: expected a folder of this kind of drafter, found {trained.kind} in {folder}"
        raise OptionError(msg)
    if not target.matches(trained.target_fingerprint):
        msg = (
            f"{drafter}: expected the target that {default_folder if model is None else folder} was trained on "
            f"({trained.target_fingerprint}), found another ({target.fingerprint}); train one for it: {command}"
        )
        raise OptionError(msg)
    return trained
