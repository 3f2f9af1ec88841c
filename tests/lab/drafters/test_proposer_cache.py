"""The cache of proposers: the engine's tests with the lab's drafters."""

from pathlib import Path

import pytest

from drafting import test_proposer_cache as proposer_cache
from drafting.test_proposer_cache import Returns, ReturnsChains
from lab.drafters.cases import REGISTERED
from pronk import Cape, Drafter, DraftModel, PromptLookup, Staged
from pronk.drafting import Target
from tiny_models import make_engine, tiny_decoder


@pytest.fixture
def target() -> Target:
    return make_engine(tiny_decoder()).target


def test_a_rewritten_folder_is_loaded_again(target: Target, tmp_path: Path) -> None:
    proposer_cache.test_a_rewritten_folder_is_loaded_again("cape({})", target, tmp_path)


@pytest.mark.parametrize("name", REGISTERED)
def test_proposers_list_their_models(name: str) -> None:
    proposer_cache.test_proposers_list_their_models(name)


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        (
            Staged((DraftModel(), Returns(3))),
            r"drafter returns: expected bind\(\) to return a Proposer, found int",
        ),
        (
            Cape((ReturnsChains(None),)),
            "drafter returns_chains: expected bind.. to return a Proposer, found NoneType",
        ),
        (
            Cape((ReturnsChains(PromptLookup()),)),
            (
                r"drafter prompt_lookup: expected bind\(\) to return a proposer with a method "
                r"chains, "
                r"found PromptLookup"
            ),
        ),
    ],
    ids=["staged", "cape", "chains of cape"],
)
def test_objects_that_are_no_drafter_are_refused(drafter: Drafter, message: str) -> None:
    proposer_cache.test_objects_that_are_no_drafter_are_refused(drafter, message)
