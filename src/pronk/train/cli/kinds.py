"""Drafters that ``pronk train`` trains: one class per kind, collected in :data:`KINDS`."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pronk.base.checks import check_integer
from pronk.train.cli.options import (
    HEAD_KIND,
    HEAD_ORDER,
    UNEMBEDDINGS,
    loop_option,
    model_option,
    refuse,
)
from pronk.train.options import DraftOptions, HeadsOptions, ModelShape, StudentOptions

if TYPE_CHECKING:
    from pronk.checkpoint import ModelConfig
    from pronk.train.students import Student

# Function that returns the fields of StudentOptions that all kinds of drafters have. Its argument
# is the drafter's context length in tokens.
Settings = Callable[[int], dict[str, Any]]
Plan = tuple["type[Student[Any]]", StudentOptions]

_Rate = Annotated[float, loop_option("Peak learning rate.", "--lr")]
_LAYERS = "Layers; each one adds to the cost of every draft token."


@dataclass(frozen=True, kw_only=True)
class DrafterKind(ABC):
    """A kind of drafter that can be trained; the fields are options of the training command.

    The docstring of a subclass is the first part of its command's help. A field that has the name
    of an option which all kinds share replaces that option.
    """

    # names of shared options that the command does not have
    without: ClassVar[tuple[str, ...]] = ()
    example: ClassVar[str]  # options in the example of the command's help

    @abstractmethod
    def plan(self, config: "ModelConfig", settings: Settings) -> Plan:
        """Return the class that trains the drafter, and the options of the training.

        ``config`` is the target's configuration. Raises OptionError if an option does not fit the
        target.
        """


@dataclass(frozen=True, kw_only=True)
class DraftKind(DrafterKind):
    """Distil a small draft model, with the same tokenizer, from a target (drafter draft_model)."""

    example = "--target ./checkpoint --on-policy 200000 --minutes 60"

    hidden: Annotated[int, model_option("Hidden size.")] = 160
    layers: Annotated[int, model_option(_LAYERS)] = 2
    heads: Annotated[int, model_option("Attention heads.")] = 5
    kv_heads: Annotated[int, model_option("Key/value heads.")] = 1
    mlp: Annotated[int, model_option("Width of the gated MLP.")] = 448
    positions: Annotated[
        int | None, model_option("Longest text, in tokens.", show_default="the target's")
    ] = None
    rate: _Rate = 0.012

    def plan(self, config: "ModelConfig", settings: Settings) -> Plan:
        from pronk.train.students import DraftStudent

        longest = config.context if self.positions is None else self.positions
        sizes = (self.hidden, self.layers, self.heads, self.kv_heads, self.mlp)
        shape = ModelShape(*sizes, config.vocab_size, longest)
        return DraftStudent, DraftOptions(**settings(longest), shape=shape)


@dataclass(frozen=True, kw_only=True)
class KangarooKind(DrafterKind):
    """Train an adapter between the target's first layers and its head (drafter kangaroo)."""

    example = "--exit-layer 3 --target ./checkpoint --on-policy 200000"

    exit_layer: Annotated[
        int | None,
        model_option(
            "The target's layer whose output the adapter reads: 1 is the first; "
            "the last is too late.",
            show_default="an eighth of its layers",
        ),
    ] = None
    adapter: Annotated[
        str,
        model_option(
            "What is trained: attention, head (with a head of its own), transformer (a whole "
            "layer), or mlp (two linears and a head, no attention)."
        ),
    ] = "attention"
    heads: Annotated[int | None, model_option("Attention heads.", show_default="the target's")] = (
        None
    )
    mlp: Annotated[
        int | None,
        model_option(
            "Width of the transformer's feed-forward network.", show_default="the target's"
        ),
    ] = None
    rate: _Rate = 0.01

    def __post_init__(self) -> None:
        if self.adapter == "mlp":
            refuse({"heads": self.heads}, "with --adapter mlp, which has no attention")
        if self.adapter != "transformer":
            reason = f"with --adapter {self.adapter}; it is for --adapter transformer"
            refuse({"mlp": self.mlp}, reason)

    def plan(self, config: "ModelConfig", settings: Settings) -> Plan:
        from pronk.lab import KangarooShape
        from pronk.train.students import KangarooStudent

        shape = KangarooShape.of_target(config, self.exit_layer, self.adapter, self.heads, self.mlp)
        return KangarooStudent, StudentOptions(**settings(config.context), shape=shape)


