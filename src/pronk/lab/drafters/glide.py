"""GLIDE: a small draft model that also attends to the target's KV cache (Du et al. 2024, 4.1).

``vanilla`` is the same model without attention to the target's cache, for comparison. Both are trained on one target
and use its vocabulary and positions. The layers are in :mod:`pronk.lab.drafters.modules.glide`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from pronk import OptionError, TokenTree
from pronk.backends import BlockTable, ForwardJob, ModelRunner, Segment
from pronk.base import known_keywords, uninterrupted
from pronk.drafting import DraftContext, DraftLane, DraftRunner, ModelDrafter, Target, Translation, open_pool
from pronk.lab.drafters.modules.files import read_trained_drafter
from pronk.lab.drafters.modules.glide import GlideDecoder, GlideShape


@dataclass
class _GlideLane(DraftLane):
    """The GLIDE model's KV cache of one request, and the request's KV blocks in the target's cache."""

    target_block_table: BlockTable = field(default_factory=BlockTable)  # the text's KV blocks in the target's cache
    num_final_rows: int = 0  # number of leading rows that are kept; later rows are run again (see ``_GlideRunner``)
    num_prompt: int = 0  # number of prompt tokens; the target's *dynamic* RoPE scaling depends on this number


class _GlideRunner(DraftRunner):
    """Owns a GLIDE model and its KV pool; runs the model for several requests in shared forward passes.

    In cross-attention, the rows of draft tokens see the target's cache up to the first draft token only. Once accepted,
    the same rows would see more, which with several layers would change the cached keys and values of all layers but
    the first. Accepted draft tokens are therefore run again together with the bonus token, so that a proposal depends
    only on the text.
    """

    max_unread = None  # the positions are the target's, and a small model reads fast

    def make_lane(self) -> DraftLane:
        return _GlideLane()

    def align_lanes(self, contexts: Sequence[DraftContext[DraftLane]]) -> list[list[int] | None]:
        """Set each lane's ``target_block_table``, then do :meth:`DraftRunner.align_lanes`.

        The forward passes after this call read the target's cache, which must not change until the next call.
        """
        recompute = len(self.runner.decoder.layers) > 1
        for context in contexts:
            lane = context.state
            assert isinstance(lane, _GlideLane)
            with uninterrupted():
                if recompute:
                    self.rollback(lane, min(len(lane.tokens), lane.num_final_rows))
                    lane.tree = None
                lane.target_block_table, lane.num_prompt = context.block_table, context.sampler.context.num_prompt
                lane.num_final_rows = context.block_table.length + 1
        return super().align_lanes(contexts)

    def make_job(self, lane: DraftLane, tree: TokenTree, logits_nodes: range, num_computed: int = 0) -> ForwardJob:
        assert isinstance(lane, _GlideLane)
        segment = Segment(lane.block_table, tree, num_computed)
        return ForwardJob(segment, logits_nodes, lane.num_prompt, (lane.target_block_table,))


@known_keywords
@dataclass(frozen=True)
class Glide(ModelDrafter):
    """Options of GLIDE: those of :class:`ModelDrafter`. The weights are loaded in the target's dtype."""

    name = "glide"
    default_folder: ClassVar[str] = "pronk-tiny-glide"  # folder in ``models`` of a clone of this repository

    def open(self, target: Target) -> DraftRunner:
        if target.is_split:
            found = "found it split; use parallel='tree'"
            msg = f"{self.name}: expected the target's whole KV cache in one process, {found}"
            raise OptionError(msg)
        trained = read_trained_drafter(self.name, self.model, self.default_folder, target)

        def load_runner() -> DraftRunner:
            module = trained.load(target, trained.make_shape(GlideShape), GlideDecoder)
            read_caches = [target.cache] if module.cache_layers else []
            runner = ModelRunner(module, open_pool(target, module.config), read_caches, clock=target.clock)
            size, relative_size = module.config.vocab_size, len(module.layers) / len(target.decoder.layers)
            return _GlideRunner(runner, Translation(size, size), target, relative_size)

        return target.load_shared(trained.folder, self.name, load=load_runner)


@known_keywords
@dataclass(frozen=True)
class Vanilla(Glide):
    """Options of the paper's baseline: a GLIDE model without attention to the target's cache."""

    name = "vanilla"
    default_folder: ClassVar[str] = "pronk-tiny-vanilla"
