"""Random checkpoints in quantized formats, with an independent dequantization rule for each format.

The rules follow the formats' own programs number by number and use no code of pronk: AutoGPTQ's and
GPTQModel's ``qlinear``, AutoAWQ's ``packing_utils``, compressed-tensors' ``pack_quantized`` and
``naive_quantized``, transformers' ``finegrained_fp8``.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from ml_dtypes import bfloat16, float8_e4m3fn
from numpy.typing import DTypeLike, NDArray
from safetensors.numpy import save_file

from pronk.checkpoint.tensors import Checkpoint

Array = NDArray[Any]
Tensors = dict[str, Array]
GROUP = 16
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclass(frozen=True)
class Format:
    """A quantized format.

    Attributes:
        config: ``quantization_config`` of a checkpoint in this format.
        make: function of a generator, outputs and inputs that returns a module's random tensors.
        rule: function of a module's tensors that returns its weight in float32.
        warns: part of the warning that loading gives; "" if it gives none.
    """

    config: dict[str, Any]
    make: Callable[[np.random.Generator, int, int], Tensors]
    rule: Callable[[Tensors], Array]
    warns: str = ""


def words(random: np.random.Generator, *shape: int) -> Array:
    """Return random 32-bit words."""
    return random.integers(-(2**31), 2**31, shape, dtype=np.int32)


def scales(
    random: np.random.Generator, bits: int, *shape: int, dtype: DTypeLike = np.float16
) -> Array:
    """Return random scales that give weights of about 0.2."""
    return (random.uniform(0.5, 1.5, shape) * 0.7 / 2**bits).astype(dtype)


def pack(values: Array, bits: int, axis: int) -> Array:
    """Pack integers along an axis into 32-bit words, the first in the lowest bits."""
    rows = np.moveaxis(values, axis, -1)
    count = -(-rows.shape[-1] * bits // 32)
    packed = np.zeros((*rows.shape[:-1], count), np.uint32)
    for i in range(rows.shape[-1]):
        packed[..., i * bits // 32] |= rows[..., i].astype(np.uint32) << np.uint32(i * bits % 32)
    return np.ascontiguousarray(np.moveaxis(packed, -1, axis)).view(np.int32)


def field_of(word: int, place: int, bits: int) -> int:
    """Return the integer at index ``place`` of a word."""
    return (word & 0xFFFFFFFF) >> (place * bits) & ((1 << bits) - 1)


# GPTQ


def make_gptq(
    random: np.random.Generator,
    outputs: int,
    inputs: int,
    *,
    bits: int,
    size: int,
    offset: int,
    sym: bool,
    order: bool,
) -> Tensors:
    size = inputs if size == -1 else size
    groups = -(-inputs // size)
    zeros = np.full((groups, outputs), 2 ** (bits - 1))
    if not sym:
        zeros = random.integers(offset, 2**bits, (groups, outputs))
    index = np.arange(inputs) // size
    return {
        "qweight": words(random, inputs * bits // 32, outputs),
        "qzeros": pack(zeros - offset, bits, axis=1),
        "scales": scales(random, bits, groups, outputs),
        "g_idx": (random.permutation(index) if order else index).astype(np.int32),
    }


def gptq_rule(tensors: Tensors, *, bits: int, offset: int) -> Array:
    qweight = tensors["qweight"].tolist()
    qzeros = tensors["qzeros"].tolist()
    index = tensors["g_idx"].tolist()
    scale = tensors["scales"].tolist()
    per = 32 // bits
    weight = np.empty((len(scale[0]), len(index)), np.float32)
    for i, group in enumerate(index):
        for o in range(len(weight)):
            code = field_of(qweight[i // per][o], i % per, bits)
            zero = field_of(qzeros[group][o // per], o % per, bits) + offset
            weight[o, i] = scale[group][o] * (code - zero)
    return weight


def gptq(
    bits: int, size: int = GROUP, *, v2: bool = False, sym: bool = True, order: bool = False
) -> Format:
    offset = 0 if v2 else 1
    return Format(
        {
            "quant_method": "gptq", "bits": bits, "group_size": size, "sym": sym, "desc_act": order,
            "damp_percent": 0.01, "static_groups": False, "true_sequential": True,
            "checkpoint_format": "gptq_v2" if v2 else "gptq",
        },
        partial(make_gptq, bits=bits, size=size, offset=offset, sym=sym, order=order),
        partial(gptq_rule, bits=bits, offset=offset),
    )  # fmt: skip


# AWQ


def make_awq(random: np.random.Generator, outputs: int, inputs: int, *, size: int) -> Tensors:
    groups = 1 if size == -1 else -(-inputs // size)
    return {
        "qweight": words(random, inputs, outputs // 8),
        "qzeros": words(random, groups, outputs // 8),
        "scales": scales(random, 4, groups, outputs),
    }


def awq_rule(tensors: Tensors, *, size: int) -> Array:
    qweight = tensors["qweight"].tolist()
    qzeros = tensors["qzeros"].tolist()
    scale = tensors["scales"].tolist()
    weight = np.empty((len(scale[0]), len(qweight)), np.float32)
    for i, row in enumerate(qweight):
        group = 0 if size == -1 else i // size
        for column, word in enumerate(row):
            for place, output in enumerate(AWQ_ORDER):
                code = field_of(word, place, 4)
                zero = field_of(qzeros[group][column], place, 4)
                weight[column * 8 + output, i] = scale[group][column * 8 + output] * (code - zero)
    return weight


def awq(size: int = GROUP) -> Format:
    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": size,
        "version": "gemm",
        "zero_point": True,
    }
    return Format(config, partial(make_awq, size=size), partial(awq_rule, size=size))


# compressed-tensors, integers


def _shape(strategy: str, outputs: int, inputs: int) -> tuple[int, ...]:
    return {"tensor": (1,), "channel": (outputs, 1), "group": (outputs, -(-inputs // GROUP))}[
        strategy
    ]


def make_ints(
    random: np.random.Generator,
    outputs: int,
    inputs: int,
    *,
    bits: int,
    strategy: str,
    packed: bool,
    sym: bool,
    order: bool,
) -> Tensors:
    shape = _shape(strategy, outputs, inputs)
    middle = 2 ** (bits - 1)
    made = {"weight_scale": scales(random, bits, *shape, dtype=bfloat16)}
    codes = random.integers(-middle, middle, (outputs, inputs))
    if packed:
        made["weight_packed"] = pack(codes + middle, bits, axis=1)
        made["weight_shape"] = np.array([outputs, inputs])
    else:
        made["weight"] = codes.astype(np.int8)
    if not sym:
        zeros = random.integers(-middle, middle, shape)
        aside = zeros.astype(np.int8)
        made["weight_zero_point"] = (
            pack(zeros + middle, bits, axis=0) if packed and strategy != "tensor" else aside
        )
    if order:
        made["weight_g_idx"] = random.permutation(np.arange(inputs) // GROUP).astype(np.int32)
    return made


def ints_rule(tensors: Tensors, *, bits: int, strategy: str, packed: bool, sym: bool) -> Array:
    per = 32 // bits
    middle = 2 ** (bits - 1)
    scale = tensors["weight_scale"].astype(np.float32).tolist()
    outputs, inputs = tensors["weight_shape"].tolist() if packed else tensors["weight"].shape
    stored = tensors["weight_packed" if packed else "weight"].tolist()
    zeros = None if sym else tensors["weight_zero_point"].tolist()
    weight = np.empty((outputs, inputs), np.float32)
    for o in range(outputs):
        for i in range(inputs):
            code = field_of(stored[o][i // per], i % per, bits) - middle if packed else stored[o][i]
            group = i // GROUP if strategy == "group" else 0
            if "weight_g_idx" in tensors:
                group = int(tensors["weight_g_idx"][i])
            zero = 0
            if zeros is not None and strategy == "tensor":
                zero = zeros[0]
            elif zeros is not None and packed:
                zero = field_of(zeros[o // per][group], o % per, bits) - middle
            elif zeros is not None:
                zero = zeros[o][group]
            weight[o, i] = (scale[0] if strategy == "tensor" else scale[o][group]) * (code - zero)
    return weight


def compressed(
    weights: dict[str, Any], layout: str, inputs: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed",
        "config_groups": {"group_0": {
            "targets": ["Linear"], "weights": weights,
            "input_activations": inputs, "output_activations": None,
        }},
        "ignore": ["lm_head"], "kv_cache_scheme": None,
        "global_compression_ratio": 1.5, "sparsity_config": {},
    }  # fmt: skip


def ints(
    bits: int, strategy: str, *, packed: bool = True, sym: bool = True, order: bool = False
) -> Format:
    weights = {
        "num_bits": bits, "type": "int", "symmetric": sym, "strategy": strategy, "dynamic": False,
        "group_size": GROUP if strategy == "group" else None,
        "actorder": "group" if order else None,
        "block_structure": None, "observer": "minmax", "observer_kwargs": {},
    }  # fmt: skip
    inputs = (
        None if packed else {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    )
    options = {"bits": bits, "strategy": strategy, "packed": packed, "sym": sym}
    return Format(
        compressed(weights, "pack-quantized" if packed else "int-quantized", inputs),
        partial(make_ints, **options, order=order),
        partial(ints_rule, **options),
    )


# 8-bit floats


def e4m3(byte: int) -> float:
    """Decode 8 bits: sign, 4 bits of exponent with bias 7, 3 bits of mantissa."""
    exponent = byte >> 3 & 15
    mantissa = byte & 7
    size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -size if byte & 128 else size


def to_bfloat16(values: Array) -> Array:
    """Round to the nearest bfloat16, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) & np.uint32(0xFFFF0000)).view(np.float32)


