"""Files of a drafter that was trained on a target.

A folder holds three files; the drafter fits that target alone, and is refused for any other::

    drafter.json        kind, shape, the target's fingerprint, measurements of the training
    model.safetensors   the weights
    README.md           the model card
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from pronk.errors import CheckpointError, OptionError
from pronk.kv_cache.paged import PagedCache
from pronk.models.checkpoint import Checkpoint, read_json
from pronk.models.clone_models import clone_model
from pronk.models.decoder import pack_linears
from pronk.models.fingerprint import Fingerprint
from pronk.models.linear import choose_linear
from pronk.models.loader import resolve_model
from pronk.speculation.target import Target

__all__ = ["FORMAT", "Trained", "open_trained"]

FORMAT = "pronk-drafter-1"
_FILE = "drafter.json"

# Commands of ``pronk train`` that are not named after the drafter.
_COMMANDS = {"multi_token": "heads", "vanilla": "glide --vanilla"}

Made = TypeVar("Made")
Module = TypeVar("Module", bound=nn.Module)
Shape = TypeVar("Shape")


@dataclass(frozen=True)
class Trained:
    """A trained drafter on disk.

    Attributes:
        folder: the folder.
        kind: name of the drafter in the registry.
        shape: fields of the module's shape.
        target: fingerprint of the model that it was trained on.
        facts: the whole JSON document.
    """

    folder: Path
    kind: str
    shape: Mapping[str, Any]
    target: Fingerprint
    facts: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Trained:
        """Read ``drafter.json``; a missing or damaged file is a CheckpointError."""
        path = folder / _FILE
        if not path.is_file():
            msg = f"{folder}: expected a folder that pronk train has written, with {_FILE}; found none there"
            raise CheckpointError(msg)
        facts = read_json(path)
        target, shape, kind = (facts.get(key) for key in ("target", "shape", "kind"))
        if not (
            facts.get("format") == FORMAT
            and isinstance(kind, str)
            and isinstance(shape, dict)
            and isinstance(target, dict)
            and {"architecture", "weights"} <= target.keys()
        ):
            msg = f"{path}: expected a drafter of format {FORMAT}, found {facts.get('format')!r}; train it again"
            raise CheckpointError(msg)
        fingerprint = Fingerprint(str(target["architecture"]), str(target["weights"]))
        return cls(folder, kind, shape, fingerprint, facts)

    def make(self, shape: type[Shape]) -> Shape:
        """Return ``self.shape`` as the dataclass ``shape``; other fields or values are a CheckpointError."""
        names = {each.name for each in fields(shape)}  # type: ignore[arg-type]
        if names != self.shape.keys():
            expected, found = ", ".join(sorted(names)), ", ".join(sorted(self.shape))
            msg = f"{self.folder / _FILE}: expected a shape with {expected}, found {found}; train it again"
            raise CheckpointError(msg)
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in self.shape.items()}
        return self.build(lambda: shape(**values))

    def build(self, make: Callable[[], Made]) -> Made:
        """Call ``make`` and return its result; its refusal of ``self.shape`` becomes a CheckpointError."""
        try:
            return make()
        except (OptionError, TypeError) as error:
            msg = f"{self.folder / _FILE}: {error}; train it again"
            raise CheckpointError(msg) from error

    def open(self, module: nn.Module) -> Checkpoint:
        """Open the weights; other tensors or shapes than those of ``module`` are a CheckpointError."""
        checkpoint = Checkpoint(self.folder, again="train it again")
        found = {name: checkpoint.shape(name) for name in checkpoint}
        expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                msg = (
                    f"{self.folder}: tensor {name}: expected shape {expected.get(name)}, found {found.get(name)}; "
                    "train it again"
                )
                raise CheckpointError(msg)
            checkpoint.check_dtype(name)
        return checkpoint

    def load(self, module: Module, cache: PagedCache) -> Module:
        """Load the weights into ``module``, frozen, in the dtype, device and layout of ``cache``."""
        checkpoint = self.open(module)
        tensors = {name: checkpoint.tensor(name).to(cache.device, cache.dtype, copy=True) for name in checkpoint}
        module.load_state_dict(tensors, assign=True)
        module.requires_grad_(False).eval()
        pack_linears(module, choose_linear(cache.kernels, cache.device))
        return module


def open_trained(drafter: str, model: str | None, default: str, target: Target) -> Trained:
    """Read a trained drafter and check that it was trained on the target.

    ``drafter`` is the name in the registry. ``model`` is a folder or a Hub id; ``None`` is the drafter ``default`` of
    the clone.

    Raises:
        CheckpointError: the folder is missing or damaged.
        OptionError: the drafter is of another kind or for another target, or ``model`` is ``None`` outside a clone.
    """
    folder = clone_model(default) if model is None else resolve_model(model).resolve()
    command = f"pronk train {_COMMANDS.get(drafter, drafter)} --target …"
    if folder is None:
        msg = f'{drafter}: expected model="…", a folder or a Hub id of a trained drafter, found none; use {command}'
        raise OptionError(msg)
    trained = Trained.read(folder)
    if trained.kind != drafter:
        msg = f"{drafter}: expected a folder of this kind of drafter, found {trained.kind} in {folder}"
        raise OptionError(msg)
    if not target.matches(trained.target):
        msg = (
            f"{drafter}: expected the target that {default if model is None else folder} was trained on "
            f"({trained.target}), found another ({target.fingerprint}); train one for it: {command}"
        )
        raise OptionError(msg)
    return trained
