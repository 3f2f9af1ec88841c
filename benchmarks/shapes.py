"""Speed and memory of models that cannot be downloaded: known shapes with random weights.

    python benchmarks/shapes.py write qwen3.5-0.8b build/shapes
    python benchmarks/shapes.py measure qwen3.5-0.8b build/shapes
    python benchmarks/shapes.py measure qwen3.5-4b build/shapes --llama-bench PATH/llama-bench
    python benchmarks/shapes.py turn qwen3.5-0.8b build/shapes

``write`` writes a GGUF file with the sizes of a published model and random Q4_K blocks, the same
ones in every run, and beside it a dense model of Qwen3's layout with as many products per token and
as much attention. The files are good for speed and memory only: the text is noise, and figures of
acceptance mean nothing. The tokenizer is that of another GGUF file (``--tokenizer``), which also
decides the size of the vocabulary; ``--vocab`` adds unused tokens, up to that of the original. LFM3
has no architecture in GGUF files: its model is a folder with random weights in bfloat16, which is
loaded with 4 bits, and has a tokenizer of bytes.

``measure`` writes missing files first. Each model has a process of its own, and waits while another
one is measured. A round measures everything once:

    bandwidth   bytes per second of reading memory on all threads
    floor       bytes that a token reads, as stored in the file, and its states, over the bandwidth
    plain       seconds per token of plain decoding
    rows        passes over 1 to 16 rows, of which all are accepted: the next pass replays them;
                with experts also compared with a pass of one row that reads the experts of all rows
    prompt      products per second of a prompt, compared with the dense model's
    memory      peak of the process

``turn`` measures the second turn of a conversation: seconds to the first token after ``--prompt``
tokens, an answer and 100 new tokens, in the same process and after a restart with a prompt cache on
disk, compared with one pass over 100 tokens after a text of that length.

Figures are medians, with the 10th and 90th percentiles in brackets. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType
from numpy.typing import NDArray
from safetensors.numpy import save_file

ROWS = (1, 2, 4, 8, 16)
CONTEXT = 200  # tokens before the rows of a pass
PROMPT = 16  # tokens of the prompt before plain decoding
TOKENS = 48  # tokens of plain decoding
NEW_TOKENS = 100  # tokens that the second turn adds
KINDS = ("plain", "passes", "prompt")  # what is measured of each model in a round
PAUSE = 0.05  # seconds after which the threads of the process measured before sleep
TOKENIZER = "smollm2"
BLOCK = 256  # weights of a Q4_K block
BLOCK_BYTES = 144
SMALL_BLOCK = 32  # weights of a Q5_0 block
SMALL_BLOCK_BYTES = 22
HEAD_DIM = 128  # of the dense model
BYTE_TOKENS = 300  # tokens of the tokenizer of bytes


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file.

    Attributes:
        name: name in the file.
        shape: rows and columns, several matrices of which, or the size of a vector.
        mean: mean of a tensor in float32.
        spread: standard deviation of a tensor in float32; ``None``: random Q4_K blocks, or Q5_0 if
            the rows are no whole blocks of Q4_K, as in files of llama.cpp.
        used: part of the weights that a token is multiplied with.
    """

    name: str
    shape: tuple[int, ...]
    mean: float = 0.0
    spread: float | None = None
    used: float = 1.0

    @property
    def type(self) -> Type:
        """Type of the blocks of a tensor without ``spread``."""
        return Type.Q5_0 if self.shape[-1] % BLOCK else Type.Q4_K


def matrix(name: str, *shape: int, used: float = 1.0) -> Tensor:
    columns = shape[-1]
    expected = f"expected a multiple of {SMALL_BLOCK} columns"
    assert columns % SMALL_BLOCK == 0, f"{name}: {expected}, found {columns}"
    return Tensor(f"{name}.weight", shape, used=used)


def gains(name: str, size: int) -> Tensor:
    return Tensor(f"{name}.weight", (size,), 1.0, 0.0)


@dataclass(frozen=True)
class Dense:
    """A dense model of Qwen3's layout."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    tied: bool = True

    arch = "qwen3"
    extension = ".gguf"
    in_layer = "blk."  # beginning of the names of tensors in a layer

    def keys(self) -> dict[str, Any]:
        """Return the metadata of the file, without the prefix of the architecture."""
        return {
            "context_length": 32768,
            "embedding_length": self.hidden,
            "block_count": self.layers,
            "feed_forward_length": self.width,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 1e6,
        }

    def tensors(self, vocab: int) -> Iterator[Tensor]:
        """Yield all tensors in the order of the file."""
        yield matrix("token_embd", vocab, self.hidden)
        yield gains("output_norm", self.hidden)
        if not self.tied:
            yield matrix("output", vocab, self.hidden)
        for layer in range(self.layers):
            yield from self.layer(layer, f"blk.{layer}.")

    def layer(self, layer: int, blk: str) -> Iterator[Tensor]:  # noqa: ARG002 - for subclasses
        """Yield the tensors of a layer (from 0); in a dense model, all layers are alike."""
        yield gains(f"{blk}attn_norm", self.hidden)
        yield gains(f"{blk}ffn_norm", self.hidden)
        yield from self.attention(blk, self.heads * self.head_dim)
        yield from self.mlp(blk)

    def attention(self, blk: str, query_rows: int) -> Iterator[Tensor]:
        """Yield the tensors of attention; ``query_rows`` is the number of the query's outputs."""
        kv_size = self.kv_heads * self.head_dim
        yield matrix(f"{blk}attn_q", query_rows, self.hidden)
        yield matrix(f"{blk}attn_k", kv_size, self.hidden)
        yield matrix(f"{blk}attn_v", kv_size, self.hidden)
        yield matrix(f"{blk}attn_output", self.hidden, self.heads * self.head_dim)
        yield gains(f"{blk}attn_q_norm", self.head_dim)
        yield gains(f"{blk}attn_k_norm", self.head_dim)

    def mlp(self, blk: str) -> Iterator[Tensor]:
        """Yield the tensors of an MLP."""
        yield matrix(f"{blk}ffn_gate", self.width, self.hidden)
        yield matrix(f"{blk}ffn_up", self.width, self.hidden)
        yield matrix(f"{blk}ffn_down", self.hidden, self.width)

    def products(self) -> int:
        """Return the products per token with the matrices of all layers, the LM head excluded."""
        in_layers = [each for each in self.tensors(0) if each.name.startswith(self.in_layer)]
        matrices = [each for each in in_layers if len(each.shape) > 1]
        return sum(round(each.used * np.prod(each.shape)) for each in matrices)

    def attention_sizes(self) -> tuple[float, float]:
        """Return the outputs of all query heads and of all KV heads, a mean over the layers."""
        return self.heads * self.head_dim, self.kv_heads * self.head_dim

    def state_bytes(self) -> int:
        """Return the bytes of a text's states, which a token reads: a dense model has none."""
        return 0


