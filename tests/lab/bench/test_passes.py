"""Costs of forward passes by their rows, and divergent outputs, on pronk-tiny."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, pairwise

import numpy as np
import pytest

from lab.bench.bench_cases import pronk_tiny, sample
from pronk.base.arrays import Array
from pronk.drafting import DraftContext
from pronk.engine.outputs import Completion
from pronk.lab.bench import measure
from pronk.lab.bench.measure import find_divergence, pass_times
from pronk.lab.bench.methods import Item
from pronk.lab.bench.records import PLAIN, DivergenceRecord
from pronk.lab.verification.plain_decoding import LogitsRecorder
from pronk.llm import LLM
from pronk.sampling.params import SamplingParams

PROMPT = "def mean(values):\n"


def test_forward_passes_have_the_requested_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round measures 1, 2, 8 and 64 rows; each record has rows and seconds of a step in the
    engine's stats.
    """
    llm = pronk_tiny()
    original = LLM.generate
    seen = list[Completion]()

    def generate(*args: object, **options: object) -> Completion:
        seen.append(original(*args, **options))  # type: ignore[call-overload]
        return seen[-1]

    monkeypatch.setattr(LLM, "generate", generate)
    found = list(pass_times(llm, llm.tokenizer.encode(PROMPT), (1, 2, 8, 64), rounds=2))
    assert [rows for rows, _ in groupby(record.rows for record in found)] == [1, 2, 8, 64] * 2
    counts = Counter(record.rows for record in found)
    assert all(counts[rows] >= 6 for rows in (1, 2, 8, 64)), counts
    assert all(record.seconds > 0 for record in found)
    steps = [
        (step.rows, step.target_clock - before.target_clock)
        for completion in seen
        for before, step in pairwise(completion.stats.steps)
    ]
    assert all((record.rows, record.seconds) in steps for record in found)


def test_the_star_has_different_draft_tokens() -> None:
    llm = pronk_tiny()
    for vocab, last in ((300, 5), (300, 298), (64, 63)):
        context = DraftContext(None, [1, last], 9, 99, SamplingParams(), None, None)  # type: ignore[arg-type]
        (tree,) = measure._StarProposer(64, vocab).propose([context])
        assert tree.tokens[0] == last
        assert len(set(tree.tokens)) == len(tree.tokens) == 64
        assert all(0 <= token < vocab for token in tree.tokens)
        assert set(tree.parents[1:]) == {0}
    (tree,) = measure._StarProposer(1, llm.config.vocab_size).propose([context])
    assert tree.tokens == (63,)


def item(temperature: float = 0.0) -> Item:
    params = SamplingParams(max_tokens=12, temperature=temperature, seed=5, ignore_eos=True)
    return Item(pronk_tiny().tokenizer.encode(PROMPT), params, sample("", temperature=temperature))


def plain_tokens(asked: Item) -> list[int]:
    return pronk_tiny().generate(asked.ids, asked.params, drafter="autoregressive").token_ids


def divergence(
    asked: Item, plain: Sequence[int], other: Sequence[int], **more: str
) -> DivergenceRecord | None:
    made = [
        replace(asked.sample, method=m, tokens=tuple(tokens))
        for m, tokens in ((PLAIN, plain), ("x", other))
    ]
    return find_divergence(pronk_tiny(), asked, made[0], replace(made[1], **more))  # type: ignore[arg-type]


def logits_after(ids: Sequence[int]) -> Array:
    """Return log-probabilities by a request with ``logprobs=64``, ``-inf`` for less likely
    tokens.
    """
    (found,) = (
        pronk_tiny().generate(list(ids), SamplingParams(max_tokens=1, logprobs=64)).logprobs or ()
    )
    return np.array([found.get(token, -np.inf) for token in range(pronk_tiny().config.vocab_size)])


def test_equal_outputs_and_failures_do_not_diverge() -> None:
    asked = item()
    assert divergence(asked, (1, 2, 3), (1, 2, 3)) is None
    assert divergence(asked, (1, 2, 3), (), error="out of memory") is None


@pytest.mark.parametrize(("other", "position"), [((1, 2), 2), ((), 0), ((1, 2, 3, 4), 3)])
def test_an_output_of_another_length_is_a_defect(other: tuple[int, ...], position: int) -> None:
    found = divergence(item(), (1, 2, 3), other)
    assert found == DivergenceRecord("code", "a", "x", 0.0, position, None, near_tie=False)


@pytest.mark.parametrize("position", [0, 7])
def test_a_much_less_likely_token_is_a_defect(position: int) -> None:
    asked = item()
    plain = plain_tokens(asked)
    scores = logits_after(asked.ids + plain[:position])
    assert int(scores.argmax()) == plain[position]
    rival = int(np.argsort(-scores)[29])
    found = divergence(asked, plain, [*plain[:position], rival, 9, 9])
    assert found is not None
    assert (found.position, found.method, found.temperature, found.near_tie) == (
        position,
        "x",
        0.0,
        False,
    )
    # the error of bfloat16 logits
    assert found.gap == pytest.approx(float(scores.max() - scores[rival]), abs=0.1)
    assert found.gap > 1


def test_an_equally_likely_token_is_a_near_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    """A logit 0.05 below the maximum is a near tie; a logit 3.0 below is more than rounding can
    explain.
    """
    asked = item()
    plain = plain_tokens(asked)
    rival = int(np.argsort(-logits_after(asked.ids + plain[:4]))[29])
    original = LogitsRecorder.choose

    def found(gap: float) -> DivergenceRecord:
        def choose(self: LogitsRecorder, logits: Array) -> int:
            moved = logits.copy()
            moved[rival] = logits.max() - gap
            return original(self, moved)

        monkeypatch.setattr(LogitsRecorder, "choose", choose)
        diverged = divergence(asked, plain, [*plain[:4], rival])
        assert diverged is not None
        assert diverged.gap == pytest.approx(gap, abs=0.02)
        return diverged

    assert found(0.0).near_tie
    assert found(0.05).near_tie  # less than a unit in the last place of logits around 20
    assert not found(3.0).near_tie


def test_sampled_outputs_are_judged_with_their_noise() -> None:
    """Where the seed's noise makes plain decoding choose a less likely token, the likeliest token
    is a defect.
    """
    asked = replace(
        item(0.8), params=SamplingParams(max_tokens=12, temperature=0.8, seed=9, ignore_eos=True)
    )
    plain = plain_tokens(asked)
    position, likeliest = next(
        (i, int(scores.argmax()))
        for i, token in enumerate(plain)
        if int((scores := logits_after(asked.ids + plain[:i])).argmax()) != token
        and scores.max() - scores[token] > 1
    )
    found = divergence(asked, plain, [*plain[:position], likeliest])
    assert found is not None
    assert (found.position, found.temperature, found.near_tie) == (position, 0.8, False)
    assert found.gap is not None
    assert found.gap > 0
