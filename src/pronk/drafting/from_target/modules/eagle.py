"""A trained head: EAGLE-3 (Li et al. 2025) or MTP, its weights and what it computes.

A row of the head belongs to a position ``i`` of the text. With the feature ``f`` of the position
(:func:`head_feature`) and the embedding ``e`` of the *next* token ``i + 1``, the head predicts
token ``i + 2``::

    EAGLE-3   x = concat(norm(e), norm(f))             y = r + attention(x)       r is f or norm(f)
              a = y + mlp(norm(y))                     logits = head(norm(a))
    MTP       x = W concat(norm(e), norm(f))     a = decoder layer of x     logits = head(norm(a))

A draft token's row has no feature of the target. It takes the head's own output in the row before
instead: ``a``, or ``norm(a)`` with ``norm_output``. EAGLE-3's further layers are ordinary ones, or
have the embedding as input as well. Embedding and LM head are those of the target if the file has
none.

The LM head of a large vocabulary costs as much as many layers. :meth:`EagleHead.trim` keeps its
rows of some tokens only; the others are then never drafted. :meth:`EagleHead.divide` makes it a
:class:`~pronk.drafting.shared.two_stage_head.TwoStageHead`, whose tokens are all drafted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import numpy as np

from pronk.base.arrays import Array, DType
from pronk.base.errors import CheckpointError, ConfigError, OptionError, locate_error, refuse
from pronk.base.files.regular import is_file
from pronk.checkpoint.gguf.checkpoint import GgufCheckpoint
from pronk.checkpoint.tensors import AnyCheckpoint, open_checkpoint, read_json
from pronk.drafting.from_target.modules.eagle_config import EagleConfig
from pronk.drafting.from_target.modules.final_state import FinalState
from pronk.drafting.shared.token_clusters import cluster_means, stored_clusters
from pronk.drafting.shared.two_stage_head import TwoStageDecoder, TwoStageHead, read_clusters
from pronk.kernels.library import Kernels
from pronk.models.decoder import Decoder, Layer
from pronk.models.inventory import Inventory, family_names
from pronk.models.linear import Linear, LinearFactory, Norm, WeightLayout, choose_linear
from pronk.models.loader import parse_dtype, read_config
from pronk.models.operations import HeadNorms, KVSource, LinearOutput
from pronk.models.placer import WeightPlacer
from pronk.models.program import Program
from pronk.models.tensor_plan import (
    CheckpointTensor,
    DecoderPart,
    plan_layer,
    plan_linear,
    plan_norm,
)
from pronk.sampling.draft_token import DraftIds


class EagleLayer(Layer):
    """A decoder layer; in a *wide* one, attention reads both the embedding and the feature."""

    hidden_norm: Norm  # norm of the feature, in wide layers


class EagleHead(TwoStageDecoder):
    """The weights of a head.

    Attributes:
        eagle: configuration.
        fc: EAGLE-3: hidden states of the target to the feature. MTP: embedding and feature to the
            layer's input.
        fc_norm: norm before ``fc``, if any.
        token_norm: MTP's norm of the embedding.
        feature_norm: MTP's norm of the feature.
        draft_ids: the target's ids of the tokens that the head can propose, ``[draft_vocab]``;
            ``None``: all.
    """

    layers: list[EagleLayer]  # type: ignore[assignment]
    fc: Linear
    token_norm: Norm
    feature_norm: Norm

    def __init__(self, eagle: EagleConfig, kernels: Kernels) -> None:
        super().__init__(eagle.layers, kernels)
        self.eagle = eagle
        config = eagle.layers
        self.layers = [
            EagleLayer(config, config.mixture_of(index)) for index in range(config.num_layers)
        ]
        self.fc_norm: Norm | None = None
        self.draft_ids: DraftIds | None = None

    def linears(self) -> Iterator[Linear]:
        yield from super().linears()
        yield self.fc

    @property
    def tokens(self) -> DraftIds:
        """The target's ids of the tokens that the head can propose, ``[draft_vocab]``."""
        if self.draft_ids is not None:
            return self.draft_ids
        if self.two_stage_head is not None:
            return np.sort(self.two_stage_head.tokens, axis=None)
        return np.arange(self.head.out_features, dtype=np.int32)

    def trim(self, tokens: DraftIds) -> None:
        """Propose only those of ``tokens``, the target's ids, that the head of one stage can.

        The rows of the LM head are copies in its packed format, so that the logits of these tokens
        keep their bits.
        """
        rows = np.flatnonzero(np.isin(self.tokens, tokens))
        self.draft_ids = self.tokens[rows]
        self.head = self.head.take_outputs(rows)

    def divide(self, num_clusters: int, num_best: int, weights: str) -> None:
        """Divide the LM head into clusters of similar rows.

        Args:
            num_clusters: number of clusters, a divisor of the number of tokens.
            num_best: number of clusters whose tokens get logits.
            weights: how the centroids are stored, as in :func:`load_head`.
        """
        rows = self.head.packed.unpack()
        clusters = stored_clusters(rows, num_clusters)
        build = choose_linear(self.kernels, weights)
        means = cluster_means(rows, clusters)
        dtype = parse_dtype("auto", self.eagle.layers)
        self.split(build(means.astype(dtype), None, WeightLayout(head=True)), clusters, num_best)

    def split(self, centroids: Linear, rows: DraftIds, num_best: int) -> None:
        """Replace the LM head by one of two stages.

        Args:
            centroids: layer from a normed output to one score for each cluster.
            rows: the rows of the LM head in each cluster, ``[clusters, size]``.
            num_best: number of clusters whose tokens get logits.
        """
        ascending = np.sort(rows, axis=1)
        linears = [self.head.take_outputs(own) for own in ascending]
        tokens = np.ascontiguousarray(self.tokens[ascending], np.int32)
        self.two_stage_head = TwoStageHead(centroids, linears, tokens, num_best)
        del self.head  # its rows are in the two-stage head

    def compile_pass(self, program: Program, *, logits: bool, only_keys: bool = False) -> None:
        """Append a forward pass; with ``logits``, also norm and LM head of requested rows.

        The residual stream holds the rows' features at first and the output of the layers at the
        end. That output is the feature of the next draft token's row.

        With ``only_keys``, the output of the rows is not needed: the pass may end when the last
        layer has stored their keys and values.
        """
        if self.eagle.kind == "mtp":
            self._compile_input(program, self.token_norm, self.feature_norm)
            program.linear(self.fc, source="A")
        for index, layer in enumerate(self.layers):
            if index < self.eagle.num_wide:
                norm_before = index == 0 and self.eagle.norm_before_residual
                self._compile_input(
                    program, layer.attention_norm, layer.hidden_norm, norm_before=norm_before
                )
                kv = KVSource(index)
                norms = HeadNorms(layer.q_norm, layer.k_norm)
                program.project(layer.qkv, None, layer.config, kv, norms, source="A")
                if only_keys and layer is self.layers[-1]:
                    return
                program.attend(layer.config, kv)
                program.linear(layer.out, source="A", residual=True)
                program.mlp(layer)
            else:
                layer.compile(program, index)
        if self.eagle.norm_output:
            program.norm(self.norm)
        if logits:
            two_stage = self.two_stage_head
            self.compile_logits(program, self.head if two_stage is None else two_stage.centroids)

    def compile_logits(self, program: Program, head: Linear) -> None:
        """Append the final norm, if the stream is not normed yet, and an LM head or a part of it.

        The logits are those of the rows that want them.
        """
        norm = None if self.eagle.norm_output else self.norm
        program.linear(head, norm=norm, to="logits", only_logits_rows=True)

    def _compile_input(
        self, program: Program, token_norm: Norm | None, norm: Norm, *, norm_before: bool = False
    ) -> None:
        """Append operations that fill buffer ``A`` with the layer's input.

        A row of ``A`` is the normed embedding and the normed residual stream, concatenated. With
        ``norm_before``, the stream itself is replaced by its norm.
        """
        names = self.eagle.names
        part = 0 if names.embedding_first else 1
        program.embed(self, norm=token_norm, part=(part, 2), zero_first=names.zero_first_embedding)
        if norm_before:
            program.norm(norm)
        program.norm(None if norm_before else norm, part=(1 - part, 2))


