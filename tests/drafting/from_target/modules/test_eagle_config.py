"""Configurations and files of heads: what is read, what is refused, and the line that says why."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from drafting.from_target.trained_eagle import VOCAB, Form, Head, random_head, write_head
from pronk.base.errors import CheckpointError, ConfigError, OptionError, PronkError
from pronk.checkpoint.rope import RopeConfig
from pronk.checkpoint.tensors import Checkpoint, read_json
from pronk.drafting import Auto, Eagle3, Mtp, make_drafter
from pronk.drafting.from_target.modules.eagle import load_head
from pronk.drafting.from_target.modules.eagle_config import EagleConfig, default_sources
from pronk.models.loader import Fingerprint, describe_architecture
from tiny_models import make_engine, tiny_decoder

EAGLE = Form()
MTP = Form("mtp", draft=VOCAB, norm_output=True, own_head=False)


def parse(folder: Path, kind: str = "eagle3") -> EagleConfig:
    return EagleConfig.parse(kind, read_json(folder / "config.json"), tuple(Checkpoint(folder)))


def test_sources_by_default_and_in_each_layout(tmp_path: Path) -> None:
    assert default_sources(32) == (2, 16, 29)
    assert default_sources(2) == (2, 1, 0)
    form = replace(EAGLE, sources=(1, 2, 3))
    for layout in ("speculators", "eagle", "deepspec"):
        given = replace(form, qk_norm=True, draft=VOCAB) if layout == "deepspec" else form
        assert parse(write_head(random_head(given), tmp_path / layout, layout)).sources == (1, 2, 3)
    by_default = {"eagle_aux_hidden_state_layer_ids": None}
    config = parse(write_head(random_head(form), tmp_path / "default", **by_default))
    assert config.sources is None
    assert config.sources_of(36) == (2, 18, 33)


@pytest.mark.parametrize(
    ("kind", "form", "layout"), [("eagle3", EAGLE, "speculators"), ("mtp", MTP, "mtp")]
)
def test_both_names_of_the_dtype_are_read(
    kind: str, form: Form, layout: str, tmp_path: Path
) -> None:
    folder = write_head(random_head(form), tmp_path, layout)
    document = {**read_json(folder / "config.json"), "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(document))
    assert parse(folder, kind).layers.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("eagle3", {}),
        ("eagle3", {"fc_norm": True, "norm_output": True, "norm_before_residual": True}),
        ("eagle3", {"norm_before_fc": True, "sources": None, "verifier": None}),
        ("eagle3", {"fingerprint": Fingerprint("llama of 4 layers", "0123")}),
        ("mtp", {}),
    ],
)
@pytest.mark.parametrize(
    "rope", [{}, {"kind": "linear", "factor": 2.0, "original": 64}, {"kind": "llama3"}], ids=str
)
def test_written_documents_are_read_again(
    kind: str, changes: dict[str, Any], rope: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_head(
        random_head(EAGLE if kind == "eagle3" else MTP),
        tmp_path,
        "speculators" if kind == "eagle3" else "mtp",
    )
    plain = parse(folder, kind)
    size = plain.layers.head_dim
    wanted = RopeConfig(
        size,
        500.0,
        **({"factor": 8.0, "original": 64} if rope.get("kind") == "llama3" else {}) | rope,
    )
    layers = replace(
        plain.layers,
        rope=wanted,
        context=wanted.extend(64) if rope.get("kind") == "linear" else 4096,
    )
    config = replace(plain, layers=replace(layers, dtype="bfloat16"), **changes)
    raw = json.loads(json.dumps(config.document(3)))
    assert EagleConfig.parse(kind, raw, tuple(Checkpoint(folder))) == config


# Keys of config.json as other programs write them, with sizes that the test replaces.
DECODER_OF_OTHERS = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rope_scaling": None,
    "use_cache": True,
}
DOCUMENTS_OF_OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "speculators 0.1": (
        "speculators",
        {
            "architectures": ["Eagle3Speculator"],
            "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
            "has_no_defaults_at_init": False,
            "norm_before_residual": True,
            "eagle_aux_hidden_state_layer_ids": None,
            "speculators_version": "0.1.0.dev14",
            "target_hidden_size": None,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.53.2",
        },
    ),
    "speculators 0.4": (
        "speculators",
        {
            "architectures": ["Eagle3DraftModel"],
            "auto_map": {"": "config.Eagle3SpeculatorConfig"},
            "base_model_ep_plan": None,
            "dtype": "float32",
            "embed_requires_grad": False,
            "has_no_defaults_at_init": False,
            "norm_before_residual": True,
            "speculators_version": "0.4.0.1",
            "target_hidden_size": None,
            "transformers_version": "5.1.0",
        },
    ),
    "SpecForge": (
        "eagle",
        {
            "bos_token_id": 1,
            "eos_token_id": 2,
            "eagle_config": None,
            "max_window_layers": 36,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.51.0",
            "use_sliding_window": False,
            **DECODER_OF_OTHERS,
        },
    ),
}


@pytest.mark.parametrize("program", DOCUMENTS_OF_OTHERS)
def test_configs_that_others_write(program: str, tmp_path: Path) -> None:
    """All keys that others write are known, and the layers are those of the default rule."""
    layout, changes = DOCUMENTS_OF_OTHERS[program]
    folder = write_head(random_head(replace(EAGLE, norm_before_residual=True)), tmp_path, layout)
    document = read_json(folder / "config.json") | changes
    if layout == "speculators":
        document["transformer_layer_config"] |= DECODER_OF_OTHERS
    (folder / "config.json").write_text(json.dumps(document))
    config = parse(folder)
    assert config.norm_before_residual
    assert config.draft_vocab_size == EAGLE.draft
    if program != "speculators 0.4":  # has the layers of the head
        assert config.sources_of(36) == default_sources(36)


SPECULATORS = {"layout": "speculators"}
DOCUMENTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown": (
        "speculators",
        {"mask_token_id": 3},
        "config.json: mask_token_id: expected no such key, found 3",
    ),
    "nested": (
        "speculators",
        {"transformer_layer_config": {"rope_type": "x"}},
        "transformer_layer_config.rope_type: expected no such key",
    ),
    "in eagle_config": (
        "eagle",
        {"eagle_config": {"num_experts": 2}},
        "eagle_config.num_experts: expected no such key, found 2",
    ),
    "eagle 2": (
        "eagle",
        {"eagle_config": {"use_aux_hidden_state": False}},
        "use_aux_hidden_state: expected true",
    ),
    "another kind": (
        "speculators",
        {"speculators_model_type": "dflash"},
        "speculators_model_type: expected eagle3, found 'dflash'",
    ),
    "another architecture": (
        "eagle",
        {"architectures": ["LlamaForCausalLMEagle4"]},
        "architectures: expected that of an EAGLE-3 head, found .'LlamaForCausalLMEagle4'",
    ),
    "a number as architectures": (
        "eagle",
        {"architectures": 7},
        "architectures: expected that of an EAGLE-3 head",
    ),
    "both norms": (
        "speculators",
        {"fc_norm": True, "norm_before_fc": True},
        "expected fc_norm or norm_before_fc",
    ),
    "no flag": ("speculators", {"norm_output": 1}, "norm_output: expected true or false, found 1"),
    "too many tokens": (
        "speculators",
        {"draft_vocab_size": 132},
        "draft_vocab_size: expected at most vocab_size = 131",
    ),
    "no size": (
        "speculators",
        {"draft_vocab_size": "all"},
        "draft_vocab_size: expected an integer",
    ),
    "no layers": (
        "speculators",
        {"eagle_aux_hidden_state_layer_ids": []},
        "expected a list of the target's layers",
    ),
    "layers beyond": (
        "speculators",
        {"eagle_aux_hidden_state_layer_ids": [2, 3, 9]},
        r"expected layers 0 to 4 of the target, found \[2, 3, 9\]",
    ),
    "nothing nested": (
        "speculators",
        {"transformer_layer_config": 7},
        "transformer_layer_config: expected an object",
    ),
    "another family": (
        "speculators",
        {"transformer_layer_config": {"model_type": "mamba2"}},
        "config.json has model_type 'mamba2': layers with a recurrent state of this kind are not",
    ),
    "bad fingerprint": (
        "speculators",
        {"pronk": {"target": {}}},
        "pronk.target: expected architecture and weights",
    ),
    "other layers": (
        "speculators",
        {"eagle_aux_hidden_state_layer_ids": [2, 3]},
        r"tensor fc.weight: expected shape \[64, 128\]",
    ),
    "other vocabulary": (
        "eagle",
        {"vocab_size": 200},
        "vocab_size: expected 131, that of the target, found 200",
    ),
    "other width": (
        "speculators",
        {"target_hidden_size": 32},
        "target_hidden_size: expected 64, that of the target, found 32",
    ),
}


def load(folder: Path, kind: str = "eagle3") -> None:
    load_head(kind, folder, tiny_decoder(windows=(None,) * 4), "plain")


@pytest.mark.parametrize("case", DOCUMENTS)
def test_bad_documents(case: str, tmp_path: Path) -> None:
    layout, changes, message = DOCUMENTS[case]
    nested = changes.get("transformer_layer_config")
    folder = write_head(random_head(EAGLE), tmp_path, layout)
    document = read_json(folder / "config.json") | changes
    if isinstance(nested, dict):
        document["transformer_layer_config"] = (
            read_json(folder / "config.json")["transformer_layer_config"] | nested
        )
    (folder / "config.json").write_text(json.dumps(document))
    with pytest.raises((ConfigError, CheckpointError, OptionError), match=message) as error:
        load(folder)
    assert str(error.value).startswith(str(folder))
    assert "\n" not in str(error.value)


def without(name: str) -> Callable[[Head], None]:
    return lambda head: head.tensors.__delitem__(name)


def with_tensor(name: str, *shape: int, dtype: Any = np.float32) -> Callable[[Head], None]:
    return lambda head: head.tensors.update({name: np.zeros(shape, dtype)})


FILES: dict[str, tuple[Callable[[Head], None], str]] = {
    "missing": (
        without("layers.0.mlp.up_proj.weight"),
        "missing tensors: midlayer.mlp.up_proj.weight",
    ),
    "unexpected": (with_tensor("mask_hidden", 1, 1, 192), "unexpected tensors: mask_hidden"),
    "a layer without a number": (
        with_tensor("layers.x.norm.weight", 4),
        "unexpected tensors: layers.x.norm.weight",
    ),
    "a layer of a long number": (
        with_tensor(f"layers.{'9' * 5000}.norm.weight", 4),
        "unexpected tensors: layers.999",
    ),
    "gate": (
        with_tensor("layers.0.self_attn.g_proj.weight", 4, 4),
        "unexpected tensors: layers.0.self_attn.g_proj",
    ),
    "shape": (
        with_tensor("layers.0.self_attn.q_proj.weight", 64, 64),
        r"q_proj.weight: expected shape \[64, 128\]",
    ),
    "type": (
        with_tensor("norm.weight", 64, dtype=np.int64),
        "tensor norm.weight: expected float32",
    ),
    "no d2t": (without("d2t"), "tensor d2t: expected 100 offsets, found none"),
    "short d2t": (
        with_tensor("d2t", 99, dtype=np.int64),
        r"tensor d2t: expected shape \[100\] .*found \[99\]",
    ),
    "type of d2t": (with_tensor("d2t", 100), "tensor d2t: expected the type I64"),
    "wrong t2d": (
        with_tensor("t2d", VOCAB, dtype=np.bool_),
        "tensor t2d: expected the tokens of d2t",
    ),
    "beyond": (
        lambda head: head.tensors.update(d2t=head.tensors["d2t"] + 100),
        "tensor d2t: expected offsets to different tokens below 131",
    ),
    "no head": (
        without("lm_head.weight"),
        "draft_vocab_size: expected 131, that of the target, found 100",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_bad_tensors(case: str, tmp_path: Path) -> None:
    change, message = FILES[case]
    head = random_head(EAGLE)
    change(head)
    with pytest.raises(PronkError, match=message) as error:
        load(write_head(head, tmp_path))
    assert "\n" not in str(error.value)


def test_damaged_and_pickled_files(tmp_path: Path) -> None:
    folder = write_head(random_head(EAGLE), tmp_path)
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(
        CheckpointError,
        match="expected a complete safetensors file, found a truncated or damaged one",
    ):
        load(folder)
    file.rename(folder / "pytorch_model.bin")
    with pytest.raises(
        CheckpointError, match=r"found pytorch_model.bin; pickle files can run code .* convert"
    ):
        load(folder)
    (folder / "pytorch_model.bin").unlink()
    file.write_bytes(content)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"expected config.json of a head, found none"):
        load(folder)


def test_mtp_heads_that_are_absent(tmp_path: Path) -> None:
    folder = write_head(random_head(EAGLE), tmp_path, "eagle")
    with pytest.raises(ConfigError, match="expected tensors of an MTP head"):
        load(folder, "mtp")
    engine = make_engine(tiny_decoder())
    for kind in ("eagle3", "mtp"):
        with pytest.raises(
            OptionError, match=f'{kind}: expected model="…", a folder or a Hub id of a head'
        ):
            make_drafter(kind).bind(engine.target)


def test_default_heads(tmp_path: Path) -> None:
    """A head is found in the target's folder, or in its checkpoint; damaged files have none."""
    config = tiny_decoder().config
    mtp = write_head(random_head(MTP), tmp_path / "mtp", "mimo")
    assert Mtp().find_default(mtp, config) == mtp
    assert Eagle3().find_default(mtp, config) is None
    head = write_head(random_head(EAGLE), tmp_path / "mtp" / "eagle3")
    assert Eagle3().find_default(mtp, config) == head
    assert Mtp().find_default(head, config) is None
    assert Mtp().find_default(tmp_path / "none", config) is None
    assert Mtp().find_default(None, config) is None
    (tmp_path / "mtp" / "model.safetensors").write_bytes(b"damaged")
    assert Mtp().find_default(mtp, config) is None