@dataclass(frozen=True)
class Llama(Dense):
    """Llama 3: a dense model without norms of queries and keys."""

    arch = "llama"

    def keys(self) -> dict[str, Any]:
        """Return the metadata of the file, without the prefix of the architecture."""
        return super().keys() | {"rope.freq_base": 5e5, "rope.dimension_count": self.head_dim}

    def attention(self, blk: str, query_rows: int) -> Iterator[Tensor]:
        """Yield the tensors of attention; ``query_rows`` is the number of the query's outputs."""
        for tensor in super().attention(blk, query_rows):
            if not tensor.name.endswith("_norm.weight"):
                yield tensor


@dataclass(frozen=True)
class Mixture(Dense):
    """Qwen3's mixtures of experts; ``width`` is that of an expert."""

    experts: int = 128
    per_row: int = 8

    arch = "qwen3moe"

    def keys(self) -> dict[str, Any]:
        """Return the metadata of the file, without the prefix of the architecture."""
        return super().keys() | {
            "expert_count": self.experts,
            "expert_used_count": self.per_row,
            "expert_feed_forward_length": self.width,
        }

    def mlp(self, blk: str) -> Iterator[Tensor]:
        """Yield the tensors of a mixture."""
        router = (self.experts, self.hidden)
        yield Tensor(f"{blk}ffn_gate_inp.weight", router, 0.0, self.hidden**-0.5)
        used = self.per_row / self.experts
        yield matrix(f"{blk}ffn_gate_exps", self.experts, self.width, self.hidden, used=used)
        yield matrix(f"{blk}ffn_up_exps", self.experts, self.width, self.hidden, used=used)
        yield matrix(f"{blk}ffn_down_exps", self.experts, self.hidden, self.width, used=used)


@dataclass(frozen=True)
class Recurrent(Dense):
    """A model with recurrent layers, and attention in the last of every ``interval`` layers."""

    key_heads: int = 16
    value_heads: int = 16
    key_dim: int = 128
    value_dim: int = 128
    taps: int = 4

    interval = 4

    def keys(self) -> dict[str, Any]:
        """Return the metadata of the file, without the prefix of the architecture."""
        return super().keys() | {
            "ssm.conv_kernel": self.taps,
            "ssm.state_size": self.key_dim,
            "ssm.group_count": self.key_heads,
            "ssm.time_step_rank": self.value_heads,
            "ssm.inner_size": self.outputs,
        }

    @property
    def outputs(self) -> int:
        """Number of outputs of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Number of inputs of the convolution."""
        return 2 * self.key_heads * self.key_dim + self.outputs

    def has_attention(self, layer: int) -> bool:
        """Return whether a layer (from 0) has attention."""
        return layer % self.interval == self.interval - 1

    @property
    def attention_layers(self) -> int:
        """Number of layers with attention."""
        return self.layers // self.interval

    @property
    def recurrent_layers(self) -> int:
        """Number of layers with a state."""
        return self.layers - self.attention_layers

    def attention_sizes(self) -> tuple[float, float]:
        """Return the outputs of all query heads and of all KV heads, a mean over the layers."""
        share = self.attention_layers / self.layers
        return share * self.heads * self.head_dim, share * self.kv_heads * self.head_dim

    def state_bytes(self) -> int:
        """Return the bytes of a text's states and convolutions, which a token reads."""
        state = self.outputs * self.key_dim
        inputs = (self.taps - 1) * self.channels
        return 4 * self.recurrent_layers * (state + inputs)


@dataclass(frozen=True)
class GatedDelta(Recurrent):
    """Qwen3.5: three layers of Gated DeltaNet, then one of gated attention."""

    arch = "qwen35"

    def keys(self) -> dict[str, Any]:
        """Return the metadata of the file, without the prefix of the architecture."""
        return super().keys() | {
            "rope.freq_base": 1e7,
            "rope.dimension_count": self.head_dim // 4,
            "rope.dimension_sections": [11, 11, 10, 0],
            "full_attention_interval": self.interval,
        }

    def layer(self, layer: int, blk: str) -> Iterator[Tensor]:
        """Yield the tensors of a layer (from 0)."""
        yield gains(f"{blk}attn_norm", self.hidden)
        yield gains(f"{blk}post_attention_norm", self.hidden)
        if self.has_attention(layer):
            # each head's query and gate
            yield from self.attention(blk, 2 * self.heads * self.head_dim)
        else:
            yield from self.recurrence(blk)
        yield from self.mlp(blk)

    def recurrence(self, blk: str) -> Iterator[Tensor]:
        """Yield the tensors of a recurrent layer."""
        heads = self.value_heads
        yield matrix(f"{blk}attn_qkv", self.channels, self.hidden)
        yield matrix(f"{blk}attn_gate", self.outputs, self.hidden)
        yield Tensor(f"{blk}ssm_beta.weight", (heads, self.hidden), 0.0, self.hidden**-0.5)
        yield Tensor(f"{blk}ssm_alpha.weight", (heads, self.hidden), 0.0, self.hidden**-0.5)
        yield Tensor(f"{blk}ssm_a", (heads,), -1.5, 0.3)
        yield Tensor(f"{blk}ssm_dt.bias", (heads,), -2.0, 1.0)
        yield Tensor(f"{blk}ssm_conv1d.weight", (self.channels, self.taps), 0.0, 0.5)
        yield gains(f"{blk}ssm_norm", self.value_dim)
        yield matrix(f"{blk}ssm_out", self.hidden, self.outputs)


