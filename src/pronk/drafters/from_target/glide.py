"""GLIDE: a draft model that attends to the target's KV cache, and its twin (Du et al. 2024, 4.1).

Otherwise GLIDE is a draft model: a chain of tokens, one forward pass each, and a cache of its own. The twin has no such
attention. Both are trained on their target (``pronk train glide``) and share its tokens and positions; see
:mod:`pronk.drafters.from_target.modules.glide`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pronk.drafters.from_draft.draft_model import ModelDrafter
from pronk.drafters.from_target.modules import glide
from pronk.drafters.from_target.modules.files import open_trained
from pronk.drafters.from_target.modules.glide import GlideShape
from pronk.drafters.shared.draft import DraftLane, DraftRunner
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
    """A lane with the draft's view of the target's cache.

    Attributes:
        target_block_table: blocks of the target's keys and values of the text.
        num_final_rows: number of leading rows whose view of the target's cache is complete.
        num_prompt: number of prompt tokens, where the target's *dynamic* RoPE scaling starts.
    """

    target_block_table: BlockTable = field(default_factory=BlockTable)
    num_final_rows: int = 0
    num_prompt: int = 0


class _GlideRunner(DraftRunner):
    """Runs GLIDE for any number of requests.

    A draft token sees less of the target's cache than the same token as part of the text. With one layer that has no
    effect: keys and values depend on the tokens alone. With several layers, accepted draft tokens are run again beside
    the bonus token, so that proposals depend only on the text.
    """

    @classmethod
    def load(cls, drafter: str, model: str | None, default: str, target: Target) -> DraftRunner:
        """Load the drafter once for each target; errors are those of ``open_trained``."""
        if target.is_split:
            msg = f"{drafter}: expected the target's whole KV cache in one process, found it split; use parallel='tree'"
            raise OptionError(msg)
        trained = open_trained(drafter, model, default, target)

        def make() -> DraftRunner:
            shape = trained.make(GlideShape)
            module = trained.build(lambda: glide.GlideModule(shape, target.decoder.config))
            trained.load(module, target.cache).tie(target.cache.kernels)
            layers = tuple(layer - 1 for layer in module.cache_layers)
            cross_source = CrossAttentionSource(target.decoder, target.cache, layers) if layers else None
            runner = ModelRunner(module, open_pool(target, module.config), cross_source, clock=target.clock)
            size = target.decoder.config.vocab_size
            return cls(runner, Translation.same(size, size))

        return target.load_shared(trained.folder, drafter, load=make)

    def lane(self) -> DraftLane:
        return _GlideLane()

    def align_lanes(self, lanes: Sequence[DraftLane], contexts: Sequence[DraftContext[Any]]) -> list[list[int] | None]:
        """Align the lanes with their texts; the target's cache must not change until the next call."""
        recompute = len(self.runner.decoder.layers) > 1
        for lane, context in zip(lanes, contexts, strict=True):
            assert isinstance(lane, _GlideLane)
            with uninterrupted():
                if recompute:
                    self.truncate(lane, lane.num_final_rows)
                lane.target_block_table, lane.num_prompt = context.block_table, context.sampler.context.num_prompt
                lane.num_final_rows = context.block_table.length + 1
        return super().align_lanes(lanes, contexts)

    def make_job(self, lane: DraftLane, tree: TokenTree, logits_nodes: range, computed: int = 0) -> ForwardJob:
        """Return a lane's part of a forward pass, with cross-attention to the target's cache."""
        assert isinstance(lane, _GlideLane)
        return ForwardJob(
            Segment(lane.block_table, tree, computed), logits_nodes, lane.num_prompt, lane.target_block_table
        )


@dataclass(frozen=True)
class Glide(ModelDrafter):
    """Options of GLIDE, those of ``ModelDrafter``; the weights have the target's dtype."""

    name = "glide"
    default: ClassVar[str] = "pronk-tiny-glide"

    def open(self, target: Target) -> DraftRunner:
        """Load the model, once for each target; it must have been trained on this target."""
        return _GlideRunner.load(self.name, self.model, self.default, target)


@dataclass(frozen=True)
class Vanilla(Glide):
    """The twin of GLIDE without cross-attention, for comparison."""

    name = "vanilla"
    default: ClassVar[str] = "pronk-tiny-vanilla"