def test_packaged_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """A head that comes with pronk is used for all quantizations of its target, and for no other
    model of the same name or of the same sizes.
    """
    packaged = tmp_path / "packaged"
    monkeypatch.setattr("pronk.drafting.from_target.eagle3._PACKAGED", packaged)
    config = tiny_decoder().config
    named = replace(config, name="Tiny GGUF")
    assert Eagle3().find_default(None, named) is None
    sizes = describe_architecture(config)
    targets = {
        "a": ("other", sizes),
        "b": ("tiny-q4_k_m.gguf", "llama of 9 layers"),
        "c": ("tiny-q4_k_m.gguf", sizes),
    }
    for name, (target, architecture) in targets.items():
        trained_on = {
            "algorithm": "eagle3",
            "verifier": {"name_or_path": target, "architectures": []},
        }
        write_head(
            random_head(EAGLE),
            packaged / name,
            speculators_config=trained_on,
            pronk={"target": {"architecture": architecture, "weights": "0" * 16}},
        )
    assert Eagle3().find_default(None, named) == packaged / "c"
    assert Eagle3().find_default(tmp_path / "Tiny-FP8", config) == packaged / "c"
    assert Eagle3().find_default(tmp_path / "tiny-2507", config) is None
    write_head(random_head(EAGLE), tmp_path / "tiny" / "eagle3")
    assert Eagle3().find_default(tmp_path / "tiny", config) == tmp_path / "tiny" / "eagle3"
    # recycling is asked only without a head, lookahead only where rows are free
    bound = make_engine(tiny_decoder()).target
    given = Auto(parts=(Eagle3(str(tmp_path / "tiny" / "eagle3")),))
    own = ["prediction", "suffix", "eagle3", "lookahead"]
    others = ["prediction", "suffix", "recycling", "lookahead"]
    for drafter, name, expected in (
        (Auto(bundled=False), "tiny-8bit", own),
        (given, "tiny", own),
        (Auto(bundled=False), "tiny-2507", others),
    ):
        target = replace(bound, folder=tmp_path / name)
        assert [part.name for part in drafter.bind(target).parts] == expected
    assert not recwarn.list


