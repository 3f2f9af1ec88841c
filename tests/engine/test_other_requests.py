"""Other requests are aborted, fail, preempt and are preempted: tokens and logprobs equal those of
plain decoding.

The KV cache is too small for two requests and shares prefixes.
"""

import random

import pytest

from engine.cases import DRAFTERS, ask, assert_same, drafter, params, plain, total
from engine.failing import FailingText, Fuse, PlantedError
from engine.test_shared_pool import SHORT, TIGHT
from pronk.base.arrays import BFLOAT16
from pronk.engine.request import Request
from tiny_models import make_engine, run, tiny_decoder

CLOSE = ("suffix", "draft_model", "oracle")
NAMES = [name if name in CLOSE else pytest.param(name, marks=pytest.mark.slow) for name in DRAFTERS]


@pytest.mark.parametrize("options", [pytest.param("greedy", marks=pytest.mark.slow), "all"])
@pytest.mark.parametrize("name", NAMES)
def test_other_requests_that_are_aborted_or_fail(name: str, options: str) -> None:
    want = plain(BFLOAT16, options, SHORT)
    engine = make_engine(tiny_decoder(BFLOAT16), share_prefixes=True, max_batch=2, **TIGHT)
    proposer = drafter(name, want).bind(engine.target)
    dice = random.Random(3)

    def again(index: int) -> Request:
        return ask(want[index].prompt, params(options, index), proposer)

    kept = [again(index) for index in range(len(want))]
    leaving = [again(index) for index in (1, 3, 4)]
    failing = [again(index) for index in (0, 2, 5)]
    for request in failing:
        request.result.detokenizer = FailingText("push", Fuse(dice.randint(1, 8)))
    for request in dice.sample(kept, len(kept)):
        engine.add(request)
    for _ in range(6):
        engine.step()
    # the first of them has the highest priority and preempts another
    for request in (*leaving, *failing):
        request.priority = 1 if request is leaving[0] else dice.choice([0, 0, 1])
        engine.add(request)
    while engine.scheduler.running or engine.scheduler.waiting:
        engine.step()
        for request in leaving:
            if request.num_generated > 3 or (request is not leaving[0] and dice.random() < 0.02):
                engine.abort(request)
    assert_same(kept, want)
    assert all(isinstance(request.result.error, PlantedError) for request in failing)
    assert leaving[0].aborted
    assert leaving[0].num_generated > 3
    assert total([*kept, *leaving, *failing], "preemptions") > 0
    for _ in range(2):
        last = again(4)
        run(engine, [last])
        assert_same([last], want[4:5])
    assert last.stats.cached_tokens >= len(last.prompt) // 16 * 16
    assert total(kept, "accepted") > 0 or name != "oracle"
