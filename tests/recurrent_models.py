"""An oracle of models with recurrent layers, token by token in float64, and their GGUF files.

The families are Qwen3.5 (``qwen3_5_text``), its mixtures (``qwen3_5_moe_text``) and Qwen3-Next
(``qwen3_next``). :class:`RecurrentOracle` is independent of pronk's code and of transformers'
chunks. :class:`MtpOracle` computes the MTP block that :func:`with_mtp` adds to a checkpoint, by the
formulas of vLLM's ``qwen3_5_mtp.py``; transformers has none. :func:`write_gguf` writes the tensors that llama.cpp's converter writes; the orders and
transforms are those of ``conversion/qwen.py`` in llama.cpp b11434.
"""

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from gguf import GGMLQuantizationType as Type
from gguf.constants import GGML_QUANT_SIZES
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from gguf_files import decode, encode, finish, write_bytes_bpe

Double = NDArray[np.float64]
Single = NDArray[np.float32]

# Numbers of key and value heads: as many, and two or three value heads for each key head.
HEADS: dict[str, dict[str, int]] = {
    "equal heads": {"linear_num_key_heads": 4, "linear_num_value_heads": 4},
    "two values": {"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    "three values": {"linear_num_key_heads": 2, "linear_num_value_heads": 6},
}
# Overrides of the checkpoints of ``checkpoints.py``: sizes of states, also such that are not
# multiples of a vector, ties, other places of the layers with attention.
SIZES: dict[str, dict[str, Any]] = {
    "wide": {"linear_key_head_dim": 32, "linear_value_head_dim": 48},
    "odd": {"linear_key_head_dim": 12, "linear_value_head_dim": 20},
    "tied": {"tie_word_embeddings": True},
    "two taps": {"linear_conv_kernel_dim": 2},
    "other layers": {
        "layer_types": [
            "full_attention",
            "linear_attention",
            "full_attention",
            "linear_attention",
            "linear_attention",
        ],
        "num_hidden_layers": 5,
    },
}
FAMILIES = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
# Sizes that are multiples of the largest block, 256.
BLOCKS: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "num_attention_heads": 4,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
}


@dataclass
class State:
    """What the layers of one text keep.

    Attributes:
        matrices: for each recurrent layer, float64 ``[value_heads, key_dim, value_dim]``.
        inputs: for each recurrent layer, the last inputs of the convolution, the oldest first:
            float64 ``[taps - 1, channels]``; zeros before the text.
        keys: for each layer with attention, a key ``[kv_heads, head_dim]`` of each token.
        values: the values likewise.
    """

    matrices: dict[int, Double] = field(default_factory=dict)
    inputs: dict[int, Double] = field(default_factory=dict)
    keys: dict[int, list[Double]] = field(default_factory=dict)
    values: dict[int, list[Double]] = field(default_factory=dict)

    def copy(self) -> "State":
        """Return a state that later tokens of this one do not change."""
        return State(
            {layer: each.copy() for layer, each in self.matrices.items()},
            {layer: each.copy() for layer, each in self.inputs.items()},
            {layer: [*each] for layer, each in self.keys.items()},
            {layer: [*each] for layer, each in self.values.items()},
        )


