"""Names of models on the Hub: their forms, the choice of files, the table of short names."""

import pytest

from pronk.base.errors import CheckpointError
from pronk.checkpoint.hub.names import HubModel, close_names, known_models, parse_name
from pronk.models.resolve import resolve_model


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("owner/name", HubModel("owner/name")),
        ("owner/name.v2:q4_k_m", HubModel("owner/name.v2", "", "q4_k_m")),
        ("owner/name/x.gguf", HubModel("owner/name", "x.gguf")),
        ("owner/name/deep/er/X.GGUF", HubModel("owner/name", "deep/er/X.GGUF")),
        ("smollm2", known_models()["smollm2"].model),
    ],
)
def test_forms(name: str, expected: HubModel) -> None:
    assert parse_name(name) == expected
    if name != "smollm2":
        assert str(expected) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "absent",
        "a b/c",
        "../x",
        "a/..",
        "a/./x.gguf",
        "a/b/../x.gguf",
        "a/b/c",
        "a/b:",
        "a/b:x/y",
        "/a/b",
    ],
)
def test_other_names(name: str) -> None:
    assert parse_name(name) is None


FILES = [
    "README.md",
    "big-Q8_0-00001-of-00002.gguf",
    "big-Q8_0-00002-of-00002.gguf",
    "half-Q6_K-00001-of-00002.gguf",
    "mmproj-model-Q4_K_M.gguf",
    "model-Q4_K_M.gguf",
    "model-Q4_K_M_L.gguf",
    "model.q5_0.gguf",
    "sub/model_Q3_K.gguf",
    "twice-Q2_K_S-00001-of-00002.gguf",
    "twice-Q2_K_S-00002-of-00002.gguf",
    "twice-Q2_K_S.gguf",
    "two-F16.gguf",
    "two.f16.gguf",
]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("o/m:q4_k_m", ["model-Q4_K_M.gguf"]),
        ("o/m:Q4_K_M_L", ["model-Q4_K_M_L.gguf"]),
        ("o/m:Q5_0", ["model.q5_0.gguf"]),
        ("o/m:Q3_K", ["sub/model_Q3_K.gguf"]),
        ("o/m:Q8_0", FILES[1:3]),
        ("o/m/big-Q8_0-00001-of-00002.gguf", FILES[1:3]),
        ("o/m/two.f16.gguf", ["two.f16.gguf"]),
        ("o/m:Q2_K_S", ["twice-Q2_K_S.gguf"]),
    ],
)
def test_choice_of_files(name: str, expected: list[str]) -> None:
    model = parse_name(name)
    assert model is not None
    assert model.choose_files(reversed(FILES)) == expected


HEADS = [
    "a-Q4_K_M.gguf",
    "a-Q8_0-00001-of-00002.gguf",
    "a-Q8_0-00002-of-00002.gguf",
    "mtp-a-F16.gguf",
    "mtp-a-Q8_0.gguf",
    "other/b-Q6_K.gguf",
    "other/mtp-b.gguf",
]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("o/m:Q4_K_M", [HEADS[0], *HEADS[3:5]]),
        ("o/m/a-Q4_K_M.gguf", [HEADS[0], *HEADS[3:5]]),
        ("o/m:Q8_0", [*HEADS[1:3], HEADS[4]]),
        ("o/m:Q6_K", HEADS[5:]),
        ("o/m/mtp-a-F16.gguf", [HEADS[3]]),
    ],
)
def test_mtp_heads_come_with_a_model(name: str, expected: list[str]) -> None:
    model = parse_name(name)
    assert model is not None
    assert model.choose_files(HEADS) == expected


def test_repositories_of_heads() -> None:
    """The only model of a repository is its only one besides heads; a head alone is a model."""
    model = HubModel("o/m")
    assert model.choose_files(["a.gguf", "mtp-a.gguf"]) == ["a.gguf", "mtp-a.gguf"]
    assert model.choose_files(["README.md", "mtp-a.gguf"]) == ["mtp-a.gguf"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("o/m:Q2_K", r"^o/m: expected a GGUF model in Q2_K, found big-.*two.f16.gguf$"),
        ("o/m:Q6_K", r"expected a GGUF model in Q6_K"),  # a part is missing
        ("o/m:F16", r"found two-F16.gguf, two.f16.gguf; name one file: o/m/two-F16.gguf$"),
        ("o/m/x.gguf", r"expected the GGUF file x.gguf, found big-"),
        ("o/m/big-Q8_0-00002-of-00002.gguf", r"found a later part of a model$"),
        ("o/m", r"expected \*.safetensors or a GGUF model, found big-.*; name one: o/m/big-"),
    ],
)
def test_refused_choices(name: str, message: str) -> None:
    model = parse_name(name)
    assert model is not None
    with pytest.raises(CheckpointError, match=message):
        model.choose_files(FILES)


