"""Quantized checkpoints of every format: the same logits as those of what they stand for, every key accounted for."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints import MakeCheckpoint
from models import kernels, text_logits
from pronk import LLM, SamplingParams
from pronk.errors import CheckpointError, ConfigError
from pronk.inflate.checkpoint import Shape, inflate
from pronk.model import loader
from pronk.model.decoder import Decoder
from pronk.model.fingerprint import Fingerprint
from pronk.model.linear import Layout, PlainLinear
from pronk.model.loader import load_decoder, read_config
from pronk.quantized.form import Quantized
from quantized_formats import FORMATS, Format, edit_config, gptq, ints, write_quantized

CPU, WEIGHTS = torch.device("cpu"), "model.safetensors"
TEXT = [5, 17, 230, 41, 3, 99, 250, 7, 64, 128, 12, 280]
UP = "model.layers.1.mlp.up_proj"


def load(folder: Path, **options: Any) -> Decoder:
    return load_decoder(folder, read_config(folder), **{"dtype": torch.float32, "device": CPU, **options})


def written(plain: Path, folder: Path, kind: Format) -> tuple[Path, Path]:
    return write_quantized(plain, folder, kind)


def warned(kind: Format) -> Any:
    return pytest.warns(UserWarning, match=kind.warns) if kind.warns else nullcontext()


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_what_the_weights_stand_for(name: str, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    quantized, twin = written(checkpoint("llama"), tmp_path, FORMATS[name])
    with warned(FORMATS[name]):
        found = load(quantized)
    expected, logits = text_logits(load(twin), TEXT), text_logits(found, TEXT)
    assert torch.equal(logits, expected)
    assert expected.std() > 0.1


@pytest.mark.parametrize("family", ["gpt2", "mistral", "qwen2", "qwen3"])
def test_families(family: str, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Biases and matrices that would be stored the other way round; with a tied head."""
    quantized, twin = written(checkpoint(family, tie_word_embeddings=True), tmp_path, gptq(4, sym=False))
    assert torch.equal(text_logits(load(quantized), TEXT), text_logits(load(twin), TEXT))


