"""The MTP block of Qwen3.5 and Qwen3-Next, in folders and GGUF files: drafts equal the formulas,
texts equal plain decoding, and a head of few rows drafts these tokens only.
"""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints import MakeCheckpoint
from covering import covering
from drafting import drafting
from drafting.drafting import Asked, Watched, assert_no_blocks, assert_plain, sampler_at, text
from drafting.from_target.trained_eagle import bigram_decoder, copying_folder
from engine.cases import step_until_ended, total
from models.test_loader import load
from models.test_quantized_loading import warned
from pronk import LLM, SamplingParams
from pronk.base.arrays import DTYPES
from pronk.base.errors import CheckpointError, OptionError
from pronk.checkpoint.gguf.checkpoint import GgufCheckpoint
from pronk.drafting import Proposer, make_drafter
from pronk.drafting.from_target._eagle_runner import EagleRunner
from pronk.engine.engine import Engine
from pronk.engine.request import Request
from quantized_formats import FORMATS as FORMATS_OF_WEIGHTS
from quantized_formats import edit_config, read_tensors, write_quantized, write_tensors
from recurrent_models import (
    BLOCKS,
    FAMILIES,
    HEADS,
    MtpOracle,
    publish,
    with_mtp,
    write_gguf,
)
from tiny_models import kernels, make_engine, make_request, run, samples

VOCAB = 300
# Where the block is right for most tokens, and where it is right for few.
RIGHT: dict[str, Any] = {"calm": 0.05, "noise": 0.05}
RANDOM: dict[str, Any] = {}
PROMPTS = [[1, 2, 3], [5], [token % VOCAB for token in text(7, 40)]]
SHAPES = {"chain": "num_tokens=3", "tree": "num_tokens=3, num_nodes=10, beam=3"}
FORMATS = ("folder", "published", "gguf", "beside")
MODELS = [
    (family, form)
    for family in FAMILIES
    for form in FORMATS
    if (family, form) != ("qwen3_next", "published")  # it is published as transformers saves it
]
# Files whose matrices have several types, as published ones.
MIXED = {"": "Q4_K", "attn_qkv": "Q5_K", "ssm_out": "Q8_0", "eh_proj": "Q8_0", "token_embd": "Q6_K"}


class Files:
    """Checkpoints with an MTP block, each written once."""

    def __init__(self, checkpoint: MakeCheckpoint, root: Path) -> None:
        self.checkpoint = checkpoint
        self.root = root
        self.made: dict[str, Path] = {}

    def folder(self, family: str = "qwen3_5_text", **block: float) -> Path:
        key = f"{family} {block}"
        if key not in self.made:
            target = self.root / f"folder-{len(self.made)}"
            sizes = HEADS["two values"]
            self.made[key] = with_mtp(self.checkpoint(family, **sizes), target, **block)
        return self.made[key]

    def model(self, form: str, family: str = "qwen3_5_text", **block: float) -> Path:
        """Return a model in one of :data:`FORMATS`, with its block in the same file or beside."""
        folder = self.folder(family, **block)
        key = f"{form} {family} {block}"
        if form == "folder":
            return folder
        if key not in self.made:
            target = self.root / f"model-{len(self.made)}"
            self.made[key] = write_form(form, folder, target)
        return self.made[key]


def write_form(form: str, folder: Path, target: Path) -> Path:
    if form == "published":
        return publish(folder, target)
    target.mkdir()
    if form == "gguf":
        return write_gguf(folder, target / "model.gguf")
    write_gguf(folder, target / "mtp-model.gguf", only_mtp=True)
    trunk = without_block(folder, target / "trunk")
    return write_gguf(trunk, target / "model.gguf")


