"""Gemma 4: values and refusals of configs, forms of checkpoints, GGUF files, and what the cache
stores.
"""

import json
import shutil
from dataclasses import replace
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints import (
    GEMMA4_EXPERTS,
    MakeCheckpoint,
    transformers_choices,
    transformers_logits,
)
from gemma4_files import BLOCKS, write_gguf
from models.test_loader import load
from pronk import LLM, SamplingParams
from pronk.base.arrays import BFLOAT16, FLOAT32, INT8, DType
from pronk.base.errors import CheckpointError, ConfigError
from pronk.cache.blocks import BlockTable
from pronk.cache.layout import kv_bytes_per_token
from pronk.checkpoint.config import AttentionShape, MixtureConfig, ModelConfig
from pronk.checkpoint.gguf.blocks import PACKED_BLOCKS, BlockMatrix
from pronk.checkpoint.gguf.checkpoint import GgufCheckpoint
from pronk.checkpoint.rope import RopeConfig
from pronk.models.families import parse_config
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.models.loader import load_decoder, read_config
from pronk.models.model_runner import ModelRunner
from pronk.sampling.tree import TokenTree
from quantized_formats import read_tensors, write_tensors
from tiny_models import kernels, make_cache, text_logits

# Sizes like those of E2B, in the keys of published files.
SMALL: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": 262144,
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 256,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    "final_logit_softcapping": 30.0,
}
# Sizes like those of 26B-A4B.
MIXTURE: dict[str, Any] = {
    "model_type": "gemma4_text",
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "num_hidden_layers": 30,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
}
FORMS = {"inputs of layers": {}, "experts": GEMMA4_EXPERTS}
EITHER = pytest.mark.parametrize("form", FORMS)
TOKENS = [int(each) for each in np.random.default_rng(3).integers(0, 300, 60)]


def parse(raw: dict[str, Any], **values: Any) -> ModelConfig:
    return parse_config(raw | values)


def test_values_of_a_small_model() -> None:
    config = parse(SMALL)
    sliding = AttentionShape(1, 256)
    full = AttentionShape(1, 512)
    assert config.attention_shapes[:15] == ((sliding,) * 4 + (full,)) * 3
    reading_sliding = AttentionShape(1, 256, reads=13)
    reading_full = AttentionShape(1, 512, reads=14)
    assert config.attention_shapes[15:] == ((reading_sliding,) * 4 + (reading_full,)) * 4
    assert config.intermediate_sizes == (6144,) * 15 + (12288,) * 20
    assert config.windows == ((512,) * 4 + (None,)) * 7
    assert config.layer_input_size == 256
    assert config.mixture is None
    assert config.query_scale == 1.0
    assert config.embedding_scale == 1536**0.5
    assert config.logits_cap == 30.0
    assert config.rope_of(0) == RopeConfig(256, 1e4)
    divisors = (1.0,) * 64 + (float(np.float32(1e30)),) * 192
    assert config.rope_of(4) == RopeConfig(512, 1e6, kind="factors", divisors=divisors)
    assert config.tied


def test_values_of_a_mixture() -> None:
    config = parse(MIXTURE)
    sliding = AttentionShape(8, 256)
    full = AttentionShape(2, 512, tied_values=True)
    assert config.attention_shapes == ((sliding,) * 5 + (full,)) * 5
    assert config.windows == ((1024,) * 5 + (None,)) * 5
    assert config.mixture == MixtureConfig(
        experts=128,
        per_row=8,
        width=704,
        normalized=True,
        layers=(True,) * 30,
        shared_width=2112,
        separate_norms=True,
        expert_scales=True,
    )
    assert config.layer_input_size == 0


def test_sizes_of_single_layers() -> None:
    """transformers writes ``per_layer_config`` in place of two keys."""
    own = {"head_dim": 512, "num_key_value_heads": 2}
    layers = {f"{layer:02}": own for layer in range(5, 30, 6)}
    raw = {key: value for key, value in MIXTURE.items() if "global" not in key}
    assert parse(raw, per_layer_config=layers) == parse(MIXTURE)
    assert parse(raw) != parse(MIXTURE)


