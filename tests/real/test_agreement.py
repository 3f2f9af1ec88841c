"""SmolLM2 agrees with llama.cpp: the same prompts of conversations, nearly the same distributions."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pronk.llm import LLM
from real.agreement import kl, last_logits, log_softmax
from real.questions import QUESTIONS, conversation

FIXTURE: dict[str, Any] = json.loads((Path(__file__).parent / "llama_cpp_smollm2.json").read_text())


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> LLM:
    return LLM(smollm2, calibration=False)


def test_prompts_of_conversations(llm: LLM) -> None:
    assert [row["question"] for row in FIXTURE["rows"]] == list(QUESTIONS)
    for row in FIXTURE["rows"]:
        assert llm.chat_ids(conversation(row["question"])) == row["prompt"], row["question"]


def test_distributions(llm: LLM) -> None:
    """The distance to llama.cpp is at most twice the larger distance to float32 on the dequantized weights."""
    between, to_float, first = [], [[], []], 0  # type: ignore[var-annotated]
    for row in FIXTURE["rows"]:
        ours = log_softmax(last_logits(llm, row["prompt"]))[row["top"]]
        theirs, exact = np.array(row["llama_cpp"]), np.array(row["float32"])
        between.append(kl(ours, theirs))
        to_float[0].append(kl(ours, exact))
        to_float[1].append(kl(theirs, exact))
        first += int(np.argmax(ours) == 0)
    limit = 2 * max(float(np.mean(distances)) for distances in to_float)
    assert 0 < np.mean(between) <= limit
    assert np.mean(to_float[0]) <= 2 * np.mean(to_float[1])  # because the limit itself contains our distance
    assert first >= 0.97 * len(QUESTIONS) - 1  # one near tie among 20 is allowed
