"""Peers: other engines and their decoding methods. Each reads the model file that pronk reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from pronk.errors import OptionError

__all__ = ["PEERS", "PeerSpec", "choose_peers"]

_ALL = "all"
_GGUF, _FOLDER = "a GGUF file", "a folder with safetensors files"


@dataclass(frozen=True)
class PeerSpec:
    """A decoding method of another engine.

    Attributes:
        name: as the user writes it.
        engine: name of the engine.
        variant: decoding method of the engine, ``""`` for plain decoding.
        needs_draft: whether the method needs a draft model.
        reads_gguf: whether the engine reads GGUF files; otherwise it reads folders with safetensors files.
    """

    name: str
    engine: str
    variant: str = ""
    needs_draft: bool = False
    reads_gguf: bool = False

    def check_model(self, model: Path) -> None:
        """Raise unless the engine reads the format of the model.

        Raises:
            OptionError: the engine reads the other format.
        """
        if _is_gguf(model) != self.reads_gguf:
            wanted, found = (_GGUF, _FOLDER) if self.reads_gguf else (_FOLDER, _GGUF)
            msg = (
                f"peer {self.name}: expected {wanted} as --model, found {found}, {model}; give the model in this format"
            )
            raise OptionError(msg)

    def __str__(self) -> str:
        return self.name


PEERS: Mapping[str, PeerSpec] = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            PeerSpec("transformers", "transformers"),
            PeerSpec("transformers_prompt_lookup", "transformers", "prompt_lookup"),
            PeerSpec("transformers_assisted", "transformers", "assisted", needs_draft=True),
            PeerSpec("openvino", "openvino", reads_gguf=True),
            PeerSpec("openvino_prompt_lookup", "openvino", "prompt_lookup", reads_gguf=True),
            PeerSpec("llama_cpp", "llama_cpp", reads_gguf=True),
            PeerSpec("llama_cpp_prompt_lookup", "llama_cpp", "prompt_lookup", reads_gguf=True),
        )
    }
)


def _is_gguf(model: Path) -> bool:
    return model.suffix.lower() == ".gguf"


def choose_peers(names: list[str], models: list[Path], *, with_draft: bool) -> tuple[PeerSpec, ...]:
    """Return the peers that the user named; ``all`` stands for every peer that reads the models.

    Args:
        names: names of peers, or ``all``.
        models: paths of the models.
        with_draft: whether there is a draft model; without it, ``all`` leaves out the peers that need one.

    Raises:
        OptionError: a peer is unknown, or cannot read a model.
    """
    found: dict[str, PeerSpec] = {}
    for name in names:
        if name == _ALL:
            found |= {
                each.name: each
                for each in PEERS.values()
                if each.reads_gguf == _is_gguf(models[0]) and (with_draft or not each.needs_draft)
            }
        elif name in PEERS:
            found[name] = PEERS[name]
        else:
            msg = f"unknown peer {name!r:.80}; expected {_ALL}, or one of {', '.join(PEERS)}"
            raise OptionError(msg)
    for spec in found.values():
        for model in models:
            spec.check_model(model)
    return tuple(found.values())