def test_heads_of_other_targets(checkpoint: Any, tmp_path: Path) -> None:
    """A head of another architecture is refused, and a head of other weights makes a warning."""
    from pronk import LLM

    model = checkpoint("llama")
    llm = LLM(str(model), drafter="autoregressive")
    config = llm.target.decoder.config
    own = Fingerprint.of(Path(model))
    form = replace(
        EAGLE,
        vocab=config.vocab_size,
        draft=config.vocab_size,
        hidden=config.hidden_size,
        own_head=False,
    )
    head = random_head(form, size=config.hidden_size)
    nothing = {"target_hidden_size": None}
    cases = [
        ({"pronk": {"target": vars(own)}}, None),
        (
            {"pronk": {"target": vars(replace(own, weights="0"))}},
            "was trained on .* weights 0, which is not this target",
        ),
        ({}, "was trained on tiny, found"),
        ({"pronk": {"target": {"architecture": "llama of 9 layers", "weights": "0"}}}, OptionError),
    ]
    for number, (changes, expected) in enumerate(cases):
        folder = write_head(head, tmp_path / str(number), **nothing, **changes)
        made = make_drafter(f"eagle3(model={str(folder)!r})")
        if expected is None:
            made.bind(llm.target)
        elif isinstance(expected, str):
            with pytest.warns(UserWarning, match=expected):
                made.bind(llm.target)
        else:
            with pytest.raises(
                OptionError,
                match=r"expected a head of this target .*found one of llama of 9 layers",
            ):
                made.bind(llm.target)


