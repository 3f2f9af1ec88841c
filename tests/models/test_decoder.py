"""``forward_weights``: number and bytes of the weights that a forward pass reads, by kind of
file.
"""

from math import ceil, prod
from pathlib import Path
from typing import Any

import pytest

from checkpoints import MakeCheckpoint
from gguf_files import convert
from models.test_loader import load
from pronk.base.arrays import BFLOAT16
from pronk.checkpoint.hub.clone_models import tiny_model
from pronk.models.decoder import ForwardWeights, count_parameters, forward_weights
from pronk.models.loader import read_config
from quantized_formats import FORMATS, read_tensors, write_quantized
from tiny_models import kernels

TINY = tiny_model()
# for blocks of 32
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}


def read(path: Path, weights: str = "plain", **options: Any) -> ForwardWeights:
    return forward_weights(load(path, **{"kernels": kernels(), "weights": weights, **options}))


@pytest.mark.parametrize(
    ("family", "options", "unread"),
    [
        ("llama", {}, "embed_tokens"),
        ("llama", {"tie_word_embeddings": True}, None),
        ("qwen3", {}, "embed_tokens"),
        ("gpt2", {}, "wpe"),
    ],
)
def test_a_pass_reads_every_matrix_but_the_embedding(
    checkpoint: MakeCheckpoint, family: str, options: dict[str, bool], unread: str | None
) -> None:
    """A tied head reads the embedding; norms and biases are not counted."""
    folder = checkpoint(family, **options)
    tensors = read_tensors(folder)
    assert unread is None or any(unread in name for name in tensors)
    matrices = {
        name: t
        for name, t in tensors.items()
        if t.ndim > 1 and (unread is None or unread not in name)
    }
    count = sum(t.size for t in matrices.values())
    vectors = sum(t.nbytes for t in tensors.values() if t.ndim == 1)
    assert vectors < 0.04 * 4 * count  # norms and biases are negligible
    packed = read(folder)
    assert (packed.formats, packed.count) == ("float32", count)
    assert 1 <= packed.nbytes / (4 * count) < 1.2  # heads of 8 outputs are padded to 16


@pytest.mark.parametrize(
    ("weights", "kinds", "groups"),
    [
        ("int8", "int8 in groups of 64", {"": (8, 64)}),
        (
            "int4",
            "int4 in groups of 32, int8 in groups of 64",
            {"": (4, 32), "embed_tokens": (8, 64)},
        ),
    ],
)
def test_weights_rounded_while_loading(
    weights: str, kinds: str, groups: dict[str, tuple[int, int]]
) -> None:
    """Groups have whole codes and a 32-bit scale each; the tied head has 8 bits."""
    folder = TINY
    expected = 0
    count = 0
    for name, tensor in read_tensors(folder).items():
        if tensor.ndim == 2:
            outputs, inputs = tensor.shape
            bits, size = next(
                (kind for part, kind in groups.items() if part and part in name), groups[""]
            )
            expected += outputs * ceil(inputs / size) * (size * bits // 8 + 4)
            count += outputs * inputs
    found = read(folder, weights, dtype=BFLOAT16)
    assert found == ForwardWeights(kinds, expected, expected, count)
    assert found.bits == 8 * expected / count < 16 / 1.6


def test_projections_of_several_forms(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """A super-block of 4 bits takes 148 bytes a row, one of 6 bits 212, of which the file has 144
    and 210.
    """
    shape = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64}
    plain = checkpoint("llama", **SIZES | shape)
    options = {"": "Q4_K", "output": "F32"}
    one, other = (
        convert(plain, tmp_path / f"{name}.gguf", options | kinds)
        for name, kinds in (("a", {}), ("b", {"attn_v": "Q6_K"}))
    )
    heads = read_config(plain).num_kv_heads * 64
    layers = read_config(plain).num_layers
    before = read(one)
    found = read(other)
    assert found.count == before.count
    assert found.nbytes - before.nbytes == layers * heads * (212 - 148)
    assert found.floor_bytes - before.floor_bytes == layers * heads * (210 - 144)


@pytest.mark.parametrize("name", ["gptq-4-zeros", "awq", "int-8-channel", "float-channel", "gguf"])
@pytest.mark.filterwarnings("ignore:quantized")
def test_quantized_checkpoints(name: str, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """The number of parameters equals that of the plain checkpoint; the bytes are fewer."""
    plain = checkpoint("llama", **SIZES)
    if name == "gguf":
        path = convert(plain, tmp_path / "a.gguf", "Q4_0")
    else:
        path, _ = write_quantized(plain, tmp_path, FORMATS[name])
    parameters = sum(prod(t.shape) for t in read_tensors(plain).values())
    assert count_parameters(read_config(path)) == parameters
    before = read(plain, dtype=BFLOAT16)
    found = read(path, dtype=BFLOAT16)
    assert found.count == before.count
    assert found.floor_bytes <= found.nbytes
    if name == "float-channel":  # dequantized by the loader
        assert (found.formats, found.nbytes) == (before.formats, before.nbytes)
        assert found.floor_bytes < before.floor_bytes  # the linear layers have 8 of 16 bits
    else:
        bits = 8 if "8" in name else 4
        assert found.formats.startswith(f"int{bits} in groups of ")
        assert found.nbytes < (0.8 if bits == 8 else 0.7) * before.nbytes
