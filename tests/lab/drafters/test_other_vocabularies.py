"""Draft models with another vocabulary, inside drafters of the lab."""

from pathlib import Path

import pytest

from checkpoints import MakeCheckpoint
from drafting.from_draft import test_other_vocabularies as vocabularies
from pronk import LLM

KINDS = (
    "cape(threshold(draft_model({})))",
    "staged(draft_model({}), prompt_lookup)",
    "beam(draft_model({}))",
)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(budget="all")


@pytest.mark.few(1)
@pytest.mark.parametrize("options", [pytest.param("greedy", marks=pytest.mark.slow), "seeded"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_shuffled_vocabulary_drafts_as_well(
    llm: LLM, kind: str, options: str, tmp_path: Path
) -> None:
    vocabularies.test_a_shuffled_vocabulary_drafts_as_well(llm, kind, options, tmp_path)


def test_a_random_model_with_another_tokenizer(llm: LLM, checkpoint: MakeCheckpoint) -> None:
    vocabularies.check_random_model(llm, checkpoint, KINDS)
