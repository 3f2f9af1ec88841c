"""An error in a logits processor or a text stream ends its request alone; the other seven requests
are unchanged.

Errors in proposers are in ``tests/engine/test_speculator.py``.
"""

import random
import traceback
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.cases import total
from engine.failing import (
    PROMPTS,
    FailingProcessor,
    FailingProposer,
    FailingText,
    Fuse,
    PlantedError,
    assert_as_plain,
    assert_observed,
    batch,
    failing_proposer,
    finish,
    options,
    plain,
)
from pronk.base.arrays import Array
from pronk.engine.request import Request
from tiny_models import NullText, assert_idle, make_engine, make_request, tiny_decoder


def add_processor(request: Request, processor: FailingProcessor) -> None:
    """Add a logits processor; the kernels do not call processors, so NumPy computes the choices."""
    sampler = request.sampler
    sampler.processors = (*sampler.processors, processor)
    sampler.kernels = None
    sampler.stateless_sampler = None
    sampler.library_sampler = None


def test_nothing_raises() -> None:
    proposer = failing_proposer()
    requests = batch(proposer)
    finish(make_engine(tiny_decoder()), requests)
    assert_as_plain(requests)
    assert_observed(proposer, requests)
    assert total(requests, "accepted") > 60
    assert total(requests, "moved") == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("verb", ["mask", "advance", "rollback"])
def test_processors_that_raise(verb: str) -> None:
    dice = random.Random(verb)
    raised = 0
    for _ in range(12):
        fuse = Fuse(dice.randrange(1, 6 if verb == "rollback" else 40))
        victim = dice.randrange(8)
        requests = batch(proposer := failing_proposer())
        add_processor(requests[victim], FailingProcessor(verb, fuse))
        finish(make_engine(tiny_decoder()), requests)
        assert_as_plain(requests, but=[victim])
        assert_observed(proposer, requests, but=[victim])
        raised += bool(fuse.raised)
        want = plain()[victim].output
        assert requests[victim].output == want[: len(requests[victim].output)]
        assert isinstance(requests[victim].result.error, PlantedError) == bool(fuse.raised)
        assert fuse.raised or requests[victim].output == want
    assert raised > 4


@pytest.mark.parametrize("verb", ["push", "flush"])
def test_texts_that_raise(verb: str) -> None:
    dice = random.Random(verb)
    for _ in range(8):
        victim = dice.randrange(8)
        fuse = Fuse(dice.randrange(1, 16) if verb == "push" else 1)
        requests = batch(proposer := failing_proposer())
        requests[victim].result.detokenizer = FailingText(verb, fuse)
        finish(make_engine(tiny_decoder()), requests)
        assert_as_plain(requests, but=[victim])
        assert_observed(proposer, requests, but=[victim])
        assert fuse.raised == 1
        assert isinstance(requests[victim].result.error, PlantedError)


@pytest.mark.parametrize("verb", ["start", "propose", "observe"])
def test_requests_that_are_aborted_within_a_step(verb: str) -> None:
    """A running and a waiting request are aborted, as by the garbage collector that closes a
    stream.
    """
    engine = make_engine(tiny_decoder(), max_batch=7)

    class AbortingProposer(FailingProposer):
        def _burn(self, at: str, prompt: tuple[int, ...]) -> None:
            if at == verb and prompt == PROMPTS[1]:
                engine.abort(requests[5])
                engine.abort(requests[7])

    proposer = AbortingProposer(failing_proposer().texts)
    requests = batch(proposer)
    for request in requests:
        engine.add(request)
    while not all(request.ended or request.aborted for request in requests):
        engine.step()
        for request in engine.scheduler.running:
            assert not request.block_table.num_released
    assert_idle(engine)
    assert_as_plain(requests, but=[5, 7])
    assert not requests[5].ended
    assert not requests[7].output
    assert len(proposer.stopped) == 7


def test_an_error_keeps_no_local_variables_alive() -> None:
    class Local:
        pass

    seen: list[weakref.ref[Local]] = []

    class Masking(FailingProcessor):
        def mask(self, logits: Array) -> Array:
            local = Local()
            seen.append(weakref.ref(local))
            return super().mask(logits)

    request = make_request(PROMPTS[0], options(0))
    add_processor(request, Masking("mask", Fuse(3)))
    finish(make_engine(tiny_decoder()), [request])
    assert isinstance(request.result.error, PlantedError)
    assert len(seen) == 3
    assert seen[-1]() is None
    assert any("mask" in line for line in traceback.format_exception(request.result.error))


def test_a_text_that_raises_at_the_last_token_leaves_no_finish_reason() -> None:
    for end in ("push", "flush"):
        request = make_request(PROMPTS[0], options(0))
        request.result.detokenizer = FailingText(
            end, Fuse(1 if end == "flush" else len(plain()[0].output))
        )
        finish(make_engine(tiny_decoder()), [request])
        assert isinstance(request.result.error, PlantedError)
        assert request.result.finish_reason is None
        assert request.result.stop_reason is None


def test_an_overflow_error_of_a_text_is_not_reported_as_bad_logits() -> None:
    request = make_request(PROMPTS[0], options(0))

    class Overflowing(NullText):
        def push(self, token: int, *, is_end: bool = False) -> tuple[str, str | None]:
            raise OverflowError(token)

    request.result.detokenizer = Overflowing()
    finish(make_engine(tiny_decoder()), [request])
    assert isinstance(request.result.error, OverflowError)


def test_several_failures_at_once() -> None:
    dice = random.Random(5)
    for _ in range(10):
        verb = dice.choice(["propose", "observe"])
        fuse = Fuse(dice.randrange(5, 60))
        requests = batch(failing_proposer(verb=verb, fuse=fuse))
        failing = dice.sample(range(8), 4)
        fuses = {index: Fuse(dice.randrange(1, 14)) for index in failing}
        for index in failing[:2]:
            requests[index].result.detokenizer = FailingText("push", fuses[index])
        for index in failing[2:]:
            add_processor(
                requests[index], FailingProcessor(dice.choice(["mask", "advance"]), fuses[index])
            )
        finish(make_engine(tiny_decoder(), max_batch=dice.choice((3, 8))), requests)
        assert_as_plain(requests, but=failing)
        for index in failing:
            assert isinstance(requests[index].result.error, PlantedError) == bool(
                fuses[index].raised
            )


def test_logits_of_nan_end_one_request_alone() -> None:
    engine = make_engine(tiny_decoder())
    requests = batch(failing_proposer())
    forward = engine.runner.forward

    def damaged(batch: Any, collect: Any = frozenset()) -> Any:
        result = forward(batch, collect)
        for entry, logits in zip(batch.entries, result.logits, strict=True):
            if entry.block_table is requests[3].block_table and len(requests[3].output) == 5:
                logits[...] = np.nan
        return result

    engine.runner.forward = damaged  # type: ignore[method-assign]
    requests[3] = make_request(PROMPTS[3], replace(requests[3].params, max_tokens=30))
    finish(engine, requests)
    assert_as_plain(requests, but=[3])
    assert "expected finite logits" in str(requests[3].result.error)
