"""Gemma 4's assistant: a small decoder that reads its target's keys and values, and drafts.

Let ``t`` be the last token of the text at position ``p``, and ``f`` the target's final state of the
token before ``t`` (:class:`~.final_state.FinalState`). A row of the assistant computes the next
draft token, and the values for the row after it::

    x = W_pre concat(embedding of t in the target, f)
    a = norm(layers(x))
    logits = head(a)                      for the draft token, the next row's t
    f = W_post a                          the next row's f

The layers are those of a Gemma 4 (:mod:`pronk.models.families.gemma4`) with queries only. A layer
reads the keys and values of the target's last layer with keys of its own and the same kind of
attention, full or with a sliding window. All rows of a proposal are at position ``p`` and see the
text before ``t``, with a window ``w`` its last ``w - 1`` tokens: no row sees another row.

The head is tied to the assistant's embedding. With ``use_ordered_embeddings`` it has two stages
(:class:`~pronk.drafting.shared.two_stage_head.TwoStageHead`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pronk.base.errors import ConfigError, OptionError, locate_error, refuse
from pronk.base.files.regular import is_file
from pronk.checkpoint.config import AttentionShape, ModelConfig
from pronk.checkpoint.rope import refuse_config
from pronk.checkpoint.tensors import open_checkpoint, read_json
from pronk.drafting.shared.two_stage_head import (
    CLUSTER_TOKENS,
    TwoStageDecoder,
    TwoStageHead,
    read_clusters,
)
from pronk.kernels.library import Kernels
from pronk.models.config_reader import ConfigReader
from pronk.models.decoder import Decoder, Layer
from pronk.models.families import get_family, parse_config
from pronk.models.inventory import Inventory
from pronk.models.linear import Linear, choose_linear
from pronk.models.loader import parse_dtype
from pronk.models.operations import KVSource
from pronk.models.placer import WeightPlacer
from pronk.models.program import Program
from pronk.models.tensor_plan import DecoderPart, plan_linear, plan_tensors

MODEL_TYPE = "gemma4_assistant"


@dataclass(frozen=True)
class AssistantConfig:
    """Sizes of an assistant.

    Attributes:
        layers: the decoder. ``attention_shapes[i].reads`` is the target's layer, from 0, whose keys
            and values layer ``i`` reads; ``None`` before :meth:`for_target`.
        target_hidden_size: hidden size of the target.
        num_clusters: number of clusters of the two-stage head; 0: the head has one stage.
        num_best: number of clusters whose tokens get logits.
    """

    layers: ModelConfig
    target_hidden_size: int
    num_clusters: int = 0
    num_best: int = 0

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> AssistantConfig:
        """Parse ``config.json`` of an assistant.

        Raises:
            ConfigError: this is another model, or a value is invalid or not supported.
        """
        keys = ConfigReader(raw, MODEL_TYPE)
        found = keys.get("model_type")
        if found != MODEL_TYPE:
            refuse_config(f"model_type: expected {MODEL_TYPE}, found {found!r:.80}")
        if not keys.flag("tie_word_embeddings", default=True):
            refuse_config("tie_word_embeddings: expected true, found false")
        layers = _parse_layers(keys)
        sizes = cls(layers, keys.integer("backbone_hidden_size", 1536))
        if not keys.flag("use_ordered_embeddings"):
            return sizes
        num_clusters = keys.integer("num_centroids", 2048, high=layers.vocab_size)
        if layers.vocab_size % num_clusters:
            refuse_config(
                f"num_centroids: expected a divisor of vocab_size = {layers.vocab_size}, found "
                f"{num_clusters}"
            )
        num_best = keys.integer("centroid_intermediate_top_k", 32, high=num_clusters)
        return replace(sizes, num_clusters=num_clusters, num_best=num_best)

    def for_target(self, target: ModelConfig) -> AssistantConfig:
        """Return the sizes with the target's layers that are read.

        Raises:
            ConfigError: the target has other sizes or rotations, or lacks a kind of layer.
        """
        layers = self.layers
        for key, expected, found in (
            ("backbone_hidden_size", target.hidden_size, self.target_hidden_size),
            ("vocab_size", target.vocab_size, layers.vocab_size),
        ):
            if expected != found:
                refuse_config(f"{key}: expected {expected}, that of the target, found {found}")
        shapes = tuple(self._shape(index, target) for index in range(layers.num_layers))
        return replace(self, layers=replace(layers, attention_shapes=shapes))

    def _shape(self, index: int, target: ModelConfig) -> AttentionShape:
        """Return the sizes of layer ``index``, with the target's layer that it reads."""
        layers = self.layers
        window = layers.window_of(index)
        kind = "full attention" if window is None else "a sliding window"
        sources = [
            layer
            for layer in range(target.num_layers)
            if target.stores_keys(layer) and (target.window_of(layer) is None) == (window is None)
        ]
        if not sources or target.latent is not None:
            refuse_config(
                f"layer_types: expected a target with {kind} as layer {index}, found none"
            )
        source = sources[-1]
        shape = target.shape_of(source)
        for key, expected, found in (
            ("head_dim", shape.head_dim, layers.shape_of(index).head_dim),
            ("sliding_window", target.window_of(source), window),
            ("rope_parameters", target.rope_of(source), layers.rope_of(index)),
        ):
            if expected != found:
                refuse_config(
                    f"{key}: layer {index}: expected {expected}, that of the target, found {found}"
                )
        if layers.num_heads % shape.num_kv_heads:
            refuse_config(
                f"num_attention_heads: expected a multiple of the target's {shape.num_kv_heads} "
                f"key/value heads, found {layers.num_heads}"
            )
        return AttentionShape(shape.num_kv_heads, shape.head_dim, reads=source)

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """Numbers (from 1) of the target's layers whose keys and values are read."""
        sources = {shape.reads for shape in self.layers.attention_shapes}
        return tuple(sorted(source + 1 for source in sources if source is not None))


