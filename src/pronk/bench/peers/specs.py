"""Peers: other engines and their decoding methods. Each reads the model file that pronk reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pronk.errors import OptionError

_ALL = "all"


@dataclass(frozen=True)
class PeerSpec:
    """A decoding method of another engine."""

    name: str  # name of the peer, as in ``--peer NAME``
    engine: str
    variant: str = ""  # decoding method of the engine; "" is plain decoding
    reads_gguf: bool = False  # True: the engine reads GGUF files; False: folders with safetensors files

    def __str__(self) -> str:
        return self.name


PEERS = {
    spec.name: spec
    for spec in (
        PeerSpec("transformers", "transformers"),
        PeerSpec("transformers_prompt_lookup", "transformers", "prompt_lookup"),
        PeerSpec("openvino", "openvino", reads_gguf=True),
        PeerSpec("openvino_prompt_lookup", "openvino", "prompt_lookup", reads_gguf=True),
        PeerSpec("llama_cpp", "llama_cpp", reads_gguf=True),
        PeerSpec("llama_cpp_prompt_lookup", "llama_cpp", "prompt_lookup", reads_gguf=True),
    )
}


def choose_peers(names: list[str], models: list[Path]) -> tuple[PeerSpec, ...]:
    """Return the peers with these names, without duplicates.

    The name ``all`` stands for every peer that reads the format of ``models[0]``.

    Raises:
        OptionError: a peer is unknown, or cannot read a model.
    """
    chosen: dict[str, PeerSpec] = {}
    gguf = [model.suffix.lower() == ".gguf" for model in models]
    for name in names:
        if name == _ALL:
            chosen |= {name: spec for name, spec in PEERS.items() if spec.reads_gguf == gguf[0]}
        elif name in PEERS:
            chosen[name] = PEERS[name]
        else:
            msg = f"unknown peer {name!r:.80}; expected {_ALL}, or one of {', '.join(PEERS)}"
            raise OptionError(msg)
    formats = "a folder with safetensors files", "a GGUF file"
    for spec in chosen.values():
        for model, is_gguf in zip(models, gguf, strict=True):
            if is_gguf != spec.reads_gguf:
                wanted, has = formats[spec.reads_gguf], formats[is_gguf]
                msg = f"peer {spec}: expected {wanted} as --model, found {has}, {model}; give the model in this format"
                raise OptionError(msg)
    return tuple(chosen.values())