def test_mtp_head_in_the_checkpoint_of_its_target(checkpoint: Any, tmp_path: Path) -> None:
    """The target ignores the tensors of its MTP head; the drafter finds them without an option."""
    from pronk import LLM, SamplingParams

    model = Path(checkpoint("qwen2", num_hidden_layers=1))
    tensors = load_file(model / "model.safetensors")
    document = read_json(model / "config.json")
    own = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.0.")}
    size = document["hidden_size"]
    head = {
        name.replace("model.layers.0.", "model.mtp_layers.0."): tensor
        for name, tensor in own.items()
    }
    head |= {
        f"model.mtp_layers.0.{name}.weight": np.ones(size, np.float32)
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm")
    }
    head["model.mtp_layers.0.input_proj.weight"] = np.concatenate(
        [np.eye(size)] * 2, axis=1
    ).astype(np.float32)
    folder = tmp_path / "mimo"
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    save_file(tensors | head, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(document | {"model_type": "mimo"}))
    params = SamplingParams(max_tokens=20)
    plain = LLM(str(folder), drafter="autoregressive").generate("abc", params)
    drafted = LLM(str(folder), drafter="mtp", budget="all").generate("abc", params)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.drafted > 0
    assert "mtp" in [part.name for part in LLM(str(folder)).get_proposer().parts]  # of ``auto``
