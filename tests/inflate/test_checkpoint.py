"""An inflated checkpoint computes what its source does, is as large as it says, and appears only when it is whole."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import pronk.inflate.checkpoint as module
from checkpoints import MakeCheckpoint, transformers_logits
from oracle import dense_logits
from pronk import LLM, SamplingParams
from pronk.cli import inflate as cli_inflate
from pronk.errors import CheckpointError, ConfigError, OptionError, PronkError
from pronk.files import shards
from pronk.inflate.checkpoint import InflatedInfo, Shape, inflate
from pronk.inflate.weights import count
from pronk.models.checkpoint import Checkpoint
from pronk.models.clone_models import default_model
from pronk.models.loader import load_decoder, read_config

TOKENS = random.Random(7).sample(range(300), 40)  # all different: equal ones would attend alike whatever the scores
TINY = default_model()
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


USUAL = Shape(80, 7, 112)


@dataclass(frozen=True)
class Case:
    name: str
    family: str
    overrides: dict[str, Any] = field(default_factory=dict)
    shape: Shape = USUAL


def window(size: int, **values: Any) -> dict[str, Any]:
    return {"use_sliding_window": True, "sliding_window": size, **values}


BIASES = {"attention_bias": True, "mlp_bias": True}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
# The source has 48 dimensions, 3 layers, 80 MLP units, 6 heads over 2 key/value heads.
CASES = [
    Case("default heads", "llama"),
    Case("larger groups", "llama", {}, Shape(60, 4, 96, 15, 3)),
    Case("two copies of a kv head", "llama", {}, Shape(60, 4, 96, 12, 6)),
    Case("three copies of a kv head", "llama", {}, Shape(63, 4, 96, 7, 7)),
    Case("one shared kv head", "llama", {"num_key_value_heads": 1}, Shape(64, 4, 96, 8, 2)),
    Case("one kv head each", "llama", {"num_key_value_heads": 6}, Shape(60, 4, 96, 12, 12)),
    Case("hidden size alone", "llama", {}, Shape(192, num_heads=6)),
    Case("layers alone", "llama", {}, Shape(num_layers=11)),
    Case("one layer", "llama", {"num_hidden_layers": 1}),
    Case("tied", "llama", {"tie_word_embeddings": True}),
    Case("biases", "llama", BIASES, Shape(84, 5, 112, 12, 6)),
    Case("head_dim of its own, gelu, eps", "llama", {"head_dim": 20, "hidden_act": "gelu", "rms_norm_eps": 0.1}),
    Case("yarn", "llama", {"rope_parameters": YARN}),
    Case("bfloat16", "llama", {"save_dtype": torch.bfloat16}),
    Case("plain", "mistral"),
    Case("window", "mistral", {"sliding_window": 8}),
    Case("biases", "qwen2", {}, Shape(84, 5, 112, 12, 6)),
    Case("tied", "qwen2", {"tie_word_embeddings": True}),
    Case("window in upper layers", "qwen2", window(8, max_window_layers=1)),
    Case("window in named layers", "qwen2", window(8, layer_types=MIXED)),
    Case("window above all layers", "qwen2", window(4, max_window_layers=3)),
    Case("query and key norms", "qwen3", {}, Shape(84, 5, 112, 12, 6)),
    Case("norms that feel the epsilon", "qwen3", {"rms_norm_eps": 0.3, "attention_bias": True}),
    Case("tied, window", "qwen3", {"tie_word_embeddings": True, **window(8, layer_types=MIXED)}),
]


def our_logits(folder: Path) -> torch.Tensor:
    decoder = load_decoder(folder, read_config(folder), dtype=torch.float32, device=torch.device("cpu"))
    return dense_logits(decoder, TOKENS)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def change(folder: Path, **values: torch.Tensor) -> Path:
    """Replace tensors, whose names have ``__`` for a dot, in a copy of the checkpoint."""
    copy = folder.with_name("changed")
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    named = {name.replace("__", "."): tensor for name, tensor in values.items()}
    save_file(tensors(folder) | named, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


@pytest.fixture
def pair(checkpoint: MakeCheckpoint, tmp_path: Path) -> tuple[Path, Path]:
    """A source and its inflated checkpoint: layers 0, 2 and 4 of 5 are real, and so are heads 0-2 and 4-6 of 12."""
    source = checkpoint("llama")
    inflate(source, tmp_path / "big", Shape(84, 5, 112, 12, 3))
    return source, tmp_path / "big"


@pytest.mark.parametrize("case", CASES, ids=[f"{case.family}: {case.name}" for case in CASES])
def test_same_function(case: Case, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source, big = checkpoint(case.family, **case.overrides), tmp_path / "big"
    info = inflate(source, big, case.shape)
    expected = transformers_logits(source, TOKENS)
    assert expected.std() > 0.5, "logits too flat to show anything"
    assert distance(transformers_logits(big, TOKENS), expected) < 1e-4
    assert distance(our_logits(big), expected) < 1e-4
    sizes = {name: tensor.numel() for name, tensor in tensors(big).items()}
    assert info.parameters == sum(sizes.values()) > 1.5 * info.source_parameters
    assert info.num_bytes == sum(Checkpoint(big).nbytes(name) for name in sizes)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_dtypes(family: str, dtype: str, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """In 16 bits the matrices are the source's, rounded; gains keep what their correction needs."""
    rounded = checkpoint(family, save_dtype=getattr(torch, dtype))
    inflate(checkpoint(family), tmp_path / "big", Shape(80, 5, 112), dtype=dtype)
    assert read_config(tmp_path / "big").dtype == dtype
    assert distance(our_logits(tmp_path / "big"), our_logits(rounded)) < 0.1  # only the source's gains are rounded
    inflate(rounded, tmp_path / "same", Shape(80, 5, 112))
    assert distance(our_logits(tmp_path / "same"), our_logits(rounded)) < 1e-4
    kinds = {name: tensor.dtype for name, tensor in tensors(tmp_path / "same").items()}
    assert kinds["model.norm.weight"] == torch.float32
    assert kinds["model.layers.0.mlp.up_proj.weight"] == getattr(torch, dtype)


