"""Folders of quantized checkpoints: errors of one line for missing, unexpected and wrong
tensors.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import DTypeLike

from checkpoints import MakeCheckpoint
from models.test_loader import load, refuse
from models.test_quantized_loading import TEXT, UP, warned
from pronk.base.arrays import BFLOAT16, Array
from pronk.base.errors import ConfigError
from pronk.models.loader import read_config
from quantized_formats import FORMATS, edit, edit_config, gptq, ints, write_quantized
from tiny_models import text_logits


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("quantize_config.json", "gptq-4"),
        ("quant_config.json", "awq"),
        ("hf_quant_config.json", "nvfp4-modelopt"),
    ],
)
def test_older_folders(file: str, name: str, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    quantized, twin = write_quantized(checkpoint("llama"), tmp_path, FORMATS[name])
    edit_config(quantized, quantization_config=None)
    config = {
        k: v
        for k, v in FORMATS[name].config.items()
        if k not in ("quant_method", "checkpoint_format")
    }
    if name == "awq":
        config = {
            "w_bit": config.pop("bits"),
            "q_group_size": config.pop("group_size"),
            **config,
            "version": "GEMM",
        }
    elif name == "nvfp4-modelopt":
        excluded = config.pop("ignore")
        config = {"quantization": {**config, "exclude_modules": excluded, "group_size": 16}}
    (quantized / file).write_text(json.dumps(config))
    with warned(FORMATS[name]):
        found = load(quantized)
    assert np.array_equal(text_logits(found, TEXT), text_logits(load(twin), TEXT))
    (quantized / file).write_text("[]")
    with pytest.raises(ConfigError, match=rf"{file}: expected a JSON object"):
        read_config(quantized)


def test_config_key_compression_config(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    kind = ints(8, "channel")
    quantized, twin = write_quantized(checkpoint("llama"), tmp_path, kind)
    edit_config(quantized, quantization_config=None, compression_config=kind.config)
    assert np.array_equal(text_logits(load(quantized), TEXT), text_logits(load(twin), TEXT))


@pytest.fixture(scope="module")
def folders(
    checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Return a function that writes the checkpoint of a format once; tests must not change it."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = write_quantized(
                checkpoint("llama"), tmp_path_factory.mktemp(name), FORMATS[name]
            )[0]
        return made[name]

    return get


ZEROS = np.zeros(3, np.float32)
WRONG: list[tuple[str, Callable[[dict[str, Array]], Any], str]] = [
    ("gptq-4", lambda t: t.pop(f"{UP}.qzeros"), (r"missing tensors: layers.1.mlp.up_proj.qzeros; "
        r"expected the \d+ ")),
    ("gptq-4-order", lambda t: t.pop(f"{UP}.g_idx"), (r"missing tensors: "
        r"layers.1.mlp.up_proj.g_idx")),
    ("awq", lambda t: t.update({f"{UP}.g_idx": ZEROS}), (rf"unexpected tensors: {UP}.g_idx; expected the "
        r"\d+")),
    ("awq", lambda t: t.update({f"{UP}.weight": ZEROS}), rf"unexpected tensors: {UP}.weight;"),
    ("packed-4-group", lambda t: t.pop(f"{UP}.weight_shape"), (r"missing tensors: "
        r"layers.1.mlp.up_proj.weight_shape")),
    ("int-8-channel-zeros", lambda t: t.pop(f"{UP}.weight_zero_point"), (r"missing tensors: "
        r".*.weight_zero_point")),
    ("packed-4-group", lambda t: t.update({"lm_head.weight_packed": ZEROS}), r"unexpected tensors: lm_head"),
    ("packed-4-group", lambda t: t.update({"model.layers.0.self_attn.k_scale": ZEROS[:1]}), "unexpected .*k_sc"),
    ("packed-4-group", lambda t: t.update({f"{UP}.input_scale2": ZEROS[:1]}), r"unexpected .*input_scale2"),
    ("gptq-4", lambda t: shorten(t, "qweight"), (rf"tensor {UP}.qweight: expected shape \[6, 80\] .* found \[5, "
        r"80\]")),
    ("gptq-4", lambda t: shorten(t, "scales"), (rf"{UP}.scales: expected shape \[3, 80\] from .* found \[2, "
        r"80\]")),
    ("awq", lambda t: shorten(t, "qzeros"), r"qzeros: expected shape \[3, 10\] .* found \[2, 10\]"),
    ("packed-4-group", lambda t: shorten(t, "weight_packed"), (r"packed: expected shape \[80, 6\] .* found \[79, "
        r"6\]")),
    ("packed-8-tensor", lambda t: t.update({f"{UP}.weight_scale": ZEROS[:2]}), (r"\[\] or \[1\] or .* found "
        r"\[2\]")),
    ("fp8-block", lambda t: shorten(t, "weight_scale_inv"), (r"scale_inv: expected shape \[3, 3\] .* found \[2, "
        r"3\]")),
    ("gptq-4", lambda t: retype(t, "qweight", np.int64), (rf"{UP}.qweight: expected the type I32, found "
        r"I64;")),
    ("gptq-4", lambda t: retype(t, "scales", np.int32), r"scales: expected float32, .* found I32"),
    ("int-8-channel", lambda t: retype(t, "weight", np.float16), (r"weight: expected the type I8, found "
        r"F16")),
    ("nvfp4-packed", lambda t: t.pop(f"{UP}.weight_global_scale"), (r"missing tensors: "
        r"layers.1.mlp.up_proj.weight_global_scale")),
    ("nvfp4-modelopt", lambda t: shorten(t, "weight_scale"), (r"scale: expected shape \[80, 3\] .* found \[79, "
        r"3\]")),
    ("nvfp4-modelopt", lambda t: t.update({f"{UP}.pre_quant_scale": ZEROS}), r"unexpected .*pre_quant_scale"),
    ("fp8-block", lambda t: retype(t, "weight", BFLOAT16), (r"weight: expected the type F8_E4M3, found "
        r"BF16")),
    ("gptq-4", lambda t: t[f"{UP}.scales"].fill(float("nan")), (rf"{UP}: expected finite numbers in "
        r"scale")),
    ("gptq-4-order", lambda t: t[f"{UP}.g_idx"].fill(7), (rf"{UP}: g_idx: expected 16 inputs in each "
        r"of")),
]  # fmt: skip


def shorten(tensors: dict[str, Array], name: str) -> None:
    tensors[f"{UP}.{name}"] = tensors[f"{UP}.{name}"][:-1]


def retype(tensors: dict[str, Array], name: str, dtype: DTypeLike) -> None:
    tensors[f"{UP}.{name}"] = tensors[f"{UP}.{name}"].astype(np.float32).astype(dtype)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    WRONG,
    ids=[f"{name}-{message[:30]}" for name, _, message in WRONG],
)
def test_refused(
    name: str,
    change: Callable[[dict[str, Array]], Any],
    message: str,
    folders: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    folder = Path(shutil.copytree(folders(name), tmp_path / "model"))
    edit(folder, change)
    refuse(folder, message)


def test_a_plain_checkpoint_with_a_quantization_config(
    checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    edit_config(folder, quantization_config=gptq(4).config)
    refuse(folder, r"missing tensors: .* and \d+ more")
    edit_config(folder, quantization_config={"quant_method": "hqq"})
    refuse(
        folder,
        r"model: quantization_config: expected the quant_method .* found 'hqq'; "
        r"use a checkpoint in one of",
    )


def test_scales_that_modelopt_adds_are_ignored(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    kind = FORMATS["nvfp4-modelopt"]
    folder = Path(shutil.copytree(folders("nvfp4-modelopt"), tmp_path / "model"))
    with warned(kind):
        expected = text_logits(load(folder), TEXT)
    scale = np.ones((), np.float32)
    added = {
        f"{UP}.input_scale": scale,
        "model.layers.0.self_attn.k_proj.k_scale": scale,
        "model.layers.0.self_attn.v_proj.v_scale": scale,
    }
    edit(folder, lambda tensors: tensors.update(added))
    config = kind.config | {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}
    edit_config(folder, quantization_config=config)
    with pytest.warns(UserWarning, match=r"static scales .*; scales of a quantized KV cache are"):
        found = load(folder)
    assert np.array_equal(text_logits(found, TEXT), expected)


def test_scales_of_cache_and_activations_are_ignored(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    kind = FORMATS["int-8-channel"]
    folder = Path(shutil.copytree(folders("int-8-channel"), tmp_path / "model"))
    expected = text_logits(load(folder), TEXT)
    added = {
        "model.layers.0.self_attn.k_scale": np.ones(1, np.float32),
        f"{UP}.input_scale": np.ones(1, np.float32),
    }
    edit(folder, lambda tensors: tensors.update(added))
    refuse(folder, "unexpected tensors: model.layers.0.self_attn.k_scale")
    config = json.loads(json.dumps(kind.config).replace('"dynamic": true', '"dynamic": false'))
    edit_config(
        folder, quantization_config=config | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    )
    with pytest.warns(
        UserWarning, match=r"model: static scales .*; scales of a quantized KV cache"
    ):
        found = load(folder)
    assert np.array_equal(text_logits(found, TEXT), expected)
