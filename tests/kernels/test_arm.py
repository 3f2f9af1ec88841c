"""The kernels of Arm under emulation: matrix products with the bits of this processor's kernels.

The test needs a cross compiler and an emulator (Debian: ``apt install g++-aarch64-linux-gnu
qemu-user``, or ``zig`` as the compiler).
"""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from checkpoint.formats.codes import CODED, some_codes
from emulated_arm import EMULATOR, PROCESSORS, TARGET, find_cross_compiler
from gguf_files import QUANTIZED, STORED
from kernels.test_blocks import INPUTS, blocks
from kernels.test_products import same, some_rows
from pronk.base.arrays import BFLOAT16, FLOAT16, FLOAT32, Array, as_bytes, split_rows
from pronk.checkpoint.formats.matrix import QuantizedMatrix
from pronk.checkpoint.gguf.blocks import BlockMatrix
from pronk.checkpoint.gguf.codebooks import codebook
from pronk.kernels.build import SOURCES, flags_for
from pronk.kernels.library import candidates
from pronk.models.linear import Linear, WeightLayout
from pronk.models.operations import _ACTIVATIONS
from pronk.models.program import Program

BATCHES = [(1, 1), (2, 1), (3, 1), (5, 2), (64, 2)]  # (rows, threads)
OUTPUTS = 37
ACTIVATIONS = [_ACTIVATIONS[name] for name in (None, "silu", "gelu", "gelu_tanh", "relu2")]


COMPILER = find_cross_compiler("musl")
pytestmark = pytest.mark.skipif(
    not COMPILER or EMULATOR is None,
    reason="Arm's kernels are NOT tested here: expected aarch64-linux-gnu-g++ or zig, and "
    "qemu-aarch64, found no such commands",
)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the kernels and ``products.cpp`` to one static program."""
    folder = tmp_path_factory.mktemp("arm")
    source_flags = flags_for(COMPILER, TARGET.source_flags)
    sources = {SOURCES / f"{name}.cpp": flags for name, flags in source_flags.items()}
    sources[Path(__file__).with_name("products.cpp")] = []
    common = [
        "-std=c++17",
        "-O0",
        "-ffp-contract=off",
        "-fno-strict-aliasing",
        "-pthread",
        "-DPRONK_FEW_TILES",
    ]

    def compile_source(source: Path) -> Path:
        out = folder / f"{source.stem}.o"
        command = [
            *COMPILER,
            *common,
            *(flag for flag in sources[source] if flag != "-O3"),
            f"-I{SOURCES}",
        ]
        subprocess.run([*command, "-c", str(source), "-o", str(out)], check=True)
        return out

    with ThreadPoolExecutor(2) as pool:
        objects = [str(out) for out in pool.map(compile_source, sources)]
    subprocess.run(
        [*COMPILER, "-static", "-pthread", *objects, "-o", str(folder / "products")], check=True
    )
    return folder / "products"


def activated(linear: Linear, x: Array, activation: int) -> Array:
    """Return the layer's activated outputs; ``activation``: ``pronk_activation``."""
    program = Program(linear.kernels, linear.in_features, FLOAT32)
    name = next(name for name, number in _ACTIVATIONS.items() if number == activation)
    program.linear(linear, activation=name, to="logits")
    y = np.empty((len(x), linear.out_features), np.float32)
    program.run(None, x, y)
    return y


@pytest.mark.long
@pytest.mark.few(2)
@pytest.mark.parametrize("processor", PROCESSORS)
def test_products_have_the_same_bits(program: Path, processor: str, tmp_path: Path) -> None:
    kernels = candidates(bits="portable")[0]
    weights: list[QuantizedMatrix | BlockMatrix | Array] = [
        blocks(each, OUTPUTS, INPUTS.get(each, 352)) for each in [*QUANTIZED, *STORED]
    ]
    for bits, minima, order in CODED:
        if not order:
            weights += [
                some_codes((OUTPUTS, 192), bits, minima, order, group) for group in (8, 16, 32, 64)
            ]
    weights += [some_rows(OUTPUTS, 1100, dtype, 1) for dtype in (FLOAT32, BFLOAT16, FLOAT16)]
    linears = [Linear(kernels, each, None, WeightLayout(), None) for each in weights]
    cases = bytearray()
    expected = []
    for number, (linear, weight) in enumerate(zip(linears, weights, strict=True)):
        entries = codebook(weight.type) if isinstance(weight, BlockMatrix) else None
        entry_bytes = b"" if entries is None else entries.tobytes()
        for rows, threads in BATCHES:
            activation = ACTIVATIONS[(number + rows) % len(ACTIVATIONS)]
            x = some_rows(rows, linear.in_features, seed=rows)
            data = as_bytes(linear.packed.data)
            cases += (
                bytes(linear.packed.struct)
                + np.array(
                    [data.nbytes, len(entry_bytes), rows, threads, activation], np.int64
                ).tobytes()
            )
            cases += data.tobytes() + entry_bytes + x.tobytes()
            expected.append(activated(linear, x, activation))
    (tmp_path / "cases").write_bytes(cases)
    command = [
        str(EMULATOR),
        "-cpu",
        processor,
        str(program),
        str(tmp_path / "cases"),
        str(tmp_path / "out"),
    ]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    assert run.stdout.strip() == PROCESSORS[processor]
    found = np.fromfile(tmp_path / "out", np.float32)
    parts = split_rows(found, [product.size for product in expected])
    for number, (part, product) in enumerate(zip(parts, expected, strict=True)):
        linear = linears[number // len(BATCHES)]
        (rows, _) = BATCHES[number % len(BATCHES)]
        assert same(part.reshape(product.shape), product), (
            processor,
            rows,
            linear.packed.struct.type,
            linear.in_features,
        )
