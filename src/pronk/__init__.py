"""Lossless speculative decoding: several tokens per forward pass, equal to plain decoding's."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pronk.base import errors
from pronk.drafting.registry import drafter_classes, find_class

if TYPE_CHECKING:
    from pronk.async_llm import AsyncLLM as AsyncLLM
    from pronk.base.errors import *  # noqa: F403 - the exceptions, for type checkers
    from pronk.drafting.autoregressive import Autoregressive as Autoregressive
    from pronk.drafting.combined.auto import Auto as Auto
    from pronk.drafting.combined.grammar import Grammar as Grammar
    from pronk.drafting.combined.merged import FirstOf as FirstOf
    from pronk.drafting.combined.merged import Merged as Merged
    from pronk.drafting.from_draft.draft_model import DraftModel as DraftModel
    from pronk.drafting.from_draft.threshold import Threshold as Threshold
    from pronk.drafting.from_outputs.recycling import Recycling as Recycling
    from pronk.drafting.from_target.eagle3 import Eagle3 as Eagle3
    from pronk.drafting.from_target.eagle3 import Mtp as Mtp
    from pronk.drafting.from_target.gemma4_assistant import Gemma4Assistant as Gemma4Assistant
    from pronk.drafting.from_text.prediction import Prediction as Prediction
    from pronk.drafting.from_text.prompt_lookup import PromptLookup as PromptLookup
    from pronk.drafting.from_text.suffix import Suffix as Suffix
    from pronk.drafting.proposer import Drafter as Drafter
    from pronk.drafting.proposer import Proposer as Proposer
    from pronk.engine.outputs import Choice as Choice
    from pronk.engine.outputs import Completion as Completion
    from pronk.engine.outputs import Piece as Piece
    from pronk.lab.drafters.beam import Beam as Beam
    from pronk.lab.drafters.cape import Cape as Cape
    from pronk.lab.drafters.glide import Glide as Glide
    from pronk.lab.drafters.glide import Vanilla as Vanilla
    from pronk.lab.drafters.jacobi import GaussSeidel as GaussSeidel
    from pronk.lab.drafters.jacobi import Jacobi as Jacobi
    from pronk.lab.drafters.kangaroo import Kangaroo as Kangaroo
    from pronk.lab.drafters.lookahead import Lookahead as Lookahead
    from pronk.lab.drafters.medusa import Medusa as Medusa
    from pronk.lab.drafters.multi_token import MultiToken as MultiToken
    from pronk.lab.drafters.retrieval import Retrieval as Retrieval
    from pronk.lab.drafters.staged import Staged as Staged
    from pronk.llm import LLM as LLM
    from pronk.sampling.params import SamplingParams as SamplingParams
    from pronk.sampling.tree import TokenTree as TokenTree
    from pronk.text.guide import Guide as Guide
    from pronk.text.infill import ContextFile as ContextFile

__version__ = "0.3.0"

# Version of the bits: with an equal value, the same model, prompt and seed give the same tokens and
# log-probabilities. A change of them raises it (tests/golden.py).
BITS = 1

# Public names of each module. The first use of a name imports the module, so that ``pronk --help``
# does not load NumPy.
_NAMES = {
    "pronk.drafting.proposer": ("Drafter", "Proposer"),
    "pronk.base.errors": errors.__all__,
    "pronk.async_llm": ("AsyncLLM",),
    "pronk.llm": ("LLM",),
    "pronk.engine.outputs": ("Choice", "Completion", "Piece"),
    "pronk.text.guide": ("Guide",),
    "pronk.text.infill": ("ContextFile",),
    "pronk.sampling.params": ("SamplingParams",),
    "pronk.sampling.tree": ("TokenTree",),
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use.

    The drafters of other packages are found by their entry points; see :mod:`pronk.base.guests`.
    """
    if name == "__all__":
        return __dir__()
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(module), name)
    drafter = None if name.startswith("_") else find_class(name)
    if drafter is None:
        msg = f"module 'pronk' has no attribute {name!r}"
        raise AttributeError(msg)
    return drafter


def __dir__() -> list[str]:
    own_names = [name for names in _NAMES.values() for name in names]
    return [*own_names, *drafter_classes(), "BITS", "__version__"]
