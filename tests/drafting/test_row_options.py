"""Drafters that ask for more rows of a request than the model verifies are refused in one line."""

from dataclasses import fields

import pytest

from pronk import LLM, OptionError, SamplingParams
from pronk.drafting import make_drafter
from pronk.drafting.proposer import Drafter, bind_proposer
from pronk.drafting.registry import DRAFTERS
from tiny_models import make_engine, tiny_decoder

SPECS = {
    "suffix(num_nodes=200)": "suffix: num_nodes",
    "recycling(num_nodes=200)": "recycling: num_nodes",
    "prompt_lookup(num_tokens=200)": "prompt_lookup: num_tokens",
    "prediction(num_tokens=200)": "prediction: num_tokens",
    "merged(num_nodes=200)": "merged: num_nodes",
    "auto(num_nodes=200)": "auto: num_nodes",
    "merged(suffix(num_nodes=200))": "suffix: num_nodes",
}


@pytest.mark.parametrize("spec", SPECS)
def test_more_rows_than_the_limit(spec: str) -> None:
    drafter = make_drafter(spec)
    message = (
        f"^{SPECS[spec]}: expected at most 128, the limit max_tree, found 200; set max_tree to 200$"
    )
    with pytest.raises(OptionError, match=message):
        bind_proposer(drafter, make_engine(tiny_decoder()).target)
    bind_proposer(drafter, make_engine(tiny_decoder(), max_tree=200).target)


def test_sizes_of_trees_are_row_options() -> None:
    drafters = [make_drafter(name) for name in DRAFTERS]
    sized = [each for each in drafters if _names(each) & {"num_nodes", "max_nodes"}]
    assert len(sized) > 4
    for drafter in sized:
        assert _names(drafter) & {"num_nodes", "max_nodes"} <= {*drafter.row_options}, drafter.name


def _names(drafter: Drafter) -> set[str]:
    return {field.name for field in fields(drafter)}  # type: ignore[arg-type]


def test_the_option_of_the_model() -> None:
    for value in (127, 1025):
        with pytest.raises(OptionError, match=rf"max_tree: expected .*128..1024, found {value}"):
            LLM(max_tree=value)
    with pytest.raises(OptionError, match="suffix: num_nodes: expected at most 128"):
        LLM(drafter="suffix(num_nodes=300)")
    llm = LLM(max_tree=301, drafter="suffix(num_nodes=300)", budget="all")
    params = SamplingParams(max_tokens=8)
    text = llm.generate("a b c a b c a b", params)
    assert (
        text.token_ids
        == llm.generate("a b c a b c a b", params, drafter="autoregressive").token_ids
    )
    assert llm.engine.scheduler.max_tree == 301