def test_absent_keys_mean_what_transformers_takes() -> None:
    from transformers import Gemma4TextConfig

    theirs = Gemma4TextConfig()
    ours = parse({"model_type": "gemma4_text"})
    written = json.loads(theirs.to_json_string(use_diff=False))
    assert replace(ours, bos_id=2, eos_ids=(1,)) == parse(written)
    assert ours.num_layers == len(theirs.layer_types) == 30
    for layer, kind in enumerate(theirs.layer_types):
        own = theirs.per_layer_config[layer]
        shape = AttentionShape(own.num_key_value_heads, own.head_dim)
        assert ours.shape_of(layer) == shape
        slides = kind == "sliding_attention"
        assert ours.window_of(layer) == (theirs.sliding_window if slides else None)


def test_a_model_without_embeddings_of_layers_needs_no_table() -> None:
    """transformers writes the size of the table also if there is none."""
    assert parse(MIXTURE, vocab_size_per_layer_input=0) == parse(MIXTURE)


def test_the_language_model_of_a_multimodal_config() -> None:
    raw = {"model_type": "gemma4", "text_config": SMALL, "vision_config": {}, "audio_config": None}
    assert parse_config(raw) == parse(SMALL)
    assert parse(SMALL, use_bidirectional_attention="vision") == parse(SMALL)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all' is not"),
        ({"num_kv_shared_layers": 32}, "expected a layer with full attention before them, found"),
        ({"num_kv_shared_layers": 36}, r"num_kv_shared_layers: expected an integer in 0..35"),
        ({"vocab_size_per_layer_input": 9}, "vocab_size_per_layer_input: expected 262144 as"),
        ({"global_head_dim": 577}, r"global_head_dim: expected an integer in 1..576"),
        ({"per_layer_config": {"0": {"rope_theta": 1}}}, "per_layer_config: 0: expected head_dim"),
        ({"per_layer_config": {"0": {"head_dim": -2}}}, "0: head_dim: expected an integer"),
        ({"per_layer_config": {"full": {}}}, "per_layer_config: full: expected the number of"),
        ({"num_key_value_heads": 3}, "8 attention heads cannot share 3 key/value heads"),
        ({"enable_moe_block": True}, "num_experts: expected an integer"),
        (
            {
                "enable_moe_block": True,
                "num_experts": 4,
                "top_k_experts": 2,
                "moe_intermediate_size": 8,
            },
            "use_double_wide_mlp with experts is not supported",
        ),
    ],
)
def test_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse(SMALL, **values)
    assert "\n" not in str(caught.value)


@EITHER
def test_200_greedy_tokens_equal_transformers(form: str, checkpoint: MakeCheckpoint) -> None:
    """Also with draft tokens; the prompt repeats itself, so that prompt lookup proposes some."""
    folder = checkpoint("gemma4_text", **FORMS[form], tie_word_embeddings=False)
    prompt = TOKENS[:12] * 2
    llm = LLM(folder, threads=1, dtype="float32")
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    outputs = list[list[int]]()
    for drafter in ("autoregressive", "prompt_lookup(min_ngram=1)", "recycling"):
        outputs.append(list(llm.generate([prompt], params, drafter=drafter)[0].token_ids))
    assert outputs[1:] == [outputs[0]] * 2
    assert len(outputs[0]) == 200
    assert len(set(outputs[0])) > 5
    assert transformers_choices(folder, prompt, outputs[0]) == outputs[0]


