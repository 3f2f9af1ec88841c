"""Programs of drafters' modules on the kernels."""

from collections.abc import Callable
from typing import Any

import pytest

from drafting.drafting import Watched
from drafting.from_target import trained_eagle
from pronk.drafting import make_drafter
from pronk.models.program import Program
from pronk.sampling.params import SamplingParams
from tiny_models import make_engine, make_request, tiny_decoder


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        (trained_eagle.spec, "project"),
        (trained_eagle.spec, "linear"),
        (lambda: trained_eagle.spec("mtp"), "embed"),
    ],
    ids=["eagle3", "eagle3's head", "mtp"],
)
def test_an_interrupted_program_is_built_again(spec: Callable[[], str], part: str) -> None:
    """Interrupt the building of a module's program at each call of ``part``; the next step starts
    anew.
    """
    prompt = [1, 2, 3]
    params = SamplingParams(max_tokens=8, logit_bias=dict.fromkeys(range(5), 30.0))

    def decode(interrupt: int | None) -> tuple[list[list[int]], int]:
        engine = make_engine(tiny_decoder())
        watched = Watched(make_drafter(spec()).bind(engine.target))
        original = getattr(Program, part)
        calls = 0

        def counted(*args: Any, **more: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == interrupt:
                raise KeyboardInterrupt
            original(*args, **more)

        request = make_request(prompt, params, watched)
        engine.add(request)
        for _ in range(2):  # steps before drafting, which build the target's programs
            if not request.output:
                engine.step()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Program, part, counted)
            if interrupt is not None:
                with pytest.raises(KeyboardInterrupt):
                    engine.step()
            else:
                engine.step()
        while request.result.finish_reason is None:
            engine.step()
        return [list(asked.tree.tokens) for asked in watched.of(request)], calls

    decode(None)  # builds the programs that all tests share
    want, calls = decode(None)
    assert max(map(len, want)) > 2
    assert calls > 0
    for interrupt in range(1, calls + 1):
        assert decode(interrupt)[0] == want
