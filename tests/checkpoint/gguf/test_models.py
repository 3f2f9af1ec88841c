"""Models from GGUF files have the bits of a folder with the dequantized weights."""

import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from checkpoints import MakeCheckpoint, transformers_logits
from gguf_files import CONVERTED, LLAMA3, QUANTIZED, STORED, convert, random_blocks
from models.test_loader import load, refuse
from models.test_quantized_loading import TEXT, assert_explained
from pronk import LLM, SamplingParams
from pronk.base.arrays import BFLOAT16, Array
from pronk.base.errors import CheckpointError
from pronk.checkpoint.gguf.checkpoint import GgufCheckpoint
from pronk.checkpoint.rows import HeadRows
from pronk.kernels.library import CODED_TYPES, SUPER_BLOCK_TYPES
from pronk.kernels.weight_cache import WeightCache
from pronk.kernels.weights import PackedMatrix
from pronk.models.inventory import tensor_names
from pronk.models.loader import Fingerprint, read_config
from pronk.models.resolve import resolve_model
from pronk.models.tensor_plan import plan_tensors
from tiny_models import kernels, text_logits

# Sizes are multiples of the largest block, 256.
SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
NUMBERS = ["F32", "F16", "BF16"]
MIXED = {"": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K"}  # as in Q4_K_M
# As in dynamic quantizations: a kind of its own for nearly every tensor, the embeddings included.
DYNAMIC = {
    "": "IQ2_XXS",
    "attn_q": "IQ3_XXS",
    "attn_k": "IQ2_S",
    "attn_v": "Q5_K",
    "attn_output": "IQ1_M",
    "ffn_gate": "TQ1_0",
    "ffn_up": "IQ2_XS",
    "ffn_down": "IQ3_S",
    "token_embd": "IQ3_S",
    "output": "Q6_K",
}
TOKENS = random.Random(0).choices(range(300), k=40)


def logits(path: Path) -> Array:
    return text_logits(load(path), TOKENS)


@pytest.mark.few(18)
@pytest.mark.parametrize("kind", [*NUMBERS, *QUANTIZED, *CONVERTED, *STORED, "MXFP4"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_bits_equal_those_of_the_dequantized_model(
    family: str, kind: str, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    twin = tmp_path / "twin"
    path = convert(checkpoint(family, **SHAPE), tmp_path / "a.gguf", kind, twin=twin)
    found = logits(path)
    assert found.std() > 0.3, "logits too flat to show anything"
    assert np.array_equal(found, logits(twin))
    assert np.abs(found - transformers_logits(twin, TOKENS)).max() < 1e-3


CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True}),
    ("llama", {"num_key_value_heads": 4}),
    ("mistral", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {}),
    ("qwen3", {"tie_word_embeddings": True}),
    ("gemma2", {"query_pre_attn_scalar": 64}),
    ("gemma3_text", {"query_pre_attn_scalar": 64, "layer_types": None, "num_hidden_layers": 7}),
    ("granite", {"embedding_multiplier": 3.0}),
    ("lfm2", {"num_hidden_layers": 3, "block_multiple_of": 256}),
    (
        "lfm2",
        {
            "num_hidden_layers": 3,
            "block_multiple_of": 256,
            "tie_word_embeddings": False,
            "conv_L_cache": 4,
        },
    ),
    ("ministral3", {}),
    ("gpt_oss", {"layer_types": None}),
    ("granitemoe", {"embedding_multiplier": 3.0}),
    ("mixtral", {}),
    ("qwen3_moe", {"moe_intermediate_size": 256, "num_experts_per_tok": 2}),
    ("qwen2_moe", {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}),
    ("glm4", {}),
    ("glm4", {"attention_bias": False, "tie_word_embeddings": True}),
    ("glm4_moe", {"moe_intermediate_size": 256, "num_experts_per_tok": 2}),
    (
        "glm4_moe",
        {
            "moe_intermediate_size": 256,
            "n_shared_experts": 2,
            "use_qk_norm": True,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    (
        "lfm2_moe",
        {"num_hidden_layers": 3, "moe_intermediate_size": 256, "routed_scaling_factor": 1.0},
    ),
    ("olmo2", {}),
    ("olmo3", {"layer_types": None, "num_hidden_layers": 4}),
    ("phi3", {}),
    ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": None}),
]


@pytest.mark.few(9)
@pytest.mark.parametrize(("family", "overrides"), CASES)
def test_families_of_mixed_blocks(
    family: str, overrides: dict[str, Any], checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    twin = tmp_path / "twin"
    path = convert(checkpoint(family, **(SHAPE | overrides)), tmp_path / "a.gguf", MIXED, twin=twin)
    found = logits(path)
    assert np.array_equal(found, logits(twin))
    assert np.abs(found - transformers_logits(twin, TOKENS)).max() < 2e-3
    packed = text_logits(load(path, kernels=kernels()), TOKENS)  # with inputs of 8 bits
    assert 0 < np.linalg.norm(packed - found) < 0.08 * np.linalg.norm(found)


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_experts_in_mxfp4(family: str, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """The kernels keep the codes of 5 bits of all experts, and draft tokens change no token."""
    kinds = {"": "Q8_0", "_exps": "MXFP4"}
    twin = tmp_path / "twin"
    folder = checkpoint(family, **SHAPE, **({"layer_types": None} if family == "gpt_oss" else {}))
    path = convert(folder, tmp_path / "a.gguf", kinds, twin=twin)
    decoder = load(path, kernels=kernels())
    experts = [
        linear for layer in decoder.layers for linear in (*layer.up.parts, *layer.down.parts)
    ]
    assert {linear.packed.struct.type for linear in experts} == {CODED_TYPES[5]}
    expected = logits(twin)
    assert np.array_equal(logits(path), expected)
    assert (
        0
        < np.linalg.norm(text_logits(decoder, TOKENS) - expected)
        < 0.08 * np.linalg.norm(expected)
    )
    llm = LLM(path, budget="all")
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.7, seed=3)
    prompts = ["def add(a, b):", "The quick brown fox"]
    plain = [each.token_ids for each in llm.generate(prompts, params, drafter="autoregressive")]
    found = llm.generate(prompts, params, drafter="suffix")
    assert [each.token_ids for each in found] == plain
    assert sum(each.stats.drafted for each in found) > 0


def test_experts_in_stored_blocks(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Experts stay in the blocks of the file."""
    kinds = {"": "Q8_0", "gate_exps": "IQ2_S", "up_exps": "IQ2_S", "down_exps": "IQ3_XXS"}
    twin = tmp_path / "twin"
    path = convert(checkpoint("mixtral", **SHAPE), tmp_path / "a.gguf", kinds, twin=twin)
    decoder = load(path, kernels=kernels())
    formats = {
        linear.packed.format
        for layer in decoder.layers
        for linear in (*layer.up.parts, *layer.down.parts)
    }
    assert formats == {"GGUF blocks of type IQ2_S", "GGUF blocks of type IQ3_XXS"}
    expected = logits(twin)
    found = text_logits(decoder, TOKENS)
    assert 0 < np.linalg.norm(found - expected) < 0.08 * np.linalg.norm(expected)


def test_a_weight_cache_keeps_experts(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    path = convert(checkpoint("mixtral", **SHAPE), tmp_path / "a.gguf", "Q8_0")
    for _ in range(2):
        cache = WeightCache.open(tmp_path / "cache", GgufCheckpoint(path).identity)
        decoder = load(path, kernels=kernels(), cache=cache)
    assert cache is not None
    assert any("_exps" in name for name in cache._mapped)
    assert np.array_equal(
        text_logits(decoder, TOKENS), text_logits(load(path, kernels=kernels()), TOKENS)
    )


def test_rotations_of_llama_3(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """The divisors in the file give the frequencies of the rule, up to the last bits."""
    folder = checkpoint("llama", **SHAPE, rope_parameters=LLAMA3)
    path = convert(folder, tmp_path / "a.gguf", "F32", twin=tmp_path / "twin")
    twin = tmp_path / "twin"
    plain = checkpoint("llama", **SHAPE)
    expected = transformers_logits(twin, TOKENS)
    assert np.abs(logits(path) - expected).max() < 1e-3
    assert np.abs(logits(plain) - expected).max() > 0.1


def test_rows_of_queries_are_permuted_and_those_of_values_are_not(
    checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    path = convert(checkpoint("llama", **SHAPE), tmp_path / "a.gguf", "Q8_0")
    config = read_config(path)
    parts = plan_tensors(config, tensor_names(GgufCheckpoint(path), config))
    qkv = next(part for part in parts if part.target == "layers.0.qkv")
    rows = [tensor.rows for tensor in qkv.weight]
    assert rows == [HeadRows(4, pairs=True), HeadRows(2, pairs=True), None]


@pytest.mark.parametrize("kind", [*QUANTIZED, *CONVERTED, *STORED, "MXFP4", "mixed", "dynamic"])
def test_kernels_differ_by_the_rounding_of_inputs(
    kind: str, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    twin = tmp_path / "twin"
    path = convert(
        checkpoint("llama", **SHAPE),
        tmp_path / "a.gguf",
        {"mixed": MIXED, "dynamic": DYNAMIC}.get(kind, kind),
        twin=twin,
    )
    decoder = load(path, kernels=kernels())
    assert isinstance(decoder.head.packed, PackedMatrix)
    found = text_logits(decoder, TOKENS)
    expected = logits(twin)
    # 256 inputs of a row share the scale of their 8 bits in super-blocks
    most = 0.08 if kind in (*STORED, "dynamic") else 0.05
    assert np.linalg.norm(found - expected) < most * np.linalg.norm(expected)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_projections_keep_their_bits_and_groups(
    family: str, checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries and keys of Q4_K and values of Q6_K are two matrices, in the super-blocks of the
    file.
    """
    path = convert(checkpoint(family, **SHAPE), tmp_path / "a.gguf", MIXED | {"token_embd": "F32"})
    decoder = load(path, kernels=kernels())
    for layer in decoder.layers:
        structs = [part.packed.struct for part in layer.qkv.parts]
        forms = [(struct.N, struct.type, struct.group) for struct in structs]
        assert forms == [
            (256 + 128, SUPER_BLOCK_TYPES["Q4_K"], 32),
            (128, SUPER_BLOCK_TYPES["Q6_K"], 16),
        ]
    assert_explained(path, text_logits(decoder, TEXT), monkeypatch, most=0.015)


@pytest.mark.parametrize(
    ("family", "target_kinds", "draft_kinds"),
    [("llama", MIXED, "Q8_0"), ("qwen3", MIXED, "Q8_0"), ("llama", DYNAMIC, "NVFP4")],
    ids=["llama", "qwen3", "dynamic"],
)
def test_draft_tokens_change_no_token(
    family: str,
    target_kinds: dict[str, str],
    draft_kinds: str,
    checkpoint: MakeCheckpoint,
    tmp_path: Path,
) -> None:
    """Target and draft model have different kinds of blocks; the default dtype of both is
    bfloat16.
    """
    folder = checkpoint(family, **SHAPE, tie_word_embeddings=True)
    path, draft = (
        convert(folder, tmp_path / f"{name}.gguf", kinds)
        for name, kinds in (("a", target_kinds), ("b", draft_kinds))
    )
    llm = LLM(path, budget="all")
    assert llm.exact
    assert llm.dtype == BFLOAT16
    prompts = [
        llm.tokenizer.encode(text)
        for text in ("def add(a, b):", "The quick brown fox", "for i in range(10):")
    ]
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.7, seed=3)
    plain = [each.token_ids for each in llm.generate(prompts, params, drafter="autoregressive")]
    accepted = 0
    for drafter in ("suffix", f"draft_model(model={str(draft)!r})"):
        found = llm.generate(prompts, params, drafter=drafter)
        assert [each.token_ids for each in found] == plain
        accepted += sum(each.stats.accepted for each in found)
    assert accepted > 10


def test_a_draft_model_whose_file_changed_is_not_current(
    checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    path = convert(checkpoint("llama", **SHAPE), tmp_path / "a.gguf", "Q8_0")
    target = LLM(path).target
    made = [target.loaded_models.get_or_load(path, "x", load=partial(load, path)) for _ in range(2)]
    assert made[0] is made[1]
    shutil.copyfile(path, tmp_path / "b")
    (tmp_path / "b").rename(path)
    assert not target.loaded_models.is_current(made[0])


def test_fingerprint(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = checkpoint("llama", **SHAPE)
    paths = [convert(folder, tmp_path / f"{kind}.gguf", kind) for kind in ("Q8_0", "Q4_0")]
    prints = [Fingerprint.of(path) for path in [*paths, paths[0], folder]]
    assert prints[0] == prints[2]
    assert len({each.weights for each in prints}) == 3
    assert len({each.architecture for each in prints}) == 1
    llm = LLM(paths[0])
    assert llm.target.fingerprint == prints[0]


def test_damaged_blocks(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    path = convert(checkpoint("llama", **SHAPE), tmp_path / "a.gguf", "Q8_0")
    with path.open("r+b") as stream:
        # the second block
        stream.seek(GgufCheckpoint(path).header.tensors["blk.1.ffn_down.weight"].start + 34)
        stream.write(np.float16("nan").tobytes())
    refuse(
        path,
        r"tensor blk.1.ffn_down.weight \(Q8_0\): expected finite numbers in scale, "
        r"found NaN or infinity",
    )
    with pytest.raises(
        CheckpointError, match=r"tensor blk.1.ffn_down.weight: expected finite scales, found NaN"
    ):
        load(path, kernels=kernels())


def extra(name: str, array: Any, kind: str | None = None) -> Any:
    return lambda w: w.add_tensor(
        name, array, raw_dtype=None if kind is None else gguf.GGMLQuantizationType[kind]
    )


def without(*names: str) -> Any:
    return lambda w: [w.tensors[0].pop(name) for name in names]


def replaced(name: str, array: Any, kind: str | None = None) -> Any:
    def change(writer: gguf.GGUFWriter) -> None:
        without(name)(writer)
        extra(name, array, kind)(writer)

    return change


REFUSED = [
    (extra("blk.0.attn_sinks.weight", np.ones(4, np.float32)),
     ("unexpected tensors: blk.0.attn_sinks.weight; expected the 21 tensors that its metadata asks "
     "for, found 22")),
    (without("blk.1.ffn_up.weight"), "missing tensors: blk.1.ffn_up.weight"),
    (without("token_embd.weight"), "expected a matrix token_embd.weight, found none"),
    (replaced("blk.1.ffn_up.weight", np.ones((512, 128), np.float32)),
     (r"tensor blk.1.ffn_up.weight: expected shape \[512, 256\] from its metadata, found \[512, "
     r"128\]")),
    (replaced("output_norm.weight", np.zeros(272, np.uint8), "Q8_0"),
     "tensor output_norm.weight: expected F32, F16, BF16, found Q8_0"),
    *(
        (replaced("output.weight", random_blocks(kind, 300, 256, 0), kind),
         (f"tensor output.weight: expected F32, .*MXFP4, found {kind}; use a Q4_K_M or Q8_0 file of "
         "this model, or"))
        for kind in ("Q8_1", "Q8_K")
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"), REFUSED, ids=[message[:50] for _, message in REFUSED]
)
def test_wrong_tensors_are_refused(
    change: Any, message: str, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    refuse(convert(checkpoint("llama", **SHAPE), tmp_path / "a.gguf", change=change), message)


def test_known_extra_tensors_are_ignored(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = checkpoint("llama", **SHAPE)
    path = convert(
        folder, tmp_path / "a.gguf", change=extra("blk.0.attn_rot_embd", np.ones(4, np.float32))
    )
    assert np.array_equal(logits(path), logits(folder))


def split(folder: Path, path: Path, **options: Any) -> list[Path]:
    """Write a file in three parts by llama.cpp's writer; return their paths."""
    known = gguf.GGUFWriter.__init__
    parts = 3

    def several(self: gguf.GGUFWriter, *args: Any, **kwargs: Any) -> None:
        known(self, *args, **kwargs, split_max_tensors=8)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "__init__", several)
        convert(folder, path, "Q8_0", **options)
    return [
        path.with_name(f"{path.stem}-{part:05}-of-{parts:05}.gguf") for part in range(1, parts + 1)
    ]


def test_several_parts(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = checkpoint("llama", **SHAPE)
    parts = split(folder, tmp_path / "a.gguf")
    whole = convert(folder, tmp_path / "b.gguf", "Q8_0")
    assert np.array_equal(logits(parts[0]), logits(whole))
    with pytest.raises(
        CheckpointError, match=r"expected the first of 3 files, .*; give a-00001-of-00003.gguf"
    ):
        GgufCheckpoint(parts[1])
    renamed = shutil.copyfile(parts[0], tmp_path / "c.gguf")
    with pytest.raises(
        CheckpointError,
        match=r"expected a name that ends in -00001-of-00003.gguf, as it is the first",
    ):
        GgufCheckpoint(renamed)
    parts[2].unlink()
    with pytest.raises(
        CheckpointError,
        match=r"expected 3 files in the same folder, found no a-00003-of-00003.gguf",
    ):
        GgufCheckpoint(parts[0])
    shutil.copyfile(parts[1], parts[2])
    with pytest.raises(CheckpointError, match=r"expected tensor .* in one part, found it in two"):
        GgufCheckpoint(parts[0])


def test_files_and_names(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"^model: expected a GGUF file, .* found no such file: 'models/a.gguf'",
    ):
        resolve_model("models/a.gguf")
    (tmp_path / "a.bin").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"or \*.gguf, found the file"):
        resolve_model(tmp_path / "a.bin")
    (tmp_path / "A.GGUF").write_bytes(b"GGUF")
    assert resolve_model(str(tmp_path / "A.GGUF")) == tmp_path / "A.GGUF"
    with pytest.raises(CheckpointError, match=r"A.GGUF: expected a GGUF file, found 4 bytes"):
        LLM(tmp_path / "A.GGUF")
