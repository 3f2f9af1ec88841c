"""Rules for every drafter: the engine's tests with the lab's drafters."""

import pytest

from drafting import test_conformance as conformance
from lab.drafters.cases import REGISTERED, spec
from pronk import LLM


@pytest.fixture(scope="module")
def tiny() -> LLM:
    """Return pronk-tiny, which has a trained drafter of every kind but heads."""
    return LLM(drafter="autoregressive")


EACH = pytest.mark.parametrize("name", REGISTERED)


@pytest.mark.few(4)
@EACH
@pytest.mark.parametrize(
    "seeds", [range(3), pytest.param(range(3, 9), marks=pytest.mark.slow)], ids=str
)
def test_state_depends_on_the_text_and_the_targets_outputs_alone(name: str, seeds: range) -> None:
    conformance.test_state_depends_on_the_text_and_the_targets_outputs_alone(spec(name), seeds)


@pytest.mark.few(4)
@EACH
def test_proposals_are_trees_within_the_limits(name: str) -> None:
    conformance.test_proposals_are_trees_within_the_limits(spec(name))


@EACH
def test_proposals_do_not_depend_on_the_batch_or_on_earlier_proposals(name: str) -> None:
    conformance.test_proposals_do_not_depend_on_the_batch_or_on_earlier_proposals(spec(name))


@EACH
def test_equal_options_bind_to_equal_proposers_of_each_target(name: str) -> None:
    conformance.test_equal_options_bind_to_equal_proposers_of_each_target(spec(name))


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("glide", {"kv_layers"}),
        ("cape(glide)", {"kv_layers"}),
        ("vanilla", set()),
        ("kangaroo", {"first_layers"}),
        ("merged(kangaroo, glide)", {"first_layers", "kv_layers"}),
        ("medusa", {"hidden"}),
        ("multi_token", set()),
        ("lookahead", {"logits"}),
    ],
)
def test_drafters_declare_what_they_need_of_the_target(
    tiny: LLM, name: str, needs: set[str]
) -> None:
    capabilities = tiny.get_proposer(name).capabilities
    declared = ("hidden", "computes_features", "logits", "first_layers", "kv_layers")
    assert {each for each in declared if getattr(capabilities, each)} == needs