def test_tensors_that_are_not_used(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Names of multimodal files, encoders of images and sound, and keys that no layer reads."""
    original = checkpoint("gemma4_text")
    folder = tmp_path / "model"
    shutil.copytree(original, folder)
    stored = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in read_tensors(original).items()
    }
    other = np.ones((4, 4), np.float32)
    for name in (
        "model.vision_tower.encoder.weight",
        "model.audio_tower.layers.0.weight",
        "model.embed_vision.embedding_projection.weight",
        "model.embed_audio.embedding_projection.weight",
        "model.language_model.layers.5.self_attn.k_proj.weight",
        "model.language_model.layers.4.self_attn.k_norm.weight",
    ):
        assert name not in stored
        stored[name] = other
    write_tensors(folder, stored)
    document = json.loads((original / "config.json").read_text())
    outer = {"model_type": "gemma4", "text_config": document, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(outer))
    assert np.array_equal(text_logits(load(folder), TOKENS), text_logits(load(original), TOKENS))


@pytest.mark.parametrize("missing", ["layer_scalar", "v_proj.weight", "per_layer_projection_norm"])
def test_missing_tensors(missing: str, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("gemma4_text"), folder)
    stored = read_tensors(folder)
    removed = next(name for name in stored if missing in name)
    del stored[removed]
    write_tensors(folder, stored)
    name = removed.removeprefix("model.")
    with pytest.raises(CheckpointError, match=f"missing tensors: {name}; expected the"):
        load(folder)


@EITHER
def test_gguf_files_of_full_precision(
    form: str, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    folder = checkpoint("gemma4_text", **FORMS[form])
    path = write_gguf(folder, tmp_path / "a.gguf")
    expected = transformers_logits(folder, TOKENS)
    found = text_logits(load(path), TOKENS)
    assert expected.std() > 0.5, "logits too flat to show anything"
    assert np.abs(found - expected).max() < 1e-4 * max(1.0, expected.std())
    assert np.array_equal(found, text_logits(load(folder), TOKENS))
    # Published files have keys of layers that read those of others.
    if form == "inputs of layers":
        other = write_gguf(folder, tmp_path / "b.gguf", extra=True)
        assert np.array_equal(text_logits(load(other), TOKENS), found)


def test_the_config_of_a_gguf_file(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    for number, form in enumerate(FORMS):
        folder = checkpoint("gemma4_text", **FORMS[form])
        mine = read_config(write_gguf(folder, tmp_path / f"{number}.gguf"))
        theirs = read_config(folder)
        for name in ("attention_shapes", "windows", "mixture", "layer_ropes", "layer_input_size"):
            assert getattr(mine, name) == getattr(theirs, name)
        layers = range(theirs.num_layers)
        widths = [mine.of_layer(layer).intermediate_size for layer in layers]
        assert widths == [theirs.of_layer(layer).intermediate_size for layer in layers]


# As in published files: the table has another type than the matrices.
MIXED = {"": "Q4_0", "per_layer_token_embd": "Q6_K", "attn_v": "Q8_0", "ffn_down": "Q5_K"}


@pytest.mark.few(3)
@EITHER
@pytest.mark.parametrize("kinds", ["Q4_0", "Q8_0", "Q4_K", MIXED], ids=str)
def test_quantized_gguf_files(
    form: str, kinds: Any, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    sizes = FORMS[form] | BLOCKS
    if form == "experts":
        sizes = sizes | {"hidden_size_per_layer_input": 0}
    twin = tmp_path / "twin"
    path = write_gguf(checkpoint("gemma4_text", **sizes), tmp_path / "a.gguf", kinds, twin=twin)
    found = text_logits(load(path), TOKENS)
    expected = transformers_logits(twin, TOKENS)
    assert np.abs(found - expected).max() < 1e-3
    packed = text_logits(load(path, kernels=kernels()), TOKENS)  # with inputs of 8 bits
    assert np.linalg.norm(packed - found) < 0.2 * np.linalg.norm(found)


@pytest.mark.parametrize(
    ("kinds", "uniform"),
    [
        ({"": "Q4_0", "per_layer_model_proj": "BF16"}, True),
        ("BF16", True),
        ({"": "BF16", "token_embd": "Q8_0"}, False),  # the head, which is tied
        ({"": "BF16", "blk.0.attn_q": "Q8_0"}, False),
    ],
    ids=str,
)
def test_roundings_of_parts_of_the_model(
    kinds: Any, uniform: bool, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """A part of the layers runs alone only if it rounds activations as all layers do."""
    path = write_gguf(checkpoint("gemma4_text", **BLOCKS), tmp_path / "a.gguf", kinds)
    decoder = load(path, kernels=kernels(), dtype=BFLOAT16)
    assert decoder.has_uniform_activations == uniform
    table = BlockTable()
    cache = make_cache(decoder.config, BFLOAT16)
    cache.prepare(table, len(TOKENS))
    last = range(len(TOKENS) - 1, len(TOKENS))
    entry = BatchEntry(table, TokenTree.chain(TOKENS), last, len(TOKENS))
    found = ModelRunner(decoder, cache).forward(ForwardBatch([entry])).logits[0][:]
    assert np.array_equal(found, text_logits(decoder, TOKENS, BFLOAT16)[-1:])


@pytest.mark.few(7)
@pytest.mark.parametrize("kind", sorted(PACKED_BLOCKS))
def test_rows_of_a_quantized_table_stay_in_the_file(
    kind: str, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """The table's rows are those of llama.cpp's own rule, and the table is not copied."""
    twin = tmp_path / "twin"
    kinds = {"": "F32", "per_layer_token_embd": kind}
    folder = checkpoint("gemma4_text", **BLOCKS)
    path = write_gguf(folder, tmp_path / "a.gguf", kinds, twin=twin)
    file = GgufCheckpoint(path)
    by = kernels()
    decoder = load_decoder(file, read_config(path), dtype=FLOAT32, kernels=by)
    assert decoder.layer_inputs is not None
    table = decoder.layer_inputs.table
    assert isinstance(table, BlockMatrix)
    in_file = file.raw_bytes("per_layer_token_embd.weight")
    assert np.shares_memory(table.parts[0].stored, in_file)
    stored = read_tensors(twin)["model.embed_tokens_per_layer.weight"]
    rows = np.array([299, 0, 17], np.int32)
    assert np.array_equal(table.dequantize_rows(rows), stored[rows])
    # The kernels dequantize by the same rule.
    exact = load_decoder(twin, read_config(twin), dtype=FLOAT32, kernels=by)
    assert np.array_equal(text_logits(decoder, TOKENS), text_logits(exact, TOKENS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_table_of_numbers_stays_in_the_file(
    dtype: torch.dtype, checkpoint: MakeCheckpoint
) -> None:
    folder = checkpoint("gemma4_text", save_dtype=dtype)
    decoder = load(folder, kernels=kernels())
    table = decoder.layer_inputs.table
    assert str(table.dtype) == str(dtype).removeprefix("torch.")
    assert isinstance(memory_of(table), mmap)
    expected = transformers_logits(folder, TOKENS)
    errors = np.abs(text_logits(decoder, TOKENS) - expected)
    assert errors.max() < 1e-4 * max(1.0, expected.std())


def memory_of(array: Any) -> object:
    """Return the object that owns the memory of an array."""
    while isinstance(array, np.ndarray | memoryview):
        array = array.base if isinstance(array, np.ndarray) else array.obj
    return array


def test_a_table_of_another_type_is_refused(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    kinds = {"": "F32", "per_layer_token_embd": "IQ4_NL"}
    path = write_gguf(checkpoint("gemma4_text", **BLOCKS), tmp_path / "a.gguf", kinds)
    with pytest.raises(CheckpointError, match=r"token_embd\.weight: expected IQ1_M") as info:
        load(path, kernels=kernels())
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [(FLOAT32, FLOAT32), (BFLOAT16, BFLOAT16), (FLOAT32, INT8)], ids=str
)
def test_pools_have_the_shapes_of_their_layers(
    dtype: DType, kv_dtype: DType, checkpoint: MakeCheckpoint
) -> None:
    """A layer that reads the keys of another one takes no memory."""
    config = read_config(checkpoint("gemma4_text", num_global_key_value_heads=None))
    cache = make_cache(config, dtype=dtype, kv_dtype=kv_dtype, num_blocks=4)
    assert [len(pool) for pool in cache.keys] == [2, 2, 2, 2, 0, 0]
    assert [len(pool) for pool in cache.values] == [2, 2, 2, 2, 0, 0]
    per_token = 2 * 2 * 2 * (8 + 16) * kv_dtype.itemsize + (2 * 8 * 4 if kv_dtype == INT8 else 0)
    assert kv_bytes_per_token(config, kv_dtype) == cache.bytes_per_token == per_token
    nbytes = sum(pool.nbytes for pool in (*cache.keys, *cache.values))
    assert nbytes == cache.num_slots * per_token
    assert len(cache.read_block(1)) == cache.block_size * per_token
