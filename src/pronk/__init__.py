"""Decode language models in leaps: many tokens per pass, and exactly the tokens that one at a time would give."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pronk.drafters import (
        Autoregressive,
        Beam,
        Cape,
        Drafter,
        DraftModel,
        FirstOf,
        GaussSeidel,
        Glide,
        Jacobi,
        Kangaroo,
        Lookahead,
        Medusa,
        Merged,
        MultiToken,
        PromptLookup,
        Recycling,
        Retrieval,
        Staged,
        Suffix,
        Threshold,
        Vanilla,
    )
    from pronk.errors import (
        CacheFullError,
        CheckpointError,
        ConfigError,
        OptionError,
        PromptError,
        PronkError,
        TokenizerError,
    )
    from pronk.llm import LLM
    from pronk.outputs import Completion, Piece
    from pronk.sampling import SamplingParams
    from pronk.tree import TokenTree

__version__ = "0.1.0"

# Loaded at first use, so that `pronk --help` does not wait for torch.
_HOMES = {
    "pronk.drafters": (
        "Autoregressive",
        "Beam",
        "Cape",
        "DraftModel",
        "Drafter",
        "FirstOf",
        "GaussSeidel",
        "Glide",
        "Jacobi",
        "Kangaroo",
        "Lookahead",
        "Medusa",
        "Merged",
        "MultiToken",
        "PromptLookup",
        "Recycling",
        "Retrieval",
        "Staged",
        "Suffix",
        "Threshold",
        "Vanilla",
    ),
    "pronk.errors": (
        "CacheFullError",
        "CheckpointError",
        "ConfigError",
        "OptionError",
        "PromptError",
        "PronkError",
        "TokenizerError",
    ),
    "pronk.llm": ("LLM",),
    "pronk.outputs": ("Completion", "Piece"),
    "pronk.sampling": ("SamplingParams",),
    "pronk.tree": ("TokenTree",),
}

__all__ = [
    "LLM",
    "Autoregressive",
    "Beam",
    "CacheFullError",
    "Cape",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "DraftModel",
    "Drafter",
    "FirstOf",
    "GaussSeidel",
    "Glide",
    "Jacobi",
    "Kangaroo",
    "Lookahead",
    "Medusa",
    "Merged",
    "MultiToken",
    "OptionError",
    "Piece",
    "PromptError",
    "PromptLookup",
    "PronkError",
    "Recycling",
    "Retrieval",
    "SamplingParams",
    "Staged",
    "Suffix",
    "Threshold",
    "TokenTree",
    "TokenizerError",
    "Vanilla",
    "__version__",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(module), name)
    msg = f"module 'pronk' has no attribute {name!r}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    return __all__
