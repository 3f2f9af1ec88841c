"""Loading of checkpoints: every tensor is used or reported, and each bad folder gives an error of
one line.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from checkpoints import MakeCheckpoint
from dequantized import DequantizingPlacer
from models.peak_memory import NEEDS_LINUX, peak
from pronk.base.arrays import BFLOAT16, FLOAT8, FLOAT16, FLOAT32, Array, DType
from pronk.base.errors import CheckpointError
from pronk.kernels.library import Kernels
from pronk.kernels.weights import PackedMatrix
from pronk.models import loader
from pronk.models.linear import WeightLayout
from pronk.models.loader import load_decoder, read_config
from pronk.models.placer import WeightPlacer
from quantized_formats import FORMATS, edit, read_tensors, write_quantized
from tiny_models import kernels as best

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(checkpoint: MakeCheckpoint, tmp_path: Path) -> Path:
    """Return a checkpoint that a test may damage."""
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))


@pytest.fixture
def sharded(checkpoint: MakeCheckpoint, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint("llama", shard_size="40KB"), tmp_path / "model"))


def load(
    folder: Path, *, kernels: Kernels | None = None, dtype: DType = FLOAT32, **options: Any
) -> Any:
    """Load a model for the kernels; without ``kernels``, with dequantized weights."""
    placer = DequantizingPlacer if kernels is None else WeightPlacer
    with patch.object(loader, "WeightPlacer", placer):
        return load_decoder(
            folder, read_config(folder), dtype=dtype, kernels=kernels or best(), **options
        )


def refuse(folder: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


NORM = "model.layers.0.input_layernorm.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"
HEAD = "lm_head.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop(QUERY),
            r"missing tensors: layers.1.self_attn.q_proj.weight; expected the 30 .* found 29",
        ),
        (
            lambda t: [t.pop(name) for name in list(t) if "layers.2" in name],
            r"missing tensors: .* and 6 more; expected the 30 tensors .* found 21",
        ),
        (lambda t: t.pop(HEAD), r"missing tensors: lm_head.weight"),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.zeros(48, np.float32)}),
            (
                r"unexpected tensors: model.layers.0.self_attn.q_proj.bias; "
                r"expected the 30 .* found 31"
            ),
        ),
        (
            lambda t: t.update({"norm.weight": np.zeros(48, np.float32)}),
            r"expected one tensor norm.weight, found two: ",
        ),
        *(
            (
                lambda t, shape=shape: t.update({QUERY: np.zeros(shape, np.float32)}),
                (
                    rf"{QUERY}: expected shape \[48, 48\] from config.json, found "
                    rf"\[{', '.join(map(str, shape))}\]"
                ),
            )
            for shape in ((48,), (48, 47), (24, 96), (48, 48, 1))
        ),
        *(
            (
                lambda t, dtype=dtype: t.update({NORM: np.zeros(48, dtype)}),
                rf"tensor {NORM}: expected float32, float16 or bfloat16 .*found {name}; convert",
            )
            for dtype, name in ((np.int8, "I8"), (FLOAT8, "F8_E4M3"), (np.float64, "F64"))
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_tensors_that_do_not_fit(
    change: Callable[[dict[str, Array]], object], message: str, folder: Path
) -> None:
    edit(folder, change)
    refuse(folder, message)


def test_tied_head_must_equal_the_embedding(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = Path(
        shutil.copytree(checkpoint("llama", tie_word_embeddings=True), tmp_path / "model")
    )
    edit(folder, lambda tensors: tensors.update({HEAD: tensors["model.embed_tokens.weight"] + 1}))
    refuse(
        folder,
        r"expected lm_head.weight to equal model.embed_tokens.weight.*set tie_word_embeddings to "
        r"false",
    )
    edit(folder, lambda tensors: tensors.update({HEAD: np.zeros((2, 48), np.float32)}))
    refuse(folder, r"tensor lm_head.weight: expected shape \[300, 48\] .*found \[2, 48\]")


def test_truncated_and_damaged_files(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    for size in (0, 5, 100, len(content) // 2, len(content) - 1):
        (folder / WEIGHTS).write_bytes(content[:size])
        refuse(
            folder,
            rf"expected a complete safetensors file, found a truncated or damaged one \({size} "
            r"bytes: ",
        )
    (folder / WEIGHTS).write_bytes(b"\xff" * 5000)
    refuse(folder, r"found a truncated or damaged one")


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "model.ckpt"]
)
def test_pickle_is_refused(name: str, folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / name)
    refuse(
        folder,
        rf"expected model.safetensors, found {name}; pickle .* convert the checkpoint to "
        r"safetensors",
    )


def test_no_weights(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "other.safetensors")
    refuse(
        folder,
        r"expected model.safetensors or model.safetensors.index.json, found only other.safetensors",
    )
    (folder / "other.safetensors").unlink()
    refuse(folder, r"found no safetensors file")


def test_missing_shard(sharded: Path) -> None:
    shard = max(sharded.glob("model-*.safetensors"))
    shard.unlink()
    refuse(sharded, rf"expected the \d+ shards that {INDEX} lists, found no {shard.name}")


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/hostname"])
def test_shard_outside_the_folder(name: str, sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"][QUERY] = name
    (sharded / INDEX).write_text(json.dumps(index))
    refuse(sharded, rf"found no {name}")


@pytest.mark.parametrize(
    "name", ["", ".", "a\0b", "\ud800", "a\nb", "x" * 300, "x" * 5000, "/" * 5000], ids=repr
)
def test_a_name_that_no_shard_has(name: str, sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"][QUERY] = name
    (sharded / INDEX).write_text(json.dumps(index))
    refuse(sharded, rf"expected the \d+ shards that {INDEX} lists, found no .*; download it again")


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", INDEX])
def test_json_files_have_limits(file: str, sharded: Path) -> None:
    path = sharded / file
    document = json.loads(path.read_text()) if path.is_file() else {}
    for depth in (100, 300, *range(900, 1000, 10)):
        path.write_text(json.dumps(document)[:-1] + ', "x": ' + "[" * depth + "]" * depth + "}")
        refuse(
            sharded,
            f"{file}: expected (at most 100 nested brackets, found more|JSON, found too many)",
        )
    with path.open("wb") as stream:
        stream.truncate(1 << 40)  # without blocks on the disk
    refuse(
        sharded,
        f"{file}: expected at most 16 MiB of JSON, found more; restore the file from its source",
    )


def test_the_header_of_safetensors_has_a_limit(folder: Path) -> None:
    size = 17 << 20
    (folder / WEIGHTS).write_bytes(size.to_bytes(8, "little") + b"{" + b" " * (size - 2) + b"}")
    refuse(folder, f"a header of {size} bytes, of which at most 16 MiB are read")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {"a": 1}}'])
def test_damaged_index(text: str, sharded: Path) -> None:
    (sharded / INDEX).write_text(text)
    refuse(sharded, rf"{INDEX}: expected")


def test_leftover_shards(sharded: Path) -> None:
    first, second = sorted(sharded.glob("model-*.safetensors"))[:2]
    save_file(load_file(first) | load_file(second), second)
    refuse(sharded, r"expected tensor .* in one file, found it in two")


@pytest.mark.parametrize("name", ["llama", "gpt2", "gptq-4"])
def test_progress_counts_every_byte(name: str, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    if name in FORMATS:
        folder, _ = write_quantized(checkpoint("llama"), tmp_path, FORMATS[name])
    else:
        folder = checkpoint(name, save_dtype=torch.bfloat16)
    seen: list[tuple[int, int]] = []
    load(folder, kernels=best(), on_progress=lambda done, total: seen.append((done, total)))
    total = sum(tensor.nbytes for tensor in read_tensors(folder).values())
    assert {total for _, total in seen} == {total}
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (total, total)


def test_dtypes_and_layouts_of_loaded_weights(checkpoint: MakeCheckpoint) -> None:
    folder = checkpoint("gpt2", save_dtype=torch.float16)
    decoder = load(folder, dtype=BFLOAT16, kernels=best())
    assert decoder.embedding.dtype == decoder.positions.dtype == FLOAT16, (
        "tables keep the dtype of the file"
    )
    for numbers in (decoder.norm.weight, decoder.layers[0].mlp_norm.bias):
        assert numbers.dtype == FLOAT32
        assert np.array_equal(numbers, numbers.astype(BFLOAT16)), (
            "norms are rounded to the loaded dtype"
        )
    layer = decoder.layers[0]
    for linear, layout in (
        (layer.qkv, WeightLayout(unit=12, several=True)),
        (layer.out, WeightLayout()),
        (layer.up, WeightLayout()),
        (layer.down, WeightLayout()),
        (decoder.head, WeightLayout(head=True)),
    ):
        assert isinstance(linear.packed, PackedMatrix)
        assert linear.layout == layout
        assert linear.packed.data.dtype == BFLOAT16
    assert decoder.kernels is best()
    assert load(checkpoint("llama"), kernels=best()).layers[0].up.layout == WeightLayout(gated=True)


def test_a_change_of_a_loaded_weight_does_not_change_the_file(folder: Path) -> None:
    before = (folder / WEIGHTS).read_bytes()
    load(folder).embedding[...] = 0
    assert (folder / WEIGHTS).read_bytes() == before


MEASURE = """
dtype = DTYPES[sys.argv[2]]
by = load_kernels()
large = {"vocab_size": 4000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8}