def _parse_layers(keys: ConfigReader) -> ModelConfig:
    """Return the decoder's sizes, for layers with keys of their own."""
    text = keys.mapping("text_config")
    model_type = text.get("model_type", "gemma4_text")
    if model_type != "gemma4_text":
        refuse_config(f"text_config: model_type: expected gemma4_text, found {model_type!r:.40}")
    num_layers = text.get("num_hidden_layers")
    num_shared = text.get("num_kv_shared_layers") or num_layers
    if num_shared != num_layers:
        refuse_config(
            f"num_kv_shared_layers: expected {num_layers} as num_hidden_layers, found "
            f"{num_shared!r:.40}"
        )
    inherited = {key: keys.get(key) for key in ("dtype", "torch_dtype") if keys.get(key)}
    own = {
        "num_kv_shared_layers": 0,
        "tie_word_embeddings": True,
        "vocab_size_per_layer_input": None,
    }
    layers = parse_config({**inherited, **text, "model_type": model_type, **own})
    for key, is_used in (
        ("hidden_size_per_layer_input", layers.layer_input_size > 0),
        ("enable_moe_block", layers.mixture is not None),
        ("use_double_wide_mlp", bool(layers.intermediate_sizes)),
    ):
        if is_used:
            refuse_config(
                f"{key}: expected 0 or false in an assistant, found {text.get(key)!r:.40}"
            )
    return replace(layers, logits_cap=None)  # the logits of an assistant have no soft cap


