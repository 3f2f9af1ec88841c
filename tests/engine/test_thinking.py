"""Thinking budget: forced ends of thoughts are the same with every drafter, in batches and after
preemption.
"""

from collections.abc import Sequence
from itertools import cycle

import numpy as np
import pytest

from engine.cases import (
    ENDS,
    MIXED,
    PROMPTS,
    ask,
    assert_same,
    drafter,
    params,
    plain,
    step_until_ended,
    total,
)
from pronk.base.arrays import FLOAT32
from pronk.base.errors import OptionError
from pronk.engine.request import Request
from pronk.sampling.logits_processors import BannedTokens, TokenContext
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import Sampler
from pronk.sampling.thinking import ThinkingBudget
from pronk.text.thinking import ThinkingMarkers
from tiny_models import THOUGHTS, make_engine, make_request, run, tiny_decoder

BEGIN = 3
END = [5, 50]
BUDGET = 4


def thoughts(output: Sequence[int]) -> list[int]:
    """Return the number of tokens in each complete thought of an output."""
    lengths = list[int]()
    at = 0
    while BEGIN in output[at:]:
        start = output.index(BEGIN, at) + 1
        stop = next((i for i in range(start, len(output)) if [*output[i : i + 2]] == END), None)
        if stop is None:
            break
        lengths.append(stop - start)
        at = stop + 2
    return lengths


def test_plain_decoding_ends_thoughts_at_the_budget() -> None:
    """All thoughts of a text share the budget: later ones end at once."""
    without = [
        THOUGHTS.begin in "".join(map(chr, request.output)) for request in plain(FLOAT32, "bias")
    ]
    assert any(without)
    forced = 0
    for request in plain(FLOAT32, "thinking"):
        lengths = thoughts(request.output)
        assert sum(lengths) <= BUDGET
        forced += len(lengths)
    assert forced > 12


def test_a_message_precedes_the_forced_end_of_thoughts() -> None:
    """The case "thinking all" of the equality tests has a message, so that it is in all of them."""
    message = [*map(ord, params("thinking all", 0).thinking_message)]
    assert message
    num_messages = 0
    for request in plain(FLOAT32, "thinking all"):
        output = [*request.output]
        for at in range(len(output)):
            if output[at : at + len(message)] == message:
                num_messages += 1
                end = output[at + len(message) :][: len(END)]
                assert end == END[: len(end)]
    assert num_messages > 4


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_other_rules_keep_the_budget(rule: str) -> None:
    engine = make_engine(tiny_decoder())
    options = [SamplingParams(max_tokens=40, temperature=1.0, seed=seed, rule=rule, thinking_budget=BUDGET,
                              logit_bias={3: 5.0}) for seed in range(4)]  # type: ignore[arg-type]  # fmt: skip
    by = drafter("oracle", plain(FLOAT32, "thinking"))
    requests = [make_request(prompt, each, by, stop_token_ids=ENDS)  # type: ignore[arg-type]
                for prompt, each in zip(PROMPTS, options, strict=False)]  # fmt: skip
    run(engine, requests)
    lengths = [thoughts(request.output) for request in requests]
    assert all(sum(each) <= BUDGET for each in lengths)
    assert sum(map(len, lengths)) > 5


def test_preempted_requests_keep_the_budget() -> None:
    want = plain(FLOAT32, "thinking")
    engine = make_engine(tiny_decoder(), max_batch=2)
    names = cycle(MIXED)
    got: list[Request] = []
    for index, prompt in enumerate(PROMPTS):
        proposer = drafter(next(names), want).bind(engine.target)
        got.append(ask(prompt, params("thinking", index), proposer))
        got[-1].priority = index // 2  # later requests preempt the first two
        engine.add(got[-1])
        for _ in range(3 * index):
            engine.step()
    step_until_ended(engine, got)
    assert total(got, "preemptions") > 0
    assert total(got, "accepted") > 0
    assert_same(got, want)


