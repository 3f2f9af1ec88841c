"""GLIDE: a small draft model that also attends to the target's KV cache (Du et al. 2024, 4.1).

``vanilla`` is the same model without attention to the target's cache, for comparison. Both are
trained on one target and use its vocabulary and positions. The layers are in
:mod:`pronk.lab.drafters.modules.glide`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pronk import TokenTree
from pronk.backends import BatchEntry, ModelRunner
from pronk.base import known_keywords
from pronk.drafting import (
    Capabilities,
    DraftCache,
    DraftContext,
    DraftRunner,
    ModelDrafter,
    Target,
    Translation,
    check_needs,
    open_pool,
)
from pronk.lab.drafters.modules.files import read_trained_drafter
from pronk.lab.drafters.modules.glide import GlideDecoder, GlideShape


def make_glide_entry(
    context: DraftContext[DraftCache], tree: TokenTree, logits_nodes: range, num_computed: int
) -> BatchEntry:
    """Return a request's entry of a forward pass of GLIDE's model.

    The nodes of ``tree`` after the first ``num_computed``, which are cached, are computed, and
    those of ``logits_nodes`` get logits. Positions are those of the target. GLIDE's model reads its
    own KV cache and that of the target, which must not change until the request's proposal is
    complete.
    """
    return BatchEntry(
        context.state.block_table,
        tree,
        logits_nodes,
        context.sampler.context.num_prompt,
        num_computed,
        other_tables=(context.block_table,),
    )


@known_keywords
@dataclass(frozen=True)
class Glide(ModelDrafter):
    """Options of GLIDE: those of :class:`ModelDrafter`.

    The weights are loaded in the target's dtype.

    Attributes:
        num_tokens: maximum number of draft tokens of a chain, 1..64. By default as many as a block
            has in training (L = 5 in the paper): later tokens would see the target's cache older
            than any token did in training.
    """

    num_tokens: int = GlideShape.block
    name = "glide"
    default_folder: ClassVar[str] = "pronk-tiny-glide"  # in ``models`` of a clone of the repository

    def open(self, target: Target) -> DraftRunner:
        return open_glide(self, self.default_folder, target)


@known_keywords
@dataclass(frozen=True)
class Vanilla(ModelDrafter):
    """Options of the paper's baseline: a GLIDE model without attention to the target's cache.

    Attributes:
        num_tokens: maximum number of draft tokens of a chain, 1..64; by default as for GLIDE.
    """

    num_tokens: int = GlideShape.block
    name = "vanilla"
    default_folder: ClassVar[str] = "pronk-tiny-vanilla"

    def open(self, target: Target) -> DraftRunner:
        return open_glide(self, self.default_folder, target)


def open_glide(options: ModelDrafter, default_folder: str, target: Target) -> DraftRunner:
    """Load a GLIDE model, with or without attention to the target's cache.

    In cross-attention, the rows of draft tokens see the target's cache up to the first draft token
    only. After these tokens were accepted, the same rows would see more, which with several layers
    would change the cached keys and values of all layers but the first. Accepted draft tokens are
    therefore run again together with the bonus token, so that a proposal depends only on the text.
    The model runs over the whole prompt, because its positions are those of the target, and a small
    model is fast. Raises OptionError if the target is split over processes.
    """
    trained = read_trained_drafter(options.name, options.model, default_folder, target)
    shape = trained.make_shape(GlideShape)
    kv_layers = trained.make_checked(lambda: shape.cache_layers(target.decoder.config))
    check_needs(options.name, Capabilities(kv_layers=kv_layers), target)

    def load_runner() -> DraftRunner:
        module = trained.load(target, shape, GlideDecoder)
        read_caches = [target.cache] if kv_layers else []
        runner = ModelRunner(
            module, open_pool(target, module.config), read_caches, clock=target.clock
        )
        size = module.config.vocab_size
        relative_size = len(module.layers) / len(target.decoder.layers)
        return DraftRunner(
            runner,
            Translation(size, size),
            target,
            relative_size,
            max_unread=None,
            keeps_drafts=len(module.layers) == 1,
            kv_layers=kv_layers,
            make_entry=make_glide_entry,
        )

    return target.loaded_models.get_or_load(trained.folder, options.name, load=load_runner)
