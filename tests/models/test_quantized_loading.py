"""Quantized checkpoints: logits equal those of ``twin``, a plain checkpoint of dequantized
weights.
"""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from checkpoints import MakeCheckpoint
from gguf_files import decode
from models.peak_memory import NEEDS_LINUX, peak
from models.test_loader import load
from oracle import DenseModel, dense_logits, to_tensor
from pronk import LLM, SamplingParams
from pronk.base.arrays import BFLOAT16, Array
from pronk.base.errors import CheckpointError
from pronk.checkpoint.formats.matrix import QuantizedMatrix
from pronk.checkpoint.gguf.blocks import BlockMatrix
from pronk.models import loader
from pronk.models.decoder import Decoder
from pronk.models.linear import AnyWeight, Linear, Norm, WeightLayout
from pronk.models.loader import Fingerprint
from quantized_formats import (
    FORMATS,
    Format,
    edit,
    edit_config,
    gptq,
    ints,
    read_tensors,
    write_quantized,
)
from tiny_models import kernels, text_logits

TEXT = [5, 17, 230, 41, 3, 99, 250, 7, 64, 128, 12, 280]
UP = "model.layers.1.mlp.up_proj"


def warned(kind: Format) -> Any:
    return pytest.warns(UserWarning, match=kind.warns) if kind.warns else nullcontext()


