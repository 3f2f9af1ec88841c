"""Checkpoints written by ``quantize``: their weights and perplexities; after an error no file
remains.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from checkpoints import MakeCheckpoint, transformers_logits
from pronk import LLM, SamplingParams
from pronk.base.convert import to_array, to_tensor
from pronk.base.errors import CheckpointError, OptionError
from pronk.checkpoint.formats.matrix import Bits
from pronk.kernels.library import KernelsError, candidates
from pronk.kernels.rounding import round_weights
from pronk.models import shards
from pronk.models.loader import read_config
from pronk.train.modules.decoder import load_module
from pronk.train.quantization import checkpoint as module
from pronk.train.quantization.checkpoint import QuantizedCheckpoint, quantize
from pronk.train.quantization.methods import CalibrationTexts, quantize_layers
from train.quantization.folders import config, dequantized, perplexity, tensors, unpacked

RANDOM = np.random.default_rng(11)
EVALUATION, CALIBRATION = (RANDOM.integers(300, size=shape) for shape in ((3, 40), (12, 48)))
TEXTS = CalibrationTexts(EVALUATION)
BOTH = CalibrationTexts(EVALUATION, CALIBRATION)
MATRICES = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
MATRICES += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


def make(
    source: Path, out: Path, bits: int = 4, group: int | None = None, **options: Any
) -> QuantizedCheckpoint:
    texts = options.pop("texts", TEXTS)
    return quantize(source, out, bits, group, lambda: texts, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bits", "group"), [(4, None), (4, 8), (4, 0), (8, None), (8, 0)])
def test_matrices_are_the_nearest_codes(
    bits: Bits, group: int | None, dtype: torch.dtype, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    source = checkpoint("llama", save_dtype=dtype)
    made = make(source, tmp_path / "out", bits, group)
    stored = tensors(tmp_path / "out")
    plain = tensors(source)
    names = [f"model.layers.{layer}.{name}" for layer in range(3) for name in MATRICES]
    for name in names:
        codes, scale = unpacked(stored, name, bits)
        weight = plain.pop(f"{name}.weight").float()
        size = weight.shape[1] if group == 0 else made.rule.group
        assert scale.dtype == dtype
        best = round_weights(candidates()[0], to_array(weight), bits, size).scale
        assert torch.equal(scale, to_tensor(best).to(dtype))
        wide = scale.float().repeat_interleave(size, dim=1)
        low = -(2 ** (bits - 1))
        nearest = (weight * (1 / wide)).round().clamp(low, -low - 1)
        assert torch.equal(torch.from_numpy(codes).float(), nearest)
    # All other tensors are unchanged.
    for name in names:
        for part in ("packed", "scale", "shape"):
            del stored[f"{name}.weight_{part}"]
    assert stored.keys() == plain.keys()
    for name, tensor in stored.items():
        assert tensor.dtype == plain[name].dtype
        assert torch.equal(tensor, plain[name]), name


def test_config_and_companions(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = shutil.copytree(checkpoint("llama"), tmp_path / "source")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates/tool_use.jinja").write_text("{{ tools }}")
    (source / "LICENSE").write_text("free")
    for group, strategy in ((16, "group"), (0, "channel")):
        out = tmp_path / strategy
        make(source, out, 4, group, command="pronk quantize source group", text="some text")
        document = config(out)
        quantization = document.pop("quantization_config")
        assert document == config(source)
        assert quantization["quant_method"] == "compressed-tensors"
        assert quantization["format"] == "pack-quantized"
        assert quantization["ignore"] == ["lm_head"]
        (rule,) = quantization["config_groups"].values()
        assert rule["targets"] == ["Linear"]
        weights = rule["weights"]
        assert (weights["num_bits"], weights["type"], weights["symmetric"]) == (4, "int", True)
        assert (weights["strategy"], weights["group_size"]) == (strategy, group or None)
        names = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
        companions = {"tokenizer.json", "generation_config.json", "chat_template.jinja", "LICENSE"}
        companions.add("additional_chat_templates/tool_use.jinja")
        assert names == {"config.json", "model.safetensors", "README.md", *companions}


@pytest.mark.few(6)
@pytest.mark.parametrize("method", ["nearest", "scaled", "gptq"])
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("llama", {"mlp_bias": True, "save_dtype": torch.bfloat16}),
        ("mistral", {"sliding_window": 8}),
        ("qwen2", {"save_dtype": torch.bfloat16}),
        ("qwen3", {}),
    ],
    ids=str,
)
def test_written_weights_have_the_measured_perplexity(
    family: str,
    overrides: dict[str, Any],
    method: str,
    checkpoint: MakeCheckpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CalibrationTexts, "methods", (method,))
    source = checkpoint(family, **overrides)
    made = make(source, tmp_path / "out", texts=BOTH)
    assert made.method == method
    card = (tmp_path / "out" / "README.md").read_text()
    assert ("norms and biases are as they were. The card" in card) == (method != "scaled")
    assert made.source_perplexity == pytest.approx(perplexity(source, EVALUATION), rel=1e-4)
    twin = dequantized(tmp_path / "out", tmp_path / "twin")
    assert made.perplexity == pytest.approx(perplexity(twin, EVALUATION), rel=1e-4)
    assert abs(made.perplexity / made.source_perplexity - 1) > 1e-3
    assert made.num_tokens == 3 * 39


def test_the_best_method_is_kept(
    checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoint("llama")
    made = make(source, tmp_path / "out", texts=BOTH)
    assert list(made.perplexities) == ["nearest", "scaled", "gptq"]
    assert len(set(made.perplexities.values())) == 3
    assert made.perplexity == min(made.perplexities.values())
    for method in made.perplexities:
        figures = dict.fromkeys(made.perplexities, 9.0) | {method: 1.0}

        def claim(*given: Any, tick: Any, figures: dict[str, float] = figures) -> float:
            quantize_layers(*given, tick=tick)
            return figures[given[2]]

        with monkeypatch.context() as patch:
            patch.setattr(module, "quantize_layers", claim)
            assert make(source, tmp_path / method, texts=BOTH).method == method
        with monkeypatch.context() as patch:
            patch.setattr(CalibrationTexts, "methods", (method,))
            make(source, tmp_path / f"{method} alone", texts=BOTH)
        one = tensors(tmp_path / method)
        other = tensors(tmp_path / f"{method} alone")
        assert all(torch.equal(one[name], other[name]) for name in one)
    alone = [
        tensors(tmp_path / method)["model.layers.0.mlp.up_proj.weight_packed"]
        for method in made.perplexities
    ]
    assert not torch.equal(alone[0], alone[1])
    assert not torch.equal(alone[0], alone[2])


@pytest.mark.parametrize("bits", [4, 8])
def test_pronk_reads_its_own_checkpoints(
    bits: int, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """The weights equal the dequantized ones, and draft tokens change no token."""
    source = checkpoint("llama")
    make(source, tmp_path / "out", bits)
    twin = dequantized(tmp_path / "out", tmp_path / "twin")
    mine, plain = (
        load_module(folder, read_config(folder), torch.float32, torch.device("cpu")).state_dict()
        for folder in (tmp_path / "out", twin)
    )
    assert mine.keys() == plain.keys()
    for name, parameter in plain.items():
        assert torch.equal(mine[name], parameter), name
    llm = LLM(tmp_path / "out", budget="all")
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    out = llm.generate("for i in range(10):", params, drafter="prompt_lookup")
    assert (
        out.token_ids
        == llm.generate("for i in range(10):", params, drafter="autoregressive").token_ids
    )
    assert out.stats.drafted


def test_shards_hold_the_same(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = checkpoint("llama", shard_size="50KB")
    assert (source / "model.safetensors.index.json").exists()
    make(source, tmp_path / "one")
    made = make(source, tmp_path / "many", shard_bytes=20_000)
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 3
    one = tensors(tmp_path / "one")
    many = tensors(tmp_path / "many")
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)
    assert made.num_bytes == sum(tensor.nbytes for tensor in many.values())
    assert made.source_bytes == sum(tensor.nbytes for tensor in tensors(source).values())


def test_card(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    given: dict[str, Any] = {"name": "owner/model", "command": "pronk quantize x", "text": "T"}
    made = make(checkpoint("llama"), tmp_path / "out", 4, 16, texts=BOTH, **given)
    card = (tmp_path / "out" / "README.md").read_text()
    for words in (
        "base_model: owner/model",
        "# out\n",
        "weights of 4 bits: integers in groups of 16 inputs with a scale in float32",
        f"| perplexity | {made.source_perplexity:.3f} | {made.perplexity:.3f} (",
        f"that of {made.num_tokens} tokens of T",
        "\npronk quantize x\n",
        f"`{made.method}` was kept",
        *(f"| `{name}` | {value:.3f} |" for name, value in made.perplexities.items()),
    ):
        assert words in card


@pytest.mark.parametrize(
    "problem", [KeyboardInterrupt(), RuntimeError("x"), OSError(28, "No space left on device")]
)
@pytest.mark.parametrize("when", ["measuring", "quantizing, gptq", "writing"])
def test_an_interrupted_run_leaves_no_output(
    when: str, problem: BaseException, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    def status(what: str, done: int, total: int) -> None:
        if what == when and 0 < done < total:
            assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
            raise problem

    with pytest.raises(CheckpointError if isinstance(problem, OSError) else type(problem)):
        make(checkpoint("llama"), tmp_path / "out", texts=BOTH, status=status)
    assert not list(tmp_path.iterdir())


def refuse(source: Path, out: Path, error: type[Exception], message: str, **options: Any) -> None:
    with pytest.raises(error, match=message) as caught:
        make(source, out, **options)
    assert "\n" not in str(caught.value)


def damaged(source: Path, folder: Path, name: str, where: Any, value: float) -> Path:
    """Copy a checkpoint with other values in one tensor."""
    shutil.copytree(source, folder)
    stored = tensors(folder)
    stored[name][where] = value
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def no_kernels() -> None:
    raise KernelsError("no library")


def test_refused(
    checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoint("llama")
    out = tmp_path / "out"
    make(source, out)
    refuse(source, out, OptionError, "expected a new or empty folder, found .* in use")
    refuse(
        out,
        tmp_path / "twice",
        CheckpointError,
        r"found a model that is quantized already \(compressed-tensors\)",
    )
    refuse(
        checkpoint("gpt2"),
        tmp_path / "x",
        CheckpointError,
        "found gpt2, .*; load it with --weights int8 or int4",
    )
    refuse(source, tmp_path / "x", OptionError, "bits: expected 4 or 8", bits=5)
    refuse(source, tmp_path / "x", OptionError, "group: expected", group=32)
    refuse(tmp_path, tmp_path / "x", CheckpointError, "expected a model folder")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    refuse(
        tmp_path / "model.gguf",
        tmp_path / "x",
        CheckpointError,
        "found a GGUF file; give the checkpoint with",
    )
    (tmp_path / "model.gguf").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(module, "load_kernels", no_kernels)
        refuse(
            source,
            tmp_path / "x",
            OptionError,
            "expected pronk's kernels .* found none: no library; install",
        )
    monkeypatch.setattr(shards.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 4, 5))
    refuse(source, tmp_path / "x", OptionError, "of free disk space")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    "family",
    "gemma2 gemma3_text gpt_oss granite granite_swa granitemoe granitemoehybrid lfm2 mixtral "
    "ministral3 olmo2 olmo3 "
    "phi3 qwen3_moe smollm3".split(),
)
def test_families_that_are_not_supported_are_refused(
    family: str, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    message = (
        f"found {family}, which this command does not support; load it with --weights int8 or int4"
    )
    refuse(checkpoint(family), tmp_path / "x", CheckpointError, message)


@pytest.mark.parametrize("texts", [TEXTS, BOTH], ids=["nearest", "all"])
def test_weights_of_nan_are_refused(
    texts: CalibrationTexts, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    source = damaged(checkpoint("llama"), tmp_path / "source", name, (3, 5), torch.nan)
    refuse(source, tmp_path / "x", CheckpointError, "layer 1: expected finite numbers", texts=texts)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("name", "value", "where"),
    [
        ("model.embed_tokens.weight", torch.nan, "embedding"),
        ("model.layers.0.input_layernorm.weight", torch.nan, "layer 0"),
        ("model.layers.2.mlp.down_proj.weight", 3e38, "layer 2"),
        ("model.norm.weight", torch.inf, "last norm or head"),
        ("lm_head.weight", torch.nan, "last norm or head"),
    ],
)
def test_models_with_infinite_outputs_are_refused(
    name: str, value: float, where: str, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """Invalid norms, embeddings and heads, which are not rounded, are found by the outputs of the
    model.
    """
    source = damaged(checkpoint("llama"), tmp_path / "source", name, slice(None), value)
    refuse(
        source,
        tmp_path / "x",
        CheckpointError,
        f"{where}: expected finite numbers in its output, found NaN",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_method_without_a_perplexity_is_not_the_best(
    checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = {"nearest": torch.nan, "scaled": torch.inf, "gptq": 9.0}

    def claim(*given: Any, tick: Any) -> float:
        quantize_layers(*given, tick=tick)
        return figures[given[2]]

    monkeypatch.setattr(module, "quantize_layers", claim)
    made = make(checkpoint("llama"), tmp_path / "out", texts=BOTH)
    assert (made.method, made.perplexity) == ("gptq", 9.0)
    figures["gptq"] = torch.nan
    message = (
        "expected a finite perplexity after quantization, found nan by nearest, inf by scaled, nan "
        "by gptq; use"
    )
    refuse(checkpoint("llama"), tmp_path / "x", CheckpointError, message, texts=BOTH)
    assert not (tmp_path / "x").exists()


@pytest.mark.few(4)
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("bits", "group"), [(4, 16), (4, 0), (8, 16), (8, 0)])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_transformers_reads_it(
    family: str, bits: int, group: int, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """The logits have the bits of those of the dequantized weights."""
    pytest.importorskip("compressed_tensors")
    make(checkpoint(family), tmp_path / "out", bits, group)
    twin = dequantized(tmp_path / "out", tmp_path / "twin")
    tokens = EVALUATION[0].tolist()
    assert np.array_equal(
        transformers_logits(tmp_path / "out", tokens), transformers_logits(twin, tokens)
    )
