"""GGUF files for tests: models converted by llama.cpp's own writer, and headers byte by byte."""

import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from gguf import GGMLQuantizationType as Type
from gguf.constants import GGML_QUANT_SIZES, MODEL_ARCH_NAMES
from numpy.typing import NDArray
from safetensors.numpy import save_file

from pronk.checkpoint.gguf.vocabulary import TokenKind
from pronk.checkpoint.tensors import Checkpoint
from pronk.models.families import parse_config

# blocks with a float16 scale that are converted before they are packed
CONVERTED = ["IQ4_NL"]
# blocks of 256 weights, the kernels' super-blocks
SUPER_BLOCKS = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"]
# blocks that stay in memory as they are
STORED = [
    "IQ1_S",
    "IQ1_M",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ2_S",
    "IQ3_XXS",
    "IQ3_S",
    "TQ1_0",
    "TQ2_0",
    "NVFP4",
]
# blocks that are packed without a conversion of numbers
QUANTIZED = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", *SUPER_BLOCKS]
ARCHITECTURES = {name: arch for arch, name in MODEL_ARCH_NAMES.items()}
# Names of families in GGUF files, where they differ from ``model_type``.
GGUF_FAMILIES = {
    "mistral": "llama",
    "mixtral": "llama",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
    "ministral3": "mistral3",
    "olmo3": "olmo2",
    "glm4_moe": "glm4moe",
    "lfm2_moe": "lfm2moe",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
# Families whose converters permute rows of queries and keys: subclasses of ``LlamaModel`` in
# ``conversion/``.
PERMUTED = ("granite", "granitemoe", "llama", "mistral3", "smollm3")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Offsets of the float16 scales within a block, in bytes.
SCALES = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
# Largest integer, code times scale, that the factor of a block multiplies; 15 for others.
UNITS = {
    "Q8_0": 127,
    "IQ4_NL": 127,
    "Q2_K": 3 * 15,
    "Q3_K": 4 * 32,
    "Q4_K": 15 * 63,
    "Q5_K": 31 * 63,
    "Q6_K": 31 * 127,
    "IQ4_XS": 127 * 32,
    "Q5_0": 16,
    "Q5_1": 31,
    "IQ1_S": 9 / 8 * 15,
    "IQ1_M": 9 / 8 * 15,
    "IQ2_XXS": 43 / 8 * 31,
    "IQ2_XS": 43 / 8 * 31,
    "IQ2_S": 43 / 8 * 31,
    "IQ3_XXS": 62 / 4 * 31,
    "IQ3_S": 15 * 31,
    "TQ1_0": 1,
    "TQ2_0": 2,
    "NVFP4": 6,
}


def random_blocks(
    kind: str, rows: int, columns: int, seed: int, scale: float = 0.05
) -> NDArray[np.uint8]:
    """Return random blocks, uint8 ``[rows, bytes]``, of weights of the magnitude ``scale``."""
    values, size = GGML_QUANT_SIZES[Type[kind]]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, columns // values, size), dtype=np.uint8)
    for number, at in enumerate(SCALES.get(kind, (0,))):
        # The second scale belongs to the block's minimum, which shifts the weights by half of their
        # range.
        shift = scale / (15 if kind == "Q2_K" else 63) if kind.endswith("K") else -scale
        largest = 2 * scale / UNITS.get(kind, 15) if number == 0 else shift
        drawn = (largest * rng.uniform(0.5, 1.0, blocks.shape[:2])).astype(np.float16)
        if kind == "IQ1_M":
            set_scattered_scale(blocks, drawn)
        elif kind == "NVFP4":
            spread = drawn[..., None] * rng.uniform(0.5, 1.0, (*drawn.shape, 4))
            blocks[..., :4] = gguf.quants.NVFP4.fp32_to_ue4m3(spread)
        else:
            blocks[..., at : at + 2] = drawn[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def set_scattered_scale(blocks: NDArray[np.uint8], scale: NDArray[np.float16]) -> None:
    """Set the scales of IQ1_M blocks: four bits of each are in the last four 16-bit words."""
    bits = scale.view(np.uint16)
    for i in range(4):
        high = (bits >> (4 * i) & 15).astype(np.uint8) << 4
        blocks[..., 49 + 2 * i] = blocks[..., 49 + 2 * i] & 15 | high


def encode(kind: str, weight: NDArray[np.float32], seed: int) -> NDArray[Any]:
    """Encode a matrix; return random blocks for types that the ``gguf`` package cannot encode."""
    if kind in ("F32", "F16"):
        return weight.astype(np.float32 if kind == "F32" else np.float16)
    if kind in ("BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4"):
        return gguf.quants.quantize(weight, Type[kind])
    # Rounded, because the last bits of NumPy's standard deviation depend on the processor.
    scale = round(1.5 * float(weight.std()), 3)
    return random_blocks(kind, *weight.shape, seed, scale=scale)


def decode(kind: str, stored: NDArray[Any]) -> NDArray[np.float32]:
    """Dequantize by llama.cpp's own rule."""
    return gguf.quants.dequantize(stored, Type[kind])


def reorder(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """Permute the rows of a query or key projection, as in files of the architecture ``llama``.

    Source: ``convert_hf_to_gguf.py`` of llama.cpp.
    """
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def convert(
    folder: Path,
    path: Path,
    kinds: str | Mapping[str, str] = "F32",
    *,
    twin: Path | None = None,
    tokenizer: tokenizers.Tokenizer | None = None,
    pre: str = "gpt-2",
    change: Any = None,
) -> Path:
    """Write the checkpoint of a folder as a GGUF file.

    Args:
        folder: checkpoint with a single safetensors file.
        path: output file.
        kinds: type of all matrices, or types by suffixes of names with ``""`` as the default.
        twin: output folder for a safetensors checkpoint with the dequantized weights; ``None``
            writes none.
        tokenizer: a byte-level BPE; ``None``: the tokenizer of the folder.
        pre: name of the pre-tokenizer.
        change: called with the writer before it writes.
    """
    raw = json.loads((folder / "config.json").read_text())
    arch = GGUF_FAMILIES.get(raw["model_type"], raw["model_type"])
    names = gguf.get_tensor_name_map(ARCHITECTURES[arch], raw["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, arch)
    write_keys(writer, raw)
    write_bytes_bpe(
        writer, tokenizer or tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")), pre
    )
    checkpoint = Checkpoint(folder)
    dequantized = {name: checkpoint.tensor(name).astype(np.float32) for name in checkpoint}
    write_experts(writer, raw["model_type"], dequantized, kinds)
    for seed, name in enumerate(
        sorted(name for name in checkpoint if ".experts." not in name and "put_linear" not in name)
    ):
        # The weights of convolutions are stored without a dimension of size 1.
        module = re.sub("(e_score_correction)_bias|(expert_bias)$", r"\1\2.bias", name)
        theirs = str(names.get_name(module, (".weight", ".bias")))
        weight = dequantized[name]
        kind = (
            kind_of(theirs, kinds) if weight.ndim == 2 and "ffn_gate_inp" not in theirs else "F32"
        )
        theirs += ".weight" if theirs.endswith("attn_sinks") else ""
        # The permutation moves whole rows, so it commutes with quantization.
        stored = encode(kind, weight.squeeze(1) if weight.ndim == 3 else weight, seed)
        dequantized[name] = decode(kind, stored) if weight.ndim == 2 else weight
        if arch.startswith("gemma") and weight.ndim == 1:
            stored = stored + np.float32(1.0)  # the factor of these norms is 1 + weight
        if arch in PERMUTED and (".attn_q." in theirs or ".attn_k." in theirs):
            heads = (
                raw["num_attention_heads"] if ".attn_q." in theirs else raw["num_key_value_heads"]
            )
            stored = reorder(stored, heads)
        writer.add_tensor(theirs, stored, raw_dtype=None if kind in ("F32", "F16") else Type[kind])
    if change is not None:
        change(writer)
    finish(writer)
    if twin is not None:
        write_twin(folder, twin, dequantized)
    return path


def write_experts(
    writer: gguf.GGUFWriter,
    family: str,
    tensors: Mapping[str, NDArray[np.float32]],
    kinds: str | Mapping[str, str],
) -> None:
    """Write the tensors of all experts, and replace ``tensors`` by the dequantized values."""
    for seed, (name, views) in enumerate(expert_views(family, tensors).items()):
        weight = np.stack(views)
        kind = kind_of(name, kinds) if weight.ndim == 3 else "F32"
        rows = weight.reshape(-1, weight.shape[-1])
        stored = encode(kind, rows, seed)
        writer.add_tensor(
            name,
            stored.reshape(*weight.shape[:-1], -1),
            raw_dtype=None if kind in ("F32", "F16") else Type[kind],
        )
        for view, values in zip(views, decode(kind, stored).reshape(weight.shape), strict=True):
            view[...] = values


def expert_views(
    family: str, tensors: Mapping[str, NDArray[np.float32]]
) -> dict[str, list[NDArray[np.float32]]]:
    """Return the views of experts' matrices in ``tensors``, for each tensor of experts in GGUF."""
    found: dict[str, list[NDArray[np.float32]]] = {}

    def add(layer: str, module: str, view: NDArray[np.float32]) -> None:
        found.setdefault(f"blk.{layer}.ffn_{module}", []).append(view)

    one_each = {
        "w1": "gate",
        "w2": "down",
        "w3": "up",
        "gate_proj": "gate",
        "down_proj": "down",
        "up_proj": "up",
    }
    numbers = re.compile(r"[0-9]+")
    for name in sorted(tensors, key=lambda name: [*map(int, numbers.findall(name))]):
        layer = "".join(numbers.findall(name)[:1])
        weight = tensors[name]
        if re.search(r"\.experts\.\d+\.", name):
            add(layer, f"{one_each[name.split('.')[-2]]}_exps.weight", weight)
            continue
        for each in weight if ".experts." in name or "put_linear" in name else ():
            if name.endswith("input_linear.weight"):
                add(layer, "gate_exps.weight", each[: len(each) // 2])
                add(layer, "up_exps.weight", each[len(each) // 2 :])
            elif "gate_up_proj" in name:
                # gpt-oss: alternating outputs of the gate and the up projection
                for number, module in enumerate(("gate", "up")):
                    add(
                        layer,
                        f"{module}_exps.{'bias' if each.ndim == 1 else 'weight'}",
                        each.T[number::2],
                    )
            else:
                suffix = "bias" if each.ndim == 1 else "weight"
                add(layer, f"down_exps.{suffix}", each.T if family == "gpt_oss" else each)
    return found


def finish(writer: gguf.GGUFWriter) -> None:
    """Write header, metadata and tensors, and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def kind_of(name: str, kinds: str | Mapping[str, str]) -> str:
    if isinstance(kinds, str):
        return kinds
    return next(
        (kind for end, kind in kinds.items() if end and name.removesuffix(".weight").endswith(end)),
        kinds[""],
    )


def write_twin(folder: Path, twin: Path, tensors: Mapping[str, NDArray[np.float32]]) -> None:
    """Write the model of ``folder`` with other weights, in float32."""
    twin.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (twin / name).write_bytes((folder / name).read_bytes())
    save_file(dict(tensors), twin / "model.safetensors")


def write_keys(writer: gguf.GGUFWriter, raw: Mapping[str, Any]) -> None:
    """Write the keys that ``convert_hf_to_gguf.py`` writes for these families."""
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(parse_config(raw).intermediate_size)
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_head_count(raw["num_attention_heads"])
    is_convolution = [kind == "conv" for kind in raw.get("layer_types") or ()]
    heads = raw["num_key_value_heads"]
    writer.add_head_count_kv(
        [0 if each else heads for each in is_convolution] if any(is_convolution) else heads
    )
    writer.add_layer_norm_rms_eps(raw.get("norm_eps") or raw["rms_norm_eps"])
    rope = raw.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    write_family_keys(writer, raw, rope)
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    size = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    if size != raw["hidden_size"] // raw["num_attention_heads"]:
        writer.add_key_length(size)
        writer.add_value_length(size)
    writer.add_rope_dimension_count(int(rope.get("partial_rotary_factor", 1.0) * size))
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for key, add in (
            ("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
            ("beta_slow", writer.add_rope_scaling_yarn_beta_slow),
            ("attention_factor", writer.add_rope_scaling_yarn_attn_factor),
        ):
            if rope.get(key) is not None:
                add(rope[key])
    if kind == "longrope":
        write_longrope(writer, raw, rope)
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, size))


def write_family_keys(
    writer: gguf.GGUFWriter, raw: Mapping[str, Any], rope: Mapping[str, Any]
) -> None:
    """Write the keys that the converter of one family writes."""
    family = raw["model_type"]
    write_expert_keys(writer, raw)
    if family.startswith("gemma") or family == "gpt_oss":
        writer.add_sliding_window(raw["sliding_window"])
    if family == "gemma2":
        writer.add_attn_logit_softcapping(raw["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(raw["final_logit_softcapping"])
    elif family in ("granite", "granitemoe"):
        writer.add_attention_scale(raw["attention_multiplier"])
        writer.add_embedding_scale(raw["embedding_multiplier"])
        writer.add_residual_scale(raw["residual_multiplier"])
        writer.add_logit_scale(raw["logits_scaling"])
    elif family in ("lfm2", "lfm2_moe"):
        writer.add_shortconv_l_cache(raw["conv_L_cache"])
    elif family == "ministral3":
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
        if rope.get("mscale_all_dim") is not None:
            writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    elif family == "olmo3":
        writer.add_sliding_window(raw["sliding_window"])
        writer.add_sliding_window_pattern(
            [kind == "sliding_attention" for kind in raw["layer_types"]]
        )
    elif family == "phi3":
        writer.add_rope_scaling_orig_ctx_len(raw["original_max_position_embeddings"])
        writer.add_sliding_window(raw["sliding_window"] or 0)


def write_expert_keys(writer: gguf.GGUFWriter, raw: Mapping[str, Any]) -> None:
    """Write the number and the size of a layer's experts, and the keys of their router."""
    family = raw["model_type"]
    counts = [raw.get(key) for key in ("num_local_experts", "num_experts", "n_routed_experts")]
    if any(counts):
        writer.add_expert_count(next(count for count in counts if count))
        writer.add_expert_used_count(raw["num_experts_per_tok"])
    if "moe_intermediate_size" in raw or family == "gpt_oss":
        writer.add_expert_feed_forward_length(
            raw.get("moe_intermediate_size") or raw["intermediate_size"]
        )
    if family == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(raw["shared_expert_intermediate_size"])
    elif family == "lfm2_moe":
        writer.add_leading_dense_block_count(raw["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    elif family == "glm4_moe":
        writer.add_expert_shared_count(raw["n_shared_experts"])
        writer.add_leading_dense_block_count(raw["first_k_dense_replace"])
        write_router_keys(writer, raw)


def write_router_keys(writer: gguf.GGUFWriter, raw: Mapping[str, Any]) -> None:
    """Write the keys of a router of DeepSeek-V3's kind."""
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_scale(raw["routed_scaling_factor"])
    writer.add_expert_weights_norm(raw["norm_topk_prob"])
    writer.add_expert_group_count(raw["n_group"])
    writer.add_expert_group_used_count(raw["topk_group"])


def write_longrope(
    writer: gguf.GGUFWriter, raw: Mapping[str, Any], rope: Mapping[str, Any]
) -> None:
    """Write the divisors of LongRoPE and its factor of cosines and sines."""
    original = raw["original_max_position_embeddings"]
    scale = raw["max_position_embeddings"] / original
    writer.add_rope_scaling_attn_factors(
        math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    )
    for name in ("long", "short"):
        writer.add_tensor(
            f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32)
        )


def llama3_divisors(rope: Mapping[str, Any], size: int) -> NDArray[np.float32]:
    """Return the divisors of Llama 3's rotations, as ``convert_hf_to_gguf.py`` computes them."""
    base = 1.0 / rope["rope_theta"] ** (np.arange(0, size, 2, dtype=np.float32) / size)
    low = rope["low_freq_factor"]
    high = rope["high_freq_factor"]
    original = rope["original_max_position_embeddings"]
    factors = []
    for wavelength in 2 * np.pi / base:
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(rope["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def write_bytes_bpe(
    writer: gguf.GGUFWriter, tokenizer: tokenizers.Tokenizer, pre: str, pad: int = 0
) -> None:
    """Write a byte-level BPE tokenizer with ``pad`` unused tokens at the end."""
    model = json.loads(tokenizer.to_str())["model"]
    added = {i: token.special for i, token in tokenizer.get_added_tokens_decoder().items()}
    vocab = {i: token for token, i in tokenizer.get_vocab(with_added_tokens=True).items()}
    kinds = [
        TokenKind.NORMAL
        if i not in added
        else TokenKind.CONTROL
        if added[i]
        else TokenKind.USER_DEFINED
        for i in range(len(vocab))
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(
        [vocab[i] for i in range(len(vocab))] + [f"[PAD{len(vocab) + i}]" for i in range(pad)]
    )
    writer.add_token_types([int(kind) for kind in kinds] + [int(TokenKind.UNUSED)] * pad)
    writer.add_token_merges(
        [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]]
    )
    end = tokenizer.token_to_id("<|endoftext|>")
    if end is not None:
        writer.add_bos_token_id(end)
        writer.add_eos_token_id(end)


def text(value: str | bytes) -> bytes:
    """Return a string: its length as 64 bits, then its bytes."""
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value)) + value


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    """Return a key with the type and the bytes of its value."""
    return text(key) + struct.pack("<I", kind) + value


def tensor_info(name: str | bytes, shape: Sequence[int], kind: int, offset: int) -> bytes:
    """Return a tensor's description; ``shape`` begins with the dimension of the shortest stride."""
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dimensions + struct.pack("<IQ", kind, offset)


def file_of(
    pairs: Sequence[bytes] = (),
    infos: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    """Return a whole file; ``counts`` overrides the announced numbers of tensors and pairs."""
    num_tensors, num_pairs = counts or (len(infos), len(pairs))
    head = (
        b"GGUF"
        + struct.pack("<IQQ", version, num_tensors, num_pairs)
        + b"".join(pairs)
        + b"".join(infos)
    )
    return head + bytes(-len(head) % alignment) + data
