"""What there is to compare with: engines, their ways to decode, and the types of weights that they are given."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pronk.errors import OptionError

__all__ = ["METHODS", "WEIGHTS", "PeerMode", "PeerSpec"]


@dataclass(frozen=True)
class PeerMode:
    """A peer's way to decode: the engine, its variant, and what it takes."""

    engine: str
    variant: str = ""
    needs_draft: bool = False
    converts: bool = False


METHODS: Mapping[str, PeerMode] = MappingProxyType(
    {
        "transformers": PeerMode("transformers"),
        "transformers_prompt_lookup": PeerMode("transformers", "prompt_lookup"),
        "transformers_assisted": PeerMode("transformers", "assisted", needs_draft=True),
        "openvino": PeerMode("openvino", converts=True),
        "openvino_prompt_lookup": PeerMode("openvino", "prompt_lookup", converts=True),
        "openvino_draft": PeerMode("openvino", "draft", needs_draft=True, converts=True),
        "llama_cpp": PeerMode("llama_cpp", converts=True),
        "llama_cpp_prompt_lookup": PeerMode("llama_cpp", "prompt_lookup", converts=True),
    }
)

# What each engine's own tools make of a plain checkpoint; the names are theirs.
WEIGHTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"openvino": ("int8", "int4"), "llama_cpp": ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0")}
)

_SPEC = re.compile(r"""\s*(\w+)\s*(?:\(\s*(?:weights\s*=\s*(["']?)(\w+)\2\s*)?\))?\s*""")


@dataclass(frozen=True)
class PeerSpec:
    """A peer as it is asked for: ``llama_cpp``, or ``llama_cpp(weights=q4_k_m)``.

    Attributes:
        method: a key of :data:`METHODS`.
        weights: one of the engine's :data:`WEIGHTS`, or ``None``: as the checkpoint has them.
    """

    method: str
    weights: str | None = None

    @classmethod
    def parse(cls, text: str) -> PeerSpec:
        """Read what the user wrote.

        Raises:
            OptionError: no such peer, or weights that its engine does not have.
        """
        found = _SPEC.fullmatch(text)
        if found is None:
            msg = f"peer {text!r:.80} cannot be read; expected a name, or a name with weights: openvino(weights=int4)"
            raise OptionError(msg)
        name, _, weights = found.groups()
        if name not in METHODS:
            msg = f"unknown peer {name!r}; expected one of {', '.join(METHODS)}"
            raise OptionError(msg)
        known = WEIGHTS.get(METHODS[name].engine, ())
        if weights is not None and weights.lower() not in known:
            wanted = f"weights of {', '.join(known)}" if known else "no weights, which only some others have"
            msg = f"peer {name}: expected {wanted}, found {weights!r}; without any it gets the checkpoint's own"
            raise OptionError(msg)
        return cls(name, None if weights is None else weights.lower())

    @property
    def mode(self) -> PeerMode:
        """The engine and how it decodes."""
        return METHODS[self.method]

    def __str__(self) -> str:
        return self.method if self.weights is None else f"{self.method}(weights={self.weights})"
