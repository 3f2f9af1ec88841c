"""Same seed, same tokens, and close logprobs: the engine by torch."""

import pytest

from engine.cases import MIXED, drafter, plain, total
from engine.test_equality import decode
from pronk.base.arrays import FLOAT32
from tiny_models import make_engine, tiny_decoder


@pytest.mark.parametrize("options", ["greedy", "temperature", "all"])
def test_inexact_mode(options: str) -> None:
    """Torch gives the same tokens and close logprobs."""
    want = plain(FLOAT32, options)
    proposers = [drafter(name, want) for name in MIXED[1:]]
    for first, block_size in ((0, 16), (2, 32)):
        engine = make_engine(
            tiny_decoder(packed=False), block_size=block_size, num_blocks=6400 // block_size
        )
        assert not engine.exact
        got = decode(engine, proposers[first:] + proposers[:first], options)
        assert total(got, "moved") > 20
        assert total(got, "accepted") > 40
        for one, other in zip(got, want, strict=True):
            assert one.output == other.output
            for mine, theirs in zip(one.result.logprobs, other.result.logprobs, strict=True):
                assert mine == pytest.approx(theirs, rel=0.0, abs=1e-4)
