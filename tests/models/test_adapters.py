"""LoRA adapters against transformers with merged weights, and bits of batches with several
adapters.
"""

import json
import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import mamba_models
from adapters import ATTENTION, LINEAR, merged_logits, write_adapter
from checkpoints import (
    GEMMA4_EXPERTS,
    MakeCheckpoint,
    load_with_transformers,
    transformers_logits,
)
from covering import covering
from gguf_files import convert
from pronk import LLM, Completion, Proposer, SamplingParams
from pronk.base.arrays import FLOAT32, Array
from pronk.base.errors import CheckpointError, OptionError, PronkError
from pronk.kernels.library import candidates
from pronk.models.adapters import Adapters
from pronk.models.loader import load_decoder, read_config
from pronk.testing import ScriptedProposer
from recurrent_models import write_gguf
from tiny_models import kernels, text_logits

TOLERANCE = 1e-4
DICE = random.Random(0)
TEXT = [DICE.randrange(1, 300) for _ in range(40)]
SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 2,
    "tie_word_embeddings": True,
}
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    **{f"smollm2, rank {rank}": ("llama", SMOLLM2, {"rank": rank}) for rank in (4, 16, 64)},
    "queries and values": ("llama", {}, {"targets": ("q_proj", "v_proj"), "rank": 8}),
    "up projection": ("llama", {}, {"targets": ("up_proj",), "rank": 37}),
    "other ranks": (
        "llama",
        {},
        {"rank_pattern": {"q_proj": 7, "up_proj": 20}, "alpha_pattern": {"down_proj": 3}},
    ),
    "rank-stabilized": ("qwen2", {}, {"use_rslora": True, "rank": 9}),
    "biases": ("qwen2", {}, {"rank": 64}),
    "head norms": ("qwen3", {}, {"rank": 5}),
    "gemma2": ("gemma2", {}, {"rank": 6}),
    "gemma3": ("gemma3_text", {}, {"rank": 6}),
    "multimodal": ("gemma3", {}, {"rank": 6, "targets": ("q_proj", "down_proj")}),
    "fused": ("phi3", {}, {"targets": FUSED, "rank": 11}),
    "transposed": ("gpt2", {}, {"targets": ("c_attn", "c_proj", "c_fc"), "rank": 4}),
    "whole norms": ("olmo2", {}, {"rank": 4}),
    "whole norms, odd heads": ("olmo2", {"head_dim": 10}, {"rank": 4}),
    "residual scale": ("granite", {}, {"rank": 4}),
    "convolutions": (
        "lfm2",
        {},
        {"targets": ("in_proj", "out_proj", "w1", "w2", "w3", "q_proj"), "rank": 4},
    ),
    "experts": ("mixtral", {}, {"targets": ATTENTION, "rank": 4}),
    "float16": ("llama", {}, {"dtype": np.float16}),
}
# Models that torch refuses; its tests run the cases above.
RECURRENT_CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gated attention": ("qwen3_5_text", {}, {"rank": 4}),
    "recurrent layers": (
        "qwen3_5_text",
        {},
        {"targets": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"), "rank": 4},
    ),
    "interleaved projections": (
        "qwen3_next",
        {},
        {"targets": ("in_proj_qkvz", "in_proj_ba", "q_proj", "shared_expert_gate"), "rank": 4},
    ),
    "Mamba 2": ("bamba", {}, {"targets": (*LINEAR, "in_proj", "out_proj"), "rank": 4}),
    "weights with factors": (
        "falcon_h1",
        {},
        {"targets": (*LINEAR, "in_proj", "out_proj"), "rank": 4},
    ),
    "a shared MLP": (
        "granitemoehybrid",
        {},
        {"targets": ("in_proj", "out_proj", "input_linear", "output_linear"), "rank": 4},
    ),
    "one sublayer": (
        "nemotron_h",
        {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
        {"targets": ("in_proj", "out_proj", "q_proj", "o_proj", "up_proj"), "rank": 4},
    ),
    "gates of heads": ("lfm3", {}, {"targets": (*ATTENTION, "g_proj", "in_proj"), "rank": 4}),
    "names of other families": ("lfm3", {}, {"rank": 4}),
    "inputs of layers": (
        "gemma4_text",
        {},
        {"targets": (*LINEAR, "per_layer_input_gate", "per_layer_projection"), "rank": 4},
    ),
    "keys that are values": ("gemma4_text", GEMMA4_EXPERTS, {"rank": 4}),
    "latent attention": (
        "deepseek_v3",
        {},
        {"targets": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"), "rank": 4},
    ),
    "latent attention, queries of rows": (
        "deepseek_v2",
        {"q_lora_rank": None, "attention_bias": True},
        {"targets": ("q_proj", "kv_a_proj_with_mqa", "o_proj"), "rank": 4},
    ),
}


def logits(checkpoint: Path, adapter: Path | None, tokens: list[int] = TEXT) -> Array:
    config = read_config(checkpoint)
    decoder = load_decoder(checkpoint, config, dtype=FLOAT32, kernels=kernels())
    if adapter is None:
        return text_logits(decoder, tokens)
    Adapters({"other": adapter, "a": adapter}, config).attach(decoder)
    return text_logits(decoder, tokens, adapter=1)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_merged_weights(
    case: str, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    check_merged(*CASES[case], checkpoint, tmp_path)


@pytest.mark.parametrize("case", RECURRENT_CASES)
def test_logits_of_recurrent_models_equal_those_of_merged_weights(
    case: str, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    check_merged(*RECURRENT_CASES[case], checkpoint, tmp_path)


def test_adapters_of_tiled_heads_are_refused(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """A GGUF file has the value heads in another order than the adapter."""
    folder = checkpoint("qwen3_5_text")
    path = write_gguf(folder, tmp_path / "a.gguf")
    adapter = write_adapter(tmp_path / "adapter", folder, targets=("in_proj_z",))
    with pytest.raises(CheckpointError, match=r"nor recurrent layers of a GGUF file\), found"):
        Adapters({"a": adapter}, read_config(path))
    attention = write_adapter(tmp_path / "attention", folder)
    assert [*Adapters({"a": attention}, read_config(path))] == ["a"]


def test_adapters_of_a_file_with_factors_are_refused(
    checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """The multipliers of a Falcon-H1 are in the weights of its GGUF file, and nowhere else."""
    folder = checkpoint("falcon_h1")
    path = mamba_models.write_gguf(folder, tmp_path / "a.gguf")
    adapter = write_adapter(tmp_path / "adapter", folder)
    with pytest.raises(CheckpointError, match="expected a model in a folder, found a GGUF file"):
        Adapters({"a": adapter}, read_config(path))


def check_merged(
    family: str,
    overrides: dict[str, Any],
    options: dict[str, Any],
    checkpoint: MakeCheckpoint,
    tmp_path: Path,
) -> None:
    """Check the logits with a random adapter against those of transformers with merged weights."""
    model = checkpoint(family, **overrides)
    adapter = write_adapter(tmp_path / "adapter", model, **options)
    want = merged_logits(model, adapter, TEXT)
    got = logits(model, adapter)
    assert np.abs(want - transformers_logits(model, TEXT)).max() > 1000 * TOLERANCE
    # Rounding grows with the logits; those of the wide model are up to 80.
    assert np.abs(got - want).max() <= TOLERANCE * max(1.0, np.abs(want).max() / 20)


WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}


MIXED = {"": "Q8_0", "attn_v": "Q5_1", "ffn_down": "Q4_0"}


@pytest.mark.parametrize(
    ("family", "targets", "kinds"),
    [
        *(
            (*case, kinds)
            for case in (("llama", LINEAR), ("qwen2", LINEAR), ("phi3", FUSED))
            for kinds in ("F32", MIXED)
        ),
        ("qwen3_moe", ATTENTION, "F32"),  # rounded inputs of a router would choose other experts
    ],
)
def test_adapters_of_gguf_files_have_the_names_of_transformers(
    family: str, targets: tuple[str, ...], kinds: Any, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """Rows of queries and keys are permuted in the file; quantized projections are several
    matrices.
    """
    experts = {"moe_intermediate_size": 32} if family == "qwen3_moe" else {}
    model = checkpoint(family, **WIDE, **experts)
    file = convert(model, tmp_path / "model.gguf", kinds, twin=tmp_path / "twin")
    twin = tmp_path / "twin"
    adapter = write_adapter(tmp_path / "adapter", model, targets=targets, rank=5)
    want = merged_logits(twin, adapter, TEXT)
    base = transformers_logits(twin, TEXT)
    error = np.abs(logits(file, adapter) - want).max()
    if kinds == "F32":
        assert error <= TOLERANCE
    else:  # the input rows of quantized matrices are rounded to 8 bits
        assert (
            error <= 3 * np.abs(logits(file, None) - base).max() <= 0.2 * np.abs(want - base).max()
        )


@pytest.fixture(scope="module")
def llama(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: MakeCheckpoint
) -> tuple[Path, dict[str, Path]]:
    """Return a checkpoint, and four adapters of different ranks and modules."""
    folder = tmp_path_factory.mktemp("adapters")
    model = checkpoint("llama")
    made = {
        "a": {"rank": 4},
        "b": {"rank": 64, "targets": ("q_proj", "v_proj")},
        "c": {"rank": 17, "targets": ("gate_proj", "down_proj")},
        "d": {"rank": 32, "targets": ATTENTION},
    }
    return model, {
        n: write_adapter(folder / n, model, seed=i, **o) for i, (n, o) in enumerate(made.items())
    }


NAMES = ("a", None, "b", "c", "a", "d", None, "b")
PROMPTS = [
    [DICE.randrange(1, 300) for _ in range(length)] for length in (3, 40, 17, 1, 90, 25, 8, 60)
]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("chosen", "weights"),
    covering([each.name for each in candidates()], ["float32", "bfloat16", "int4"], strength=1),
)
def test_requests_of_a_batch_have_the_bits_of_each_alone(
    chosen: str, weights: str, llama: tuple[Path, dict[str, Path]]
) -> None:
    """Eight requests with four adapters and none, in one batch and alone, by each instruction
    set.
    """
    model, folders = llama
    how = {"weights": "int4"} if weights == "int4" else {"dtype": weights}
    llm = LLM(model, adapters=folders, kernels=chosen, threads=2, drafter="autoregressive", **how)
    plain = LLM(model, kernels=chosen, threads=1, drafter="autoregressive", **how)
    params = [
        SamplingParams(max_tokens=12, temperature=0.8, seed=i, logprobs=3, ignore_eos=True)
        for i in range(8)
    ]
    alone = [llm.generate(p, o, adapter=n) for p, o, n in zip(PROMPTS, params, NAMES, strict=True)]
    create = llm.request_factory.create_samples
    proposer = llm.get_proposer()
    batch = [
        create(p, o, proposer, adapter=llm.adapters.find(n))[0]
        for p, o, n in zip(PROMPTS, params, NAMES, strict=True)
    ]
    llm.engine.run(batch)
    for request, one, name, prompt, options in zip(
        batch, alone, NAMES, PROMPTS, params, strict=True
    ):
        assert request.output == list(one.token_ids)
        assert request.result.logprobs == list(one.logprobs or ())
        base = plain.generate(prompt, options)
        assert (base.logprobs == one.logprobs) == (name is None)


def test_chunks_trees_and_threads_have_the_same_bits(llama: tuple[Path, dict[str, Path]]) -> None:
    model, folders = llama
    prompt = PROMPTS[4]
    params = SamplingParams(max_tokens=30, logprobs=2, ignore_eos=True)

    def generate(drafter: str | Proposer[Any], **how: Any) -> Completion:
        llm = LLM(model, adapters=folders, budget="all", drafter=drafter, **how)
        return llm.generate(prompt, params, adapter="d")

    want = generate("autoregressive", threads=1)
    assert generate("autoregressive", threads=3, prefill_chunk=16).logprobs == want.logprobs
    drafted = generate(ScriptedProposer({tuple(prompt): want.token_ids}), threads=2)
    assert drafted.logprobs == want.logprobs
    assert drafted.stats.accepted > 0


def test_log_probabilities_of_options_and_prompts(
    llama: tuple[Path, dict[str, Path]], tmp_path: Path
) -> None:
    """``choose`` and ``prompt_logprobs`` are computed with the adapter, too."""
    model, folders = llama
    llm = LLM(model, adapters=folders, prefix_cache=True, threads=1)
    found = [
        llm.choose("ab", ["cd", "e"], adapter=name).logprobs for name in (None, "a", "b", None, "a")
    ]
    assert (found[0], found[1]) == (found[3], found[4])
    assert len({*map(tuple, found)}) == 3
    prompt = PROMPTS[1]
    got = llm.generate(
        prompt, SamplingParams(max_tokens=1, prompt_logprobs=0), adapter="a"
    ).prompt_logprobs
    want = merged_logits(model, folders["a"], prompt)
    want = want - np.log(np.exp(want).sum(-1, keepdims=True))
    assert got is not None
    for position, each in enumerate(got[1:], 1):
        assert each is not None
        assert abs(each[prompt[position]] - want[position - 1, prompt[position]]) < 1e-3


# of PEFT and transformers
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_an_adapter_that_peft_saves(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Runs if PEFT is installed; the other tests write its format themselves."""
    peft = pytest.importorskip("peft")
    model = checkpoint("qwen2")
    options = {
        "r": 16,
        "lora_alpha": 5,
        "rank_pattern": {"q_proj": 5, "layers.1.mlp.up_proj": 9},
        "use_rslora": True,
    }
    config = peft.LoraConfig(
        target_modules="all-linear", alpha_pattern={"down_proj": 40}, **options
    )
    made = peft.get_peft_model(deepcopy(load_with_transformers(model, torch.float32)), config)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.3 * parameter.shape[1] ** -0.5)
        want = made(torch.tensor([TEXT])).logits[0].numpy()
    made.save_pretrained(str(tmp_path / "adapter"))
    assert np.abs(want - transformers_logits(model, TEXT)).max() > 1000 * TOLERANCE
    assert np.abs(logits(model, tmp_path / "adapter") - want).max() <= TOLERANCE


def damaged(source: Path, target: Path, *, tensors: Any = None, **config: Any) -> Path:
    target.mkdir()
    options = json.loads((source / "adapter_config.json").read_text()) | config
    (target / "adapter_config.json").write_text(json.dumps(options))
    loaded = load_file(source / "adapter_model.safetensors")
    save_file(loaded if tensors is None else tensors(loaded), target / "adapter_model.safetensors")
    return target


Q = "base_model.model.model.layers.0.self_attn.q_proj"


def rename(old: str, new: str) -> Any:
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "use_dora: expected False, found True"),
        ({"bias": "all"}, "bias: expected 'none', found 'all'"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save: expected None, found \['lm_head'\]"),
        ({"peft_type": "IA3"}, "peft_type: expected 'LORA', found 'IA3'"),
        ({"layer_replication": [[0, 1]]}, "layer_replication: expected None"),
        (
            {"init_lora_weights": "pissa_niter_4"},
            "init_lora_weights: expected an unchanged base model",
        ),
        (
            {"rank_pattern": {"(a+)+": 3}},
            r"rank_pattern: expected names of modules, found '\(a\+\)\+'",
        ),
        ({"kasa_config": {}}, "kasa_config: expected None"),
        ({"r": 0}, "r: expected a number above 0, found 0"),
        ({"lora_alpha": None}, "lora_alpha: expected a number above 0, found None"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern: expected an object, found"),
        ({"r": 5}, r"expected the shape \[5, 80\], found \[4, 80\]; use an adapter of this model"),
        (
            {"tensors": rename("layers.0.self_attn", "layers.9.self_attn")},
            "found layers.9.self_attn",
        ),
        (
            {"tensors": rename("layers.0.mlp.up_proj", "layers.0.mlp.experts.0.up_proj")},
            "found layers.0.mlp.experts.0",
        ),
        (
            {"tensors": rename("lora_A.weight", "lora_magnitude_vector")},
            "a tensor that is not supported",
        ),
        (
            {"tensors": lambda t: {n: v for n, v in t.items() if n != f"{Q}.lora_B.weight"}},
            "q_proj.lora_B.weight",
        ),
        (
            {"tensors": lambda t: {n: v for n, v in t.items() if not n.startswith(Q)}},
            "which target_modules names",
        ),
        (
            {"tensors": lambda t: t | {f"{Q}.lora_A.weight": t[f"{Q}.lora_A.weight"] * np.nan}},
            "finite numbers",
        ),
        (
            {"tensors": lambda t: {n: v.astype(np.int32) for n, v in t.items()}},
            "expected float32, float16 or bfloat16",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_refusals(
    changes: dict[str, Any], message: str, llama: tuple[Path, dict[str, Path]], tmp_path: Path
) -> None:
    model, folders = llama
    with pytest.raises(CheckpointError, match=message) as error:
        LLM(model, adapters={"x": damaged(folders["a"], tmp_path / "x", **changes)})
    assert "\n" not in str(error.value)


def test_refusals_of_folders_and_options(
    llama: tuple[Path, dict[str, Path]], checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    model, folders = llama

    def refused(message: str, error: type[PronkError] = CheckpointError, **options: Any) -> None:
        with pytest.raises(error, match=message):
            LLM(**{"model": model, "threads": 1} | options)

    refused("expected a folder with adapter_config.json, found none", adapters={"x": tmp_path})
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "adapter_config.json").write_bytes(
        (folders["a"] / "adapter_config.json").read_bytes()
    )
    refused("adapter_model.safetensors, found no such file", adapters={"x": pickled})
    (pickled / "adapter_model.bin").touch()
    refused("found adapter_model.bin; pickle files can run code", adapters={"x": pickled})
    refused("use an adapter of this model", model=checkpoint("qwen3"), adapters=folders)
    refused("expected one process", OptionError, adapters=folders, workers=2)
    refused("adapters: expected folders by name", OptionError, adapters=["x"])
    with pytest.raises(OptionError, match="adapter: expected one of a, b, c, d, found 'e'"):
        LLM(model, adapters=folders, threads=1).generate([1, 2], adapter="e")
    with pytest.raises(
        OptionError, match="adapter: expected none, because the model has no adapters"
    ):
        LLM(model, threads=1).generate([1, 2], adapter="a")


def test_every_linear_layer_of_a_model_can_be_named_at_once(
    checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    model = checkpoint("llama")
    everything = write_adapter(tmp_path / "a", model, target_modules="all-linear")
    some = write_adapter(tmp_path / "b", model, targets=("q_proj",), target_modules=r".*\.q_proj")
    assert (
        np.abs(logits(model, everything) - merged_logits(model, everything, TEXT)).max() < TOLERANCE
    )
    assert np.abs(logits(model, some) - merged_logits(model, some, TEXT)).max() < TOLERANCE
