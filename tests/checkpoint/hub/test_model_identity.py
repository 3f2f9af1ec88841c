"""Names by which the tables find a model: equal in any quantization, others for another model."""

from dataclasses import replace
from pathlib import Path

import pytest

from checkpoints import MakeCheckpoint
from pronk.checkpoint.hub.model_identity import model_names, place_name, simplify_name
from pronk.models.loader import read_config


@pytest.mark.parametrize(
    "name",
    [
        "Qwen3-8B",
        "Qwen3 8B",
        "qwen3_8b",
        "Qwen3-8B-GGUF",
        "Qwen3-8B-Q4_K_M",
        "Qwen3-8B-Q8_0",
        "Qwen3-8B-UD-Q4_K_XL",
        "Qwen3-8B.i1-IQ4_XS",
        "Qwen3-8B-AWQ",
        "Qwen3-8B-GPTQ-Int4",
        "Qwen3-8B-FP8-dynamic",
        "Qwen3-8B-quantized.w4a16",
        "Qwen3-8B-bnb-4bit",
    ],
)
def test_quantizations_have_the_name_of_their_original(name: str) -> None:
    assert simplify_name(name) == "qwen3-8b"


@pytest.mark.parametrize(
    "name",
    ["Qwen3-8B-Base", "Qwen3-8B-Instruct-2507", "Qwen3-80B", "Qwen3-8B-Pirate-GGUF", "GGUF", ""],
)
def test_other_models_have_other_names(name: str) -> None:
    assert simplify_name(name) != "qwen3-8b"


def test_sizes_and_versions_are_no_quantizations() -> None:
    names = ("LFM2-350M", "gpt-oss-20b", "gemma-3-1b-it", "Phi-4", "Llama-3.2-1B", "SmolLM2-1.7B")
    simplified = [simplify_name(name) for name in names]
    assert [name.replace("-", "") for name in simplified] == [
        name.lower().replace("-", "").replace(".", "") for name in names
    ]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("hub/models--Qwen--Qwen3-8B-GGUF/snapshots/0a1b/x-00001-of-00002.gguf", "qwen3-8b"),
        ("hub/models--Qwen--Qwen3-8B/snapshots/0a1b", "qwen3-8b"),
        ("models/Qwen3-8B-Q4_K_M-00001-of-00002.gguf", "qwen3-8b"),
        ("models/Qwen3.8B.GGUF", "qwen3-8b"),
        ("models/Qwen3-8B", "qwen3-8b"),
        ("models/Qwen3-8B.v2", "qwen3-8b-v2"),
    ],
)
def test_names_of_places(path: str, expected: str) -> None:
    assert place_name(Path(path)) == expected


def test_names_of_a_model(checkpoint: MakeCheckpoint) -> None:
    config = replace(read_config(checkpoint("llama")), name="Qwen3 8B AWQ")
    assert model_names(Path("a/renamed.gguf"), config) == {
        "qwen3-8b",
        "qwen3-8b-instruct",  # an alias in known_models.json
        "renamed",
    }
    assert model_names(Path("a/GGUF.gguf"), replace(config, name="")) == frozenset()
