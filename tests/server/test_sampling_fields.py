"""Fields of requests that are options of ``SamplingParams``: type and range are those of its
declaration.
"""

from __future__ import annotations

from typing import Any, get_args

import pytest
from pydantic import ValidationError

from pronk import SamplingParams
from pronk.base import declared_options
from pronk.server.protocol.request import TextRequest

# Fields with a range of the protocol, with its reason.
OWN_RANGE = {
    "top_p": "0 is the likeliest token alone, as for OpenAI",
    "top_k": "-1 is all tokens, as for vLLM",
    "n": "its maximum is a setting of the server",
    "seed": "any integer of 64 bits; a negative one and a larger one have a seed of their own",
}
# Fields of another type than the option, with its reason.
OWN_TYPE = {
    "stop": "JSON has lists, and an empty text ends nothing",
    "stop_token_ids": "JSON has lists",
    "bad_words": "JSON has lists",
    "logit_bias": "keys in JSON are texts",
    "top_k": OWN_RANGE["top_k"],
}
DECLARED = {
    name: each
    for name, each in declared_options(SamplingParams).items()
    if name in TextRequest.model_fields
}


def accepts(name: str, value: Any) -> bool:
    try:
        TextRequest.model_validate({name: value})
    except ValidationError:
        return False
    return True


@pytest.mark.parametrize("name", [name for name in DECLARED if name not in OWN_TYPE])
def test_types_are_those_of_the_declaration(name: str) -> None:
    kinds = {*get_args(TextRequest.model_fields[name].annotation)} - {type(None)}
    assert kinds == {DECLARED[name].kind}


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, each in DECLARED.items()
        if each.option.low is not None and name not in OWN_RANGE
    ],
)
def test_ranges_are_those_of_the_declaration(name: str) -> None:
    option = DECLARED[name].option
    assert option.low is not None
    assert accepts(name, option.low) is not option.exclusive_min
    assert not accepts(name, option.low - 1)
    if option.high is None:
        assert accepts(name, 2**40)
    else:
        assert accepts(name, option.high)
        assert not accepts(name, option.high + 1)


def test_reasons_are_of_fields() -> None:
    assert {*OWN_RANGE, *OWN_TYPE} <= DECLARED.keys()
    assert len(DECLARED) >= 17
