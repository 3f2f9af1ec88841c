"""GLIDE: a draft model that looks into the target's cache (Du et al. 2024, section 4.1), and its twin that does not.

It is a draft model in every other way: a chain of tokens, a pass of its own for each, a cache of its own that is kept
level with the text. Both are trained on the target that they guess for (``pronk train glide``), with which they share
tokens and positions; see :mod:`pronk.drafters.from_target.modules.glide`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pronk.drafters.from_draft.draft_model import ModelDrafter
from pronk.drafters.from_target.modules import glide
from pronk.drafters.from_target.modules.files import open_trained
from pronk.drafters.from_target.modules.glide import GlideShape
from pronk.drafters.shared.draft import Draft, DraftLane
from pronk.drafters.shared.side_cache import open_pool
from pronk.drafters.shared.vocabulary.translation import Translation
from pronk.errors import OptionError
from pronk.execution.attention import Segment
from pronk.execution.model_runner import CrossAttentionSource, ForwardJob, ModelRunner
from pronk.interrupts import uninterrupted
from pronk.kv_cache.blocks import BlockTable
from pronk.speculation.proposer import DraftContext
from pronk.speculation.target import Target
from pronk.speculation.tree import TokenTree

__all__ = ["Glide", "Vanilla"]


@dataclass
class _GlideLane(DraftLane):
    """A lane with what its draft sees of the target.

    Attributes:
        beside: where the target's keys and values of the text are.
        final: so many of the lane's rows have seen all that they will ever see there.
        prompt: tokens of the text that are the prompt, which is where the target's *dynamic* RoPE scaling starts.
    """

    beside: BlockTable = field(default_factory=BlockTable)
    final: int = 0
    prompt: int = 0


class _GlideDraft(Draft):
    """Runs GLIDE for any number of requests; see :class:`~pronk.drafters.shared.draft.Draft`.

    A guess sees less of the target's cache than it would as part of the text. With one layer that leaves no trace: keys
    and values come from the tokens alone. With several, guesses that were accepted are run again, in the pass that
    reads the bonus token, so that proposals depend on the text and not on how it came about.
    """

    @classmethod
    def load(cls, drafter: str, model: str | None, default: str, target: Target) -> Draft:
        """The drafter of a path or name, loaded once for each target; errors are those of ``open_trained``."""
        if target.split:
            msg = f"{drafter}: expected all of the target's keys, which it reads, in one process; use parallel='tree'"
            raise OptionError(msg)
        trained = open_trained(drafter, model, default, target)

        def make() -> Draft:
            shape = trained.make(GlideShape)
            module = trained.build(lambda: glide.GlideModule(shape, target.decoder.config))
            trained.load(module, target.cache).tie(target.cache.kernels)
            layers = tuple(layer - 1 for layer in module.cache_layers)
            beside = CrossAttentionSource(target.decoder, target.cache, layers) if layers else None
            runner = ModelRunner(module, open_pool(target, module.config), beside, clock=target.clock)
            size = target.decoder.config.vocab_size
            return cls(runner, Translation.same(size, size))

        return target.share(trained.folder, drafter, make=make)

    def lane(self) -> DraftLane:
        """See :class:`~pronk.drafters.shared.draft.Draft`."""
        return _GlideLane()

    def level(self, lanes: Sequence[DraftLane], contexts: Sequence[DraftContext[Any]]) -> list[list[int] | None]:
        """Bring the lanes up to their texts; from here to the next time the target's cache stays as it is."""
        again = len(self.runner.decoder.layers) > 1
        for lane, context in zip(lanes, contexts, strict=True):
            assert isinstance(lane, _GlideLane)
            with uninterrupted():
                if again:
                    self.cut(lane, lane.final)
                lane.beside, lane.prompt = context.block_table, context.sampler.context.num_prompt
                lane.final = context.block_table.length + 1
        return super().level(lanes, contexts)

    def job(self, lane: DraftLane, tree: TokenTree, wanted: range, computed: int = 0) -> ForwardJob:
        """A lane's share of a pass, with the target's cache beside it."""
        assert isinstance(lane, _GlideLane)
        return ForwardJob(Segment(lane.block_table, tree, computed), wanted, lane.prompt, lane.beside)


@dataclass(frozen=True)
class Glide(ModelDrafter):
    """Options of GLIDE, the same as of ``ModelDrafter``; its weights are in the target's dtype."""

    name = "glide"
    default: ClassVar[str] = "pronk-tiny-glide"

    def open(self, target: Target) -> Draft:
        """The model, loaded once for each target; it must have been trained on this target."""
        return _GlideDraft.load(self.name, self.model, self.default, target)


@dataclass(frozen=True)
class Vanilla(Glide):
    """The twin without cross-attention, which shows what looking into the cache is worth."""

    name = "vanilla"
    default: ClassVar[str] = "pronk-tiny-vanilla"
