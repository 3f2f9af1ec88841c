"""Drafters by name and options: valid specifications, and one-line errors for invalid ones."""

import math
import re
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

import pytest

from pronk.base.errors import OptionError
from pronk.base.options import Option
from pronk.drafting import REGISTRY, PromptLookup, make_drafter
from pronk.drafting.registry import DRAFTERS

OUT_OF_RANGE: dict[type, tuple[Any, ...]] = {
    int: (-1, 10**9, 1.5, "many", True, None),
    float: (-1.0, 1e9, math.nan, "many", None),
    bool: (2, "yes", None),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_options_out_of_range_are_refused(name: str) -> None:
    """The message names the option, its range and the value."""
    for option in fields(REGISTRY[name]):
        for value in OUT_OF_RANGE.get(type(option.default), ()):
            with pytest.raises(OptionError, match=re.escape(option.name)) as caught:
                REGISTRY[name](**{option.name: value})
            message = str(caught.value)
            assert name in message
            assert repr(value) in message
            assert re.search(r"\d+\.\.\d+|at (least|most)|above|true or false", message), message
            assert "\n" not in message


@pytest.mark.parametrize("name", DRAFTERS)
def test_declared_options_of_a_subclass_are_checked(name: str) -> None:
    """The author of a subclass declares a range, and calls no check."""

    @dataclass(frozen=True)
    class More(REGISTRY[name]):  # type: ignore[misc]
        more: Annotated[int, Option("More.", low=1, high=3)] = 2

    assert More().more == 2
    for value in (0, 4, "a"):
        with pytest.raises(OptionError) as error:
            More(more=value)
        assert str(error.value) == f"{name}: more: expected an integer in 1..3, found {value!r}"


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_name_makes_a_drafter(name: str) -> None:
    made = make_drafter(name)
    assert type(made) is REGISTRY[name]
    assert made.name == name
    assert make_drafter(f" {name}( ) ") == made
    assert make_drafter(made) is made
    for option in fields(REGISTRY[name]):
        if type(option.default) in OUT_OF_RANGE:
            spec = f"{name}({option.name}={option.default!r})"
            assert make_drafter(spec) == make_drafter(name)


def test_options_may_be_part_of_the_name() -> None:
    want = PromptLookup(num_tokens=9, max_ngram=3)
    assert make_drafter("prompt_lookup(num_tokens=9, max_ngram=3)") == want
    assert make_drafter("prompt_lookup( max_ngram = 3,num_tokens=9, )") == want
    assert make_drafter(want) is want
    assert replace(want, max_ngram=4) == make_drafter("prompt_lookup(num_tokens=9)")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "which cannot be read"),
        ("prompt_lookup(", "which cannot be read"),
        ("prompt lookup", "which cannot be read"),
        ("suffix(**{})", "which cannot be read"),
        ("prompt_lookup; autoregressive", "which cannot be read"),
        ("prompt_lookup(7)", "which cannot be read"),
        ("a.prompt_lookup()", "which cannot be read"),
        ("prompt_lookup()()", "which cannot be read"),
        ("7", "which cannot be read"),
        ("\0", "which cannot be read"),
        ("(" * 10_000, "which cannot be read"),
        ("-" * 100_000 + "1", "which cannot be read"),
        ("oracle", r"drafter: expected one of autoregressive, .*prompt_lookup.*, found 'oracle'"),
        ("Prompt_Lookup", "found 'Prompt_Lookup'; did you mean prompt_lookup\\?"),
        (
            "prompt_lookup(ngram=2)",
            r"prompt_lookup: expected one of .*found 'ngram'; did you mean min_ngram or max_ngram",
        ),
        (
            "autoregressive(num_tokens=2)",
            r"autoregressive: expected no options, found 'num_tokens'",
        ),
        ("prompt_lookup(**{'max_ngram': 2})", "prompt_lookup"),
        ("prompt_lookup(max_ngram=4, max_ngram=5)", "max_ngram"),
        ("prompt_lookup(max_ngram=many)", "max_ngram"),
        ("prompt_lookup(max_ngram=__import__('os'))", "max_ngram"),
        ("prompt_lookup(max_ngram={[]: 1})", "max_ngram"),
        ("prompt_lookup(max_ngram='3')", "max_ngram: expected an integer in 1..16, found '3'"),
        ("prompt_lookup(max_ngram=2, min_ngram=3)", "min_ngram"),
        (
            "draft_model(num_tokens=0)",
            "draft_model: num_tokens: expected an integer in 1..64, found 0",
        ),
        (
            "draft_model(min_confidence=1.5)",
            "draft_model: min_confidence: expected a number in 0..1, found 1.5",
        ),
        ("draft_model(dtype='int4')", "draft_model: dtype: expected one of auto, .*, found 'int4'"),
        (
            "draft_model(weights='int2')",
            "draft_model: weights: expected one of plain, int8, int4, found",
        ),
        ("draft_model(model='')", "draft_model: model: expected a path, found ''"),
        ("draft_model(model=7)", "draft_model: model: expected a path, found 7"),
        (
            "threshold(lowest=0.5, highest=0.4)",
            "threshold: lowest: expected at most highest = 0.4, found 0.5",
        ),
        (
            "threshold(threshold=0.01)",
            "threshold: threshold: expected a number in 0.05..0.95, found 0.01",
        ),
        ("threshold(prompt_lookup)", "threshold: expected one drafter of chains"),
        ("first_of(oracle)", "expected one of .*, found 'oracle'"),
        ("first_of(7)", "which cannot be read"),
        ("first_of(*recycling)", "which cannot be read"),
        ("first_of(recycling, num_nodes=2)", "first_of: expected no options, found 'num_nodes'"),
        ("merged(parts=(1,))", "merged: expected one of num_nodes.*, found 'parts'"),
        ("merged(recycling(top_k=99))", "recycling: top_k"),
        ("recycling(jacobi)", "which cannot be read"),
        ("suffix(num_nodes=0)", r"suffix: num_nodes: expected an integer in 1\.\.1023, found 0"),
        ("suffix(max_match=1)", r"suffix: max_match: expected an integer in 2\.\.64, found 1"),
        ("suffix(min_match=17)", "suffix: expected min_match at most max_match = 16, found 17"),
        (
            "suffix(depth_factor=0)",
            r"suffix: depth_factor: expected a number in 0\.25\.\.64, found 0",
        ),
        (
            "suffix(store_tokens=16777217)",
            r"suffix: store_tokens: expected an integer in 0\.\.16777216",
        ),
        ("suffix(store=3)", "suffix: store: expected a path, found 3"),
        (
            "suffix(store='x', store_tokens=0)",
            "suffix: expected store_tokens of at least 1 for store='x', found 0",
        ),
        ("auto(num_nodes=0)", "auto: num_nodes"),
        ("auto(bundled=2)", "auto: bundled"),
        ("auto(deep=1)", "auto: expected one of bundled, num_nodes, found 'deep'"),
        ("auto(nobody)", "found 'nobody'"),
    ],
    ids=lambda value: value[:60],
)
def test_invalid_specifications_are_refused(spec: str, message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        make_drafter(spec)
    assert "\n" not in str(caught.value)
