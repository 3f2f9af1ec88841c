"""All drafters, in packages by the source of their draft tokens.

A module with the name of an entry of ``registry.py`` implements that drafter. Modules with a leading underscore are
helpers of their package. ``shared`` has code for several packages. The interface is
:mod:`pronk.speculation.proposer`; ``docs/methods`` describes each drafter, when it pays, and what it costs.

Functions with a parameter ``drafter`` accept an object (``PromptLookup(num_tokens=8)``), a name (``"prompt_lookup"``),
or a name with options (``"prompt_lookup(num_tokens=8, max_ngram=3)"``). A combined drafter takes the drafters that it
combines as first arguments (``"first_of(prompt_lookup, recycling(num_nodes=7))"``).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any
from warnings import warn

from pronk.drafters.registry import REGISTRY as REGISTRY
from pronk.drafters.registry import drafter_classes, find_class
from pronk.drafters.registry import make_drafter as make_drafter

if TYPE_CHECKING:
    from pronk.drafters.autoregressive import Autoregressive as Autoregressive
    from pronk.drafters.combined.auto import Auto as Auto
    from pronk.drafters.combined.grammar import Grammar as Grammar
    from pronk.drafters.combined.merged import FirstOf as FirstOf
    from pronk.drafters.combined.merged import Merged as Merged
    from pronk.drafters.from_draft.draft_model import DraftModel as DraftModel
    from pronk.drafters.from_draft.threshold import Threshold as Threshold
    from pronk.drafters.from_outputs.recycling import Recycling as Recycling
    from pronk.drafters.from_target.eagle3 import Eagle3 as Eagle3
    from pronk.drafters.from_target.eagle3 import Mtp as Mtp
    from pronk.drafters.from_text.prompt_lookup import PromptLookup as PromptLookup
    from pronk.drafters.from_text.suffix import Suffix as Suffix
    from pronk.speculation.proposer import Capabilities as Capabilities
    from pronk.speculation.proposer import DraftContext as DraftContext
    from pronk.speculation.proposer import Drafter as Drafter
    from pronk.speculation.proposer import Outcome as Outcome
    from pronk.speculation.proposer import Proposer as Proposer
    from pronk.speculation.target import Target as Target

# The classes of the drafter interface, which pronk.speculation.proposer defines or imports.
_INTERFACE = ("DraftContext", "Drafter", "Proposer", "Capabilities", "Outcome", "Target")


def __getattr__(name: str) -> Any:
    """Import an exported class at its first use."""
    if name == "__all__":
        return __dir__()
    if name == "Guesser":
        warn("pronk.drafters.Guesser is deprecated; use pronk.drafters.Proposer", DeprecationWarning, stacklevel=2)
        name = "Proposer"
    if name in _INTERFACE:
        return getattr(import_module("pronk.speculation.proposer"), name)
    drafter = None if name.startswith("_") else find_class(name)
    if drafter is None:
        msg = f"module 'pronk.drafters' has no attribute {name!r}"
        raise AttributeError(msg)
    return drafter


def __dir__() -> list[str]:
    return [*_INTERFACE, "REGISTRY", "make_drafter", *drafter_classes()]
