"""Masks after the rollbacks of a token tree are those of the same text without rollbacks."""

import random

import numpy as np
import pytest

from pronk.models.clone_models import tiny_model
from pronk.sampling.guide import Guide
from pronk.structured.grammar_processor import GrammarProcessor
from pronk.structured.grammars import Grammars
from pronk.tokenization.tokenizer import Tokenizer

ANY_CALL = """
start: <[1]> " [" call (", " call)* "]"
call: "{\\"name\\": \\"weather\\", \\"arguments\\": " %json {"type": "object", "properties": {"deep": {}}} "}"
"""
# Tokens of pronk-tiny: <[1]>, tokens with the marks of JSON, and a few letters.
MARKS = (1, 490, 94, 5, 707, 332, 479, 3300, 655, 2138, 71, 88, 96, 64, 62, 30)
GUIDES = [
    Guide(grammar=ANY_CALL),
    Guide(json={"type": "object"}),
    Guide(json={"type": "array", "items": {"type": ["integer", "null", "string"]}}),
    Guide(regex="(ab|a[b-d]{2})+ (x|y)*"),
]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    tokenizer = Tokenizer.load(tiny_model())
    return Grammars(tokenizer, tokenizer.vocab_size, (0,))


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.kind)
@pytest.mark.parametrize("seed", range(12))
def test_masks_after_rollbacks_are_those_of_the_text(grammars: Grammars, guide: Guide, seed: int) -> None:
    """A random walk like that of the verification of trees: branches, returns, now and then an accepted path."""
    draw, compiled = random.Random(seed), grammars.compile(guide)
    walked, text, num_rollbacks = compiled.new_processor(), list[int](), 0

    def allowed(processor: GrammarProcessor) -> np.ndarray:
        return np.flatnonzero(processor.allowed_tokens())

    for _ in range(120):
        path = list[int]()
        for _ in range(draw.randint(1, 5)):  # down a branch
            if draw.random() < 0.5:
                walked.forced()
            here = compiled.new_processor([*text, *path])
            tokens = allowed(here)
            np.testing.assert_array_equal(allowed(walked), tokens)
            assert walked.forced() == here.forced()
            marks = tokens[np.isin(tokens, MARKS)]  # nested values more often than long strings
            token = int(draw.choice([*marks] or [*tokens]) if draw.random() < 0.8 else draw.choice([*tokens]))
            assert walked.allows(token) == here.allows(token)
            walked.advance(token)
            path.append(token)
            if token == 0:
                break
        back = len(path) if 0 in path or draw.random() < 0.7 else draw.randint(0, len(path))
        walked.rollback(back)
        num_rollbacks += back > 0
        text += path[: len(path) - back]
        if len(text) > 60:
            walked.rollback(50)
            del text[-50:]
    assert num_rollbacks > 50
    assert text
