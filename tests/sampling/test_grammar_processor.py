"""Masks after the rollbacks of a token tree are those of the same text without rollbacks."""

import random

import numpy as np
import pytest

from pronk.base.errors import GuideError
from pronk.checkpoint.hub.clone_models import tiny_model
from pronk.llm import LLM
from pronk.sampling.grammar_processor import GrammarProcessor
from pronk.sampling.grammars import Grammars
from pronk.sampling.params import SamplingParams
from pronk.text.guide import Guide
from pronk.text.tokenizer import Tokenizer

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


def test_a_limit_at_a_token_is_an_error_after_it_whatever_is_rolled_back(
    grammars: Grammars,
) -> None:
    """A token whose consumption exceeds a limit is no forbidden token, after which logits are not
    masked.
    """
    processor = grammars.compile(Guide(regex="a+")).new_processor()
    token = int(np.flatnonzero(processor.allowed_tokens())[0])
    processor.advance(token)
    processor._matcher = _Failing()  # type: ignore[assignment]
    processor.advance(token)
    processor.advance(5)
    processor.rollback(1)
    with pytest.raises(GuideError, match="a limit"):
        processor.mask(np.zeros(8, np.float32))
    processor.rollback(1)
    assert processor.mask(np.zeros(token + 1, np.float32))[token] == 0


class _Failing:
    """A matcher that has reached a limit."""

    def try_consume_tokens(self, _: list[int]) -> int:
        return 0

    def is_error(self) -> bool:
        return True

    def is_accepting(self) -> bool:
        return False

    def is_stopped(self) -> bool:
        return True

    def compute_bitmask(self) -> bytes:
        return bytes(1000)

    def get_error(self) -> str:
        return "a limit"


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["autoregressive", "suffix", "grammar", "auto"])
@pytest.mark.parametrize("count", [126])
def test_objects_with_many_optional_properties(name: str, count: int) -> None:
    llm = LLM(threads=1, budget="all")
    schema = {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(count)}}
    guide = Guide(json=schema | {"additionalProperties": False})
    for mode in ("forced", "plain", "jump"):
        params = SamplingParams(
            max_tokens=12, guide=guide, guide_mode=mode, temperature=1.0, seed=3
        )
        text = llm.generate("Hi", params, drafter=name).text
        assert text.startswith(("{}", '{"p')), (mode, text)


@pytest.mark.few(16)
@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.kind)
@pytest.mark.parametrize("seed", range(12))
def test_masks_after_rollbacks_are_those_of_the_text(
    grammars: Grammars, guide: Guide, seed: int
) -> None:
    """A random walk like that of the verification of trees: branches, returns, now and then an
    accepted path.
    """
    draw = random.Random(seed)
    compiled = grammars.compile(guide)
    walked = compiled.new_processor()
    text = list[int]()
    num_rollbacks = 0

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
            token = int(
                draw.choice([*marks] or [*tokens])
                if draw.random() < 0.8
                else draw.choice([*tokens])
            )
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