@dataclass(frozen=True)
class Mamba(Recurrent):
    """A model with layers of Mamba 2."""

    def keys(self) -> dict[str, Any]:
        """Return the metadata of the file, without the prefix of the architecture."""
        kv_heads = [
            self.kv_heads if self.has_attention(layer) else 0 for layer in range(self.layers)
        ]
        return super().keys() | {"attention.head_count_kv": kv_heads}

    def mixer(self, layer: int, blk: str) -> Iterator[Tensor]:
        """Yield the tensors of attention without norms of heads, or of a Mamba layer."""
        if not self.has_attention(layer):
            yield from self.recurrence(blk)
            return
        for tensor in self.attention(blk, self.heads * self.head_dim):
            if not tensor.name.endswith("_norm.weight"):
                yield tensor

    def recurrence(self, blk: str) -> Iterator[Tensor]:
        """Yield the tensors of a Mamba layer."""
        heads = self.value_heads
        yield matrix(f"{blk}ssm_in", self.outputs + self.channels + heads, self.hidden)
        yield Tensor(f"{blk}ssm_a", (heads, 1), -1.5, 0.3)
        yield Tensor(f"{blk}ssm_d", (heads, 1), 1.0, 0.3)
        yield Tensor(f"{blk}ssm_dt.bias", (heads,), -2.0, 1.0)
        yield Tensor(f"{blk}ssm_conv1d.weight", (self.channels, self.taps), 0.0, 0.5)
        yield Tensor(f"{blk}ssm_conv1d.bias", (self.channels,), 0.0, 0.3)
        rows = (self.key_heads, self.outputs // self.key_heads)
        yield Tensor(f"{blk}ssm_norm.weight", rows, 1.0, 0.0)
        yield matrix(f"{blk}ssm_out", self.hidden, self.outputs)


@dataclass(frozen=True)
class Granite(Mamba):
    """Granite 4 H without experts: nine layers of Mamba 2, then one of attention."""

    arch = "granitehybrid"
    interval = 10

    def keys(self) -> dict[str, Any]:
        """Return the metadata of the file, without the prefix of the architecture."""
        return super().keys() | {
            "rope.scaling.finetuned": False,
            "attention.scale": 1 / 64,
            "embedding_scale": 12.0,
            "residual_scale": 0.22,
            "logit_scale": 6.0,
        }

    def layer(self, layer: int, blk: str) -> Iterator[Tensor]:
        """Yield the tensors of a layer (from 0)."""
        yield gains(f"{blk}attn_norm", self.hidden)
        yield gains(f"{blk}ffn_norm", self.hidden)
        yield from self.mixer(layer, blk)
        yield from self.mlp(blk)


@dataclass(frozen=True)
class Nemotron(Mamba):
    """Nemotron 3 without experts, whose layers have one sublayer each.

    ``pattern`` has a letter for each layer, as ``hybrid_override_pattern`` of config.json: ``M``
    for Mamba 2, ``*`` for attention, ``-`` for an MLP without a gate.
    """

    pattern: str = ""

    arch = "nemotron_h"

    def keys(self) -> dict[str, Any]:
        """Return the metadata of the file, without the prefix of the architecture."""
        widths = [self.width if kind == "-" else 0 for kind in self.pattern]
        return super().keys() | {
            "feed_forward_length": widths,
            "attention.layer_norm_epsilon": 1e-5,
        }

    def has_attention(self, layer: int) -> bool:
        """Return whether a layer (from 0) has attention."""
        return self.pattern[layer] == "*"

    @property
    def attention_layers(self) -> int:
        """Number of layers with attention."""
        return self.pattern.count("*")

    @property
    def recurrent_layers(self) -> int:
        """Number of layers with a state."""
        return self.pattern.count("M")

    def layer(self, layer: int, blk: str) -> Iterator[Tensor]:
        """Yield the tensors of a layer (from 0)."""
        yield gains(f"{blk}attn_norm", self.hidden)
        if self.pattern[layer] == "-":
            yield matrix(f"{blk}ffn_up", self.width, self.hidden)
            yield matrix(f"{blk}ffn_down", self.hidden, self.width)
        else:
            yield from self.mixer(layer, blk)


@dataclass(frozen=True)
class Gemma4(Dense):
    """Gemma 4 E2B: heads of two sizes, embeddings of single layers, layers without keys.

    ``head_dim`` and ``width`` are those of layers with a window and of layers with keys.
    """

    full_dim: int = 512
    interval: int = 5  # every fifth layer has full attention
    shared: int = 20  # number of layers without keys
    shared_width: int = 2  # times the width of the other layers, which MLPs of these layers have
    input_size: int = 256
    window: int = 512

    arch = "gemma4"

    def keys(self) -> dict[str, Any]:
        """Return the metadata of the file, without the prefix of the architecture."""
        layers = range(self.layers)
        return super().keys() | {
            "attention.key_length": self.full_dim,
            "attention.value_length": self.full_dim,
            "attention.key_length_swa": self.head_dim,
            "attention.value_length_swa": self.head_dim,
            "attention.sliding_window": self.window,
            "attention.sliding_window_pattern": [not self.is_full(layer) for layer in layers],
            "attention.shared_kv_layers": self.shared,
            "embedding_length_per_layer_input": self.input_size,
            "feed_forward_length": [self.width_of(layer) for layer in layers],
            "rope.freq_base_swa": 1e4,
            "rope.dimension_count": self.full_dim,
            "rope.dimension_count_swa": self.head_dim,
            "final_logit_softcapping": 30.0,
        }

    def is_full(self, layer: int) -> bool:
        """Return whether a layer (from 0) has full attention."""
        return layer % self.interval == self.interval - 1

    def has_keys(self, layer: int) -> bool:
        """Return whether a layer (from 0) has keys of its own."""
        return layer < self.layers - self.shared

    def width_of(self, layer: int) -> int:
        """Return the width of the MLP of a layer (from 0)."""
        return self.width if self.has_keys(layer) else self.shared_width * self.width

    def dim_of(self, layer: int) -> int:
        """Return the size of the heads of a layer (from 0)."""
        return self.full_dim if self.is_full(layer) else self.head_dim

    def tensors(self, vocab: int) -> Iterator[Tensor]:
        """Yield all tensors in the order of the file."""
        yield from super().tensors(vocab)
        width = self.layers * self.input_size
        yield matrix("per_layer_token_embd", vocab, width)
        yield matrix("per_layer_model_proj", width, self.hidden)
        yield gains("per_layer_proj_norm", self.input_size)
        yield gains("rope_freqs", self.full_dim // 2)

    def layer(self, layer: int, blk: str) -> Iterator[Tensor]:
        """Yield the tensors of a layer (from 0)."""
        dim = self.dim_of(layer)
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_norm"):
            yield gains(f"{blk}{name}", self.hidden)
        yield matrix(f"{blk}attn_q", self.heads * dim, self.hidden)
        yield gains(f"{blk}attn_q_norm", dim)
        if self.has_keys(layer):
            yield matrix(f"{blk}attn_k", self.kv_heads * dim, self.hidden)
            yield matrix(f"{blk}attn_v", self.kv_heads * dim, self.hidden)
            yield gains(f"{blk}attn_k_norm", dim)
        yield matrix(f"{blk}attn_output", self.hidden, self.heads * dim)
        width = self.width_of(layer)
        yield matrix(f"{blk}ffn_gate", width, self.hidden)
        yield matrix(f"{blk}ffn_up", width, self.hidden)
        yield matrix(f"{blk}ffn_down", self.hidden, width)
        yield matrix(f"{blk}inp_gate", self.input_size, self.hidden)
        yield matrix(f"{blk}proj", self.hidden, self.input_size)
        yield gains(f"{blk}layer_output_scale", 1)

    def attention_sizes(self) -> tuple[float, float]:
        """Return the outputs of all query heads and of all KV heads, a mean over the layers."""
        dims = [self.dim_of(layer) for layer in range(self.layers)]
        queries = self.heads * sum(dims)
        keys = self.kv_heads * sum(dims[: self.layers - self.shared])
        return queries / self.layers, keys / self.layers


@dataclass(frozen=True)
class Latent(Dense):
    """GLM-4.7-Flash: multi-head latent attention, and mixtures of experts but in the first layer.

    ``kv_heads`` and ``head_dim`` are those of the cache, whose row is a latent and a key that RoPE
    rotates. ``width`` is that of the first layer's MLP.
    """

    rank: int = 512
    query_rank: int = 768
    rope_dim: int = 64
    plain_dim: int = 192
    value_dim: int = 256
    experts: int = 64
    per_row: int = 4
    expert_width: int = 1536

    arch = "deepseek2"

    def keys(self) -> dict[str, Any]:
        """Return the metadata of the file, without the prefix of the architecture."""
        return super().keys() | {
            "attention.q_lora_rank": self.query_rank,
            "attention.kv_lora_rank": self.rank,
            "attention.value_length": self.rank,
            "attention.key_length_mla": self.plain_dim + self.rope_dim,
            "attention.value_length_mla": self.value_dim,
            "rope.dimension_count": self.rope_dim,
            "leading_dense_block_count": 1,
            "expert_count": self.experts,
            "expert_used_count": self.per_row,
            "expert_shared_count": 1,
            "expert_feed_forward_length": self.expert_width,
            "expert_weights_scale": 1.8,
            "expert_weights_norm": True,
            "expert_gating_func": 2,  # sigmoid
        }

    def layer(self, layer: int, blk: str) -> Iterator[Tensor]:
        """Yield the tensors of a layer (from 0)."""
        yield gains(f"{blk}attn_norm", self.hidden)
        yield gains(f"{blk}ffn_norm", self.hidden)
        queries = self.heads * (self.plain_dim + self.rope_dim)
        yield matrix(f"{blk}attn_q_a", self.query_rank, self.hidden)
        yield gains(f"{blk}attn_q_a_norm", self.query_rank)
        yield matrix(f"{blk}attn_q_b", queries, self.query_rank)
        yield matrix(f"{blk}attn_kv_a_mqa", self.head_dim, self.hidden)
        yield gains(f"{blk}attn_kv_a_norm", self.rank)
        yield matrix(f"{blk}attn_k_b", self.heads, self.rank, self.plain_dim)
        yield matrix(f"{blk}attn_v_b", self.heads, self.value_dim, self.rank)
        yield matrix(f"{blk}attn_output", self.hidden, self.heads * self.value_dim)
        if layer == 0:
            yield from self.mlp(blk)
        else:
            yield from self.mixture(blk)

    def mixture(self, blk: str) -> Iterator[Tensor]:
        """Yield the tensors of a mixture and its shared expert."""
        width = self.expert_width
        router = (self.experts, self.hidden)
        yield Tensor(f"{blk}ffn_gate_inp.weight", router, 0.0, self.hidden**-0.5)
        yield Tensor(f"{blk}exp_probs_b.bias", (self.experts,), 0.0, 0.0)
        used = self.per_row / self.experts
        for name in ("gate", "up"):
            yield matrix(f"{blk}ffn_{name}_exps", self.experts, width, self.hidden, used=used)
            yield matrix(f"{blk}ffn_{name}_shexp", width, self.hidden)
        yield matrix(f"{blk}ffn_down_exps", self.experts, self.hidden, width, used=used)
        yield matrix(f"{blk}ffn_down_shexp", self.hidden, width)


@dataclass(frozen=True)
class Lfm3(Dense):
    """LFM3: short convolutions in half of the layers, attention with gates of heads in the others.

    No architecture in GGUF files is known, so the model is a folder.
    """

    taps: int = 7

    extension = ""
    in_layer = "model.layers."

    def keys(self) -> dict[str, Any]:
        """Return the content of ``config.json``, without the size of the vocabulary."""
        return {
            "model_type": "lfm3",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.width,
            "conv_L_cache": self.taps,
            "tie_word_embeddings": self.tied,
            "eos_token_id": 0,
            "dtype": "bfloat16",
        }

    @staticmethod
    def has_attention(layer: int) -> bool:
        """Return whether a layer (from 0) has attention: 2, 4, 6 and so on."""
        return layer % 2 == 0 and layer > 0

    @property
    def attention_layers(self) -> int:
        """Number of layers with attention."""
        return sum(map(self.has_attention, range(self.layers)))

    def tensors(self, vocab: int) -> Iterator[Tensor]:
        """Yield all tensors."""
        yield self.weight("model.embed_tokens", vocab, self.hidden)
        yield gains("model.embedding_norm", self.hidden)
        for layer in range(self.layers):
            yield from self.layer(layer, f"{self.in_layer}{layer}.")

    def layer(self, layer: int, blk: str) -> Iterator[Tensor]:
        """Yield the tensors of a layer (from 0)."""
        for name in ("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm"):
            yield gains(f"{blk}{name}", self.hidden)
        if self.has_attention(layer):
            sizes = {"q": self.heads, "k": self.kv_heads, "v": self.kv_heads}
            for name, heads in sizes.items():
                rows = heads * self.head_dim
                yield self.weight(f"{blk}self_attn.{name}_proj", rows, self.hidden)
            for name in ("q_norm", "k_norm"):
                yield gains(f"{blk}self_attn.{name}", self.head_dim)
            yield self.weight(f"{blk}self_attn.gate_proj", self.heads, self.hidden)
            yield self.weight(f"{blk}self_attn.o_proj", self.hidden, self.heads * self.head_dim)
        else:
            yield self.weight(f"{blk}conv.in_proj", 3 * self.hidden, self.hidden)
            yield Tensor(f"{blk}conv.conv.weight", (self.hidden, 1, self.taps), 0.0, 0.5)
            yield self.weight(f"{blk}conv.out_proj", self.hidden, self.hidden)
        yield self.weight(f"{blk}feed_forward.w1", self.width, self.hidden)
        yield self.weight(f"{blk}feed_forward.w3", self.width, self.hidden)
        yield self.weight(f"{blk}feed_forward.w2", self.hidden, self.width)

    @staticmethod
    def weight(name: str, rows: int, columns: int) -> Tensor:
        """Return a matrix whose products keep the scale of a row."""
        return Tensor(f"{name}.weight", (rows, columns), 0.0, columns**-0.5)

    def attention_sizes(self) -> tuple[float, float]:
        """Return the outputs of all query heads and of all KV heads, a mean over the layers."""
        share = self.attention_layers / self.layers
        return share * self.heads * self.head_dim, share * self.kv_heads * self.head_dim

    def state_bytes(self) -> int:
        """Return the bytes of a text's states in bfloat16, which a token reads."""
        return 2 * (self.layers - self.attention_layers) * (self.taps - 1) * self.hidden


# The files of GLM-4.7-Flash with its 47 layers, and of Qwen3-30B-A3B with its 48, would have 17 GB
# each. The sizes of Granite 4 H 1B are from memory. Nemotron 3 Nano 4B has a hidden size of 3,136,
# whose rows are no whole Q4_K blocks, and another order of its 21, 17 and 4 layers.
SHAPES: dict[str, Dense] = {
    "gemma4-e2b": Gemma4(1536, 35, 8, 1, 256, 6144),
    "gemma4-e4b": Gemma4(2560, 42, 8, 2, 256, 10240, interval=6, shared=18, shared_width=1),
    "glm-4.7-flash": Latent(2048, 16, 20, 1, 576, 10240, tied=False),
    "granite-4-h-1b": Granite(
        1536, 40, 12, 4, 128, 4096, key_heads=1, value_heads=48, value_dim=64
    ),
    "llama-3.1-8b": Llama(4096, 32, 32, 8, 128, 14336, tied=False),
    "lfm3-1.7b": Lfm3(2048, 24, 16, 4, 128, 7680),
    "nemotron-3-nano-4b": Nemotron(
        *(3072, 42, 40, 8, 128, 12544),
        tied=False,
        key_heads=8,
        value_heads=96,
        value_dim=80,
        pattern="M-M-M-M-M*" * 4 + "M-",
    ),
    "qwen3-1.7b": Dense(2048, 28, 16, 8, 128, 6144),
    "qwen3-30b-a3b": Mixture(2048, 16, 32, 4, 128, 768, tied=False),
    "qwen3-4b": Dense(2560, 36, 32, 8, 128, 9728),
    "qwen3-8b": Dense(4096, 36, 32, 8, 128, 12288, tied=False),
    "qwen3.5-0.8b": GatedDelta(1024, 24, 8, 2, 256, 3584),
    "qwen3.5-4b": GatedDelta(2560, 32, 16, 4, 256, 9216, value_heads=32),
    "qwen3.5-9b": GatedDelta(4096, 32, 16, 4, 256, 12288, tied=False, value_heads=32),
}


def dense_like(shape: Dense) -> Dense:
    """Return a dense model with about as many products, and as much attention, as another model.

    Products that attention does not have are those of a wider MLP.
    """
    query_size, kv_size = shape.attention_sizes()
    # Two heads have the width of a block.
    heads = 2 * max(1, round(query_size / HEAD_DIM / 2))
    kv_heads = max(1, round(kv_size / HEAD_DIM))
    while heads % kv_heads:
        kv_heads -= 1
    in_attention = 2 * (heads + kv_heads) * HEAD_DIM
    rows = shape.products() / shape.layers / shape.hidden
    width = BLOCK * max(1, round((rows - in_attention) / 3 / BLOCK))
    return Dense(shape.hidden, shape.layers, heads, kv_heads, HEAD_DIM, width, shape.tied)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("write", "measure", "turn"):
        command = commands.add_parser(name)
        command.add_argument("shape", choices=SHAPES)
        command.add_argument("folder", type=Path, help="folder of the files, outside of git")
        command.add_argument(
            "--tokenizer",
            default=TOKENIZER,
            help=f"GGUF file, or name of a model, whose tokenizer is copied; default: {TOKENIZER}",
        )
        command.add_argument(
            "--vocab", type=int, help="size of the vocabulary; default: that of the tokenizer"
        )
        if name != "write":
            length = 700 if name == "measure" else 4000
            command.add_argument("--threads", type=int, default=2)
            command.add_argument("--rounds", type=int, default=10)
            command.add_argument("--prompt", type=int, default=length, help="tokens of the prompt")
        if name == "measure":
            command.add_argument(
                "--llama-bench", type=Path, help="llama.cpp's program, measured beside pronk"
            )
    options = parser.parse_args()
    files = write_both(options.shape, options.folder, options.tokenizer, options.vocab)
    if getattr(options, "llama_bench", None) is not None and not SHAPES[options.shape].extension:
        sys.exit(f"--llama-bench: expected a GGUF file, found {files[options.shape]}; leave it out")
    if options.command == "measure":
        measure(options, files)
    if options.command == "turn":
        measure_turns(options, files[options.shape])


def write_both(name: str, folder: Path, tokenizer: str, vocab: int | None) -> dict[str, Path]:
    """Write the files of a shape and of its dense model, if they are missing; return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    suffix = "" if vocab is None else f"-{vocab}"
    shapes = {name: SHAPES[name], f"{name}-dense": dense_like(SHAPES[name])}
    files = {each: folder / f"{each}{suffix}{shape.extension}" for each, shape in shapes.items()}
    for each, path in files.items():
        if path.exists():
            continue
        if shapes[each].extension:
            write(shapes[each], each, path, tokenizer_file(tokenizer), vocab)
        else:
            write_folder(shapes[each], path, vocab or BYTE_TOKENS)
    return files


def write_folder(shape: Dense, path: Path, vocab: int) -> None:
    """Write a checkpoint in safetensors; the path exists only once the checkpoint is complete."""
    from pronk.testing import byte_tokenizer  # noqa: PLC0415 - ``write`` needs it once

    partial = path.with_name(f"{path.name}.partial")
    partial.mkdir(exist_ok=True)
    tensors = {
        tensor.name: make_data(tensor, number).astype(ml_dtypes.bfloat16)
        for number, tensor in enumerate(shape.tensors(vocab))
    }
    save_file(tensors, partial / "model.safetensors")
    byte_tokenizer(BYTE_TOKENS).save(str(partial / "tokenizer.json"))
    document = json.dumps(shape.keys() | {"vocab_size": vocab})
    (partial / "config.json").write_text(document, encoding="utf-8")
    partial.rename(path)


def tokenizer_file(name: str) -> Path:
    """Return the GGUF file of a name or path."""
    from pronk.models.resolve import resolve_model  # noqa: PLC0415 - ``write`` needs it once

    path = Path(name) if Path(name).is_file() else resolve_model(name)
    if path.suffix != ".gguf":
        sys.exit(f"--tokenizer: expected a GGUF file, found {path}")
    return path


def write(shape: Dense, name: str, path: Path, tokenizer: Path, vocab: int | None) -> None:
    """Write a GGUF file of a shape; the path exists only once the file is complete."""
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, shape.arch)
    writer.add_name(f"{name}-random")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    for key, value in shape.keys().items():
        add_value(writer, f"{shape.arch}.{key}", value)
    tensors = [*shape.tensors(copy_tokenizer(writer, tokenizer, vocab))]
    total = 0
    for tensor in tensors:
        nbytes = stored_bytes(tensor)
        total += nbytes
        if tensor.spread is not None:
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), nbytes)
            continue
        in_bytes = (*tensor.shape[:-1], stored_bytes(tensor) // int(np.prod(tensor.shape[:-1])))
        writer.add_tensor_info(tensor.name, in_bytes, np.dtype(np.uint8), nbytes, tensor.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    done = 0
    for number, tensor in enumerate(tensors):
        writer.write_tensor_data(make_data(tensor, number))
        done += stored_bytes(tensor)
        percent = 100 * done // total
        print(f"\r{path.name}: {percent} % of {total / 1e6:.0f} MB", end="", file=sys.stderr)
    print(file=sys.stderr)
    writer.close()
    partial.rename(path)


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a boolean, a number or an array of metadata."""
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def copy_tokenizer(writer: gguf.GGUFWriter, source: Path, vocab: int | None) -> int:
    """Copy the tokenizer of a file; return the number of tokens, with unused ones up to ``vocab``.

    Raises:
        SystemExit: ``vocab`` is less than the tokenizer's.
    """
    fields = gguf.GGUFReader(source).fields
    tokens = len(fields["tokenizer.ggml.tokens"].data)
    unused = 0 if vocab is None else vocab - tokens
    if unused < 0:
        sys.exit(f"--vocab: expected at least the {tokens} of the tokenizer, found {vocab}")
    padding: dict[str, list[Any]] = {
        "tokenizer.ggml.tokens": [f"[PAD{tokens + i}]" for i in range(unused)],
        "tokenizer.ggml.token_type": [int(gguf.TokenType.UNUSED)] * unused,
        "tokenizer.ggml.scores": [0.0] * unused,
    }
    for key, each in fields.items():
        if not key.startswith("tokenizer."):
            continue
        value = each.contents()
        if each.types[0] == GGUFValueType.ARRAY:
            writer.add_array(key, [*value, *padding.get(key, [])])
        else:
            writer.add_key_value(key, value, each.types[0])
    return tokens + unused


def stored_bytes(tensor: Tensor) -> int:
    """Return the size of a tensor in the file."""
    if tensor.spread is not None:
        return 4 * int(np.prod(tensor.shape))
    weights = int(np.prod(tensor.shape))
    if tensor.type == Type.Q5_0:
        return weights // SMALL_BLOCK * SMALL_BLOCK_BYTES
    return weights // BLOCK * BLOCK_BYTES


def make_data(tensor: Tensor, seed: int) -> NDArray[Any]:
    """Return the values of a tensor: float32, or blocks as uint8 ``[…, rows, bytes]``.

    The product of a matrix with a row keeps the scale of the row.
    """
    dice = np.random.default_rng(seed)
    if tensor.spread is not None:
        return tensor.mean + tensor.spread * dice.standard_normal(tensor.shape, np.float32)
    *matrices, columns = tensor.shape
    if tensor.type == Type.Q5_0:
        shape = (*matrices, columns // SMALL_BLOCK, SMALL_BLOCK_BYTES)
        blocks = dice.integers(0, 256, shape, dtype=np.uint8)
        # A weight is d · (q - 16) with codes q of 0 to 31, whose standard deviation is 9.2.
        blocks[..., 0:2] = as_bytes(columns**-0.5 / 9.2)
        return blocks.reshape(*matrices, -1)
    blocks = dice.integers(0, 256, (*matrices, columns // BLOCK, BLOCK_BYTES), dtype=np.uint8)
    # A weight is d · 32 · q - dmin · 32 with codes q of 0 to 15, whose standard deviation is 4.6.
    # The bytes 4 to 16 hold eight scales and eight minima, here all 32.
    step = columns**-0.5 / 4.6
    blocks[..., 0:2] = as_bytes(step / 32)
    blocks[..., 2:4] = as_bytes(7.5 * step / 32)
    blocks[..., 4:12] = 0xA0
    blocks[..., 12:16] = 0
    return blocks.reshape(*matrices, -1)


def as_bytes(value: float) -> NDArray[np.uint8]:
    """Return the two bytes of a float16."""
    return np.frombuffer(np.float16(value).tobytes(), np.uint8)


# A request to a process: what to measure, and the number of tokens or rows.
Request = tuple[str, int]


def serve(path: str, threads: int, context: int, pipe: Connection) -> None:
    """Load a model, and answer requests for measurements until ``None``.

    This is the work of a process of :class:`Models`.
    """
    from pronk import LLM, SamplingParams  # noqa: PLC0415 - only these processes need it
    from pronk.cache.blocks import BlockTable  # noqa: PLC0415
    from pronk.diagnosis import BandwidthMeter  # noqa: PLC0415
    from pronk.lab.bench.machine import PeakMemory, describe_hardware  # noqa: PLC0415
    from pronk.models.decoder import fixed_costs, forward_weights  # noqa: PLC0415
    from pronk.models.forward_batch import BatchEntry, ForwardBatch  # noqa: PLC0415
    from pronk.sampling.tree import TokenTree  # noqa: PLC0415

    weights = "int4" if Path(path).is_dir() else "plain"
    began = perf_counter()
    llm = LLM(
        path, threads=threads, context=context, max_batch=1, prefix_cache=False, weights=weights
    )
    load_seconds = perf_counter() - began
    runner = llm.engine.runner
    size = forward_weights(runner.decoder)
    meter: BandwidthMeter | None = None
    dice = random.Random(0)
    table = BlockTable()

    def draw(count: int) -> list[int]:
        return [dice.randrange(1, llm.config.vocab_size) for _ in range(count)]

    def forward(rows: int, num_final: int = 1) -> tuple[float, float]:
        """Compute rows after those of ``table``, and accept them all.

        The first ``num_final`` rows are tokens of the text, the others draft tokens. Return the
        seconds, and the number of experts that the pass reads, relative to a pass of one row.
        """
        llm.engine.cache.prepare(table, table.length + rows)
        tree = TokenTree.chain(draw(rows))
        entry = BatchEntry(table, tree, range(rows), num_final=table.length + num_final)
        began = perf_counter()
        result = runner.forward(ForwardBatch([entry]))
        seconds = perf_counter() - began
        llm.engine.cache.commit_slots(table, range(rows))
        return seconds, result.experts_read or 1.0

    def answer(kind: str, count: int) -> Any:
        nonlocal meter
        if kind == "bandwidth":
            meter = meter or BandwidthMeter(runner.decoder.kernels)
            return meter.measure()
        if kind == "memory":
            return PeakMemory("cpu", 0 if meter is None else meter.nbytes).read()
        if kind == "passes":
            forward(CONTEXT, CONTEXT)
            passes = [forward(rows) for rows in ROWS]
            llm.engine.cache.release(table)
            return passes
        params = SamplingParams(max_tokens=1 if kind == "prompt" else TOKENS, ignore_eos=True)
        stats = llm.generate(draw(count), params, drafter="autoregressive").stats
        if kind == "prompt":
            return stats.ttft
        clocks = [step.clock for step in stats.steps]
        return (clocks[-1] - clocks[0]) / (len(clocks) - 1)

    pipe.send(
        {
            "floor_bytes": size.floor_bytes,
            "packed_bytes": size.nbytes,
            "experts": fixed_costs(runner.decoder).experts,
            "kernels": llm.kernels,
            "load_seconds": load_seconds,
            **describe_hardware("cpu"),
        }
    )
    while (request := pipe.recv()) is not None:
        sleep(PAUSE)
        pipe.send(answer(*request))


class Models:
    """One process per model, measured one after the other."""

    def __init__(self, files: Mapping[str, Path], threads: int, context: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipes: dict[str, Connection] = {}
        self.about: dict[str, Any] = {}
        for name, path in files.items():
            ours, theirs = spawn.Pipe()
            arguments = (str(path), threads, context, theirs)
            spawn.Process(target=serve, args=arguments, daemon=True).start()
            theirs.close()  # so that the end of the process ends a wait for its answer
            self.pipes[name] = ours
            self.about[name] = ours.recv()

    def measure(self, name: str, kind: str, count: int = 0) -> Any:
        """Return a measurement of a model; see :func:`serve`."""
        self.pipes[name].send((kind, count))
        return self.pipes[name].recv()

    def close(self) -> None:
        """Stop the processes."""
        for pipe in self.pipes.values():
            pipe.send(None)


def run_llama_bench(program: Path, path: Path, threads: int, prompt: int) -> dict[str, float]:
    """Return llama.cpp's seconds per token, seconds of a prompt, and peak memory of its process."""
    words = [str(program), "-m", str(path), "-t", str(threads), "-p", str(prompt)]
    words += ["-n", str(TOKENS), "-r", "1", "-fa", "1", "-o", "json"]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)  # noqa: S603
    assert child.stdout is not None
    text = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        sys.exit(f"--llama-bench: expected exit status 0, found {child.returncode}; run {words}")
    runs = {bool(run["n_gen"]): run["avg_ns"] / 1e9 for run in json.loads(text)}
    # Linux counts in KiB.
    return {"plain": runs[True] / TOKENS, "prompt": runs[False], "memory": usage.ru_maxrss * 1024.0}


def measure(options: argparse.Namespace, files: Mapping[str, Path]) -> None:
    """Measure a shape and its dense model in turns, and print all figures."""
    name = options.shape
    dense = f"{name}-dense"
    context = max(CONTEXT + sum(ROWS), PROMPT + TOKENS, options.prompt + 1) + 64
    models = Models(files, options.threads, context)
    took: dict[str, list[Any]] = {}

    def take(key: str, value: Any, number: int) -> None:
        if number:  # the first round warms up
            took.setdefault(key, []).append(value)

    counts = {"plain": PROMPT, "passes": 0, "prompt": options.prompt}
    for number in range(options.rounds + 1):
        take("bandwidth", models.measure(name, "bandwidth"), number)
        for each in (name, dense):
            for kind in KINDS:
                take(f"{each} {kind}", models.measure(each, kind, counts[kind]), number)
        if options.llama_bench is not None:
            found = run_llama_bench(
                options.llama_bench, files[name], options.threads, options.prompt
            )
            for kind, value in found.items():
                take(f"llama.cpp {kind}", value, number)
    memory = {each: models.measure(each, "memory") for each in (name, dense)}
    models.close()
    report = show(options, models.about[name], took, memory)
    print(json.dumps(report))


def measure_turns(options: argparse.Namespace, path: Path) -> None:
    """Measure the second turn of a conversation, and print the figures."""
    from pronk import LLM, SamplingParams  # noqa: PLC0415 - loads the kernels
    from pronk.cache.blocks import BlockTable  # noqa: PLC0415
    from pronk.models.forward_batch import BatchEntry, ForwardBatch  # noqa: PLC0415
    from pronk.sampling.tree import TokenTree  # noqa: PLC0415

    dice = random.Random(0)
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    first_token = SamplingParams(max_tokens=1, ignore_eos=True)
    took: dict[str, list[float]] = {"same process": [], "after a restart": [], "one pass": []}
    cached: dict[str, list[int]] = {"same process": [], "after a restart": []}
    for number in range(options.rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            settings: dict[str, Any] = {
                "threads": options.threads,
                "context": options.prompt + TOKENS + 2 * NEW_TOKENS + 64,
                "drafter": "autoregressive",
                "prompt_cache": folder,
            }
            llm = LLM(str(path), **settings)
            text = [dice.randrange(1, llm.config.vocab_size) for _ in range(options.prompt)]
            text += llm.generate(text, params).token_ids
            ends = [
                [dice.randrange(1, llm.config.vocab_size) for _ in range(NEW_TOKENS)]
                for _ in range(2)
            ]
            found = {"same process": llm.generate(text + ends[0], first_token).stats}
            llm.close()
            restarted = LLM(str(path), **settings)
            found["after a restart"] = restarted.generate(text + ends[1], first_token).stats
            table = BlockTable()
            cache = restarted.engine.cache
            tree = TokenTree.chain(ends[0])
            for start in range(0, options.prompt, 512):
                chunk = TokenTree.chain(text[start : min(start + 512, options.prompt)])
                stop = start + len(chunk)
                cache.prepare(table, stop)
                entry = BatchEntry(table, chunk, num_final=stop)
                restarted.engine.runner.forward(ForwardBatch([entry]))
                cache.commit_slots(table, range(len(chunk)))
            stop = table.length + NEW_TOKENS
            cache.prepare(table, stop)
            last = range(NEW_TOKENS - 1, NEW_TOKENS)
            began = perf_counter()
            restarted.engine.runner.forward(
                ForwardBatch([BatchEntry(table, tree, last, num_final=stop)])
            )
            seconds = perf_counter() - began
            restarted.close()
        if number:  # the first round warms up
            took["one pass"].append(seconds)
            for kind, stats in found.items():
                took[kind].append(stats.ttft)
                cached[kind].append(stats.cached_tokens)
    print(f"{options.shape}, random weights, {options.threads} threads, {options.rounds} rounds")
    print(f"one pass over {NEW_TOKENS} tokens  {median(in_ms(took['one pass']), 1)} ms")
    for kind, tokens in cached.items():
        times = f"{median(in_ms(took[kind]), 1)} ms"
        multiples = median(ratios(took[kind], took["one pass"]), 2)
        print(f"{kind:15}  {times}, {multiples} x that pass, {min(tokens)} tokens cached")


def show(
    options: argparse.Namespace,
    about: Mapping[str, Any],
    took: Mapping[str, list[Any]],
    memory: Mapping[str, int | None],
) -> dict[str, Any]:
    """Print the figures; return all measurements."""
    name = options.shape
    dense = f"{name}-dense"
    shape = SHAPES[name]
    states = shape.state_bytes()
    read = about["floor_bytes"] + states
    floors = [read / bandwidth for bandwidth in took["bandwidth"]]
    print(f"{name}, random weights, {about['kernels']}, {options.threads} threads")
    print(f"{about['processor']}, {options.rounds} rounds")
    print(f"bandwidth  {median([each / 1e9 for each in took['bandwidth']], 1)} GB/s")
    weights = f"{about['floor_bytes'] / 1e6:.0f} MB of weights, {states / 1e6:.1f} MB of states"
    print(f"floor      {median(in_ms(floors), 2)} ms: {weights}")
    plain = took[f"{name} plain"]
    multiples = ratios(plain, floors)
    print(f"plain      {median(in_ms(plain), 2)} ms a token, {median(multiples, 2)} x floor")
    passes = took[f"{name} passes"]
    dense_passes = took[f"{dense} passes"]
    first = [one_round[0][0] for one_round in passes]
    dense_first = [one_round[0][0] for one_round in dense_passes]
    for number, rows in enumerate(ROWS):
        each = [one_round[number][0] for one_round in passes]
        of_dense = ratios([one_round[number][0] for one_round in dense_passes], dense_first)
        times = f"{median(in_ms(each), 2)} ms, {median(ratios(each, first), 2)} x one row"
        if about["experts"]:
            experts = [one_round[number][1] for one_round in passes]
            # Bytes that the pass reads, relative to those of one row.
            unions = [1.0 + about["experts"] * (count - 1.0) for count in experts]
            of_union = [
                seconds / (one_row * union)
                for seconds, one_row, union in zip(each, first, unions, strict=True)
            ]
            count = f"{median(experts, 1)} times the experts of one row"
            times += f", {median(of_union, 2)} x the bytes of {count}"
        print(f"{rows:2} rows    {times}; dense {median(of_dense, 2)} x")
    # The LM head multiplies the last row of a prompt only.
    speeds = {}
    for each, its_shape in ((name, shape), (dense, dense_like(shape))):
        products = its_shape.products() * options.prompt / 1e9
        speeds[each] = [products / seconds for seconds in took[f"{each} prompt"]]
        rate = options.prompt / statistics.median(took[f"{each} prompt"])
        label = "prompt  " if each == name else "  dense "
        print(f"{label}   {median(speeds[each], 0)} GMAC/s, {rate:.0f} tokens/s")
    compared = ratios(speeds[name], speeds[dense])
    print(f"           {median(compared, 2)} x the speed of the dense model per product")
    peaks = {
        each: "unknown" if peak is None else f"{peak / 1e9:.2f} GB" for each, peak in memory.items()
    }
    print(f"memory     {peaks[name]}, dense {peaks[dense]}")
    if "llama.cpp plain" in took:
        theirs = took["llama.cpp plain"]
        prompts = took["llama.cpp prompt"]
        print(f"llama.cpp  {median(in_ms(theirs), 2)} ms a token, ", end="")
        print(f"{options.prompt / statistics.median(prompts):.0f} tokens/s of a prompt, ", end="")
        print(f"{max(took['llama.cpp memory']) / 1e9:.2f} GB")
        print(f"           plain decoding of pronk is {median(ratios(theirs, plain), 2)} x as fast")
        own = took[f"{name} prompt"]
        print(f"           a prompt in pronk is {median(ratios(prompts, own), 2)} x as fast")
    return {"about": dict(about), "shape": name, "took": dict(took), "memory": dict(memory)}


def ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the ratio of each round."""
    return [value / other for value, other in zip(values, others, strict=True)]


def in_ms(seconds: Sequence[float]) -> list[float]:
    return [1e3 * each for each in seconds]


def median(values: Sequence[float], digits: int) -> str:
    """Return the median, and the 10th and 90th percentiles in brackets."""
    ordered = sorted(values)
    low = ordered[round(0.1 * (len(ordered) - 1))]
    high = ordered[round(0.9 * (len(ordered) - 1))]
    middle = statistics.median(ordered)
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


if __name__ == "__main__":
    main()