@dataclass(frozen=True, kw_only=True)
class GlideKind(DrafterKind):
    """Distil a small decoder that also reads the target's cache (drafters glide and vanilla)."""

    example = "--target ./checkpoint --layers 2 --vanilla --minutes 60"

    layers: Annotated[int, model_option(_LAYERS)] = 1
    hidden: Annotated[
        int | None,
        model_option("Hidden size.", show_default="a third of the target's, at least 192"),
    ] = None
    heads: Annotated[
        int | None, model_option("Heads of the self-attention.", show_default="of 32 dimensions")
    ] = None
    kv_heads: Annotated[
        int | None,
        model_option("Key/value heads of the self-attention.", show_default="a third of the heads"),
    ] = None
    mlp: Annotated[
        int | None, model_option("Width of the gated MLP.", show_default="8/3 of the hidden size")
    ] = None
    block: Annotated[
        int | None,
        model_option(
            "Tokens per block in training; a token reads the cache of earlier blocks.",
            show_default="5",
        ),
    ] = None
    cache_layer: Annotated[
        int | None,
        model_option(
            "The target's layer whose cache the first layer reads; further layers read the "
            "following ones.",
            show_default="so that the last layer reads the target's last",
        ),
    ] = None
    vanilla: Annotated[
        bool, model_option("Without cross-attention, for comparison; for the drafter vanilla.")
    ] = False
    rate: _Rate = 0.012

    def __post_init__(self) -> None:
        if self.vanilla:
            refuse({"block": self.block, "cache-layer": self.cache_layer}, "with --vanilla")

    def plan(self, config: "ModelConfig", settings: Settings) -> Plan:
        from pronk.lab import GlideShape
        from pronk.train.students import GlideStudent, VanillaStudent

        sizes = (self.hidden, self.heads, self.kv_heads, self.mlp)
        block = GlideShape.block if self.block is None else self.block
        more: dict[str, Any] = {
            "block": block,
            "cross": not self.vanilla,
            "cache_layer": self.cache_layer,
        }
        shape = GlideShape.of_target(config, self.layers, *sizes, **more)
        shape.cache_layers(config)  # raises OptionError if the target has too few layers
        student = VanillaStudent if self.vanilla else GlideStudent
        return student, StudentOptions(**settings(config.context), shape=shape)


@dataclass(frozen=True, kw_only=True)
class MedusaKind(DrafterKind):
    """Train heads on the target's last output, one for each later token (drafter medusa)."""

    example = "--target ./checkpoint --heads 3 --blocks 1 --minutes 30"

    heads: Annotated[
        int, model_option("Heads, one for each draft token after the target's own token.")
    ] = 4
    blocks: Annotated[int, model_option("Residual blocks of a head.")] = 2
    unembeddings: Annotated[
        str,
        model_option(
            "shared: the target's; replicated: a copy that each head trains, many times as large."
        ),
    ] = "shared"
    tree_size: Annotated[
        int,
        model_option(
            "Draft tokens of the tree, chosen by the accuracy of the heads on held-out text."
        ),
    ] = 15
    rate: _Rate = 0.02
    num_tokens: Annotated[
        int | None,
        loop_option(
            "Depth of the tree when the engine measures the drafter; 0: not at all.",
            show_default="all heads",
        ),
    ] = None

    def plan(self, config: "ModelConfig", settings: Settings) -> Plan:
        from pronk.lab import MedusaShape
        from pronk.train.heads import MedusaOptions, MedusaStudent

        fields = settings(config.context) | {
            "num_tokens": self.heads if self.num_tokens is None else self.num_tokens
        }
        shape = MedusaShape(self.heads, self.blocks, self.unembeddings)
        return MedusaStudent, MedusaOptions(**fields, shape=shape, tree_size=self.tree_size)


@dataclass(frozen=True, kw_only=True)
class HeadsKind(DrafterKind):
    """Train heads that predict several tokens in one forward pass (drafter multi_token)."""

    example = "--target ./checkpoint --heads 4 --order causal --minutes 60"

    without = ("compile",)

    heads: Annotated[int, model_option("Heads; the first predicts the token after the next.")] = 3
    layer: Annotated[
        int | None,
        model_option("Layer of the target whose output the heads read.", show_default="the last"),
    ] = None
    kind: Annotated[str, model_option(HEAD_KIND)] = "transformer"
    order: Annotated[str, model_option(HEAD_ORDER)] = "parallel"
    unembeddings: Annotated[str, model_option(UNEMBEDDINGS)] = "shared"
    mlp: Annotated[
        int | None,
        model_option("Width of a head's MLP.", show_default="1.2 times the target's hidden size"),
    ] = None
    num_tokens: Annotated[
        int | None,
        loop_option(
            "Draft tokens per step when the engine measures them; 0: never.", show_default="all"
        ),
    ] = None
    # Heads start near the identity function, far from their optimum. This learning rate is
    # therefore higher than that of a language model.
    rate: _Rate = 0.02

    def __post_init__(self) -> None:
        check_integer("heads", self.heads, 1, 63)

    def plan(self, config: "ModelConfig", settings: Settings) -> Plan:
        from pronk.lab import HeadsShape
        from pronk.train.heads import HeadsStudent

        layer = config.num_layers if self.layer is None else self.layer
        width = 6 * config.hidden_size // 5 if self.mlp is None else self.mlp
        shape = HeadsShape(self.heads, layer, width, self.kind, self.order, self.unembeddings)
        shape.check(config)
        fields = settings(config.context) | {
            "num_tokens": self.heads if self.num_tokens is None else self.num_tokens
        }
        return HeadsStudent, HeadsOptions(**fields, shape=shape)


# Kinds of drafters, by the command that trains them, in the order in which the help lists them.
KINDS: dict[str, type[DrafterKind]] = {
    "draft": DraftKind,
    "kangaroo": KangarooKind,
    "glide": GlideKind,
    "medusa": MedusaKind,
    "heads": HeadsKind,
}
