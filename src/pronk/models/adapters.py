"""Low-rank adapters (LoRA) of a loaded model, of which each request uses one or none.

A linear layer with adapters computes ``x Wᵀ + scale (x Aᵀ) Bᵀ + b`` for the rows of a request with an adapter, in
float32. The adapters are not merged into the weights, so that requests with different adapters share a forward pass. A
merged checkpoint instead rounds ``W + scale B A`` to its data type: in float32 its logits agree within 1e-4, and texts
of a merged bfloat16 checkpoint may differ. Rows without an adapter have the bits of the model without adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from pronk.architecture.config import ModelConfig
from pronk.errors import OptionError
from pronk.kernels.adapters import LowRank
from pronk.models.peft import AdapterModule, read_adapter

if TYPE_CHECKING:
    from pronk.models.decoder import Decoder

__all__ = ["Adapter", "Adapters", "cache_salt"]


@dataclass(frozen=True)
class Adapter:
    """An adapter of a model."""

    name: str
    number: int  # index in ``Linear.adapters``
    digest: bytes  # of the adapter's files; blocks of the prefix cache depend on it


def cache_salt(adapter: Adapter | None, salt: bytes = b"") -> bytes:
    """Return the salt of the keys of prefix caches, in memory and on disk: adapters share no blocks."""
    return salt if adapter is None else sha256(adapter.digest + salt).digest()


class Adapters:
    """The adapters of one model, by name.

    Raises:
        OptionError: a name is empty, ``adapters`` is no mapping, or several processes compute the model.
        CheckpointError: a folder has no adapter of this model; see :func:`~pronk.models.peft.read_adapter`.
    """

    def __init__(self, folders: Mapping[str, str | Path] | None, config: ModelConfig, workers: int = 1) -> None:
        """Read the adapters; :meth:`attach` adds them to a loaded model."""
        if folders and workers > 1:
            msg = f"adapters: expected one process (workers=1), found workers={workers}; leave one of the options out"
            raise OptionError(msg)
        self._modules: list[list[AdapterModule]] = []
        self.by_name: dict[str, Adapter] = {}
        for name, folder in _check_folders(folders).items():
            modules, digest = read_adapter(Path(folder).expanduser(), config)
            self.by_name[name] = Adapter(name, len(self._modules), digest)
            self._modules.append(modules)

    def __contains__(self, name: object) -> bool:
        return name in self.by_name

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_name)

    def __len__(self) -> int:
        return len(self.by_name)

    def find(self, name: str | None) -> Adapter | None:
        """Return the adapter with a name; ``None`` for ``None``; raise an OptionError if there is none."""
        if name is None:
            return None
        if name not in self.by_name:
            known = ", ".join(self.by_name) or "none, because the model was loaded without adapters"
            msg = f"adapter: expected one of {known}; found {name!r}"
            raise OptionError(msg)
        return self.by_name[name]

    def attach(self, decoder: Decoder) -> None:
        """Add the adapters to the linear layers of a model, before its first forward pass."""
        for number, modules in enumerate(self._modules):
            by_target: dict[str, list[AdapterModule]] = {}
            for module in modules:
                by_target.setdefault(module.target, []).append(module)
            for target, found in by_target.items():
                start = 0
                for linear in decoder.get(target).parts:  # a stacked layer has several matrices
                    stop = start + linear.out_features
                    parts = [part for each in found if (part := _slice(each, start, stop)) is not None]
                    if parts:
                        linear.adapters = linear.adapters or [None] * len(self._modules)
                        linear.adapters[number] = decoder.backend.pack_adapter(linear.packed, parts)
                    start = stop
        self._modules = []


def _check_folders(folders: Mapping[str, str | Path] | None) -> Mapping[str, str | Path]:
    """Return the option ``adapters``, which maps names to folders; ``None`` is empty."""
    folders = {} if folders is None else folders
    if not isinstance(folders, Mapping) or not all(isinstance(name, str) and name for name in folders):
        msg = f"adapters: expected folders by name, found {folders!r}"
        raise OptionError(msg)
    return folders


def _slice(module: AdapterModule, start: int, stop: int) -> LowRank | None:
    """Return the part of a module for the outputs ``start .. stop - 1``; ``None``: there is none."""
    first, end = max(module.start, start), min(module.start + len(module.up), stop)
    if first >= end:
        return None
    return LowRank(first - start, module.down, module.up[first - module.start : end - module.start])
