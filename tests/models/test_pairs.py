"""The table of published heads and draft models: its form, and which targets it finds."""

import re
from dataclasses import fields
from itertools import groupby
from urllib.parse import urlsplit

import pytest

from pronk.checkpoint.hub.model_identity import equal_names, simplify_name
from pronk.checkpoint.hub.names import HubModel, known_models, parse_name
from pronk.drafting import REGISTRY, make_drafter
from pronk.models.pairs import Pair, all_pairs, find_pairs, targets_of

REPOSITORY = re.compile(r"[\w-]+/[\w.-]+")


def sources_of(*names: str) -> list[str]:
    """Return the heads and draft models of a target with these names."""
    return [pair.source for pair in find_pairs(frozenset().union(*map(equal_names, names)))]


def test_rows_are_unique_and_those_of_a_target_stand_together() -> None:
    rows = all_pairs()
    assert len(rows) >= 20
    assert len({(pair.target, pair.source) for pair in rows}) == len(rows)
    targets = [target for target, _ in groupby(rows, key=lambda pair: pair.target)]
    assert len(targets) == len(set(targets))
    # a head costs less than a draft model
    for _, group in groupby(rows, key=lambda pair: pair.target):
        are_models = [pair.drafter == "draft_model" for pair in group]
        assert are_models == sorted(are_models)


@pytest.mark.parametrize("pair", all_pairs(), ids=lambda pair: f"{pair.target} {pair.source}")
def test_each_row(pair: Pair) -> None:
    assert REPOSITORY.fullmatch(pair.target)
    name = pair.target.rpartition("/")[2]
    assert "-".join(re.findall("[a-z0-9]+", name.lower())) == simplify_name(name)  # no quantization
    assert pair.drafter in REGISTRY
    assert "model" in {field.name for field in fields(REGISTRY[pair.drafter])}
    drafter = make_drafter(pair.specification)
    assert (drafter.name, vars(drafter)["model"]) == (pair.drafter, pair.source)
    assert isinstance(parse_name(pair.source), HubModel)
    # draft models are those of the table of short names, heads are repositories
    is_short = pair.source in known_models()
    assert is_short is (pair.drafter == "draft_model")
    assert is_short or REPOSITORY.fullmatch(pair.source)
    assert not is_short or pair.license
    address = urlsplit(pair.confirmed)
    assert address.scheme == "https"
    assert "." in address.netloc
    assert address.path.strip("/")


@pytest.mark.parametrize(
    "names",
    [
        ("Qwen3-8B",),
        ("Qwen3 8B", "0a1b"),
        ("Qwen3-8B-Instruct",),  # an alias in known_models.json
        ("", "Qwen3-8B-GGUF"),
        ("renamed", "qwen3-8b-q4_k_m"),
    ],
)
def test_targets_are_found_in_any_quantization(names: tuple[str, ...]) -> None:
    found = sources_of(*names)
    assert found == [pair.source for pair in all_pairs() if pair.target == "Qwen/Qwen3-8B"]
    assert len(found) > 1


@pytest.mark.parametrize(
    "names",
    [
        ("Qwen3-8B-Base",),
        ("DeepSeek-R1-0528-Qwen3-8B",),
        ("Qwen3-4B-Instruct-2507",),  # has the sizes of Qwen3-4B
        ("Llama-3.1-8B",),
        ("Llama-3.1-8B-Instruct-abliterated",),
        ("",),
    ],
)
def test_other_models_are_not_found(names: tuple[str, ...]) -> None:
    assert sources_of(*names) == []


def test_a_name_of_the_table_of_short_names_finds_its_target() -> None:
    assert sources_of("Meta Llama 3.1 8B Instruct") == sources_of("Llama-3.1-8B-Instruct") != []


def test_targets_of_heads() -> None:
    [pair] = [pair for pair in all_pairs() if pair.target == "openai/gpt-oss-20b"]
    assert targets_of(pair.source) == ["openai/gpt-oss-20b"]
    assert targets_of("Qwen/Qwen3-0.6B-GGUF") == []  # a draft model is a model of its own
    assert targets_of(None) == []
