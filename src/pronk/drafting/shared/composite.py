"""Options of composite drafters, which combine several drafters or wrap a drafter of chains."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from pronk.base.errors import OptionError
from pronk.drafting.proposer import Drafter, Proposer, bind_proposer
from pronk.drafting.target import Target


@dataclass(frozen=True)
class Composite(Drafter):
    """Options of a composite drafter.

    Attributes:
        parts: the wrapped drafters, in order of precedence.
    """

    parts: tuple[Drafter, ...]

    def __post_init__(self) -> None:
        if (
            not isinstance(self.parts, tuple)
            or not self.parts
            or not all(isinstance(p, Drafter) for p in self.parts)
        ):
            msg = f"{self.name}: parts: expected a tuple of drafters, found {self.parts!r}"
            raise OptionError(msg)
        super().__post_init__()

    def bind_parts(self, target: Target) -> tuple[Proposer[Any], ...]:
        """Bind each wrapped drafter to the target and return the proposers."""
        return tuple(bind_proposer(drafter, target) for drafter in self.parts)

    def for_adapter(self) -> Self | None:
        """Return the composite of the parts that serve only the requests of one adapter.

        ``None`` if no part drafts from texts of earlier requests: one proposer then serves all
        adapters.
        """
        own = [drafter.for_adapter() for drafter in self.parts]
        parts = tuple(each or drafter for each, drafter in zip(own, self.parts, strict=True))
        return replace(self, parts=parts) if any(own) else None


def check_wraps_chains(options: Composite) -> Drafter:
    """Return the single part of a wrapper; raise OptionError unless it proposes chains."""
    parts = options.parts
    name = options.name
    inner = parts[0] if isinstance(parts, tuple) and len(parts) == 1 else None
    chains = inner.as_chains() if isinstance(inner, Drafter) else None
    if inner is None or chains is None:
        found = parts if isinstance(parts, tuple) else (parts,)
        names = [part.name if isinstance(part, Drafter) else repr(part) for part in found]
        msg = (
            f"{name}: expected one drafter of chains, such as draft_model, found "
            f"{', '.join(names) or 'none'}; as_chains() of a drafter's options returns those that "
            "propose chains"
        )
        raise OptionError(msg)
    if chains != inner:
        if inner.name == name:  # the same wrapper is given twice: cape(cape(…))
            advice = f"one {inner.name} is enough"
        elif isinstance(inner, Composite):
            # two wrappers are given in the wrong order, such as threshold(cape(…))
            advice = f"write {inner.name}({name}(…)) instead"
        else:  # an option makes the drafter propose trees, as in multi_token(tree=…)
            advice = "leave out its tree"
        msg = f"{name}: expected a drafter of chains, found {inner.name}; {advice}"
        raise OptionError(msg)
    return inner