class HeadFeature:
    """Input of an EAGLE-3 head at one position: ``fc`` of outputs of the target's layers.

    The outputs of several layers are concatenated. The target's KV cache stores this *feature* for
    every token.

    Attributes:
        layers: layers of the target that are read, from 1; 0 is the embedding.
        width: number of values.
    """

    only_logits_rows = False  # the head reads the whole text

    def __init__(self, head: EagleHead, target: Decoder, dtype: DType) -> None:
        eagle = head.eagle
        self.layers = eagle.sources_of(len(target.layers))
        self.width = eagle.layers.hidden_size
        self._dtype = dtype
        # the norm of each layer's output
        self._norms: list[Norm | None] = [None] * len(self.layers)
        if eagle.fc_norm:
            self._norms = [getattr(head, f"fc_norm_{index}") for index in range(len(self.layers))]
        self._fc = head.fc
        self._fc_norm = head.fc_norm

    @cached_property
    def identity(self) -> str:
        """Digest of the weights that compute the feature, in hexadecimal digits.

        Heads with equal digests have equal features, so that they share those in the target's
        cache.
        """
        packed = self._fc.packed
        digest = sha256(f"eagle3 {self.layers} {self._dtype} {packed.format}".encode())
        for norm in (self._fc_norm, *self._norms):
            digest.update(b"no norm" if norm is None else norm.weight.tobytes())
        digest.update(packed.unpack().tobytes())
        return digest.hexdigest()

    def compile(self, program: Program, collected: Mapping[int, int]) -> None:
        """Append the operations that compute the feature and save it in the target's cache.

        The last layer's output is in the stream, the others are ``collected``. Side by side, they
        are a row of the buffer ``A``.
        """
        count = len(self.layers)
        for index, (layer, norm) in enumerate(zip(self.layers, self._norms, strict=True)):
            program.norm(norm, source=collected.get(layer, "stream"), part=(index, count))
        if self._fc_norm is not None:
            program.norm(self._fc_norm, source="A", to="A", width=self._fc.in_features)
        program.linear(self._fc, source="A", output=LinearOutput(feature=self))