def without_block(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    tensors = load_file(folder / "model.safetensors")
    kept = {name: each for name, each in tensors.items() if not name.startswith("mtp.")}
    save_file(kept, target / "model.safetensors")
    return target


@pytest.fixture(scope="module")
def files(checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(checkpoint, tmp_path_factory.mktemp("mtp"))


def open_model(path: Path, **options: Any) -> Engine:
    return make_engine(load(path, kernels=kernels()), folder=path, **options)


def bind(engine: Engine, spec: str = "mtp") -> Watched:
    return Watched(make_drafter(spec).bind(engine.target))


def decode(
    engine: Engine, drafter: Proposer[Any], prompts: list[list[int]], **options: Any
) -> list[Request]:
    """Decode prompts in one batch; the outputs must be those of plain decoding."""
    return drafting.decode(
        engine, drafter, prompts, **{"max_tokens": 20, "ignore_eos": True, **options}
    )


def check_drafts(oracle: MtpOracle, request: Request, asked: Asked) -> int:
    """Compare the draft tokens of a chain with the oracle's; return their number."""
    sampler = sampler_at(request, asked.tokens)
    oracle.begin(asked.tokens)
    for token in asked.tree.tokens[1:]:
        assert token == sampler.choose(oracle.logits().astype(np.float32))
        oracle.add(token)
        sampler.advance(token)
    return asked.tree.num_draft_tokens


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("model", "temperature", "batch"), covering(MODELS, [0.0, 0.8], [1, 2], strength=1), ids=str
)
def test_drafts_equal_the_formulas(
    model: tuple[str, str], temperature: float, batch: int, files: Files
) -> None:
    """The block of a random model, which is mostly wrong, so that all is computed again."""
    family, form = model
    engine = open_model(files.model(form, family))
    drafter = bind(engine)
    requests = decode(engine, drafter, PROMPTS[2 - batch + 1 :], temperature=temperature)
    oracle = MtpOracle(files.folder(family))
    checked = 0
    for request in requests:
        for asked in drafter.of(request)[::4]:
            if len(asked.tokens) > 1:
                checked += check_drafts(oracle, request, asked)
    assert checked > 8


@pytest.mark.parametrize(
    ("model", "shape", "temperature"),
    covering(MODELS, [*SHAPES], [0.0, 0.8], strength=1),
    ids=str,
)
def test_texts_are_equal_and_draft_tokens_right(
    model: tuple[str, str], shape: str, temperature: float, files: Files
) -> None:
    family, form = model
    engine = open_model(files.model(form, family, **RIGHT), share_prefixes=True)
    drafter = bind(engine, f"mtp({SHAPES[shape]})")
    requests = decode(engine, drafter, PROMPTS, temperature=temperature)
    assert total(requests, "accepted") > 0.3 * total(requests, "generated_tokens")
    assert total(requests, "target_steps") < 0.8 * total(requests, "generated_tokens")
    assert_no_blocks(drafter.inner)


@pytest.mark.few(2)
@pytest.mark.parametrize("kinds", ["Q8_0", "Q4_0", MIXED], ids=str)
@pytest.mark.parametrize("family", FAMILIES[:2])
def test_quantized_files(
    family: str, kinds: Any, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """The block is packed in the formats of the file."""
    folder = with_mtp(checkpoint(family, **BLOCKS), tmp_path / "folder", **RIGHT)
    path = write_gguf(folder, tmp_path / "model.gguf", kinds)
    engine = open_model(path)
    drafter = bind(engine)
    requests = decode(engine, drafter, PROMPTS)
    assert total(requests, "accepted") > 0.3 * total(requests, "generated_tokens")
    (runner,) = drafter.models
    assert isinstance(runner, EagleRunner)
    bits = {"Q8_0": "int8", "Q4_0": "int4"}.get(kinds if isinstance(kinds, str) else "Q8_0")
    assert bits is not None
    assert runner.head.fc.packed.format.startswith(bits)
    attention = runner.head.layers[0].qkv.parts[0].packed.format
    assert attention.startswith("int8" if kinds == "Q8_0" else "int4")


@pytest.mark.parametrize("form", ["gptq-4", "awq", "packed-8-channel", "fp8-block"])
def test_a_plain_block_of_a_quantized_model(
    form: str, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """As in checkpoints to which the block of the original was added."""
    made = checkpoint("qwen3_5_text", linear_num_value_heads=8)  # a multiple of 8, as AWQ demands
    folder = with_mtp(made, tmp_path / "folder")
    with warned(FORMATS_OF_WEIGHTS[form]):
        quantized, _ = write_quantized(folder, tmp_path, FORMATS_OF_WEIGHTS[form])
        restore_block(quantized, folder, "mtp.")
        engine = open_model(quantized)
    drafter = bind(engine)
    decode(engine, drafter, PROMPTS[:1])
    assert head_of(drafter).fc.packed.format == "float32"
    assert head_of(drafter).layers[0].up.packed.format == "float32"


def test_a_quantized_block(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = with_mtp(checkpoint("qwen3_5_text"), tmp_path / "folder")
    kind = FORMATS_OF_WEIGHTS["packed-8-channel"]
    quantized, _ = write_quantized(folder, tmp_path, kind)
    edit_config(quantized, quantization_config=kind.config | {"ignore": ["lm_head", "re:mtp.fc"]})
    engine = open_model(quantized)
    drafter = bind(engine)
    decode(engine, drafter, PROMPTS[:1])
    assert head_of(drafter).fc.packed.format == "float32"
    assert head_of(drafter).layers[0].up.packed.format.startswith("int8")


def restore_block(folder: Path, original: Path, prefix: str) -> None:
    """Replace the tensors that begin with ``prefix`` by those of the original checkpoint."""
    stored = read_tensors(folder)
    kept = {name: each for name, each in stored.items() if not name.startswith(prefix)}
    plain = read_tensors(original)
    kept |= {name: each for name, each in plain.items() if name.startswith(prefix)}
    write_tensors(folder, kept)


@pytest.mark.parametrize(
    ("dtype", "target", "block"), [("bfloat16", "plain", "int4"), ("float32", "int4", "plain")]
)
def test_weights_of_other_precision(dtype: str, target: str, block: str, files: Files) -> None:
    path = files.folder(**RIGHT)
    decoder = load(path, kernels=kernels(), dtype=DTYPES[dtype], weights=target)
    engine = make_engine(decoder, folder=path)
    drafter = bind(engine, f"mtp(weights={block!r}, draft_vocab=200)")
    requests = decode(engine, drafter, PROMPTS)
    assert total(requests, "accepted") > 0.2 * total(requests, "generated_tokens")


@pytest.mark.parametrize("fused", ["block", "model"])
def test_experts_of_block_and_model_may_be_stored_differently(
    fused: str, files: Files, tmp_path: Path
) -> None:
    """One has a tensor for each expert, the other one for all experts."""
    folder = files.folder("qwen3_5_moe_text")
    if fused == "model":
        path = publish(folder, tmp_path / "model", fused_mtp=False)
    else:
        path = Path(shutil.copytree(folder, tmp_path / "model"))
        restore_block(path, publish(folder, tmp_path / "published"), "mtp.")
    engine = open_model(path)
    drafter = bind(engine)
    (request,) = decode(engine, drafter, PROMPTS[:1])
    oracle = MtpOracle(folder)
    assert sum(check_drafts(oracle, request, asked) for asked in drafter.of(request)[::4]) > 5


def test_a_preempted_request_and_samples(files: Files) -> None:
    engine = open_model(files.folder(**RIGHT), max_batch=2, share_prefixes=True)
    drafter = bind(engine)
    params = SamplingParams(max_tokens=30, temperature=0.8, seed=3, n=2, ignore_eos=True)
    requests = samples(PROMPTS[2], params, drafter)
    for request in requests:
        engine.add(request)
    while requests[0].num_generated < 8:
        engine.step()
    urgent = make_request(PROMPTS[0], SamplingParams(max_tokens=5, ignore_eos=True), drafter)
    urgent.priority = 1
    engine.add(urgent)
    step_until_ended(engine, [*requests, urgent])
    assert sum(request.stats.preemptions for request in requests) > 0
    assert_plain(engine, [*requests, urgent])
    assert all(request.stats.accepted > 3 for request in requests)


def test_the_second_turn_reads_the_prefix_cache(files: Files) -> None:
    """Proposals after a cache hit are those without a cache."""
    found = list[Any]()
    for shares in (False, True):
        engine = open_model(files.folder(**RIGHT), share_prefixes=shares)
        drafter = bind(engine)
        (one,) = decode(engine, drafter, PROMPTS[2:], max_tokens=40)
        (other,) = decode(engine, drafter, [[*one.tokens, 4, 5, 6]], max_tokens=30)
        assert (other.stats.cached_tokens > 30) == shares
        found.append([asked.tree.tokens for asked in drafter.of(other)])
    assert found[0] == found[1]


def test_auto_drafts_with_the_block(files: Files) -> None:
    for form in FORMATS:
        path = files.model(form, **RIGHT)
        llm = LLM(path, threads=1, dtype="float32", budget="all")
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        (plain,) = llm.generate([PROMPTS[2]], params, drafter="autoregressive")
        (found,) = llm.generate([PROMPTS[2]], params)
        assert found.token_ids == plain.token_ids
        own = found.stats.sources["mtp"]
        assert 0 < own.accepted <= own.drafted, form


# Few rows of the head


def head_of(drafter: Watched) -> Any:
    (runner,) = drafter.models
    assert isinstance(runner, EagleRunner)
    return runner.head


def drafted_tokens(drafter: Watched, requests: list[Request]) -> set[int]:
    return {
        token
        for request in requests
        for asked in drafter.of(request)
        for token in asked.tree.tokens[1:]
    }


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_a_trimmed_head_drafts_its_tokens_only(form: str, shape: str, files: Files) -> None:
    engine = open_model(files.model(form, **RIGHT))
    whole = bind(engine, f"mtp({SHAPES[shape]})")
    requests = decode(engine, whole, PROMPTS, temperature=0.8)
    assert max(drafted_tokens(whole, requests)) >= 150, "expected drafts outside the trimmed head"
    trimmed = bind(engine, f"mtp(draft_vocab=150, {SHAPES[shape]})")
    ids = head_of(trimmed).draft_ids
    assert len(ids) == 150
    assert set(engine.target.decoder.config.eos_ids) <= set(ids.tolist())
    requests = decode(engine, trimmed, PROMPTS, temperature=0.8)
    found = drafted_tokens(trimmed, requests)
    assert found <= set(ids.tolist())
    assert len(found) > 5
    assert total(requests, "accepted") > 0


def test_rows_of_a_trimmed_head_are_those_of_the_target(files: Files) -> None:
    """Logits of the tokens that are left have the same bits."""
    engine = open_model(files.model("gguf", **RIGHT))
    drafter = bind(engine)
    head = head_of(drafter)
    dice = np.random.default_rng(0)
    rows = dice.standard_normal((5, head.head.in_features)).astype(np.float32)
    expected = engine.target.decoder.head.logits(rows)
    for tokens in (
        np.arange(200),
        np.array([3, 17, 18, 99, 150, 299]),
    ):  # the second after the first
        head.trim(tokens)
        kept = tokens[tokens < 200]
        assert head.draft_ids.tolist() == kept.tolist()
        assert np.array_equal(head.head.logits(rows), expected[:, kept])
    requests = decode(engine, drafter, PROMPTS, temperature=0.8)
    assert drafted_tokens(drafter, requests) <= {3, 17, 18, 99, 150}
    assert total(requests, "drafted") > 0


@pytest.mark.parametrize("shape", SHAPES)
def test_all_rows_draft_what_the_whole_head_drafts(shape: str, files: Files) -> None:
    engine = open_model(files.folder(**RIGHT))
    trees = []
    for vocab in (300, 32768):
        drafter = bind(engine, f"mtp(draft_vocab={vocab}, {SHAPES[shape]})")
        assert head_of(drafter).draft_ids is None
        requests = decode(engine, drafter, PROMPTS, temperature=0.8)
        trees.append([asked.tree for request in requests for asked in drafter.of(request)])
    one_less = bind(engine, f"mtp(draft_vocab=299, {SHAPES[shape]})")
    requests = decode(engine, one_less, PROMPTS, temperature=0.8)
    assert len(head_of(one_less).draft_ids) == 299
    assert trees[0] == trees[1]


def test_tokens_of_the_users_texts(files: Files, tmp_path: Path) -> None:
    """They come before those that are first in the vocabulary; added tokens always stay."""
    folder = files.folder(**RIGHT)
    llm = LLM(folder, threads=1, dtype="float32", drafter="autoregressive")
    own = "zebra ~~ {}"
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(own)
    ids = llm.tokenizer.encode(own, add_special_tokens=False)
    count = len({*ids} | llm.tokenizer.added_ids)
    for path in (tmp_path / "texts", tmp_path / "texts" / "a.txt"):
        spec = f"mtp(draft_vocab={count}, draft_text={str(path)!r})"
        head = make_drafter(spec).bind(llm.target).models[0].head  # type: ignore[attr-defined]
        assert set(head.draft_ids.tolist()) == {*ids} | llm.tokenizer.added_ids
    missing = "mtp: draft_text: expected a text file or a folder with .*, found none in"
    (tmp_path / "empty").mkdir()
    with pytest.raises(OptionError, match=missing):
        make_drafter(f"mtp(draft_vocab=9, draft_text={str(tmp_path / 'empty')!r})").bind(llm.target)
    with pytest.raises(OptionError, match="mtp: draft_text: expected a file that can be read"):
        make_drafter("mtp(draft_vocab=9, draft_text='nothing')").bind(llm.target)
    engine = open_model(folder)
    with pytest.raises(OptionError, match="draft_text: expected a target with a tokenizer"):
        make_drafter("mtp(draft_vocab=9, draft_text='nothing')").bind(engine.target)


def test_eagle3_heads_are_trimmed_alike() -> None:
    engine = make_engine(bigram_decoder())
    drafter = bind(engine, f"eagle3(model={copying_folder()!r}, draft_vocab=40)")
    requests = [make_request([1, 2, 3], SamplingParams(max_tokens=20), drafter)]
    run(engine, requests)
    assert_plain(engine, requests)
    assert drafted_tokens(drafter, requests) <= set(head_of(drafter).draft_ids.tolist())
    assert total(requests, "drafted") > 0


# Damaged and other files


def changed(files: Files, target: Path, **tensors: Any) -> Path:
    """Return a copy of a folder with other tensors; ``None`` removes one."""
    shutil.copytree(files.folder(**RIGHT), target)
    stored = load_file(target / "model.safetensors") | tensors
    kept = {name: each for name, each in stored.items() if each is not None}
    save_file(kept, target / "model.safetensors")
    return target


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"mtp.norm.weight": None}, r"missing tensors: mtp.norm.weight; expected .*, found 14;"),
        ({"mtp.pre_fc_norm_hidden.weight": None}, r"missing tensors: mtp.pre_fc_norm_hidden.w"),
        (
            {"mtp.layers.0.mlp.up_proj.weight": None},
            r"missing tensors: mtp.layers.0.mlp.up_proj.w",
        ),
        (
            {"mtp.layers.0.self_attn.q_norm.weight": None},
            r"unexpected tensors: mtp.layers.0.*k_nor",
        ),
        ({"mtp.fc.weight": np.ones((32, 32), np.float32)}, r"tensor mtp.fc.weight: expected shape"),
        ({"mtp.more.weight": np.ones(3, np.float32)}, None),
        ({"mtp.layers.1.input_layernorm.weight": np.ones(32, np.float32)}, None),
    ],
    ids=[
        "missing",
        "missing input",
        "missing in layer",
        "half a norm",
        "shape",
        "more",
        "second block",
    ],
)
def test_damaged_blocks(
    tensors: dict[str, Any], message: str | None, files: Files, tmp_path: Path
) -> None:
    """The drafter refuses a damaged block by name; ``auto`` warns and goes on without.

    Tensors that no block has are ignored, as those of a second block.
    """
    folder = changed(files, tmp_path / "changed", **tensors)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        llm = LLM(folder, threads=1, dtype="float32", drafter="auto(bundled=False)", budget="all")
        (output,) = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=8, ignore_eos=True))
    assert len(output.token_ids) == 8
    left_out = [str(each.message) for each in caught if "left out" in str(each.message)]
    if message is None:
        assert not left_out
        assert make_drafter("mtp").bind(llm.target).models
        return
    assert len(left_out) == 1
    assert "\n" not in left_out[0]
    with pytest.raises(CheckpointError, match=message) as refused:
        make_drafter("mtp").bind(llm.target)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("family", "overrides", "tensor", "found"),
    [
        ("deepseek_v2", {}, "model.layers.3.eh_proj.weight", "multi-head latent attention"),
        ("nemotron_h", {}, "mtp.layers.0.norm.weight", "attention or an MLP alone"),
        ("bamba", {"attn_layer_indices": []}, "mtp.layers.0.norm.weight", "a recurrence alone"),
    ],
)
def test_blocks_of_other_kinds_are_refused(
    family: str,
    overrides: dict[str, Any],
    tensor: str,
    found: str,
    checkpoint: MakeCheckpoint,
    tmp_path: Path,
) -> None:
    folder = Path(shutil.copytree(checkpoint(family, **overrides), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {tensor: np.ones((4, 4), np.float32)}, folder / "model.safetensors")
    engine = open_model(folder)
    message = f"expected an MTP layer with keys and values .* with layers of {found}; use another"
    with pytest.raises(OptionError, match=message) as caught:
        make_drafter("mtp").bind(engine.target)
    assert "\n" not in str(caught.value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is damaged
        assert make_drafter("auto(bundled=False)").bind(engine.target).parts


def test_a_block_with_deepseeks_names(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """GLM-4-MoE has it behind its layers, with an embedding and an LM head of its own."""
    folder = Path(shutil.copytree(checkpoint("glm4_moe"), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    last = f"model.layers.{layers - 1}."
    prefix = f"model.layers.{layers}."
    block = {
        name.replace(last, prefix): each for name, each in tensors.items() if name.startswith(last)
    }
    embedding = tensors["model.embed_tokens.weight"]
    hidden = embedding.shape[1]
    block[f"{prefix}embed_tokens.weight"] = embedding
    block[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"]
    block[f"{prefix}eh_proj.weight"] = np.eye(hidden, 2 * hidden, dtype=np.float32)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        block[f"{prefix}{name}.weight"] = np.ones(hidden, np.float32)
    copies = {name: each.copy() for name, each in (tensors | block).items()}
    save_file(copies, folder / "model.safetensors")
    engine = open_model(folder)
    drafter = bind(engine)
    requests = decode(engine, drafter, PROMPTS)
    assert total(requests, "drafted") > 20
    assert not head_of(drafter).eagle.norm_output


def test_a_model_without_a_block(files: Files, tmp_path: Path) -> None:
    folder = without_block(files.folder(**RIGHT), tmp_path / "plain")
    path = write_gguf(folder, tmp_path / "model.gguf")
    for each in (folder, path):
        engine = open_model(each)
        assert make_drafter("mtp").find_default(each, engine.target.decoder.config) is None
        with pytest.raises(OptionError, match='mtp: expected model="…", a folder or a Hub id'):
            make_drafter("mtp").bind(engine.target)
    with pytest.raises(CheckpointError, match=r"expected tensors of an MTP head .* found none"):
        make_drafter(f"mtp(model={str(path)!r})").bind(engine.target)
    with pytest.raises(CheckpointError, match="expected a folder of an eagle3 head, found a GGUF"):
        make_drafter(f"eagle3(model={str(path)!r})").bind(engine.target)


def test_a_file_beside_is_one_of_the_target(files: Files, tmp_path: Path) -> None:
    """A file of another architecture, or a damaged one, is no head of the target."""
    trunk = without_block(files.folder(**RIGHT), tmp_path / "plain")
    path = write_gguf(trunk, tmp_path / "model.gguf")
    config = open_model(path).target.decoder.config
    find = make_drafter("mtp").find_default
    write_gguf(
        files.folder("qwen3_5_moe_text", **RIGHT), tmp_path / "mtp-1-other.gguf", only_mtp=True
    )
    (tmp_path / "mtp-2-damaged.gguf").write_bytes(b"GGUF")
    damaged = "mtp: head left out: .*mtp-2-damaged.gguf: expected a GGUF file, found 4 bytes"
    with pytest.warns(UserWarning, match=damaged):
        assert find(path, config) is None
    own = write_gguf(files.folder(**RIGHT), tmp_path / "mtp-3-own.gguf", only_mtp=True)
    with pytest.warns(UserWarning, match=damaged):
        assert find(path, config) == own
    assert not any(name.startswith("blk.0.") for name in GgufCheckpoint(own))


def test_a_folder_with_a_file_beside_has_one_model(files: Files) -> None:
    path = files.model("beside", **RIGHT)
    llm = LLM(path.parent, threads=1, drafter="autoregressive")
    assert llm.path == path


def test_a_head_of_another_size_is_refused(files: Files, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(files.folder(**RIGHT), tmp_path / "other"))
    raw = json.loads((folder / "config.json").read_text()) | {"vocab_size": 301}
    (folder / "config.json").write_text(json.dumps(raw))
    engine = open_model(files.folder(**RIGHT))
    with pytest.raises(
        OptionError, match="vocab_size: expected 300, that of the target, found 301"
    ):
        make_drafter(f"mtp(model={str(folder)!r})").bind(engine.target)
