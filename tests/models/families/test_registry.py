"""Families by name: the modules of the package, the names that they claim, and the table of the
documentation.
"""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from pronk.base.errors import ConfigError
from pronk.models import families
from pronk.models.families import (
    ARCHITECTURES,
    FAMILIES,
    SUPPORTED,
    discover,
    get_family,
    index_architectures,
    index_model_types,
    parse_config,
)
from pronk.models.families.llama import parse_llama
from pronk.models.family import Family, GgufArchitecture, RefusedFamily

PAGE = Path(__file__).parents[3] / "docs" / "families.md"
NEW = """
from pronk.models.families.llama import parse_llama
from pronk.models.family import Family

FAMILIES = (Family("novel", parse_llama, defaults={"num_hidden_layers": 5}),)
"""


def named(name: str, **options: Any) -> Family:
    return Family(name, parse_llama, **options)


def test_a_module_is_all_that_a_family_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "novel.py").write_text(NEW, encoding="utf-8")
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    found = [*discover()]
    del sys.modules["pronk.models.families.novel"]
    assert {family.model_type for family in found} - {family.model_type for family in FAMILIES} == {
        "novel"
    }
    monkeypatch.setattr(families, "_BY_MODEL_TYPE", index_model_types(found))
    raw = {"vocab_size": 10, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    config = parse_config({"model_type": "novel", **raw})
    assert (config.family, config.num_layers) == ("novel", 5)


@pytest.mark.parametrize(
    "other",
    [
        named("a"),
        named("c", multimodal=("a",)),
        RefusedFamily("a", "because"),
        named("c", multimodal=("b",)),
    ],
)
def test_two_families_with_one_model_type(other: Family | RefusedFamily) -> None:
    own = named("a", multimodal=("b",))
    assert index_model_types([own]) == {"a": own, "b": own}
    with pytest.raises(
        ValueError, match=r"^model_type '[ab]': expected one family with this name, found two$"
    ):
        index_model_types([own, other])


def test_two_families_with_one_architecture() -> None:
    one, other = (named(name, gguf=(GgufArchitecture("x"),)) for name in "ab")
    assert index_architectures([one]) == {"x": (one, one.gguf[0])}
    with pytest.raises(
        ValueError, match="architecture 'x': expected one family with this name, found two"
    ):
        index_architectures([one, other])


def test_unsupported_names() -> None:
    assert get_family("llama").model_type == "llama"
    with pytest.raises(ConfigError, match=r"model_type 'mamba': layers with a recurrent state"):
        get_family("mamba")
    with pytest.raises(ConfigError, match=r"model_type 'gemma3'; supported are bamba, deepseek_v2"):
        # that of images and text; a config of a language model has gemma3_text
        get_family("gemma3")


def test_the_documentation_lists_all_families() -> None:
    table = (
        PAGE.read_text(encoding="utf-8").partition("|---|---|---|---|\n")[2].partition("\n\n")[0]
    )
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \| ([^|]+) \|", table, re.MULTILINE)
    names = [
        (re.findall(r"`(.+?)`", types), re.findall(r"`(.+?)`", archs)) for types, archs in rows
    ]
    assert sorted(name for types, _ in names for name in types) == SUPPORTED
    assert {name for _, archs in names for name in archs} == {*ARCHITECTURES}
    for types, archs in names:
        own = [
            each.name
            for family in FAMILIES
            if family.model_type in types
            for each in getattr(family, "gguf", ())
        ]
        assert {*own} <= {*archs}


def test_the_documentation_shows_a_whole_module() -> None:
    module = Path(families.__file__).with_name("granite_swa.py").read_text(encoding="utf-8")
    assert f"```python\n{module}```\n" in PAGE.read_text(encoding="utf-8")