def head_feature(head: EagleHead, target: Decoder, dtype: DType) -> HeadFeature | FinalState:
    """Return the feature that a head reads, with values of ``dtype``."""
    if head.eagle.kind == "mtp":
        return FinalState(target, dtype)
    return HeadFeature(head, target, dtype)


def load_head(kind: str, folder: Path, target: Decoder, weights: str | LinearFactory) -> EagleHead:
    """Load a head.

    Args:
        kind: ``"eagle3"`` or ``"mtp"``.
        folder: folder or GGUF file of the head.
        target: the target, on the device of the head.
        weights: how the weights are stored in memory, as the option of this name of
            :class:`~pronk.llm.LLM`; or a function that builds each layer.

    Raises:
        CheckpointError: the files are missing or damaged, or no head of this kind.
        OptionError: the head has other sizes than the target, or ``weights`` needs kernels.
    """
    checkpoint = open_checkpoint(folder)
    eagle = _read_config(kind, checkpoint)
    with locate_error(folder, ConfigError, ConfigError):
        sources = eagle.sources_of(len(target.layers))
    stored = {eagle.names.canonical(name): name for name in checkpoint}
    _check_target(folder, eagle, target, stored)
    parts = list(plan_head(eagle, len(sources), stored))
    head = EagleHead(eagle, target.kernels)
    inventory = Inventory(checkpoint, eagle.layers, parts, eagle.names)
    linear = weights
    if isinstance(linear, str):
        linear = choose_linear(target.kernels, linear, checkpoint.release)
    placer = WeightPlacer(head, inventory, parse_dtype("auto", eagle.layers), linear, None)
    for part in parts:
        placer.place(part)
    if not _has(stored, "embed_tokens"):
        head.embedding = target.embedding
        head.table = target.table
    if not _has(stored, "lm_head"):
        head.head = target.head
    head.draft_ids = _read_draft_ids(checkpoint, eagle, stored)
    if eagle.num_clusters:
        rows = read_clusters(checkpoint, eagle.draft_vocab_size, eagle.num_clusters)
        head.split(head.centroids, rows, eagle.num_best)
    return head


def _read_config(kind: str, checkpoint: AnyCheckpoint) -> EagleConfig:
    """Return the configuration of a head of this kind.

    Raises:
        ConfigError: it is missing or invalid, or this is another kind of head.
    """
    folder = checkpoint.folder
    if isinstance(checkpoint, GgufCheckpoint):
        if kind != "mtp":
            refuse(folder, f"expected a folder of an {kind} head, found a GGUF file", ConfigError)
        target = read_config(folder, checkpoint)
        names = family_names(checkpoint, target)
        with locate_error(folder, ConfigError, ConfigError):
            return EagleConfig.in_target(target, names, tuple(checkpoint))
    config = folder / "config.json"
    if not is_file(config):
        refuse(folder, "expected config.json of a head, found none", ConfigError)
    raw = read_json(config, ConfigError)
    with locate_error(folder, ConfigError, ConfigError):
        return EagleConfig.parse(kind, raw, tuple(checkpoint))


def _has(stored: Collection[str], module: str) -> bool:
    """Return whether the head's file has a weight of the module, quantized or not."""
    return any(name.startswith(f"{module}.") for name in stored)