def write(path, **sizes):
    return write_plain(path, lambda shape: np.full(shape, 0.5, BFLOAT16), **sizes)

def load(path):
    return loader.load_decoder(path, loader.read_config(path), dtype=dtype, kernels=by)

def size(made, written):
    return written * dtype.itemsize
"""


@NEEDS_LINUX
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_memory_of_loading(dtype: str, tmp_path: Path) -> None:
    """The peak is at most 1.2 times the weights in the loaded dtype."""
    assert 0.5 < peak(MEASURE, tmp_path, dtype) < 1.2


def test_a_router_is_not_rounded(checkpoint: MakeCheckpoint) -> None:
    """In a bfloat16 model, the router keeps the file's weights and bias; other biases are
    rounded.
    """
    folder = checkpoint("gpt_oss")
    tensors = read_tensors(folder)
    layer = load(folder, kernels=best(), dtype=BFLOAT16).layers[0]
    router = layer.router.packed
    bias = tensors["model.layers.0.mlp.router.bias"]
    assert router.format == "float32"
    assert not np.array_equal(bias.astype(BFLOAT16).astype(FLOAT32), bias)
    assert np.array_equal(router.bias[: len(bias)], bias)
    bias = tensors["model.layers.0.self_attn.o_proj.bias"]
    assert np.array_equal(layer.out.packed.bias[: len(bias)], bias.astype(BFLOAT16).astype(FLOAT32))