def test_repositories_in_the_hugging_face_layout() -> None:
    wanted = [
        "additional_chat_templates/tool_use.jinja",
        "chat_template.jinja",
        "config.json",
        "merges.txt",
        "model-00001-of-00002.safetensors",
        "tokenizer.model",
    ]
    others = [
        "pytorch_model.bin",
        "modeling.py",
        "a.pth",
        "original/model.safetensors",
        "consolidated.safetensors",
    ]
    others += [
        "additional_chat_templates/model.safetensors",
        "additional_chat_templates/a/b.jinja",
        "a/b.jinja",
    ]
    assert HubModel("o/m").choose_files(wanted + others) == wanted
    with pytest.raises(CheckpointError, match=r"found no GGUF model$"):
        HubModel("o/m").choose_files(others)
    assert HubModel("o/m").choose_files(["a.gguf", "config.json"]) == ["a.gguf"]


def test_the_table() -> None:
    for name, known in known_models().items():
        assert parse_name(name) == known.model
        assert known.model.file or known.model.quantization
        assert known.license
        assert known.num_bytes == 0 or 10**7 < known.num_bytes < 10**11
        # A file from a second source is stored under the Hub's commit and hash.
        assert known.package is None or (known.sha256 and known.model.revision and known.model.file)
    assert close_names("smolm2").startswith(" (did you mean smollm2")
    assert close_names("xyzzy") == ""


@pytest.mark.parametrize(
    ("url", "name", "revision"),
    [
        ("https://huggingface.co/owner/name", "owner/name", None),
        ("http://www.huggingface.co/owner/name/", "owner/name", None),
        ("huggingface.co/owner/name", "owner/name", None),
        ("HTTPS://HF.CO/owner/name#files", "owner/name", None),
        ("https://huggingface.co/owner/name/tree/main", "owner/name", None),
        (
            "https://huggingface.co/owner/name/tree/v1.0?not-for-all-audiences=true",
            "owner/name",
            "v1.0",
        ),
        ("https://huggingface.co/owner/name/tree/main/onnx", "owner/name", None),
        ("https://huggingface.co/owner/name/blob/main/config.json", "owner/name", None),
        (
            "https://huggingface.co/owner/name/blob/refs%2Fpr%2F1/config.json",
            "owner/name",
            "refs/pr/1",
        ),
        ("https://huggingface.co/owner/name/blob/main/model.gguf", "owner/name/model.gguf", None),
        (
            "https://huggingface.co/owner/name/blob/main/a/model%20x.gguf",
            "owner/name/a/model x.gguf",
            None,
        ),
        (
            "https://huggingface.co/owner/name/resolve/main/m.gguf?download=true",
            "owner/name/m.gguf",
            None,
        ),
        ("https://huggingface.co/owner/name/raw/0123abc/m.GGUF", "owner/name/m.GGUF", "0123abc"),
        ("hf.co/owner/name:Q4_K_M", "owner/name:Q4_K_M", None),
        ("hf.co/owner/name/m.gguf", "owner/name/m.gguf", None),
        ("hf://owner/name", "owner/name", None),
        ("hf://models/owner/name/m.gguf", "owner/name/m.gguf", None),
    ],
)
def test_addresses_on_the_hub_are_names(url: str, name: str, revision: str | None) -> None:
    found = parse_name(url)
    expected = parse_name(name, revision)
    assert found is not None
    assert found == expected
    assert parse_name(url, "other") == parse_name(name, "other")


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/owner/name",
        "ftp://huggingface.co/owner/name",
        "https://huggingface.co/owner",
        "https://huggingface.co/",
        "https://huggingface.co/datasets/owner/name",
        "https://huggingface.co/owner/name/discussions/3",
        "https://huggingface.co/owner/../name",
        "hf.co/owner",
        "s3://bucket/model.gguf",
    ],
)
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(CheckpointError, match=r"expected .*, found .*; ") as error:
        parse_name(url)
    assert str(error.value).startswith("model: ")
    assert url in str(error.value)
    with pytest.raises(CheckpointError, match="expected"):
        resolve_model(url)
