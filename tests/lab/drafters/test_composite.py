"""Drafters of the lab as parts of composite drafters."""

import pytest

from drafting.helpers import bind
from drafting.shared import test_composite as composite
from pronk import Jacobi, Lookahead
from pronk.drafting import Drafter, FirstOf, PromptLookup, make_drafter
from pronk.sampling.params import SamplingParams
from tiny_models import make_engine, make_request, run, tiny_decoder


def test_capabilities_of_a_part() -> None:
    drafter = bind(FirstOf((PromptLookup(), Jacobi())))
    assert drafter.capabilities.logits
    assert make_drafter("first_of(prompt_lookup, jacobi)").parts[1] == Jacobi()


@pytest.mark.parametrize(
    "spec",
    [
        "first_of(lookahead(window=3, ngram=3), lookahead(window=5, ngram=4))",
        "first_of(lookahead, lookahead(window=2))",
        (
            "first_of(lookahead(window=1, ngram=2), lookahead(window=1, ngram=4), "
            "lookahead(window=2, "
            "ngram=2))"
        ),
        "merged(lookahead(window=3), first_of(jacobi, lookahead(window=2)), recycling)",
    ],
)
def test_each_lookahead_reads_its_own_window(spec: str) -> None:
    engine = make_engine(tiny_decoder())
    drafter = make_drafter(spec).bind(engine.target)
    options = SamplingParams(max_tokens=60, temperature=0.7, seed=1, logit_bias={3: 9.0, 5: 9.0})
    request = make_request([3, 5, 3], options, drafter)
    plain = make_request([3, 5, 3], options)
    run(engine, [request])
    run(engine, [plain])
    assert request.output == plain.output
    assert request.stats.accepted > 0


@pytest.mark.parametrize(
    "part", [Lookahead(window=2), bind(Lookahead(window=2))], ids=["options", "proposer"]
)
def test_one_drafter_may_be_two_parts(part: Drafter) -> None:
    composite.test_one_drafter_may_be_two_parts(part)
