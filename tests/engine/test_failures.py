"""A failure stays with its request: in a batch of eight something raises somewhere, and seven texts are what they were.

What raises in a request's processors or its text ends that request with the very error. (Guessers that raise are in
``test_proposing.py``.)
"""

import random
import traceback
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.touchy import (
    PROMPTS,
    Fuse,
    PlantedError,
    Touchy,
    TouchyProcessor,
    TouchyText,
    assert_as_plain,
    assert_heard,
    batch,
    finish,
    options,
    plain,
    touchy,
)
from tiny_models import NullText, assert_idle, make_engine, make_request, tiny_decoder


def test_nothing_raises() -> None:
    proposer = touchy()
    requests = batch(proposer)
    finish(make_engine(tiny_decoder()), requests)
    assert_as_plain(requests)
    assert_heard(proposer, requests)
    assert sum(request.stats.accepted for request in requests) > 60
    assert sum(request.stats.moved for request in requests) == 0


@pytest.mark.parametrize("verb", ["mask", "advance", "rollback"])
def test_processors_that_raise(verb: str) -> None:
    dice, burnt = random.Random(verb), 0
    for _ in range(12):
        proposer, fuse, victim = touchy(), Fuse(dice.randrange(1, 6 if verb == "rollback" else 40)), dice.randrange(8)
        requests = batch(proposer)
        sampler = requests[victim].sampler
        sampler.processors, sampler.kernels = (*sampler.processors, TouchyProcessor(verb, fuse)), None
        finish(make_engine(tiny_decoder()), requests)
        assert_as_plain(requests, but=[victim])
        assert_heard(proposer, requests, but=[victim])
        burnt += bool(fuse.burnt)
        want = plain()[victim].output
        assert requests[victim].output == want[: len(requests[victim].output)]
        assert isinstance(requests[victim].error, PlantedError) == bool(fuse.burnt)
        assert fuse.burnt or requests[victim].output == want
    assert burnt > 4


@pytest.mark.parametrize("verb", ["push", "flush"])
def test_texts_that_raise(verb: str) -> None:
    dice = random.Random(verb)
    for _ in range(8):
        proposer, victim = touchy(), dice.randrange(8)
        fuse = Fuse(dice.randrange(1, 16) if verb == "push" else 1)
        requests = batch(proposer)
        requests[victim].detokenizer = TouchyText(verb, fuse)
        finish(make_engine(tiny_decoder()), requests)
        assert_as_plain(requests, but=[victim])
        assert_heard(proposer, requests, but=[victim])
        assert fuse.burnt == 1
        assert isinstance(requests[victim].error, PlantedError)


@pytest.mark.parametrize("verb", ["start", "propose", "observe"])
def test_requests_that_are_aborted_within_a_step(verb: str) -> None:
    """As when the garbage collector closes a stream there; one of them is still waiting for its turn."""
    engine = make_engine(tiny_decoder(), max_batch=7)

    class Closing(Touchy):
        def _burn(self, at: str, prompt: tuple[int, ...]) -> None:
            if at == verb and prompt == PROMPTS[1]:
                engine.abort(requests[5])
                engine.abort(requests[7])

    proposer = Closing(touchy().texts)
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


def test_an_error_keeps_no_pass_alive() -> None:
    class Kept:
        pass

    seen: list[weakref.ref[Kept]] = []

    class Masking(TouchyProcessor):
        def mask(self, logits: Tensor) -> Tensor:
            local = Kept()
            seen.append(weakref.ref(local))
            return super().mask(logits)

    request = make_request(PROMPTS[0], options(0))
    request.sampler.processors, request.sampler.kernels = (Masking("mask", Fuse(3)),), None
    finish(make_engine(tiny_decoder()), [request])
    assert isinstance(request.error, PlantedError)
    assert len(seen) == 3
    assert seen[-1]() is None
    assert any("mask" in line for line in traceback.format_exception(request.error))


def test_a_request_ends_well_or_badly() -> None:
    """The text raises at its last token, which has ended the request already."""
    for end in ("push", "flush"):
        request = make_request(PROMPTS[0], options(0))
        request.detokenizer = TouchyText(end, Fuse(1 if end == "flush" else len(plain()[0].output)))
        finish(make_engine(tiny_decoder()), [request])
        assert isinstance(request.error, PlantedError)
        assert request.finish_reason is None
        assert request.stop_reason is None


def test_an_overflow_of_somebody_else_s_is_not_the_model_s() -> None:
    request = make_request(PROMPTS[0], options(0))

    class Overflowing(NullText):
        def push(self, token: int) -> tuple[str, str | None]:
            raise OverflowError(token)

    request.detokenizer = Overflowing()
    finish(make_engine(tiny_decoder()), [request])
    assert isinstance(request.error, OverflowError)


def test_everything_at_once() -> None:
    """Many of the eight fail in different ways, at different times, while new ones come in."""
    dice = random.Random(5)
    for _ in range(10):
        proposer = touchy(verb=dice.choice(["propose", "observe"]), fuse=Fuse(dice.randrange(5, 60), lasting=False))
        requests, failing = batch(proposer), dice.sample(range(8), 4)
        fuses = {index: Fuse(dice.randrange(1, 14)) for index in failing}
        for index in failing[:2]:
            requests[index].detokenizer = TouchyText("push", fuses[index])
        for index in failing[2:]:
            sampler, verb = requests[index].sampler, dice.choice(["mask", "advance"])
            sampler.processors, sampler.kernels = (*sampler.processors, TouchyProcessor(verb, fuses[index])), None
        finish(make_engine(tiny_decoder(), max_batch=dice.choice((3, 8))), requests)
        assert_as_plain(requests, but=failing)
        for index in failing:
            assert isinstance(requests[index].error, PlantedError) == bool(fuses[index].burnt)


def test_numbers_that_overflow_end_one_request_alone() -> None:
    """A row of NaN in one request's logits, as a damaged cache would give."""
    engine, requests = make_engine(tiny_decoder()), batch(touchy())
    forward = engine.runner.forward

    def damaged(jobs: Any, collect: Any = frozenset()) -> Any:
        result = forward(jobs, collect)
        for job, logits in zip(jobs, result.logits, strict=True):
            if job.segment.block_table is requests[3].block_table and len(requests[3].output) == 5:
                logits.fill_(torch.nan)
        return result

    engine.runner.forward = damaged  # type: ignore[method-assign]
    longer = [replace(each.params, max_tokens=30) for each in requests[3:4]]
    requests[3] = make_request(PROMPTS[3], longer[0])
    finish(engine, requests)
    assert_as_plain(requests, but=[3])
    assert "expected finite logits" in str(requests[3].error)