class AssistantDecoder(TwoStageDecoder):
    """The weights of an assistant; :mod:`.gemma4_assistant` has the formulas.

    Attributes:
        assistant: sizes.
        pre_projection: embedding and state of the target to the first layer's input.
        post_projection: output to the state of the next row.
    """

    pre_projection: Linear
    post_projection: Linear

    def __init__(self, assistant: AssistantConfig, kernels: Kernels) -> None:
        super().__init__(assistant.layers, kernels)
        self.assistant = assistant

    def _make_layer(self, sizes: ModelConfig, index: int) -> Layer:
        source = self.config.shape_of(index).reads
        assert source is not None, "expected the sizes of an assistant for one target"
        return Layer(sizes, reads=KVSource(source, cache=1))

    def linears(self) -> Iterator[Linear]:
        yield from super().linears()
        yield from (self.pre_projection, self.post_projection)

    def compile_input(self, program: Program, target: Decoder) -> None:
        """Append ``logits = W_pre concat(embedding, stream)``; the stream has the states ``f``.

        The program is as wide as the target.
        """
        program.embed(target, part=(0, 2))
        program.norm(None, part=(1, 2))
        program.linear(self.pre_projection, source="A", to="logits")

    def compile_layers(self, program: Program) -> None:
        """Append the layers and the final norm, and the head if it has one stage."""
        for index, layer in enumerate(self.layers):
            layer.compile(program, index)
        program.norm(self.norm)
        if self.two_stage_head is None:
            program.linear(self.head, to="logits")


def read_assistant_config(folder: Path, target: ModelConfig) -> AssistantConfig:
    """Read the sizes of an assistant of a target.

    Raises:
        ConfigError: ``config.json`` is missing or invalid.
        OptionError: the assistant is one of another target.
    """
    path = folder / "config.json"
    if not is_file(path):
        refuse(folder, "expected config.json of an assistant, found none", ConfigError)
    raw = read_json(path, ConfigError)
    with locate_error(folder, ConfigError, ConfigError):
        config = AssistantConfig.parse(raw)
    with locate_error(folder, ConfigError, OptionError, remedy="; use an assistant of this target"):
        return config.for_target(target)


def load_assistant(
    folder: Path, config: AssistantConfig, kernels: Kernels, weights: str
) -> AssistantDecoder:
    """Load an assistant.

    Args:
        folder: folder of the checkpoint.
        config: its sizes.
        kernels: the kernels of the target.
        weights: how the weights are stored in memory, as the option of this name of
            :class:`~pronk.llm.LLM`.

    Raises:
        CheckpointError: a file is missing or damaged.
        OptionError: ``weights`` needs kernels.
    """
    checkpoint = open_checkpoint(folder)
    assistant = AssistantDecoder(config, kernels)
    names = get_family("gemma4_text").names
    # the numbers of tokens are no weights
    ignored = f"{names.ignored.pattern}|{re.escape(CLUSTER_TOKENS)}"
    names = replace(names, ignored=re.compile(ignored))
    parts = [*plan_tensors(config.layers, names), *_plan_projections(config)]
    inventory = Inventory(checkpoint, config.layers, parts, names)
    linear = choose_linear(kernels, weights, checkpoint.release)
    placer = WeightPlacer(assistant, inventory, parse_dtype("auto", config.layers), linear, None)
    for part in parts:
        placer.place(part)
    if config.num_clusters:
        tokens = read_clusters(checkpoint, config.layers.vocab_size, config.num_clusters)
        assistant.two_stage_head = TwoStageHead.split(
            assistant.head, assistant.centroids, tokens, config.num_best
        )
        del assistant.head  # its rows are in the two-stage head
    del assistant.embedding  # rows have embeddings of the target
    return assistant


def _plan_projections(config: AssistantConfig) -> Iterator[DecoderPart]:
    """Yield the modules that a Gemma 4 does not have, with their checkpoint tensors."""
    size = config.layers.hidden_size
    width = config.target_hidden_size
    yield plan_linear("pre_projection", ("pre_projection",), (size,), 2 * width)
    yield plan_linear("post_projection", ("post_projection",), (width,), size)
    if config.num_clusters:
        stored = ("masked_embedding.centroids",)
        yield plan_linear("centroids", stored, (config.num_clusters,), size)