def make_fp8(
    random: np.random.Generator,
    outputs: int,
    inputs: int,
    *,
    name: str,
    block: tuple[int, int] | None,
    whole: bool,
) -> Tensors:
    stored = random.integers(0, 256, (outputs, inputs), dtype=np.uint8)
    stored[stored & 127 == 127] = 0  # replace NaN
    shape: tuple[int, ...] = (1,) if whole else (outputs, 1)
    if block is not None:
        shape = (-(-outputs // block[0]), -(-inputs // block[1]))
    factors = (random.uniform(0.5, 1.5, shape) / 400).astype(np.float32)
    return {"weight": stored.view(float8_e4m3fn), name: factors}


def fp8_rule(tensors: Tensors, *, name: str, block: tuple[int, int] | None, whole: bool) -> Array:
    stored = tensors["weight"].view(np.uint8).tolist()
    factors = tensors[name]
    weight = np.empty((len(stored), len(stored[0])), np.float32)
    for o, row in enumerate(stored):
        for i, byte in enumerate(row):
            at: tuple[int, ...] = (0,) if whole else (o, 0)
            if block is not None:
                at = (o // block[0], i // block[1])
            weight[o, i] = np.float32(e4m3(byte)) * factors[at]
    return to_bfloat16(weight)


def fp8(
    config: dict[str, Any], name: str, *, block: tuple[int, int] | None = None, whole: bool = False
) -> Format:
    options = {"name": name, "block": block, "whole": whole}
    return Format(
        config,
        partial(make_fp8, **options),
        partial(fp8_rule, **options),
        "dequantized to bfloat16",
    )


def compressed_fp8(strategy: str, layout: str = "float-quantized") -> Format:
    weights = {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": strategy,
        "dynamic": False,
    }
    block = None
    if strategy == "block":
        weights["block_structure"] = [32, 16]
        block = (32, 16)
    elif strategy == "group":
        weights["group_size"] = GROUP
        block = (1, GROUP)
    config = compressed(
        weights, layout, {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    )
    return fp8(config, "weight_scale", block=block, whole=strategy == "tensor")


# 4-bit floats

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def make_nvfp4(
    random: np.random.Generator, outputs: int, inputs: int, *, names: tuple[str, str], factor: float
) -> Tensors:
    scale = random.integers(0, 256, (outputs, inputs // 16), dtype=np.uint8)
    scale[scale & 127 == 127] = 0  # replace NaN
    return {
        names[0]: random.integers(0, 256, (outputs, inputs // 2), dtype=np.uint8),
        "weight_scale": scale.view(float8_e4m3fn),
        names[1]: np.array([factor], np.float32),
    }


def nvfp4_rule(tensors: Tensors, *, names: tuple[str, str], divides: bool) -> Array:
    pairs = tensors[names[0]].tolist()
    scales = tensors["weight_scale"].view(np.uint8).tolist()
    factor = tensors[names[1]][0]
    weight = np.empty((len(pairs), 2 * len(pairs[0])), np.float32)
    for o, row in enumerate(pairs):
        for i in range(weight.shape[1]):
            bits = row[i // 2] >> (4 * (i % 2)) & 15
            number = -E2M1[bits - 8] if bits >= 8 else E2M1[bits]
            scale = np.float32(e4m3(scales[o][i // 16]))
            scale = scale / factor if divides else scale * factor
            weight[o, i] = np.float32(number) * scale
    return weight


def compressed_nvfp4() -> Format:
    weights = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor_group",
        "group_size": 16,
        "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn",
    }
    config = compressed(weights, "nvfp4-pack-quantized", weights | {"dynamic": "local"})
    names = ("weight_packed", "weight_global_scale")
    return Format(
        config,
        partial(make_nvfp4, names=names, factor=7000.0),
        partial(nvfp4_rule, names=names, divides=True),
        "static scales of activations are not used",
    )


def modelopt_nvfp4() -> Format:
    config = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "ignore": ["lm_head"],
        "producer": {"name": "modelopt", "version": "0.39.0"},
    }
    names = ("weight", "weight_scale_2")
    return Format(
        config,
        partial(make_nvfp4, names=names, factor=1 / 7000),
        partial(nvfp4_rule, names=names, divides=False),
        "static scales of activations are not used",
    )


_BLOCKS = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [32, 16],
}

FORMATS: dict[str, Format] = {
    "gptq-4": gptq(4),
    "gptq-4-zeros": gptq(4, sym=False),
    "gptq-4-order": gptq(4, order=True),
    "gptq-4-order-zeros-v2": gptq(4, v2=True, sym=False, order=True),
    "gptq-4-rows": gptq(4, -1, sym=False),
    "gptq-8": gptq(8),
    "gptq-8-zeros-v2": gptq(8, v2=True, sym=False),
    "gptq-8-zeros": gptq(8, sym=False),
    "awq": awq(),
    "awq-rows": awq(-1),
    "packed-4-group": ints(4, "group"),
    "packed-4-group-zeros": ints(4, "group", sym=False),
    "packed-4-group-order": ints(4, "group", order=True),
    "packed-4-group-order-zeros": ints(4, "group", order=True, sym=False),
    "packed-4-channel": ints(4, "channel"),
    "packed-4-tensor-zeros": ints(4, "tensor", sym=False),
    "packed-8-group": ints(8, "group"),
    "packed-8-channel": ints(8, "channel"),
    "packed-8-channel-zeros": ints(8, "channel", sym=False),
    "packed-8-tensor": ints(8, "tensor"),
    "int-8-channel": ints(8, "channel", packed=False),
    "int-8-channel-zeros": ints(8, "channel", packed=False, sym=False),
    "int-8-group-zeros": ints(8, "group", packed=False, sym=False),
    "int-8-tensor": ints(8, "tensor", packed=False),
    "int-4-group": ints(4, "group", packed=False),
    "float-tensor": compressed_fp8("tensor"),
    "float-channel": compressed_fp8("channel"),
    "float-group": compressed_fp8("group"),
    "float-block": compressed_fp8("block", "naive-quantized"),
    "fp8-block": fp8(_BLOCKS, "weight_scale_inv", block=(32, 16)),
    "fp8-tensor": fp8(
        {"quant_method": "fp8", "activation_scheme": "dynamic"}, "weight_scale", whole=True
    ),
    "fp8-channel": fp8(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "weight_scale"
    ),
    "nvfp4-packed": compressed_nvfp4(),
    "nvfp4-modelopt": modelopt_nvfp4(),
}


def is_quantized(name: str) -> bool:
    """Return whether the tensor with this name, in Llama's or GPT-2's naming, is quantized."""
    is_projection = re.search(r"_proj(_\w+)?\.weight", name) is not None
    return is_projection or (".c_" in name and name.endswith(".weight"))


def write_quantized(plain: Path, folder: Path, kind: Format, seed: int = 0) -> tuple[Path, Path]:
    """Write a checkpoint with random quantized weights, and a twin with the same weights as floats.

    The sizes and all other weights are those of the checkpoint ``plain``.
    """
    random = np.random.default_rng(seed)
    stored = Tensors()
    twin = Tensors()
    for name, tensor in read_tensors(plain).items():
        if not is_quantized(name):
            stored[name] = twin[name] = tensor
            continue
        transposed = ".c_" in name
        outputs, inputs = tensor.shape[::-1] if transposed else tensor.shape
        made = kind.make(random, outputs, inputs)
        stored |= {f"{name.removesuffix('.weight')}.{key}": each for key, each in made.items()}
        weight = kind.rule(made)
        twin[name] = weight.T if transposed else weight
    for path, tensors in ((folder / "quantized", stored), (folder / "twin", twin)):
        shutil.copytree(plain, path)
        write_tensors(path, tensors)
        align(path / "model.safetensors")
    edit_config(folder / "quantized", quantization_config=kind.config)
    return folder / "quantized", folder / "twin"


def align(path: Path) -> None:
    """Pad a file's header so that its tensors begin at a multiple of 64 bytes.

    On AMD processors, MKL's product of one row has different bits if the weight's address is not a
    multiple of 16.
    """
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    spaces = b" " * (-start % 64)
    path.write_bytes(
        (start - 8 + len(spaces)).to_bytes(8, "little") + data[8:start] + spaces + data[start:]
    )


def write_rounded(plain: Path, folder: Path) -> Path:
    """Write a checkpoint with linear layers rounded to 4 bits, in the format compressed-tensors."""
    shutil.copytree(plain, folder)
    stored = Tensors()
    for name, tensor in read_tensors(plain).items():
        if not is_quantized(name):
            stored[name] = tensor
            continue
        weight = tensor.astype(np.float32).reshape(len(tensor), -1, 32)
        scale = (np.abs(weight).max(2) / 7).astype(bfloat16)
        codes = np.round(weight / scale.astype(np.float32)[:, :, None]).clip(-8, 7) + 8
        stored[f"{name}_packed"] = pack(codes.reshape(tensor.shape), 4, axis=1)
        stored[f"{name}_scale"] = scale
        stored[f"{name}_shape"] = np.array(tensor.shape)
    write_tensors(folder, stored)
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": 32,
    }
    edit_config(folder, quantization_config=compressed(weights, "pack-quantized"))
    return folder


def edit_config(folder: Path, **values: Any) -> None:
    """Change values of ``config.json``; ``None`` removes a value."""
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if v is not None})
    )


def edit(folder: Path, change: Callable[[Tensors], Any]) -> None:
    """Change the tensors of a folder: ``change`` edits a dictionary, or returns a new one."""
    tensors = read_tensors(folder)
    changed = change(tensors)
    write_tensors(folder, changed if isinstance(changed, dict) else tensors)


def read_tensors(folder: Path) -> Tensors:
    """Return copies of the tensors of a checkpoint."""
    checkpoint = Checkpoint(folder)
    return {name: checkpoint.tensor(name).copy() for name in checkpoint}


def write_tensors(folder: Path, tensors: Tensors) -> None:
    """Write a checkpoint's tensors into one file."""
    save_file(
        {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
