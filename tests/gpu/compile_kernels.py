"""Compile the kernels for a GPU of compute capability 9.0, which needs no GPU.

A program of its own, because Triton's interpreter replaces the compiler in the process of the
tests. It writes one JSON object: for each kernel, the shared memory and counts of instructions.
"""

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pronk.gpu import attention, choose, gemm, rows, walk
from pronk.gpu.launch import OPTIONS

TARGET = GPUTarget("cuda", 90, 32)
INSTRUCTIONS = ("wgmma", "cp.async", "fma.rn.f64", "div.rn.f32", "mma.sync")

PRODUCT = {
    "scale": None,
    "minimum": None,
    "factor": None,
    "minimum_factor": None,
    "FORMAT": "plain",
    "GROUP": 0,
    "ZERO": 0,
    "HAS_MINIMUM": False,
    "HAS_FACTOR": False,
    "TILE_ROWS": gemm.TILE_ROWS,
    "TILE_OUTPUTS": 128,
    "INPUT_BLOCK": 128,
    "SPLIT_BLOCKS": 4,
    "UPCASTS": False,
    "num_stages": gemm.NUM_STAGES[2],
}
Q4_K = {"FORMAT": "int4", "GROUP": 32, "HAS_MINIMUM": True, "HAS_FACTOR": True}
PARAMETERS = ("scale", "minimum", "factor", "minimum_factor")
HEADS = {"SIZE": 128, "SIZE_BLOCK": 128, "SPLIT": attention.SPLIT, "HAS_WINDOW": True}
ATTENTION = HEADS | {
    "HAS_CAP": True,
    "GROUP": 4,
    "GROUP_BLOCK": 16,
    "PAGE": 16,
    "KEY_BLOCK": attention.KEY_BLOCK,
    "UPCASTS": False,
    "num_stages": attention.NUM_STAGES,
}
LAYOUT = "*i32 *i32 *i32 *i32 i32 *i32 *i32 i32"

# Kernel, types of the arguments that are not constants, and the constants. Triton's option
# ``num_stages`` is among these, if the package does not leave it to Triton.
KERNELS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "product": (gemm._multiply_tile, "*bf16 *bf16 *fp32 i32 i32 i32 i32", PRODUCT),
    "product of float32": (
        gemm._multiply_tile,
        "*fp32 *fp32 *fp32 i32 i32 i32 i32",
        PRODUCT | {"num_stages": gemm.NUM_STAGES[4]},
    ),
    "product of Q4_K": (
        gemm._multiply_tile,
        "*bf16 *u8 *u8 *u8 *fp16 *fp16 *fp32 i32 i32 i32 i32",
        {name: value for name, value in (PRODUCT | Q4_K).items() if name not in PARAMETERS},
    ),
    "splits": (
        gemm._add_splits,
        "*fp32 *bf16 *bf16 i32 i32",
        {"NUM_SPLITS": 8, "HAS_BIAS": True, "BLOCK": 1024},
    ),
    "attention": (
        attention._attend_split,
        f"*bf16 *bf16 *bf16 i32 {LAYOUT} *fp32 *fp32 i32 fp32 fp32 i32",
        ATTENTION,
    ),
    "attention in float32": (
        attention._attend_split,
        f"*fp32 *fp32 *fp32 i32 {LAYOUT} *fp32 *fp32 i32 fp32 fp32 i32",
        ATTENTION,
    ),
    "combination": (
        attention._combine_splits,
        "*fp32 *fp32 *i32 *fp32 *bf16 i32 i32 i32",
        HEADS | {"HEADS": 32, "HEADS_BLOCK": 32, "HAS_SINKS": True},
    ),
    "norm": (rows._normalize, "*bf16 *fp32 *bf16 i32 i32 fp32", {"ROWS": 1, "BLOCK": 4096}),
    "gate": (rows._gate, "*bf16 *bf16 i32 i32", {"ACTIVATION": "silu", "BLOCK": 1024}),
    "rotation": (
        rows._rotate,
        "*bf16 *bf16 *bf16 *bf16 i32 *i32 *i32 *fp32 *fp32 *fp32 fp32 i32",
        {"QUERIES": 32, "KEYS": 8, "SIZE": 128, "DIM": 128}
        | {"HAS_NORM": True, "PAIRS": 32, "BLOCK": 128},
    ),
    "choice": (choose._choose_in_block, "*fp32 *i64 *fp32 *fp64 *i32 i32", {"BLOCK": 1024}),
    "choice of blocks": (choose._choose_block, "*fp64 *i32 *i32 i32", {"BLOCK": 128}),
    "scores": (
        choose._score,
        "*fp32 *i64 *fp32 *i32 *fp32 i32",
        {"HAS_IDS": True, "BLOCK": 1024},
    ),
    "walk": (walk._walk, "*i32 *i32 *i32 *i32 i32", {"BLOCK": 128}),
}
# Integers that are multiples of 16 in all models, which lets loads be wide.
ALIGNED = ("num_inputs", "stride")


def compile_kernel(kernel: Any, types: str, constants: dict[str, Any]) -> dict[str, int]:
    """Return the shared memory of a kernel in bytes, and counts of instructions."""
    constants = dict(constants)
    options = {"num_stages": constants.pop("num_stages", 3), **OPTIONS}
    others = iter(types.split())
    signature = {
        name: "constexpr" if name in constants else next(others) for name in kernel.arg_names
    }
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, type_) in enumerate(signature.items())
        if type_.startswith("*") or name in ALIGNED
    }
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=values, attrs=aligned)
    made = triton.compile(source, target=TARGET, options=options)
    counts = {name: made.asm["ptx"].count(name) for name in INSTRUCTIONS}
    return {"shared": made.metadata.shared, **counts}


if __name__ == "__main__":
    sys.stdout.write(json.dumps({name: compile_kernel(*each) for name, each in KERNELS.items()}))