def test_norms_of_queries_in_16_bits(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Their epsilon is off by at most two; for queries around 1 that is nothing, if it is not off by 16."""
    source = checkpoint("qwen3", rms_norm_eps=1e-2, save_dtype=torch.bfloat16)
    inflate(source, tmp_path / "big", Shape(720, num_heads=6))
    big, small = (tensors(folder)["model.layers.0.self_attn.q_proj.weight"] for folder in (tmp_path / "big", source))
    assert torch.equal(big[:, :48] * 4, small)
    assert distance(our_logits(tmp_path / "big"), our_logits(source)) < 0.02


def test_a_power_of_four_is_exact(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = checkpoint("llama", save_dtype=torch.bfloat16)
    inflate(source, tmp_path / "big", Shape(192))
    gains = tensors(tmp_path / "big")["model.norm.weight"]
    assert gains.dtype == torch.bfloat16
    assert torch.equal(gains[:48] * 2, tensors(source)["model.norm.weight"])
    assert read_config(tmp_path / "big").norm_eps == read_config(source).norm_eps / 4


def test_greedy_text_of_pronk_tiny(tmp_path: Path) -> None:
    inflate(TINY, tmp_path / "big", Shape(512, 10, 1024))
    prompts = ["def fibonacci(n):\n", "The old man walked"]
    params = SamplingParams(max_tokens=40)
    small, big = (
        [LLM(folder, dtype="float32", threads=1).generate(prompt, params).token_ids for prompt in prompts]
        for folder in (TINY, tmp_path / "big")
    )
    assert small == big
    assert len(set(small[0])) > 10


def test_added_weights_are_there(pair: tuple[Path, Path]) -> None:
    _, big = pair
    weights = tensors(big)
    assert {name.split(".")[2] for name in weights if "layers" in name} == set("01234")
    for name, tensor in weights.items():
        if name.endswith(("q_proj.weight", "gate_proj.weight", "lm_head.weight")):
            assert (tensor[:, 48:] != 0).all(), name
            assert 0.015 < tensor[:, 48:].std() < 0.025
    assert weights["model.layers.1.mlp.up_proj.weight"].std() > 0.015
    assert not weights["model.layers.1.mlp.down_proj.weight"].any()
    assert not weights["model.embed_tokens.weight"][:, 48:].any()


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.2.input_layernorm.weight"])
def test_uncorrected_gains_show(name: str, pair: tuple[Path, Path]) -> None:
    source, big = pair
    wrong = change(big, **{name: tensors(big)[name] * (84 / 48) ** 0.5})
    assert distance(our_logits(wrong), our_logits(source)) > 0.05


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("model.layers.1.self_attn.o_proj.weight", slice(None)),
        ("model.layers.3.mlp.down_proj.weight", slice(None)),
        ("model.layers.2.self_attn.o_proj.weight", slice(24, 32)),
        ("model.layers.2.mlp.down_proj.weight", slice(80, 112)),
    ],
    ids=["layer's attention", "layer's MLP", "head", "MLP units"],
)
def test_added_parts_run(name: str, columns: slice, pair: tuple[Path, Path]) -> None:
    """Each of them moves the logits as soon as its way out is not zero."""
    source, big = pair
    weight = tensors(big)[name]
    assert not weight[:, columns].any()
    weight[:48, columns] = torch.randn(weight[:48, columns].shape, generator=torch.Generator().manual_seed(1))
    assert distance(our_logits(change(big, **{name: weight})), our_logits(source)) > 1e-3


def test_epsilon_shows(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = checkpoint("llama", rms_norm_eps=0.1)
    inflate(source, tmp_path / "big", Shape(80))
    file = tmp_path / "big" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 0.1}))
    assert distance(our_logits(tmp_path / "big"), our_logits(source)) > 0.01


def test_config_and_card(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = checkpoint("qwen2", **window(8, max_window_layers=2))
    info = inflate(
        source, tmp_path / "big", Shape(80, 5), name="owner/tiny", command="pronk inflate big", dtype="float16"
    )
    config = json.loads((tmp_path / "big" / "config.json").read_text())
    assert config["pronk_inflated"] == {
        "source": "owner/tiny",
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "intermediate_size": 80,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "parameters": info.source_parameters,
    }
    assert (config["hidden_size"], config["num_hidden_layers"], config["head_dim"]) == (80, 5, 8)
    assert config["layer_types"] == ["full_attention"] * 4 + ["sliding_attention"]
    assert config["max_window_layers"] == 4
    assert config["dtype"] == "float16"
    card = (tmp_path / "big" / "README.md").read_text()
    assert f"same function as owner/tiny ({info.source_parameters:,} parameters)" in card.splitlines()[2]
    assert f"cost of {info.parameters:,} parameters" in card.splitlines()[2]
    assert "pronk inflate big\n" in card
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "big" / name).read_bytes() == (source / name).read_bytes()


def test_default_is_a_billion() -> None:
    small = read_config(TINY)
    sizes = module._sizes(Shape(2048, 22, 5632), small)
    assert (sizes["num_attention_heads"], sizes["num_key_value_heads"]) == (64, 8)
    raw = json.loads((TINY / "config.json").read_text())
    big = module.parse_config(module._document(raw, small, sizes, torch.bfloat16))
    assert 0.95e9 < count(big) < 1.05e9


def test_equal_arguments_equal_bytes(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        inflate(checkpoint("llama"), tmp_path / name, Shape(80, 4), seed=seed, command="-")
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c
    assert (tmp_path / "a" / "config.json").read_bytes() == (tmp_path / "b" / "config.json").read_bytes()


def test_own_shape_is_the_source(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = checkpoint("qwen3", save_dtype=torch.bfloat16)
    inflate(source, tmp_path / "same", Shape(num_heads=6, num_kv_heads=2))
    copy, original = tensors(tmp_path / "same"), tensors(source)
    assert copy.keys() == original.keys()
    assert all(torch.equal(copy[name], original[name]) for name in copy)


def test_shards(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source, shape = checkpoint("llama", tie_word_embeddings=True, save_dtype=torch.bfloat16), Shape(80, 6, 112)
    seen: list[tuple[int, int]] = []
    info = inflate(source, tmp_path / "one", shape)
    inflate(source, tmp_path / "many", shape, shard_bytes=70_000, progress=lambda *at: seen.append(at))
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert files == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) >= 4
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == info.num_bytes
    for name in files:
        with safe_open(tmp_path / "many" / name, framework="pt") as file:
            assert set(file.keys()) == {key for key, at in index["weight_map"].items() if at == name}
        assert (tmp_path / "many" / name).stat().st_size < 75_000
    one, many = tensors(tmp_path / "one"), tensors(tmp_path / "many")
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)
    assert distance(transformers_logits(tmp_path / "many", TOKENS), transformers_logits(source, TOKENS)) < 1e-4
    assert seen == sorted(seen)
    assert seen[-1] == (info.num_bytes, info.num_bytes)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (Shape(hidden_size=47), "hidden_size: expected 48 "),
        (Shape(num_layers=2), "num_layers: expected 3 "),
        (Shape(num_layers=10**9), "num_layers: .* found 1000000000"),
        (Shape(intermediate_size=79), "intermediate_size: expected 80 "),
        (Shape(num_heads=5), "num_heads: expected 6 "),
        (Shape(num_heads=12, num_kv_heads=1), "num_kv_heads: expected 2 "),
        (Shape(num_heads=12, num_kv_heads=5), "num_kv_heads: expected a divisor of 12 heads, found 5"),
        (Shape(num_heads=7), "num_heads: expected a divisor of the hidden size 48, found 7"),
        (Shape(num_heads=8, num_kv_heads=4), None),
        (Shape(hidden_size=53), None),
        (Shape(num_heads=0), "num_heads: expected 6 "),
    ],
)
def test_shapes(shape: Shape, expected: str | None, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    if expected is None:
        inflate(checkpoint("llama"), tmp_path / "big", shape)
        return
    with pytest.raises(OptionError, match=expected) as error:
        inflate(checkpoint("llama"), tmp_path / "big", shape)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_too_few_kv_heads_says_what_fits(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """3 kv heads with 5 queries each: over 4, of 4 queries, they would be 6; over 8, of 2, they would be 9."""
    source = checkpoint("llama", num_attention_heads=15, num_key_value_heads=3, hidden_size=45, head_dim=8)
    with pytest.raises(OptionError, match="num_kv_heads: expected 16 with 16 heads, found 4; those that fit are 16"):
        inflate(source, tmp_path / "big", Shape(48, num_heads=16, num_kv_heads=4))


def refuse(source: Path, out: Path, error: type[PronkError], expected: str, **options: Any) -> None:
    with pytest.raises(error, match=expected):
        inflate(source, out, Shape(96), **options)


def test_refused_sources(checkpoint: MakeCheckpoint, pair: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    refuse(checkpoint("gpt2"), out, ConfigError, "found gpt2; only RMSNorm can be padded")
    refuse(pair[1], out, ConfigError, "inflated itself")
    refuse(tmp_path / "nowhere", out, ConfigError, "no such folder")
    refuse(pair[0], out, OptionError, "dtype: expected auto, float32", dtype="int8")
    huge = change(pair[1], **{"lm_head.weight": torch.full((300, 84), 1e5)})
    config = json.loads((huge / "config.json").read_text())
    del config["pronk_inflated"]
    (huge / "config.json").write_text(json.dumps(config))
    refuse(huge, out, OptionError, "dtype: .* found torch.float16; choose bfloat16", dtype="float16")
    save_file({"model.norm.weight": torch.ones(84)}, huge / "model.safetensors")
    refuse(huge, out, CheckpointError, "expected a tensor embed_tokens.weight of shape")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["big", "changed"]


def test_refused_targets(checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = checkpoint("llama"), tmp_path / "out"
    out.mkdir()
    inflate(source, out, Shape(80))
    refuse(source, out, OptionError, "new or empty folder")
    refuse(source, out / "config.json", OptionError, "new or empty folder")
    refuse(source, out / "config.json" / "below", CheckpointError, "expected to write the checkpoint")
    monkeypatch.setattr(shards.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 4, 5))
    refuse(source, tmp_path / "new", OptionError, r"expected 0\.00 GB of free disk space in .*, found 0\.00 GB")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("problem", [KeyboardInterrupt(), RuntimeError("x"), OSError(28, "No space left on device")])
def test_an_interrupted_run_leaves_nothing(problem: BaseException, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    def progress(done: int, total: int) -> None:
        if done > total // 2:
            (partial,) = tmp_path.iterdir()
            assert partial.name == "big.partial"
            assert not (partial / "config.json").exists()
            raise problem

    with pytest.raises(CheckpointError if isinstance(problem, OSError) else type(problem)):
        inflate(checkpoint("llama"), tmp_path / "big", Shape(80), progress=progress)
    assert not list(tmp_path.iterdir())


def run(*arguments: str) -> int:
    app = typer.Typer(rich_markup_mode="rich")
    app.command()(cli_inflate.inflate)
    return app(list(arguments), standalone_mode=False) or 0


SIZES = ("--hidden", "80", "--layers", "4", "--intermediate", "96")


def test_command(checkpoint: MakeCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = checkpoint("llama"), tmp_path / "big"
    assert run(str(out), "--source", str(source), *SIZES, "--kv-heads", "5", "--dtype", "float16", "--seed", "3") == 0
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    assert "big: " in stderr
    assert f"Its size is simulated: it computes what {source.name} does" in stderr
    config = read_config(out)
    assert (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads) == (80, 4, 10, 5)
    expected = f"\npronk inflate big --source {source.name} {' '.join(SIZES)} --kv-heads 5 --dtype float16 --seed 3\n"
    assert expected in (out / "README.md").read_text()


def test_command_inflates_pronk_tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[tuple[Any, ...]] = []

    def record(*given: Any, **options: Any) -> InflatedInfo:
        seen.append((*given, options["name"], options["command"]))
        return InflatedInfo(tmp_path, 1, 1, 1)

    monkeypatch.setattr(module, "inflate", record)
    assert run(str(tmp_path / "big")) == 0
    shape = Shape(2048, 22, 5632)
    command = "pronk inflate big --hidden 2048 --layers 22 --intermediate 5632 --dtype auto --seed 0"
    assert seen == [(TINY, tmp_path / "big", shape, "pronk-tiny", command)]


def test_command_interrupted(
    checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shards, "_header", interrupt)
    assert run(str(tmp_path / "big"), "--source", str(checkpoint("llama")), *SIZES) == 130
    assert "interrupted" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def interrupt(_: Iterable[object]) -> bytes:
    raise KeyboardInterrupt


def test_help_needs_no_torch() -> None:
    code = "import sys, pronk.cli.inflate; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
