"""SmolLM2 agrees with llama.cpp: the same prompts of conversations, nearly the same
distributions.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pronk.llm import LLM
from real.agreement import kl, last_logits, log_softmax
from real.questions import QUESTIONS, conversation

FIXTURE: dict[str, Any] = json.loads((Path(__file__).parent / "llama_cpp_smollm2.json").read_text())

NEAR_TIE = 0.3  # nats


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> LLM:
    return LLM(smollm2, calibration=False)


def test_prompts_of_conversations(llm: LLM) -> None:
    assert [row["question"] for row in FIXTURE["rows"]] == list(QUESTIONS)
    for row in FIXTURE["rows"]:
        assert llm.chat_ids(conversation(row["question"])) == row["prompt"], row["question"]


def test_distributions(llm: LLM) -> None:
    """The distance to llama.cpp is at most twice the larger distance to float32 on the dequantized
    weights.
    """
    # type: ignore[var-annotated]
    between = []
    to_float = [[], []]
    exact_choices = [0, 0]
    for row in FIXTURE["rows"]:
        ours = log_softmax(last_logits(llm, row["prompt"]))[row["top"]]
        theirs = np.array(row["llama_cpp"])
        exact = np.array(row["float32"])
        between.append(kl(ours, theirs))
        to_float[0].append(kl(ours, exact))
        to_float[1].append(kl(theirs, exact))
        exact_choices[0] += int(np.argmax(ours) == np.argmax(exact))
        exact_choices[1] += int(np.argmax(theirs) == np.argmax(exact))
        # Where the first choices differ, llama.cpp and float32 both have a near tie there.
        for reference in (theirs, exact):
            assert reference.max() - reference[np.argmax(ours)] < NEAR_TIE, row["question"]
    limit = 2 * max(float(np.mean(distances)) for distances in to_float)
    assert 0 < np.mean(between) <= limit
    # because the limit itself contains our distance
    assert np.mean(to_float[0]) <= 2 * np.mean(to_float[1])
    assert exact_choices[0] >= exact_choices[1] - 1 > 0.8 * len(QUESTIONS)