def plan_head(
    eagle: EagleConfig, num_sources: int, stored: dict[str, str]
) -> Iterator[DecoderPart]:
    """Yield the modules of a head with the tensors of each, named as in the layout speculators.

    ``num_sources`` is the number of the target's layers that the head reads. ``stored`` maps these
    names to those in the file.
    """
    config = eagle.layers
    size = eagle.layers.hidden_size
    names = eagle.names
    if _has(stored, "embed_tokens"):
        table = CheckpointTensor("embed_tokens.weight", (config.vocab_size, size))
        yield DecoderPart("embedding", "table", (table,))
    if _has(stored, "lm_head"):
        yield plan_linear("head", ("lm_head",), (eagle.draft_vocab_size,), size)
    if eagle.num_clusters:
        centroids = ("masked_embedding.centroids",)
        yield plan_linear("centroids", centroids, (eagle.num_clusters,), size)
    yield plan_norm(config, "norm", "norm", size)
    if eagle.kind == "mtp":
        yield plan_norm(config, "token_norm", "token_norm", size)
        yield plan_norm(config, "feature_norm", "feature_norm", size)
        yield plan_linear("fc", ("fc",), (size,), 2 * size)
    else:
        width = eagle.target_hidden_size
        yield plan_linear("fc", ("fc",), (size,), num_sources * width)
        if eagle.norm_before_fc:
            yield plan_norm(config, "fc_norm", "input_norm", num_sources * width)
        for index in range(num_sources if eagle.fc_norm else 0):
            yield plan_norm(config, f"fc_norm_{index}", f"fc_norm.{index}", width)
    for index in range(config.num_layers):
        for part in plan_layer(config, names, index):
            wide = index < eagle.num_wide and part.target.endswith(".qkv")
            weight = tuple(
                CheckpointTensor(each.name, (each.shape[0], 2 * size)) for each in part.weight
            )
            yield replace(part, weight=weight) if wide else part
        if index < eagle.num_wide:
            yield plan_norm(
                config, f"layers.{index}.hidden_norm", f"layers.{index}.hidden_norm", size
            )


def _check_target(
    folder: Path, eagle: EagleConfig, target: Decoder, stored: dict[str, str]
) -> None:
    """Raise an OptionError unless the head's sizes are those of the target."""
    config = target.config
    size = eagle.layers.hidden_size
    wanted = {
        "vocab_size": (config.vocab_size, eagle.layers.vocab_size),
        "target_hidden_size": (config.hidden_size, eagle.target_hidden_size),
    }
    if not _has(stored, "embed_tokens") or not _has(stored, "lm_head") or eagle.kind == "mtp":
        wanted["hidden_size"] = config.hidden_size, size
    if not _has(stored, "lm_head"):
        wanted["draft_vocab_size"] = config.vocab_size, eagle.draft_vocab_size
    for key, (expected, found) in wanted.items():
        if expected != found:
            msg = (
                f"{folder}: {key}: expected {expected}, that of the target, found {found}; use a "
                "head of this target"
            )
            raise OptionError(msg)


def draft_ids_of(offsets: Array, vocab_size: int, folder: Path) -> DraftIds:
    """Return the target's id of each token of a draft vocabulary, int32 ``[len(offsets)]``.

    ``offsets`` is the tensor ``d2t`` of a head in ``folder``: element ``i`` is the target's id of
    draft token ``i``, minus ``i``. Raises CheckpointError if two ids are equal, or one is not in
    ``0 .. vocab_size - 1``.
    """
    ids = np.arange(len(offsets)) + offsets
    if ids.min() < 0 or ids.max() >= vocab_size or len(np.unique(ids)) < len(ids):
        msg = (
            f"{folder}: tensor d2t: expected offsets to different tokens below {vocab_size}, found "
            "others"
        )
        raise CheckpointError(msg)
    return ids.astype(np.int32)


def _read_draft_ids(
    checkpoint: AnyCheckpoint, eagle: EagleConfig, stored: dict[str, str]
) -> DraftIds | None:
    """Return the target's ids of the draft vocabulary; ``None`` if it is the whole one."""
    count = eagle.draft_vocab_size
    vocab = eagle.layers.vocab_size
    if "d2t" not in stored:
        if count == vocab:
            return None
        msg = (
            f"{checkpoint.folder}: tensor d2t: expected {count} offsets, found none; use a "
            "complete head"
        )
        raise CheckpointError(msg)
    found = checkpoint.shape(stored["d2t"])
    if found != (count,):
        msg = (
            f"{checkpoint.folder}: tensor d2t: expected shape [{count}] from draft_vocab_size, "
            f"found {list(found)}"
        )
        raise CheckpointError(msg)
    checkpoint.check_dtype(stored["d2t"], ("I64", "I32"))
    ids = draft_ids_of(checkpoint.tensor(stored["d2t"]), vocab, checkpoint.folder)
    if "t2d" in stored:
        name = stored["t2d"]
        checkpoint.check_dtype(name, ("BOOL", "U8", "I64"))
        mask = checkpoint.tensor(name).astype(bool)
        if mask.shape != (vocab,) or not np.array_equal(np.flatnonzero(mask), np.sort(ids)):
            msg = (
                f"{checkpoint.folder}: tensor t2d: expected the tokens of d2t, found others; use "
                "one head's tensors"
            )
            raise CheckpointError(msg)
    return ids