@pytest.mark.parametrize("budget", [0, 1, 3])
@pytest.mark.parametrize("opened", [True, False])
def test_masks_follow_the_context(budget: int, opened: bool) -> None:
    """Every way to reach a context gives the same mask: token by token, after rollbacks, or in a
    new sampler.
    """
    rng = np.random.default_rng(budget)
    # 32 is a space: the begin marker may be followed by white space
    prompt = [1, 3, 32] if opened else [1, 3, 2]
    logits = rng.normal(size=64).astype(np.float32)

    def sampler_after(output: Sequence[int]) -> Sampler:
        made = ThinkingBudget(budget, THOUGHTS, prompt, output)
        return Sampler(
            SamplingParams(), 0, TokenContext([*prompt, *output], 3), 64, processors=[made]
        )

    sampler = sampler_after([])
    path = list[int]()
    forced = 0
    for _ in range(60):
        if path and rng.random() < 0.3:
            count = int(rng.integers(1, len(path) + 1))
            sampler.rollback(count)
            del path[-count:]
        token = (
            int(rng.choice([3, 5, 50, *range(6)]))
            if rng.random() < 0.5
            else int(sampler.scores(logits).argmax())
        )
        sampler.advance(token)
        path.append(token)
        scores = sampler.scores(logits)
        assert np.array_equal(scores, sampler_after(path).scores(logits))
        forced += int(np.isfinite(scores).sum() == 1)
        thinking = opened
        count = 0
        at = 0
        while at < len(path):  # a slow reference
            if thinking and path[at : at + 2] == END:
                # tokens of the marker are counted, too
                thinking = False
                count = count + 2
                at = at + 2
            elif not thinking and path[at] == BEGIN:
                thinking = True
                at = at + 1
            else:
                count = count + thinking
                at = at + 1
        assert (np.isfinite(scores).sum() == 1) == (thinking and count >= budget)
    assert forced > 5


def test_a_banned_end_marker_is_an_error() -> None:
    def sampler(output: Sequence[int], bad_words: Sequence[Sequence[int]]) -> Sampler:
        made = ThinkingBudget(1, THOUGHTS, [1, 3], output)
        return Sampler(
            SamplingParams(),
            0,
            TokenContext([1, 3, *output], 2),
            64,
            banned=BannedTokens(bad_words=bad_words),
            processors=[made],
        )

    logits = np.zeros(64, np.float32)
    for output, bad_words, token in (([7], [[5]], 5), ([7, 5], [[5, 50]], 50)):
        with pytest.raises(
            OptionError, match=f"^thinking_budget: expected .*, found its token {token} banned"
        ):
            sampler(output, bad_words).choose(logits)
        assert sampler(output, bad_words).draft_token(logits, 0) is None
    assert sampler([7, 5], [[5]]).choose(logits) == 50
    with pytest.raises(OptionError, match=r"^expected an allowed token"):
        sampler([], [[token] for token in range(64)]).choose(logits)


def test_markers_may_be_parts_of_tokens() -> None:
    texts = ["x", "a <thi", "nk>b", "</", "think", "> c", "d", "</think>", "<think>"]
    markers = ThinkingMarkers("<think>", "</think>", (7,), texts.__getitem__, repeats=True)
    sampler = Sampler(
        SamplingParams(), 0, TokenContext([0]), 9, processors=[ThinkingBudget(2, markers, [0])]
    )
    logits = np.zeros(9, np.float32)

    def finite(*tokens: int) -> list[int]:
        with sampler.after(tokens):
            return np.flatnonzero(np.isfinite(sampler.scores(logits))).tolist()

    everything = [*range(9)]
    assert finite(1) == finite(1, 2) == finite(1, 2, 6) == everything
    assert finite(1, 2, 6, 3) == finite(1, 2, 0, 0) == [7]
    # a marker of three tokens, the last of which is forbidden as a draft
    assert finite(1, 2, 3, 4, 5) == everything
    assert finite(1, 2, 0, 0, 7) == everything
    assert markers.opened_by([0, 8, 0]) is False
    assert markers.opened_by([0, 1, 8]) is True


def test_text_with_a_marker_is_no_thought() -> None:
    """Only an answer that begins with the marker, perhaps after white space, has thoughts."""
    texts = ["\n", "a", "<thi", "nk>", "b", "</think>", "<think>"]
    markers = ThinkingMarkers("<think>", "</think>", (5,), texts.__getitem__)
    sampler = Sampler(
        SamplingParams(), 0, TokenContext([0]), 7, processors=[ThinkingBudget(1, markers, [1])]
    )
    logits = np.zeros(7, np.float32)

    def forced(*tokens: int) -> bool:
        with sampler.after(tokens):
            return int(np.isfinite(sampler.scores(logits)).sum()) == 1

    assert forced(6, 4)
    assert forced(0, 0, 2, 3, 4)
    assert not forced(6)
    assert not forced(1, 6, 4, 4)
    assert not forced(2, 4, 6, 4, 4)
    assert not forced(6, 5, 6, 4, 4)