@pytest.mark.parametrize("name", ["gptq-4-zeros", "packed-4-group", "float-block"])
def test_generating(name: str, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    quantized, twin = written(checkpoint("llama"), tmp_path, FORMATS[name])
    params = SamplingParams(max_tokens=24, logprobs=3)
    with warned(FORMATS[name]):
        found = LLM(quantized, kernels="torch", drafter="autoregressive").generate(TEXT, params)
    expected = LLM(twin, kernels="torch", drafter="autoregressive").generate(TEXT, params)
    assert found.token_ids == expected.token_ids
    assert found.logprobs == expected.logprobs


def test_a_checkpoint_without_the_prefix(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Patterns are for the names that the file has."""
    kind = ints(4, "group")
    quantized, twin = written(checkpoint("llama"), tmp_path, kind)
    edit(quantized, lambda tensors: {name.removeprefix("model."): tensor for name, tensor in tensors.items()})
    config = json.loads(json.dumps(kind.config).replace('["Linear"]', r'["re:layers\\..*_proj$"]'))
    edit_config(quantized, quantization_config=config)
    assert torch.equal(text_logits(load(quantized), TEXT), text_logits(load(twin), TEXT))


@pytest.mark.parametrize(("file", "name"), [("quantize_config.json", "gptq-4"), ("quant_config.json", "awq")])
def test_older_folders(file: str, name: str, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    quantized, twin = written(checkpoint("llama"), tmp_path, FORMATS[name])
    edit_config(quantized, quantization_config=None)
    config = {
        key: value for key, value in FORMATS[name].config.items() if key not in ("quant_method", "checkpoint_format")
    }
    if name == "awq":
        config = {"w_bit": config.pop("bits"), "q_group_size": config.pop("group_size"), **config, "version": "GEMM"}
    (quantized / file).write_text(json.dumps(config))
    assert torch.equal(text_logits(load(quantized), TEXT), text_logits(load(twin), TEXT))
    (quantized / file).write_text("[]")
    with pytest.raises(ConfigError, match=rf"{file}: expected a JSON object"):
        read_config(quantized)


def test_the_other_name_of_the_config(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    kind = ints(8, "channel")
    quantized, twin = written(checkpoint("llama"), tmp_path, kind)
    edit_config(quantized, quantization_config=None, compression_config=kind.config)
    assert torch.equal(text_logits(load(quantized), TEXT), text_logits(load(twin), TEXT))


# What reaches the kernels


class Handed:
    """A factory of linear layers that keeps what it is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.weights: list[Tensor | Quantized] = []
        monkeypatch.setattr(loader, "choose_linear", lambda *_: self.make)

    def make(self, weight: Tensor | Quantized, bias: Tensor | None, layout: Layout) -> PlainLinear:
        self.weights.append(weight)
        return PlainLinear(weight.dequantize() if isinstance(weight, Quantized) else weight, bias)


@pytest.mark.parametrize("name", [name for name, kind in FORMATS.items() if not kind.warns and "order" not in name])
def test_the_kernels_get_codes(
    name: str, checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Projections that share their inputs are one matrix; the head stays as it is."""
    quantized, twin = written(checkpoint("llama"), tmp_path, FORMATS[name])
    handed = Handed(monkeypatch)
    found = load(quantized, kernels=kernels())
    codes = [weight for weight in handed.weights if isinstance(weight, Quantized)]
    assert len(codes) == 4 * len(found.layers)
    assert {weight.bits for weight in codes} == {8 if "8" in name else 4}
    assert len(handed.weights) == len(codes) + 1
    assert isinstance(handed.weights[0], Tensor)
    monkeypatch.undo()
    for ours, theirs in zip(found.layers, load(twin).layers, strict=True):
        for linear in ("qkv", "out", "up", "down"):
            assert torch.equal(getattr(ours, linear).weight, getattr(theirs, linear).weight)


def test_one_order_of_the_inputs_is_kept(
    checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPTQ orders inputs by what they are, so those who share them agree; if not, that is said."""
    quantized, _ = written(checkpoint("llama"), tmp_path, gptq(4, order=True))
    handed = Handed(monkeypatch)
    with pytest.warns(UserWarning, match=r"quantized: 6 matrices that share their inputs .* dequantized to bfloat16"):
        load(quantized, kernels=kernels(), dtype=torch.bfloat16)
    assert sum(isinstance(weight, Quantized) for weight in handed.weights) == 6  # out and down of three layers

    def agree(tensors: dict[str, Tensor]) -> None:
        for layer in range(3):
            attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
            for name in ("k", "v"):
                tensors[f"{attention}.{name}_proj.g_idx"] = tensors[f"{attention}.q_proj.g_idx"].clone()
            tensors[f"{mlp}.gate_proj.g_idx"] = tensors[f"{mlp}.up_proj.g_idx"].clone()

    edit(quantized, agree)
    handed.weights.clear()
    load(quantized, kernels=kernels())
    found = [weight for weight in handed.weights if isinstance(weight, Quantized)]
    assert len(found) == 12
    assert all(weight.order is not None for weight in found)


def test_some_projections_are_not_quantized(
    checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = gptq(4)
    quantized, twin = written(checkpoint("llama"), tmp_path, kind)
    weight = load_file(twin / WEIGHTS)[f"{UP}.weight"]

    def plain(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: each for name, each in tensors.items() if not name.startswith(UP)} | {f"{UP}.weight": weight}

    edit(quantized, plain)
    refuse(quantized, rf"missing tensors: {UP.removeprefix('model.')}.qweight")
    edit_config(quantized, quantization_config=kind.config | {"dynamic": {r"-:.*\.1\.mlp\.up_proj": {}}})
    assert torch.equal(text_logits(load(quantized), TEXT), text_logits(load(twin), TEXT))
    handed = Handed(monkeypatch)
    with pytest.warns(UserWarning, match="1 matrices that share"):
        found = load(quantized, kernels=kernels())
    monkeypatch.undo()
    assert torch.equal(found.layers[1].up.weight, load(twin).layers[1].up.weight)
    assert sum(isinstance(weight, Quantized) for weight in handed.weights) == 11


def test_off_the_cpu_weights_are_dequantized(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """The meta device stands in for a GPU."""
    quantized, _ = written(checkpoint("llama"), tmp_path, gptq(4))
    decoder = load(quantized, device=torch.device("meta"), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in decoder.parameters()} == {torch.bfloat16}


def test_progress_counts_every_byte(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    quantized, _ = written(checkpoint("llama"), tmp_path, gptq(4))
    seen: list[tuple[int, int]] = []
    load(quantized, on_progress=lambda done, total: seen.append((done, total)))
    total = sum(tensor.nbytes for tensor in load_file(quantized / WEIGHTS).values())
    assert {total for _, total in seen} == {total}
    assert seen[-1] == (total, total)


def test_a_fingerprint_sees_codes(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    for number, name in enumerate(("gptq-4", "int-8-channel", "fp8-block")):
        quantized, twin = written(checkpoint("llama"), tmp_path / str(number), FORMATS[name])
        before = Fingerprint.of(quantized)
        assert before != Fingerprint.of(twin)
        edit(
            quantized,
            lambda tensors: next(t for n, t in tensors.items() if UP in n and t.dim() == 2).view(-1)[0].zero_(),
        )
        assert Fingerprint.of(quantized) != before


# What is wrong with a folder


def edit(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
    changed = change(tensors)
    save_file(changed if isinstance(changed, dict) else tensors, folder / WEIGHTS)


def refuse(folder: Path, message: str) -> None:
    with warnings.catch_warnings(), pytest.raises(CheckpointError, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.fixture(scope="module")
def folders(checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Checkpoints that nobody may write into."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = written(checkpoint("llama"), tmp_path_factory.mktemp(name), FORMATS[name])[0]
        return made[name]

    return get


WRONG: list[tuple[str, Callable[[dict[str, Tensor]], Any], str]] = [
    ("gptq-4", lambda t: t.pop(f"{UP}.qzeros"), r"missing tensors: layers.1.mlp.up_proj.qzeros; expected the \d+ "),
    ("gptq-4-order", lambda t: t.pop(f"{UP}.g_idx"), r"missing tensors: layers.1.mlp.up_proj.g_idx"),
    ("awq", lambda t: t.update({f"{UP}.g_idx": torch.zeros(3)}), rf"unexpected tensors: {UP}.g_idx; expected the \d+"),
    ("awq", lambda t: t.update({f"{UP}.weight": torch.zeros(3)}), rf"unexpected tensors: {UP}.weight;"),
    ("packed-4-group", lambda t: t.pop(f"{UP}.weight_shape"), r"missing tensors: layers.1.mlp.up_proj.weight_shape"),
    ("int-8-channel-zeros", lambda t: t.pop(f"{UP}.weight_zero_point"), r"missing tensors: .*.weight_zero_point"),
    ("packed-4-group", lambda t: t.update({"lm_head.weight_packed": torch.zeros(3)}), r"unexpected tensors: lm_head"),
    ("packed-4-group", lambda t: t.update({"model.layers.0.self_attn.k_scale": torch.zeros(1)}), "unexpected .*k_sc"),
    ("packed-4-group", lambda t: t.update({f"{UP}.input_scale2": torch.zeros(1)}), r"unexpected .*input_scale2"),
    ("gptq-4", lambda t: shorten(t, "qweight"), rf"tensor {UP}.qweight: expected shape \[6, 80\] .* found \[5, 80\]"),
    ("gptq-4", lambda t: shorten(t, "scales"), rf"{UP}.scales: expected shape \[3, 80\] from .* found \[2, 80\]"),
    ("awq", lambda t: shorten(t, "qzeros"), r"qzeros: expected shape \[3, 10\] .* found \[2, 10\]"),
    ("packed-4-group", lambda t: shorten(t, "weight_packed"), r"packed: expected shape \[80, 6\] .* found \[79, 6\]"),
    ("packed-8-tensor", lambda t: t.update({f"{UP}.weight_scale": torch.ones(2)}), r"\[\] or \[1\] or .* found \[2\]"),
    ("fp8-block", lambda t: shorten(t, "weight_scale_inv"), r"scale_inv: expected shape \[3, 3\] .* found \[2, 3\]"),
    ("gptq-4", lambda t: retype(t, "qweight", torch.int64), rf"{UP}.qweight: expected the type I32, found I64;"),
    ("gptq-4", lambda t: retype(t, "scales", torch.int32), r"scales: expected float32, .* found I32"),
    ("int-8-channel", lambda t: retype(t, "weight", torch.float16), r"weight: expected the type I8, found F16"),
    ("fp8-block", lambda t: retype(t, "weight", torch.bfloat16), r"weight: expected the type F8_E4M3, found BF16"),
    ("gptq-4", lambda t: t[f"{UP}.scales"].fill_(float("nan")), rf"{UP}: expected finite numbers in scale"),
    ("gptq-4-order", lambda t: t[f"{UP}.g_idx"].fill_(7), rf"{UP}: g_idx: expected 16 inputs in each of"),
]  # fmt: skip


def shorten(tensors: dict[str, Tensor], name: str) -> None:
    tensors[f"{UP}.{name}"] = tensors[f"{UP}.{name}"][:-1].contiguous()


def retype(tensors: dict[str, Tensor], name: str, dtype: torch.dtype) -> None:
    tensors[f"{UP}.{name}"] = tensors[f"{UP}.{name}"].float().to(dtype)


@pytest.mark.parametrize(
    ("name", "change", "message"), WRONG, ids=[f"{name}-{message[:30]}" for name, _, message in WRONG]
)
def test_refused(
    name: str, change: Callable[[dict[str, Tensor]], Any], message: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(folders(name), tmp_path / "model"))
    edit(folder, change)
    refuse(folder, message)


def test_a_plain_checkpoint_that_says_it_is_quantized(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    edit_config(folder, quantization_config=gptq(4).config)
    refuse(folder, r"missing tensors: .* and \d+ more")
    edit_config(folder, quantization_config={"quant_method": "hqq"})
    refuse(
        folder, r"model: quantization_config: expected the quant_method .* found 'hqq'; use a checkpoint in one of them"
    )


def test_scales_of_the_cache_and_of_activations_are_left(folders: Callable[[str], Path], tmp_path: Path) -> None:
    kind = FORMATS["int-8-channel"]
    folder = Path(shutil.copytree(folders("int-8-channel"), tmp_path / "model"))
    expected = text_logits(load(folder), TEXT)
    added = {"model.layers.0.self_attn.k_scale": torch.ones(1), f"{UP}.input_scale": torch.ones(1)}
    edit(folder, lambda tensors: tensors.update(added))
    refuse(folder, "unexpected tensors: model.layers.0.self_attn.k_scale")
    config = json.loads(json.dumps(kind.config).replace('"dynamic": true', '"dynamic": false'))
    edit_config(folder, quantization_config=config | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}})
    with pytest.warns(UserWarning, match=r"model: static scales .*; kv_cache_scheme is not followed"):
        found = load(folder)
    assert torch.equal(text_logits(found, TEXT), expected)


def test_a_quantized_model_is_not_inflated(folders: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"source: expected plain weights, found .*, which is quantized; inflate what"
    ):
        inflate(folders("gptq-4"), tmp_path / "out", Shape(num_layers=6))


MEASURE = """
import ctypes, gc, json, re, sys, torch
from pathlib import Path
from safetensors.torch import save_file
from pronk.model import loader
from pronk.model.families import plan_tensors
from pronk.model.kernels import load_kernels
from pronk.model.linear import PlainLinear
from pronk.quantized.form import Quantized

folder, cpu = Path(sys.argv[1]), torch.device("cpu")
torch.set_num_threads(1)
kept = []

def kilobytes(key):
    return int(re.search(key + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def keep(weight, bias, layout):
    # As kernels would, whose codes are as wide as the file's.
    if isinstance(weight, Quantized):
        packed = torch.empty(weight.shape[0], weight.shape[1] // 2, dtype=torch.uint8)
        for rows in range(0, len(packed), 256):
            codes = weight.codes[rows : rows + 256]
            packed[rows : rows + 256] = codes[:, ::2] | codes[:, 1::2] << 4
        kept.append((packed, weight.scale, weight.minimum))
        weight = torch.empty(1, 1)
    return PlainLinear(weight, bias)

def write(path, **sizes):
    path.mkdir()
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
    config = {"model_type": "llama", "num_attention_heads": 8, "tie_word_embeddings": True, **sizes}
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    tensors = {}
    for part in plan_tensors(loader.read_config(path)):
        for piece in part.pieces:
            name = piece.name.removesuffix(".weight")
            if part.kind != "linear":
                tensors[piece.name] = torch.full(piece.shape, 0.5, dtype=torch.bfloat16)
                continue
            n, k = piece.shape
            tensors[f"{name}.qweight"] = torch.zeros(k // 8, n, dtype=torch.int32)
            tensors[f"{name}.qzeros"] = torch.full((k // 128, n // 8), 0x77777777, dtype=torch.int32)
            tensors[f"{name}.scales"] = torch.ones(k // 128, n, dtype=torch.float16)
    save_file(tensors, path / "model.safetensors")
    return sum(tensor.nbytes for tensor in tensors.values())

def load(path):
    loader.load_decoder(path, loader.read_config(path), dtype=torch.bfloat16, device=cpu, kernels=load_kernels())

loader.choose_linear = lambda *_: keep
small = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
large = {"vocab_size": 64, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
write(folder / "small", **small)
size = write(folder / "large", **large)
load(folder / "small")
gc.collect()
ctypes.CDLL(None).malloc_trim(0)  # what writing has left would hide what loading takes
Path("/proc/self/clear_refs").write_text("5")  # start the high-water mark anew
before = kilobytes("VmRSS")
load(folder / "large")
print((kilobytes("VmHWM") - before) * 1024 / size)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's high-water mark")
def test_memory_of_loading(tmp_path: Path) -> None:
    """The peak, pages of the mapped file included, is at most 1.15 times the weights in the file."""
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    ratio = float(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)
    assert 0.5 < ratio < 1.15