@pytest.mark.few(12)
@pytest.mark.parametrize("name", FORMATS)
def test_logits_equal_those_of_dequantized_weights(
    name: str, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    quantized, twin = write_quantized(checkpoint("llama"), tmp_path, FORMATS[name])
    with warned(FORMATS[name]):
        found = load(quantized)
    expected = text_logits(load(twin), TEXT)
    logits = text_logits(found, TEXT)
    assert np.array_equal(logits, expected)
    assert expected.std() > 0.1


@pytest.mark.parametrize("family", ["gpt2", "mistral", "qwen2", "qwen3"])
def test_families(family: str, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Other families have biases, transposed matrices (GPT-2) and tied heads."""
    quantized, twin = write_quantized(
        checkpoint(family, tie_word_embeddings=True), tmp_path, gptq(4, sym=False)
    )
    assert np.array_equal(text_logits(load(quantized), TEXT), text_logits(load(twin), TEXT))


@pytest.mark.parametrize(
    "name", ["gptq-4-zeros", "awq", "gptq-4-order", "int-8-channel", "nvfp4-packed"]
)
def test_draft_tokens_change_no_bit(name: str, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    quantized, _ = write_quantized(checkpoint("llama"), tmp_path, FORMATS[name])
    if "order" in name:
        edit(quantized, agree)
    with warned(FORMATS[name]):
        llm = LLM(quantized, kernels=kernels().name, drafter="autoregressive", budget="all")
    params = SamplingParams(max_tokens=32, logprobs=3)
    plain = llm.generate(TEXT, params)
    drafted = llm.generate(TEXT, params, drafter="recycling")
    assert drafted.token_ids == plain.token_ids
    assert drafted.logprobs == plain.logprobs
    assert drafted.stats.drafted > 0


def test_names_without_the_prefix_model(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Patterns of the config match the tensor names in the file, here without ``model.``."""
    kind = ints(4, "group")
    quantized, twin = write_quantized(checkpoint("llama"), tmp_path, kind)
    edit(
        quantized,
        lambda tensors: {name.removeprefix("model."): tensor for name, tensor in tensors.items()},
    )
    config = json.loads(json.dumps(kind.config).replace('["Linear"]', r'["re:layers\\..*_proj$"]'))
    edit_config(quantized, quantization_config=config)
    assert np.array_equal(text_logits(load(quantized), TEXT), text_logits(load(twin), TEXT))


class RecordingFactory:
    """Replacement of ``choose_linear`` that records the weight of each linear layer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.weights: list[AnyWeight] = []
        monkeypatch.setattr(loader, "choose_linear", lambda *_: self.make)

    def make(self, weight: AnyWeight, bias: Array | None, layout: WeightLayout) -> Linear:
        self.weights.append(weight)
        return Linear(kernels(), weight, bias, layout, None)


@pytest.mark.few(8)
@pytest.mark.parametrize(
    "name",
    [name for name, kind in FORMATS.items() if "bf" not in kind.warns and "order" not in name],
)
def test_the_kernels_get_codes(
    name: str, checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels get quantized matrices, one for all projections with the same input; the head is
    plain.
    """
    quantized, twin = write_quantized(checkpoint("llama"), tmp_path, FORMATS[name])
    factory = RecordingFactory(monkeypatch)
    with warned(FORMATS[name]):
        found = load(quantized, kernels=kernels())
    codes = [weight for weight in factory.weights if isinstance(weight, QuantizedMatrix)]
    assert len(codes) == sum(len(layer.qkv.parts) + 3 for layer in found.layers)
    # A per-tensor zero point may be the middle of the codes; that matrix has no minima and is not
    # stacked with others.
    assert "tensor-zeros" in name or len(codes) == 4 * len(found.layers)
    assert {weight.bits for weight in codes} == {8 if "8" in name or "nvfp4" in name else 4}
    assert len(factory.weights) == len(codes) + 1
    assert isinstance(factory.weights[0], np.ndarray)
    monkeypatch.undo()
    for ours, theirs in zip(found.layers, load(twin).layers, strict=True):
        for linear in ("qkv", "out", "up", "down"):
            weight = np.concatenate([part.packed.unpack() for part in getattr(ours, linear).parts])
            assert np.array_equal(weight, getattr(theirs, linear).packed.unpack())


def dequantized(matrix: BlockMatrix) -> Array:
    """Return the weights of blocks by llama.cpp's own dequantization, the rows of each head in
    order.
    """
    weights = []
    for part in matrix.parts:
        weight = decode(matrix.type, part.stored)
        if part.heads:
            weight = (
                weight.reshape(part.heads, -1, 2, matrix.inputs)
                .swapaxes(1, 2)
                .reshape(weight.shape)
            )
        weights.append(weight)
    return np.concatenate(weights)


class Rounded(nn.Linear):
    """The kernels' product by torch: inputs are rounded to 8 bits in the groups of a quantized
    weight.
    """

    def __init__(self, weight: AnyWeight, bias: Array | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.group = 0
        order = None
        if isinstance(weight, BlockMatrix):
            self.group = 256 if weight.type.endswith("K") else 32
            values = dequantized(weight)
        elif isinstance(weight, QuantizedMatrix):
            self.group = weight.group
            values = weight.dequantize()
            order = weight.order
        else:
            values = weight
        super().__init__(self.in_features, self.out_features, bias=False, device="meta")
        self.weight = nn.Parameter(to_tensor(values), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(to_tensor(bias), requires_grad=False)
        self.order = torch.arange(self.in_features) if order is None else torch.from_numpy(order)

    @property
    def parts(self) -> "tuple[Rounded]":
        return (self,)

    def forward(self, x: Tensor) -> Tensor:
        if not self.group:
            return super().forward(x)
        grouped = pad(x[:, self.order], (0, -self.in_features % self.group)).unflatten(
            1, (-1, self.group)
        )
        step = grouped.abs().amax(-1, keepdim=True) / 127
        rounded = ((grouped / step).round() * step).flatten(1)[:, : self.in_features]
        return super().forward(torch.empty_like(x).index_copy_(1, self.order, rounded))


class Stacked(nn.Module):
    """Layers with the same input and concatenated outputs."""

    def __init__(self, parts: Sequence[Rounded]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


def dense_model(decoder: Decoder) -> DenseModel:
    """Return the oracle with the norms of a decoder, and with its linear layers, which are
    :class:`Rounded`.
    """
    model = DenseModel(decoder.config)
    embedding = (
        decoder.embedding if len(decoder.embedding) else decoder.table.weight.detach().numpy()
    )
    model.embedding = nn.Parameter(to_tensor(embedding).float(), requires_grad=False)
    model.head = decoder.head
    load_norm(model.norm, decoder.norm)
    for own, layer in zip(decoder.layers, model.layers, strict=True):
        for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm"):
            if getattr(own, name) is not None:
                load_norm(getattr(layer, name), getattr(own, name))
        for name in ("qkv", "out", "up", "down"):
            setattr(layer, name, Stacked(getattr(own, name).parts))
    return model


def load_norm(module: nn.Module, norm: Norm) -> None:
    module.weight = nn.Parameter(to_tensor(norm.weight), requires_grad=False)


def assert_explained(
    folder: Path, found: Array, monkeypatch: pytest.MonkeyPatch, most: float = 0.003
) -> None:
    """Check that 8-bit rounding of inputs explains how ``found`` differs from dequantized weights.

    The tolerance ``most`` (of the standard deviation) allows for inputs that are rounded to a
    neighbouring code.
    """
    monkeypatch.setattr(
        loader, "choose_linear", lambda *_: lambda weight, bias, _: Rounded(weight, bias)
    )
    kept = load(folder, kernels=kernels())
    monkeypatch.undo()
    expected = dense_logits(dense_model(kept), TEXT)
    assert (found - expected).std() < most * expected.std()


@pytest.mark.parametrize(
    "name", ["gptq-4", "gptq-4-zeros", "gptq-4-order", "awq", "packed-4-channel", "int-8-tensor"]
)
def test_logits_of_the_kernels(
    name: str, checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized, twin = write_quantized(checkpoint("llama"), tmp_path, FORMATS[name])
    if "order" in name:
        edit(quantized, agree)
    found = text_logits(load(quantized, kernels=kernels()), TEXT)
    assert_explained(quantized, found, monkeypatch)
    if name != "gptq-4-order":  # agree() has changed only the quantized checkpoint
        plain = text_logits(load(twin), TEXT)
        assert 0.003 * plain.std() < (found - plain).std() < 0.1 * plain.std()


def agree(tensors: dict[str, Array]) -> None:
    """Give all projections with the same inputs the same input order."""
    agree_on_gates(tensors)
    for layer in range(3):
        attention = f"model.layers.{layer}.self_attn"
        for other in "kv":
            tensors[f"{attention}.{other}_proj.g_idx"] = tensors[f"{attention}.q_proj.g_idx"].copy()


def agree_on_gates(tensors: dict[str, Array]) -> None:
    for layer in range(3):
        mlp = f"model.layers.{layer}.mlp"
        tensors[f"{mlp}.gate_proj.g_idx"] = tensors[f"{mlp}.up_proj.g_idx"].copy()


def test_one_order_of_the_inputs_is_kept(
    checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes are dequantized with a warning if the halves of a gated matrix differ in input
    order.
    """
    quantized, _ = write_quantized(checkpoint("llama"), tmp_path, gptq(4, order=True))
    factory = RecordingFactory(monkeypatch)
    with pytest.warns(
        UserWarning,
        match="quantized: 3 stacked matrices are dequantized to bfloat16: their parts",
    ):
        load(quantized, kernels=kernels(), dtype=BFLOAT16)
    # all but gated matrices
    assert sum(isinstance(weight, QuantizedMatrix) for weight in factory.weights) == 15
    edit(quantized, agree)
    factory.weights.clear()
    load(quantized, kernels=kernels())
    found = [weight for weight in factory.weights if isinstance(weight, QuantizedMatrix)]
    assert len(found) == 12
    assert all(weight.order is not None for weight in found)


def test_some_projections_are_not_quantized(
    checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = gptq(4)
    quantized, twin = write_quantized(checkpoint("llama"), tmp_path, kind)
    weight = read_tensors(twin)[f"{UP}.weight"]

    def plain(tensors: dict[str, Array]) -> dict[str, Array]:
        return {name: each for name, each in tensors.items() if not name.startswith(UP)} | {
            f"{UP}.weight": weight
        }

    edit(quantized, plain)
    with pytest.raises(
        CheckpointError, match=rf"missing tensors: {UP.removeprefix('model.')}.qweight"
    ):
        load(quantized)
    edit_config(
        quantized, quantization_config=kind.config | {"dynamic": {r"-:.*\.1\.mlp\.up_proj": {}}}
    )
    assert np.array_equal(text_logits(load(quantized), TEXT), text_logits(load(twin), TEXT))
    factory = RecordingFactory(monkeypatch)
    with pytest.warns(UserWarning, match="1 stacked matrices are dequantized"):
        found = load(quantized, kernels=kernels())
    monkeypatch.undo()
    assert np.array_equal(
        found.layers[1].up.packed.unpack(), load(twin).layers[1].up.packed.unpack()
    )
    assert sum(isinstance(weight, QuantizedMatrix) for weight in factory.weights) == 11


def test_fingerprints_depend_on_codes(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    def zero_a_code(tensors: dict[str, Array]) -> None:
        next(tensor for name, tensor in tensors.items() if UP in name and tensor.ndim == 2)[
            0, 0
        ] = 0

    for number, name in enumerate(("gptq-4", "int-8-channel", "fp8-block")):
        quantized, twin = write_quantized(
            checkpoint("llama"), tmp_path / str(number), FORMATS[name]
        )
        before = Fingerprint.of(quantized)
        assert before != Fingerprint.of(twin)
        edit(quantized, zero_a_code)
        assert Fingerprint.of(quantized) != before


ROUNDED = """
large = {"vocab_size": 50_000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8}

def make(shape):
    return np.random.default_rng(0).standard_normal(shape, np.float32).astype(BFLOAT16)

def write(path, **sizes):
    return write_plain(path, make, tie_word_embeddings=True, **sizes)

def load(path):
    config, by = loader.read_config(path), load_kernels()
    return loader.load_decoder(path, config, dtype=BFLOAT16, kernels=by, weights=sys.argv[2])

def size(made, written):
    return forward_weights(made).nbytes
"""
CODES = """
large = {"vocab_size": 64, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
kept = []

def keep(weight, bias, layout):
    # The codes of the kernels have the width of the file's codes.
    if isinstance(weight, QuantizedMatrix):
        packed = np.empty((weight.shape[0], weight.shape[1] // 2), np.uint8)
        for rows in range(0, len(packed), 256):
            codes = weight.codes[rows : rows + 256]
            packed[rows : rows + 256] = codes[:, ::2] | codes[:, 1::2] << 4
        kept.append((packed, weight.scale, weight.minimum))
    else:
        kept.append(weight)
    return type("Linear", (), {})()

def write(path, **sizes):
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
    tensors = {}
    for part, piece in begin(path, tie_word_embeddings=True, quantization_config=quantization, **sizes):
        name = piece.name.removesuffix(".weight")
        if part.kind != "linear":
            tensors[piece.name] = np.full(piece.shape, 0.5, BFLOAT16)
            continue
        n, k = piece.shape
        tensors[f"{name}.qweight"] = np.zeros((k // 8, n), np.int32)
        tensors[f"{name}.qzeros"] = np.full((k // 128, n // 8), 0x77777777, np.int32)
        tensors[f"{name}.scales"] = np.ones((k // 128, n), np.float16)
    save_file(tensors, path / "model.safetensors")
    return sum(tensor.nbytes for tensor in tensors.values())

def load(path):
    by = load_kernels()
    loader.load_decoder(path, loader.read_config(path), dtype=BFLOAT16, kernels=by)

def size(made, written):
    return written

loader.choose_linear = lambda *_: keep
"""


@pytest.mark.slow  # test_memory_of_loading is the same for blocks
@NEEDS_LINUX
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_memory_of_rounding(weights: str, tmp_path: Path) -> None:
    """The peak is at most 1.15 times the kept weights; the vocabulary is large."""
    assert 0.5 < peak(ROUNDED, tmp_path, weights) < 1.15


@NEEDS_LINUX
def test_memory_of_loading(tmp_path: Path) -> None:
    """The peak is at most 1.15 times the weights in the file.

    The minimum of three runs counts: the system reads pages ahead, which adds up to 10 % beside
    other processes.
    """
    ratios = list[float]()
    for turn in range(3):
        (folder := tmp_path / str(turn)).mkdir()
        ratios.append(peak(CODES, folder))
        if ratios[-1] < 1.15:
            break
    assert 0.5 < min(ratios) < 1.15
