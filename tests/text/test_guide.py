import json
from typing import Any

import pytest

from guides import ToyFollower
from pronk.base.errors import OptionError
from pronk.sampling.grammar_pruning import prune
from pronk.sampling.params import SamplingParams
from pronk.sampling.tree import TokenTree
from pronk.text.guide import MAX_SIZE, Guide


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "expected one of json, regex, choice and grammar, found none"),
        ({"regex": "a", "grammar": "start: "}, "found regex and grammar"),
        ({"json": {}, "choice": ["a"]}, "found json and choice"),
        ({"json": "{"}, r"found a mistake at line 1, column 2 \(Expecting"),
        ({"json": "[" * 100_000}, "levels"),
        ({"json": [1]}, "an object or true"),
        ({"json": 3}, "an object or true"),
        ({"json": '"abc"'}, "an object or true"),
        ({"json": False}, "that some value matches"),
        ({"json": "false"}, "that some value matches"),
        ({"json": {"a": object()}}, "JSON values"),
        ({"json": {"minimum": float("nan")}}, "JSON values"),
        ({"json": nested(70)}, "at most 64 levels"),
        ({"json": json.dumps(nested(70))}, "at most 64 levels"),
        ({"json": {"enum": ["x" * MAX_SIZE]}}, f"at most {MAX_SIZE} characters"),
        ({"json": "x" * (MAX_SIZE + 1)}, f"at most {MAX_SIZE} characters"),
        ({"regex": ""}, "not empty"),
        ({"regex": 3}, "not empty"),
        ({"regex": "a" * (MAX_SIZE + 1)}, f"at most {MAX_SIZE} characters"),
        ({"regex": "a\ud800"}, "half a character"),
        ({"grammar": ""}, "not empty"),
        ({"grammar": "x" * 10_000_000}, "at most"),
        ({"choice": []}, "expected 1..1024 texts, found 0"),
        ({"choice": ["a"] * 1025}, "found 1025"),
        ({"choice": "yes"}, "expected a list of texts"),
        ({"choice": ["a", ""]}, "not empty"),
        ({"choice": ["a", 1]}, "not empty"),
        ({"choice": ["a", "a"]}, "found a duplicate"),
        ({"choice": ["a\udc80"]}, "half a character"),
        ({"regex": "a", "whitespace": True}, "with json only"),
        ({"json": True, "whitespace": 1}, "whitespace"),
    ],
)
def test_invalid_guides_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Guide(**given)


def test_equal_guides() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    assert Guide(json=schema) == Guide(json=json.dumps(schema))
    assert hash(Guide(choice=["a", "b"])) == hash(Guide(choice=("a", "b")))
    assert Guide(json=schema) != Guide(json={"type": "object", "properties": {"a": {}, "b": {}}})


@pytest.mark.parametrize(
    "guide",
    [
        Guide(json={"type": "object"}, whitespace=True),
        Guide(json=True),
        Guide(regex="[ab]+"),
        Guide(choice=["é", "b"]),
        Guide(grammar='start: "a"'),
    ],
    ids=lambda guide: guide.kind,
)
def test_guides_as_json_values(guide: Guide) -> None:
    assert Guide(**json.loads(json.dumps(guide.to_dict()))) == guide
    params = SamplingParams(guide=guide, guide_mode="plain")
    values = json.loads(json.dumps(params.to_dict()))
    again = SamplingParams(**(values | {"guide": Guide(**values["guide"])}))
    assert again == SamplingParams(**(params.to_dict() | {"guide": guide}))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"guide": "[0-9]+"}, "expected a Guide"),
        ({"guide_mode": "fast"}, "guide_mode"),
        ({"guide": Guide(regex="a"), "ignore_eos": True}, "ignore_eos"),
        ({"guide": Guide(regex="a"), "guide_mode": "jump", "logprobs": 0}, "logprobs"),
        ({"guide": Guide(regex="a"), "guide_mode": "jump", "bad_words": ["b"]}, "bad_words"),
    ],
)
def test_invalid_options_with_a_guide_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        SamplingParams(**given)


def test_pruned_trees_keep_what_the_guide_allows() -> None:
    follower = ToyFollower(131)  # allows 20, then 21
    tree = TokenTree(
        (9, 20, 21, 20, 5, 21, 20), (-1, 0, 1, 1, 0, 4, 4), verify=(True,) * 4 + (False, True, True)
    )
    kept = prune(tree, follower)
    assert (kept.tokens, kept.parents) == ((9, 20, 21, 5, 21, 20), (-1, 0, 1, 0, 3, 3))
    assert follower.states == [0]
    assert prune(kept, follower) is kept


def test_an_error_in_pruning_restores_the_state() -> None:
    class Broken(ToyFollower):
        def allows(self, token: int) -> bool:
            if len(self.states) > 2:
                raise RuntimeError
            return super().allows(token)

    follower = Broken(131)
    with pytest.raises(RuntimeError):
        prune(TokenTree.chain([9, 20, 21, 22]), follower)
    assert follower.states == [0]