class RecurrentOracle:
    """The forward pass of a checkpoint with recurrent layers, one token at a time, in float64.

    Args:
        folder: a checkpoint of :data:`FAMILIES`, in one safetensors file with the names that
            transformers writes.
    """

    def __init__(self, folder: Path) -> None:
        self.raw: dict[str, Any] = json.loads((folder / "config.json").read_text())
        stored = load_file(folder / "model.safetensors")
        self.tensors = {name: each.astype(np.float64) for name, each in stored.items()}
        self.layers = self.raw["num_hidden_layers"]
        self.kinds: list[str] = self.raw["layer_types"]

    def start(self) -> State:
        """Return the state before the first token."""
        raw = self.raw
        state = State()
        value_heads = raw["linear_num_value_heads"]
        key_dim = raw["linear_key_head_dim"]
        value_dim = raw["linear_value_head_dim"]
        channels = 2 * raw["linear_num_key_heads"] * key_dim + value_heads * value_dim
        for layer, kind in enumerate(self.kinds):
            if kind == "linear_attention":
                state.matrices[layer] = np.zeros((value_heads, key_dim, value_dim))
                state.inputs[layer] = np.zeros((raw["linear_conv_kernel_dim"] - 1, channels))
            else:
                state.keys[layer] = []
                state.values[layer] = []
        return state

    def read(self, tokens: Sequence[int]) -> tuple[Double, list[State]]:
        """Return the logits ``[tokens, vocab]`` of a text, and the state after each token."""
        state = self.start()
        logits = []
        states = []
        for token in tokens:
            logits.append(self.step(state, token))
            states.append(state.copy())
        return np.stack(logits), states

    def step(self, state: State, token: int) -> Double:
        """Append a token to ``state``; return the logits after it, ``[vocab]``."""
        return self.unembed(self.hidden(state, token))

    def embed(self, token: int) -> Double:
        """Return the embedding of a token, ``[hidden]``."""
        return self.tensors["model.embed_tokens.weight"][token]

    def unembed(self, x: Double) -> Double:
        """Return the logits ``[vocab]`` of the output ``x`` of the final norm, ``[hidden]``."""
        head = "model.embed_tokens.weight" if self.raw["tie_word_embeddings"] else "lm_head.weight"
        return self.tensors[head] @ x

    def hidden(self, state: State, token: int) -> Double:
        """Append a token to ``state``; return the output of the final norm, ``[hidden]``."""
        x = self.embed(token)
        for layer, kind in enumerate(self.kinds):
            x = self.run_layer(state, layer, f"model.layers.{layer}.", x, kind)
        return self.norm(x, "model.norm.weight")

    def run_layer(
        self, state: State, layer: int, prefix: str, x: Double, kind: str = "full_attention"
    ) -> Double:
        """Return the output of a layer for the next token, ``[hidden]``.

        ``layer`` is the number of its keys and values or matrices in ``state``.
        """
        h = self.norm(x, f"{prefix}input_layernorm.weight")
        if kind == "linear_attention":
            x = x + self._recur(state, layer, h)
        else:
            x = x + self._attend(state, layer, f"{prefix}self_attn.", h)
        h = self.norm(x, f"{prefix}post_attention_layernorm.weight")
        if f"{prefix}mlp.gate.weight" in self.tensors:
            return x + self._mix(f"{prefix}mlp.", h)
        return x + self._mlp(f"{prefix}mlp.", h)

    def norm(self, x: Double, name: str, *, offset: float = 1.0) -> Double:
        """Return the RMS norm of the last axis, times ``offset`` plus a weight."""
        mean = (x * x).mean(-1, keepdims=True)
        normed: Double = x / np.sqrt(mean + self.raw["rms_norm_eps"])
        return normed * (offset + self.tensors[name])

    def _recur(self, state: State, layer: int, h: Double) -> Double:
        raw = self.raw
        prefix = f"model.layers.{layer}.linear_attn."
        key_heads = raw["linear_num_key_heads"]
        value_heads = raw["linear_num_value_heads"]
        key_dim = raw["linear_key_head_dim"]
        value_dim = raw["linear_value_head_dim"]
        per_key = value_heads // key_heads
        mixed, gate, beta, decay = self._project(prefix, h)

        window = np.vstack([state.inputs[layer], mixed])  # [taps, channels]
        state.inputs[layer] = window[1:]
        taps = self.tensors[f"{prefix}conv1d.weight"][:, 0].T
        channels = silu((window * taps).sum(0))
        size = key_heads * key_dim
        queries = channels[:size].reshape(key_heads, key_dim)
        keys = channels[size : 2 * size].reshape(key_heads, key_dim)
        values = channels[2 * size :].reshape(value_heads, value_dim)

        outputs = np.empty((value_heads, value_dim))
        for head in range(value_heads):
            key = unit(keys[head // per_key])
            query = unit(queries[head // per_key]) / math.sqrt(key_dim)
            rate = -math.exp(self.tensors[f"{prefix}A_log"][head])
            step = softplus(decay[head] + self.tensors[f"{prefix}dt_bias"][head])
            matrix = state.matrices[layer][head] * math.exp(rate * step)
            change = sigmoid(beta[head]) * (values[head] - matrix.T @ key)
            matrix += np.outer(key, change)
            state.matrices[layer][head] = matrix
            outputs[head] = matrix.T @ query
        normed = self.norm(outputs, f"{prefix}norm.weight", offset=0.0)
        gated = normed * silu(gate.reshape(value_heads, value_dim))
        return self.tensors[f"{prefix}out_proj.weight"] @ gated.reshape(-1)

    def _project(self, prefix: str, h: Double) -> tuple[Double, Double, Double, Double]:
        """Return a row's projections.

        They are the inputs of the convolution (queries, keys, values), the gates of the outputs,
        and for each value head ``beta`` before its sigmoid and the decay before its softplus.
        """
        if f"{prefix}in_proj_qkv.weight" in self.tensors:
            mixed, gate, beta, decay = (
                self.tensors[f"{prefix}in_proj_{name}.weight"] @ h
                for name in ("qkv", "z", "b", "a")
            )
            return mixed, gate, beta, decay
        # Qwen3-Next: the rows of a key head are together, in the order q, k, v, z.
        raw = self.raw
        key_dim = raw["linear_key_head_dim"]
        per_key = raw["linear_num_value_heads"] // raw["linear_num_key_heads"]
        width = per_key * raw["linear_value_head_dim"]
        rows = self.tensors[f"{prefix}in_proj_qkvz.weight"] @ h
        rows = rows.reshape(raw["linear_num_key_heads"], -1)
        bounds = [key_dim, 2 * key_dim, 2 * key_dim + width]
        q, k, v, z = (part.reshape(-1) for part in np.split(rows, bounds, axis=1))
        numbers = self.tensors[f"{prefix}in_proj_ba.weight"] @ h
        numbers = numbers.reshape(raw["linear_num_key_heads"], 2, per_key)
        mixed = np.concatenate([q, k, v])
        return mixed, z, numbers[:, 0].reshape(-1), numbers[:, 1].reshape(-1)

    def _attend(self, state: State, layer: int, prefix: str, h: Double) -> Double:
        raw = self.raw
        heads = raw["num_attention_heads"]
        kv_heads = raw["num_key_value_heads"]
        size = raw["head_dim"]
        position = len(state.keys[layer])
        both = (self.tensors[f"{prefix}q_proj.weight"] @ h).reshape(heads, 2, size)
        keys = (self.tensors[f"{prefix}k_proj.weight"] @ h).reshape(kv_heads, size)
        values = (self.tensors[f"{prefix}v_proj.weight"] @ h).reshape(kv_heads, size)
        queries = self._rotate(self.norm(both[:, 0], f"{prefix}q_norm.weight"), position)
        state.keys[layer].append(self._rotate(self.norm(keys, f"{prefix}k_norm.weight"), position))
        state.values[layer].append(values)
        outputs = np.empty((heads, size))
        for head in range(heads):
            group = head // (heads // kv_heads)
            past_keys = np.stack([each[group] for each in state.keys[layer]])
            past_values = np.stack([each[group] for each in state.values[layer]])
            weights = softmax(past_keys @ queries[head] / math.sqrt(size))
            outputs[head] = weights @ past_values
        gated = outputs * sigmoid(both[:, 1])
        return self.tensors[f"{prefix}o_proj.weight"] @ gated.reshape(-1)

    def _rotate(self, x: Double, position: int) -> Double:
        """Rotate the first part of each head, ``[heads, head_dim]``: pairs ``i, i + half``."""
        rope = self.raw["rope_parameters"]
        size = int(self.raw["head_dim"] * rope["partial_rotary_factor"])
        half = size // 2
        angles = position * rope["rope_theta"] ** (-np.arange(half) / half)
        first = x[:, :half]
        second = x[:, half:size]
        turned = [
            first * np.cos(angles) - second * np.sin(angles),
            second * np.cos(angles) + first * np.sin(angles),
            x[:, size:],
        ]
        return np.concatenate(turned, axis=1)

    def _mlp(self, prefix: str, h: Double) -> Double:
        gate = silu(self.tensors[f"{prefix}gate_proj.weight"] @ h)
        up = self.tensors[f"{prefix}up_proj.weight"] @ h
        return self.tensors[f"{prefix}down_proj.weight"] @ (gate * up)

    def _mix(self, prefix: str, h: Double) -> Double:
        chances = softmax(self.tensors[f"{prefix}gate.weight"] @ h)
        chosen = np.argsort(-chances)[: self.raw["num_experts_per_tok"]]
        total = chances[chosen].sum()
        gate = sigmoid(self.tensors[f"{prefix}shared_expert_gate.weight"] @ h)
        mixed = gate * self._mlp(f"{prefix}shared_expert.", h)
        for expert in chosen:
            mixed = mixed + chances[expert] / total * self._mlp(f"{prefix}experts.{expert}.", h)
        return mixed


_BLOCK = -1  # number of the MTP block's keys and values in a state


class MtpOracle:
    """The drafts of the MTP block in a checkpoint of :data:`FAMILIES`, row by row, in float64.

    A row has the target's output of the final norm at a position, or the block's own output in the
    row before, and the embedding of the next token. The output of a row predicts the token after
    that one.

    Args:
        folder: the checkpoint, as that of :class:`RecurrentOracle`.
    """

    def __init__(self, folder: Path) -> None:
        self.target = RecurrentOracle(folder)
        self._block = State()
        self._output: Double = np.zeros(0)

    def begin(self, text: Sequence[int]) -> None:
        """Read a text of two or more tokens."""
        target = self.target
        state = target.start()
        self._block = State(keys={_BLOCK: []}, values={_BLOCK: []})
        for token, following in pairwise(text):
            self._add_row(target.hidden(state, token), following)

    def add(self, token: int) -> None:
        """Append a draft token."""
        self._add_row(self._output, token)

    def logits(self) -> Double:
        """Return the logits ``[vocab]`` after the text and its draft tokens."""
        return self.target.unembed(self._output)

    def _add_row(self, hidden: Double, token: int) -> None:
        target = self.target
        embedding = target.norm(target.embed(token), "mtp.pre_fc_norm_embedding.weight")
        previous = target.norm(hidden, "mtp.pre_fc_norm_hidden.weight")
        x = target.tensors["mtp.fc.weight"] @ np.concatenate([embedding, previous])
        x = target.run_layer(self._block, _BLOCK, "mtp.layers.0.", x)
        self._output = target.norm(x, "mtp.norm.weight")


def with_mtp(folder: Path, target: Path, *, calm: float = 1.0, noise: float = 1.0) -> Path:
    """Write a copy of a checkpoint of :data:`FAMILIES` with an MTP block.

    Args:
        folder: the checkpoint, in one safetensors file.
        target: output folder.
        calm: factor of what the layers add to the embedding. With a small one, the next token
            depends mostly on the last one.
        noise: factor of what the block adds to the embedding of its token. With a small one and
            little ``calm``, most draft tokens are right.
    """
    raw = json.loads((folder / "config.json").read_text())
    tensors: dict[str, Single] = load_file(folder / "model.safetensors")
    for name, weight in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensors[name] = weight * np.float32(calm)
    copied = f"model.layers.{raw['layer_types'].index('full_attention')}."
    block: dict[str, Single] = {}
    for name, weight in tensors.items():
        if name.startswith(copied):
            # rows in another order, so that the block differs from the layer
            block[name.replace(copied, "mtp.layers.0.")] = np.roll(weight, 3, axis=-1)
    for name, weight in block.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            block[name] = weight * np.float32(noise / calm)
    hidden = raw["hidden_size"]
    dice = np.random.default_rng(0)
    mixing = dice.standard_normal((hidden, hidden)).astype(np.float32) * np.float32(hidden**-0.5)
    block["mtp.fc.weight"] = np.hstack([np.eye(hidden, dtype=np.float32), noise * mixing])
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        block[f"mtp.{name}.weight"] = dice.uniform(-0.3, 0.3, hidden) * noise
    block["mtp.norm.weight"] = tensors["model.norm.weight"].copy()
    shutil.copytree(folder, target)
    stored = {name: weight.astype(np.float32) for name, weight in (tensors | block).items()}
    save_file(stored, target / "model.safetensors")
    return target


def sigmoid(x: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-x))


def silu(x: Double) -> Double:
    return x * sigmoid(x)


def softplus(x: float) -> float:
    return float(np.logaddexp(0.0, x))


def softmax(x: Double) -> Double:
    powers = np.exp(x - x.max())
    return powers / powers.sum()


def unit(x: Double) -> Double:
    """Return a key or a query divided by its length."""
    return x / np.sqrt((x * x).sum() + 1e-6)


# GGUF


@dataclass(frozen=True)
class Piece:
    """A tensor of a GGUF file: rows and columns of a tensor of the checkpoint.

    Attributes:
        name: name in the GGUF file.
        source: name in the checkpoint.
        rows: numbers of the source's rows (of its elements, if it has one dimension).
        columns: numbers of the source's columns; ``None``: all, in their order.
        change: function of the values before they are stored; its inverse is ``undo``.
        undo: function of the values that a reader gets.
    """

    name: str
    source: str
    rows: NDArray[np.intp]
    columns: NDArray[np.intp] | None = None
    change: Callable[[Single], Single] | None = None
    undo: Callable[[Single], Single] | None = None

    def take(self, weight: Single) -> Single:
        """Return the values of the GGUF file."""
        part = weight[self.rows]
        if self.columns is not None:
            part = part[:, self.columns]
        return np.ascontiguousarray(part if self.change is None else self.change(part))

    def put_back(self, part: Single, weight: Single) -> None:
        """Write the values that a reader gets into the tensor of the checkpoint."""
        if self.undo is not None:
            part = self.undo(part)
        if self.columns is None:
            weight[self.rows] = part
        else:
            weight[np.ix_(self.rows, self.columns)] = part


def write_gguf(
    folder: Path,
    path: Path,
    kinds: str | Mapping[str, str] = "F32",
    *,
    twin: Path | None = None,
    fused_experts: bool = False,
    older: bool = False,
    only_mtp: bool = False,
    tokenizer: tokenizers.Tokenizer | None = None,
) -> Path:
    """Write a checkpoint of :data:`FAMILIES` as a GGUF file, as llama.cpp's converter does.

    The MTP block of :func:`with_mtp` becomes a layer behind the others, which ``block_count``
    counts.

    Args:
        folder: checkpoint in one safetensors file, with the names that transformers writes.
        path: output file.
        kinds: type of all matrices, or types by suffixes of names with ``""`` as the default.
            Vectors, routers, convolutions, and matrices whose rows are no multiple of a block have
            float32.
        twin: output folder for a checkpoint with the weights that a reader of the file gets.
        fused_experts: write the gate and up projections of all experts as one tensor.
        older: as files of early 2026: ``full_attention_interval`` alone says which layers are
            recurrent, and the gate of the shared expert is a vector.
        only_mtp: write the MTP block, the embedding, the final norm and the LM head only, as the
            converter does with ``--mtp``.
        tokenizer: a byte-level BPE; ``None``: the tokenizer of the folder.
    """
    raw = json.loads((folder / "config.json").read_text())
    tensors: dict[str, Single] = load_file(folder / "model.safetensors")
    arch = {"qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "qwen3_next": "qwen3next"}
    writer = gguf.GGUFWriter(path, arch[raw["model_type"]])
    has_mtp = "mtp.fc.weight" in tensors
    _write_keys(writer, raw, older=older, has_mtp=has_mtp)
    if tokenizer is None:
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    write_bytes_bpe(writer, tokenizer, "qwen35")
    written = {name: weight.copy() for name, weight in tensors.items()}
    layers = raw["num_hidden_layers"]
    for seed, piece in enumerate(pieces(raw, tensors)):
        if only_mtp and piece.name.startswith("blk.") and f"blk.{layers}." not in piece.name:
            continue
        values = piece.take(tensors[piece.source])
        if older and piece.name.endswith("ffn_gate_inp_shexp.weight"):
            writer.add_tensor(piece.name, values[0])
            continue
        piece.put_back(add_tensor(writer, piece.name, values, kinds, seed), written[piece.source])
    if "num_experts" in raw:
        first = layers if only_mtp else 0
        for layer in range(first, layers + has_mtp):
            _write_experts(writer, raw, tensors, written, kinds, layer, fused=fused_experts)
    finish(writer)
    if twin is not None:
        twin.mkdir()
        for name in ("config.json", "tokenizer.json"):
            shutil.copy(folder / name, twin / name)
        save_file(written, twin / "model.safetensors")
    return path


def pieces(raw: Mapping[str, Any], tensors: Mapping[str, Single]) -> list[Piece]:
    """Return all tensors of a GGUF file but those of experts."""
    found = [
        _whole("token_embd.weight", "model.embed_tokens.weight", tensors),
        _gain("output_norm.weight", "model.norm.weight", tensors),
    ]
    if not raw["tie_word_embeddings"]:
        found.append(_whole("output.weight", "lm_head.weight", tensors))
    kinds = [*raw["layer_types"]]
    if "mtp.fc.weight" in tensors:
        kinds.append("full_attention")
        nextn = f"blk.{raw['num_hidden_layers']}.nextn."
        found += [
            _whole(f"{nextn}eh_proj.weight", "mtp.fc.weight", tensors),
            _gain(f"{nextn}enorm.weight", "mtp.pre_fc_norm_embedding.weight", tensors),
            _gain(f"{nextn}hnorm.weight", "mtp.pre_fc_norm_hidden.weight", tensors),
            _gain(f"{nextn}shared_head_norm.weight", "mtp.norm.weight", tensors),
        ]
    for layer, kind in enumerate(kinds):
        prefix = _prefix(raw, layer)
        blk = f"blk.{layer}."
        found += [
            _gain(f"{blk}attn_norm.weight", f"{prefix}input_layernorm.weight", tensors),
            _gain(
                f"{blk}post_attention_norm.weight",
                f"{prefix}post_attention_layernorm.weight",
                tensors,
            ),
        ]
        if kind == "linear_attention":
            found += _recurrent_pieces(raw, tensors, f"{prefix}linear_attn.", blk)
        else:
            found += _attention_pieces(tensors, f"{prefix}self_attn.", blk)
        shared = "_shexp" if f"{prefix}mlp.shared_expert_gate.weight" in tensors else ""
        module = "mlp.shared_expert." if shared else "mlp."
        found += [
            _whole(
                f"{blk}ffn_{name}{shared}.weight", f"{prefix}{module}{name}_proj.weight", tensors
            )
            for name in ("gate", "up", "down")
        ]
        if shared:
            router = f"{prefix}mlp.gate.weight"
            found.append(_whole(f"{blk}ffn_gate_inp.weight", router, tensors))
            gate = f"{prefix}mlp.shared_expert_gate.weight"
            found.append(_whole(f"{blk}ffn_gate_inp_shexp.weight", gate, tensors))
    return found


def _prefix(raw: Mapping[str, Any], layer: int) -> str:
    """Return the beginning of the names of a layer's tensors; the MTP block follows the layers."""
    return f"model.layers.{layer}." if layer < raw["num_hidden_layers"] else "mtp.layers.0."


def _whole(name: str, source: str, tensors: Mapping[str, Single]) -> Piece:
    return Piece(name, source, np.arange(len(tensors[source])))


def _gain(name: str, source: str, tensors: Mapping[str, Single]) -> Piece:
    """Return the gains of a norm: files store the factor, checkpoints the factor minus 1."""
    one = np.float32(1.0)
    every = np.arange(len(tensors[source]))
    return Piece(name, source, every, None, lambda w: w + one, lambda w: w - one)


def _attention_pieces(tensors: Mapping[str, Single], prefix: str, blk: str) -> list[Piece]:
    names = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}
    projections = [
        _whole(f"{blk}{theirs}.weight", f"{prefix}{ours}_proj.weight", tensors)
        for ours, theirs in names.items()
    ]
    norms = [
        _gain(f"{blk}attn_{name}_norm.weight", f"{prefix}{name}_norm.weight", tensors)
        for name in ("q", "k")
    ]
    return projections + norms


def _recurrent_pieces(
    raw: Mapping[str, Any], tensors: Mapping[str, Single], prefix: str, blk: str
) -> list[Piece]:
    key_heads = raw["linear_num_key_heads"]
    value_heads = raw["linear_num_value_heads"]
    key_dim = raw["linear_key_head_dim"]
    value_dim = raw["linear_value_head_dim"]
    per_key = value_heads // key_heads
    heads = np.arange(value_heads)
    interleaved = raw["model_type"] == "qwen3_next"
    if not interleaved:
        # Value heads by their number within a key head, then by key head.
        heads = heads.reshape(key_heads, per_key).T.reshape(-1)
    values = (heads[:, None] * value_dim + np.arange(value_dim)).reshape(-1)
    keys = np.arange(2 * key_heads * key_dim)
    channels = np.concatenate([keys, len(keys) + values])
    every = np.arange(raw["hidden_size"])
    if interleaved:
        width = per_key * value_dim
        of_key = np.arange(2 * (key_dim + width) * key_heads).reshape(key_heads, -1)
        bounds = [key_dim, 2 * key_dim, 2 * key_dim + width]
        q, k, v, z = (part.reshape(-1) for part in np.split(of_key, bounds, axis=1))
        qkvz = f"{prefix}in_proj_qkvz.weight"
        found = [
            Piece(f"{blk}attn_qkv.weight", qkvz, np.concatenate([q, k, v])),
            Piece(f"{blk}attn_gate.weight", qkvz, z),
            _whole(f"{blk}ssm_ba.weight", f"{prefix}in_proj_ba.weight", tensors),
        ]
    else:
        found = [
            Piece(f"{blk}attn_qkv.weight", f"{prefix}in_proj_qkv.weight", channels),
            Piece(f"{blk}attn_gate.weight", f"{prefix}in_proj_z.weight", values),
            Piece(f"{blk}ssm_beta.weight", f"{prefix}in_proj_b.weight", heads),
            Piece(f"{blk}ssm_alpha.weight", f"{prefix}in_proj_a.weight", heads),
        ]
    return [
        *found,
        Piece(
            f"{blk}ssm_a",
            f"{prefix}A_log",
            heads,
            None,
            lambda w: -np.exp(w),
            lambda w: np.log(-w),
        ),
        Piece(f"{blk}ssm_dt.bias", f"{prefix}dt_bias", heads),
        # without the dimension of size 1
        Piece(
            f"{blk}ssm_conv1d.weight",
            f"{prefix}conv1d.weight",
            channels,
            None,
            lambda w: w[:, 0],
            lambda w: w[:, None],
        ),
        _whole(f"{blk}ssm_norm.weight", f"{prefix}norm.weight", tensors),
        Piece(f"{blk}ssm_out.weight", f"{prefix}out_proj.weight", every, values),
    ]


def _kind(name: str, shape: tuple[int, ...], kinds: str | Mapping[str, str]) -> str:
    """Return the type of a tensor in the file."""
    full = ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "ssm_conv1d.weight")
    full += ("ssm_a", "ssm_d", "ssm_norm.weight")
    if len(shape) == 1 or name.endswith(full):
        return "F32"
    if isinstance(kinds, str):
        kind = kinds
    else:
        suffixes = [each for each in kinds if each and name.removesuffix(".weight").endswith(each)]
        kind = kinds[suffixes[0] if suffixes else ""]
    block, _ = GGML_QUANT_SIZES[Type[kind]]
    return "F32" if shape[-1] % block else kind


def add_tensor(
    writer: gguf.GGUFWriter,
    name: str,
    values: Single,
    kinds: str | Mapping[str, str],
    seed: int,
) -> Single:
    """Write a tensor; return the values that a reader gets."""
    kind = _kind(name, values.shape, kinds)
    if values.ndim == 1:
        writer.add_tensor(name, values)
        return values
    stored = encode(kind, values.reshape(-1, values.shape[-1]), seed)
    writer.add_tensor(
        name,
        stored.reshape(*values.shape[:-1], -1),
        raw_dtype=None if kind in ("F32", "F16") else Type[kind],
    )
    return decode(kind, stored).reshape(values.shape)


def _write_experts(
    writer: gguf.GGUFWriter,
    raw: Mapping[str, Any],
    tensors: Mapping[str, Single],
    written: dict[str, Single],
    kinds: str | Mapping[str, str],
    layer: int,
    *,
    fused: bool,
) -> None:
    """Write the tensors of all experts of a layer, and their values into ``written``."""
    groups = {"gate_up": ("gate", "up"), "down": ("down",)}
    if not fused:
        groups = {name: (name,) for name in ("gate", "up", "down")}
    for number, (theirs, ours) in enumerate(groups.items()):
        names = [
            [f"{_prefix(raw, layer)}mlp.experts.{expert}.{name}_proj.weight" for name in ours]
            for expert in range(raw["num_experts"])
        ]
        stack = np.stack([np.concatenate([tensors[name] for name in each]) for each in names])
        seed = 1000 + 10 * layer + number
        found = add_tensor(writer, f"blk.{layer}.ffn_{theirs}_exps.weight", stack, kinds, seed)
        for each, values in zip(names, found, strict=True):
            for name, part in zip(each, np.split(values, len(each)), strict=True):
                written[name] = np.ascontiguousarray(part)


def _write_keys(
    writer: gguf.GGUFWriter, raw: Mapping[str, Any], *, older: bool, has_mtp: bool
) -> None:
    """Write the keys that the converter writes."""
    rope = raw["rope_parameters"]
    size = raw["head_dim"]
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_block_count(raw["num_hidden_layers"] + has_mtp)
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(size * rope["partial_rotary_factor"]))
    if raw["model_type"] != "qwen3_next":
        writer.add_rope_dimension_sections([*rope.get("mrope_section", [11, 11, 10]), 0])
    if "num_experts" in raw:
        writer.add_expert_count(raw["num_experts"])
        writer.add_expert_used_count(raw["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(raw["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(raw["shared_expert_intermediate_size"])
    writer.add_ssm_conv_kernel(raw["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(raw["linear_key_head_dim"])
    writer.add_ssm_group_count(raw["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(raw["linear_num_value_heads"])
    writer.add_ssm_inner_size(raw["linear_num_value_heads"] * raw["linear_value_head_dim"])
    writer.add_full_attention_interval(4)
    if not older:
        recurrent = [kind == "linear_attention" for kind in raw["layer_types"]]
        recurrent += [False] * has_mtp
        writer.add_array(f"{writer.arch}.attention.recurrent_layers", recurrent)
    if has_mtp:
        writer.add_nextn_predict_layers(1)


def publish(folder: Path, target: Path, *, fused_mtp: bool = True) -> Path:
    """Write a checkpoint of Qwen3.5 under the names of published, multimodal checkpoints.

    The language model is one of several parts, and the experts of a layer are two tensors. There
    are tensors of an image encoder. ``fused_mtp=False`` writes a tensor for each expert of the MTP
    block, as some published checkpoints have.
    """
    raw = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    prefix = "model.language_model."
    published = {
        name.replace("model.", prefix, 1): weight
        for name, weight in tensors.items()
        if ".experts." not in name
    }
    layers = range(raw["num_hidden_layers"] + ("mtp.fc.weight" in tensors))
    for layer in layers if "num_experts" in raw else ():
        path = f"{_prefix(raw, layer)}mlp.experts."
        if path.startswith("mtp.") and not fused_mtp:
            own = {name: weight for name, weight in tensors.items() if name.startswith(path)}
            published |= own
            continue
        experts = range(raw["num_experts"])
        gates, ups, downs = (
            np.stack([tensors[f"{path}{expert}.{name}_proj.weight"] for expert in experts])
            for name in ("gate", "up", "down")
        )
        theirs = path.replace("model.", prefix, 1)
        published[f"{theirs}gate_up_proj"] = np.concatenate([gates, ups], axis=1)
        published[f"{theirs}down_proj"] = downs
    published["model.visual.blocks.0.norm1.weight"] = np.ones(16, np.float32)
    target.mkdir()
    family = raw["model_type"].removesuffix("_text")
    document = {
        "model_type": family,
        "text_config": raw,
        "vision_config": {"model_type": f"{family}_vision"},
        "tie_word_embeddings": raw["tie_word_embeddings"],
    }
    (target / "config.json").write_text(json.dumps(document))
    shutil.copy(folder / "tokenizer.json", target / "tokenizer.json")
    save_file(published, target / "model.safetensors")
    return target
