"""Fair share of tenants: counters of served tokens, also after a tenant leaves and comes back."""

from collections.abc import Sequence

import pytest

from engine.cases import assert_same, drafter, params, text
from pronk.engine.engine import Engine
from pronk.engine.fair_share import FairShare
from pronk.engine.request import Request
from pronk.sampling.params import SamplingParams
from tiny_models import make_engine, make_request, run, run_alone, tiny_decoder


def test_generated_tokens_count_twice() -> None:
    fair_share = FairShare()
    fair_share.join("a", 0.0)
    fair_share.serve("a", prefilled=10)
    fair_share.serve("a", generated=4)
    assert fair_share.counters == {"a": 18}


def test_an_idle_tenant_gains_no_credit() -> None:
    fair_share = FairShare()
    for tenant in ("a", "b"):
        fair_share.join(tenant, 0.0)
    fair_share.serve("a", prefilled=100)
    fair_share.serve("b", prefilled=70)
    fair_share.join("c", 0.0)
    assert fair_share.counters["c"] == 70, "the smallest count of active tenants"
    fair_share.leave("c")
    fair_share.serve("b", prefilled=50)
    fair_share.join("c", 0.0)
    assert fair_share.counters == {"a": 100, "b": 120, "c": 100}
    fair_share.join("c", 0.0)
    assert fair_share.counters["c"] == 100


def test_a_tenant_that_left_keeps_its_count_while_it_is_above_the_others() -> None:
    fair_share = FairShare()
    for tenant in ("a", "b"):
        fair_share.join(tenant, 0.0)
    fair_share.serve("b", prefilled=50)
    fair_share.leave("b")
    assert fair_share.counters == {"a": 0, "b": 50}
    fair_share.join("b", 0.0)
    assert fair_share.counters["b"] == 50
    fair_share.leave("b")
    fair_share.serve("a", prefilled=60)
    fair_share.join("c", 0.0)
    fair_share.leave("c")
    assert fair_share.counters == {"a": 60}
    fair_share.leave("a")
    assert fair_share.counters == {}


def of_tenants(want: Sequence[Request], engine: Engine, names: Sequence[str]) -> list[Request]:
    """Return new requests with the same prompts and parameters, a drafter, and the tenants
    ``names``.
    """
    proposer = drafter("suffix", want).bind(engine.target)
    got = [make_request(each.prompt, each.params, proposer) for each in want]
    for request, name in zip(got, names, strict=True):
        request.tenant = name
    return got


@pytest.mark.parametrize("num_blocks", [400, 14])
def test_tenants_change_the_order_and_not_the_tokens(num_blocks: int) -> None:
    want = [
        run_alone(tiny_decoder(), text(seed, 20 + 5 * seed), params("temperature", seed))
        for seed in range(8)
    ]
    order = []
    for names in ("aaaaaaaa", "aaaaaabc", "abababab"):
        engine = make_engine(tiny_decoder(), num_blocks=num_blocks, max_batch=3)
        got = of_tenants(want, engine, names)
        run(engine, got)
        assert_same(got, want)
        order.append([request.queueing.start_order for request in got])
    assert order[0] == sorted(order[0])
    assert order[1] != order[0] != order[2]


def test_a_request_after_its_deadline_gives_way_at_once() -> None:
    engine = make_engine(tiny_decoder(), max_batch=1)
    late, after = (
        make_request(text(seed, 10), SamplingParams(max_tokens=20, seed=seed)) for seed in range(2)
    )
    engine.add(late)
    engine.add(after)
    engine.step()
    assert (late.num_generated, after.num_generated) == (1, 0)
    late.deadline = 0.0
    engine.step()
    assert isinstance(late.result.error, TimeoutError)
    assert after.num_generated == 1
    assert late not in engine.scheduler.running
