"""Figures from hand-made records: every expectation here was computed by hand, in the comments
beside it.

Two prompts, ``a`` and ``b``, in two repeats, by plain decoding and by one drafter; the clocks are
whole seconds.
"""

import math
from dataclasses import asdict, replace

import pytest

from lab.bench.bench_cases import DRAFTER, document, figures, model, sample, start, steps
from pronk.engine.stats import StepStats
from pronk.lab.bench.document import Failure, Latency, PassCost, Range, Split
from pronk.lab.bench.figures import summarize
from pronk.lab.bench.records import (
    FORMAT,
    PLAIN,
    Bandwidth,
    DivergenceRecord,
    End,
    PassTime,
    PeerRecord,
    Record,
    Sample,
    Skip,
)

A = (1, 2, 3, 4)
B = (5, 6)


def plain_steps(*clocks: tuple[float, float]) -> tuple[StepStats, ...]:
    """Return steps of one row and one token each from pairs ``(target_clock, clock)``."""
    return steps(*[(1, 0, 0, 0, 1, 0, target, clock) for target, clock in clocks])


SAMPLES = [
    # Plain passes after the first take 2 seconds in the first repeat and 4 in the second: 3 in the
    # mean.
    sample(
        PLAIN, "a", 0, A, seconds=16, total_seconds=15, ttft=5.0, peak_memory=100,
        steps=plain_steps((4, 5), (6, 8), (8, 11), (10, 14)),
    ),
    sample(
        PLAIN, "b", 0, B, seconds=8, total_seconds=8, ttft=4.0, prompt_tokens=20,
        steps=plain_steps((3, 4), (5, 7)),
    ),
    sample(
        PLAIN, "a", 1, A, seconds=20, total_seconds=20, ttft=5.0,
        steps=plain_steps((4, 5), (8, 10), (12, 15), (16, 20)),
    ),
    sample(
        PLAIN, "b", 1, B, seconds=10, total_seconds=10, ttft=4.0, prompt_tokens=20,
        steps=plain_steps((3, 4), (7, 9)),
    ),
    # The drafter's later steps take (draft, target, clock) = (1, 3, 5) and (.5, 3, 4) seconds in
    # the first repeat, (2, 5, 8) and (.5, 5, 6) in the second.
    sample(
        DRAFTER, "a", 0, A, seconds=12, total_seconds=11, ttft=5.0, peak_memory=120,
        steps=steps((10, 0, 0, 0, 1, 0, 4, 5), (4, 3, 3, 2, 3, 1, 7, 10)),
    ),
    sample(
        DRAFTER, "b", 0, B, seconds=8, total_seconds=8, ttft=3.0, prompt_tokens=20, peak_memory=130,
        steps=steps((20, 0, 0, 0, 1, 0.5, 2, 3), (5, 4, 2, 0, 1, 1, 5, 7)),
    ),
    sample(
        DRAFTER, "a", 1, A, seconds=10, total_seconds=14, ttft=5.0, peak_memory=110,
        steps=steps((10, 0, 0, 0, 1, 0, 4, 5), (4, 3, 3, 2, 3, 2, 9, 13)),
    ),
    sample(
        DRAFTER, "b", 1, B, seconds=5, total_seconds=11, ttft=4.0, prompt_tokens=20, peak_memory=110,
        steps=steps((20, 0, 0, 0, 1, 0.5, 3, 4), (5, 4, 2, 0, 1, 1, 8, 10)),
    ),
]  # fmt: skip
SPEEDS: list[Record] = [Bandwidth(8e3), Bandwidth(14e3), Bandwidth(10e3)]
LOOP = (7,) * 12
VARIED = tuple(range(12))


def test_every_figure_of_a_drafter() -> None:
    found = figures(document(*SPEEDS, *SAMPLES), DRAFTER)
    assert (found.task, found.method, found.engine, found.temperature) == (
        "all",
        DRAFTER,
        "pronk",
        0.0,
    )
    assert (found.prompts, found.asked, found.failures, found.tokens) == (2, 2, (), 6)
    # The drafter needs 20 and 15 seconds for 6 tokens, plain decoding 24 and 30: speed-ups 0.3 /
    # 0.25 and 0.4 / 0.2.
    assert_range(found.tokens_per_second, 0.35, 0.05)
    assert_range(found.speedup, 1.6, 0.4)
    # After the first tokens, 4 tokens take plain decoding 14 and 21 seconds, the drafter 11 and 16.
    assert_range(found.decode_speedup, (14 / 11 + 21 / 16) / 2, (21 / 16 - 14 / 11) / 2)
    assert_range(found.ttft, 4.25, 0.25)  # the repeats' means: (5 + 3) / 2 and (5 + 4) / 2
    assert found.peak_memory == 130
    # 4 passes gave 6 tokens; 2 draft tokens of a chain of 3 were accepted, and none of a tree of 4
    # with depth 2.
    assert (found.steps, found.S, found.drafted, found.accepted) == (4, 1.5, 7, 2)
    assert found.alpha == 0.5
    # 1 of 2, 1 of 2 and 0 of 1 trees of at least that depth
    assert found.acceptance == (0.5, 0.5, 0.0)
    assert found.rows_per_pass == 4.5
    # passes of 3, 3, 5 and 5 seconds; plain ones take 3
    assert found.verify_cost == pytest.approx(4 / 3)
    # The mean context is 16.5 tokens (12 and 21), so a pass reads 1000 + 165 bytes at 10,000 bytes
    # per second.
    assert found.over_floor == pytest.approx((5 + 4 + 8 + 6) / 4 / 0.1165)
    # Drafting took 1 + .5 + 2 + .5 seconds for 10 levels of trees; a plain pass takes 3 seconds.
    assert found.cost_coefficient == pytest.approx(0.4 / 3)
    # Expected tokens: (1 + 1/2 + 1/4 + 1/8) + (1 + 1/2 + 1/4), twice; cost: 4 passes and drafting
    # of 10 levels.
    assert found.expected_speedup == pytest.approx(7.25 / (4 + 10 * 0.4 / 3))
    # Sorted latencies: three of 5/3, three of 8/3, 4, 6. The percentiles interpolate at ranks 3.5,
    # 6.3 and 6.93.
    assert found.itl is not None
    assert (found.itl.p50, found.itl.p90, found.itl.p99) == pytest.approx((8 / 3, 4.6, 5.86))
    # Of 10 + 7 + 13 + 10 seconds, drafting took 1 + 1 + 2 + 1 and the target 7 + 5 + 9 + 8.
    assert found.split == Split(5 / 40, 29 / 40, pytest.approx(6 / 40))
    assert (found.same, found.compared, found.near_ties) == (2, 2, 0)
    assert (found.repeated, found.degenerated) == (0.0, 0)


def assert_range(found: Range | None, middle: float, around: float) -> None:
    assert found is not None
    assert (found.median, found.spread) == pytest.approx((middle, around))


def test_figures_of_plain_decoding_are_the_unit() -> None:
    found = figures(document(*SPEEDS, *SAMPLES), PLAIN)
    assert found.speedup == found.decode_speedup == Range(1.0, 0.0)
    assert (found.S, found.verify_cost, found.rows_per_pass, found.drafted) == (1.0, 1.0, 1.0, 0)
    assert (found.alpha, found.acceptance) == (None, ())
    assert (found.cost_coefficient, found.expected_speedup) == (None, None)
    # the second repeat against the first
    assert (found.same, found.compared, found.near_ties) == (2, 2, 0)
    # of 3, 3, 3, 3, 5, 5, 5, 5 seconds
    assert found.itl == Latency(*map(pytest.approx, (4.0, 5.0, 5.0)))


def test_plain_decoding_is_compared_with_itself() -> None:
    plain = [s for s in SAMPLES if s.method == PLAIN]
    assert figures(document(*[s for s in plain if s.repeat == 0]), PLAIN).same is None
    other = [
        replace(s, tokens=(9,) * len(s.tokens)) if (s.id, s.repeat) == ("a", 1) else s
        for s in plain
    ]
    found = figures(document(*other), PLAIN)
    assert (found.same, found.compared) == (1, 2)


def test_a_batch_reads_its_keys_and_values_in_one_pass() -> None:
    found = figures(document(*SPEEDS, *(replace(s, batch=2) for s in SAMPLES)), DRAFTER)
    assert found.over_floor == pytest.approx(23 / 4 / ((1000 + 2 * 165) / 10e3))


def test_without_bandwidth_there_is_no_floor() -> None:
    found = figures(document(*SAMPLES), DRAFTER)
    assert found.over_floor is None
    assert found.verify_cost == pytest.approx(4 / 3)


def test_acceptance_counts_draft_tokens_of_the_first_step_and_costs_do_not() -> None:
    """The first forward pass includes the prefill, so its duration is left out; its draft tokens
    count.
    """
    own = [
        replace(s, steps=steps((9, 2, 2, 2, 3, 9, 4, 13), (3, 2, 2, 0, 1, 10, 7, 17)))
        for s in SAMPLES
        if s.method == DRAFTER and s.id == "a"
    ]
    found = figures(
        document(*[s for s in SAMPLES if s.method == PLAIN and s.id == "a"], *own), DRAFTER
    )
    assert (found.alpha, found.acceptance) == (0.5, (0.5, 0.5))
    # A plain pass takes 3 seconds (2 and 4). The second step drafts for 1 second 2 levels, none of
    # them accepted.
    assert found.verify_cost == pytest.approx(1.0)
    assert found.cost_coefficient == pytest.approx(0.5 / 3)
    assert found.expected_speedup == pytest.approx(1 / (2 * 0.5 / 3 + 1))
    assert found.rows_per_pass == 3
    # The drafter needs 11 - 5 and 14 - 5 seconds for the second step's token, plain decoding 10/3
    # and 15/3 per token.
    assert_range(found.decode_speedup, (10 / 18 + 15 / 27) / 2, 0.0)


def test_curves_end_at_sixteen_positions() -> None:
    own = sample(
        DRAFTER,
        tokens=range(22),
        steps=steps((1, 0, 0, 0, 1, 0, 1, 1), (31, 30, 30, 20, 21, 1, 2, 3)),
    )
    plain = sample(
        PLAIN, tokens=range(22), steps=steps(*[(1, 0, 0, 0, 1, 0, i, i) for i in range(22)])
    )
    found = figures(document(plain, own), DRAFTER)
    assert found.acceptance == (1.0,) * 16
    assert found.acceptance == (1.0,) * 16


def test_output_of_one_step_has_no_later_passes() -> None:
    one = steps((4, 0, 0, 0, 1, 0, 1, 2))
    both = [
        sample(m, tokens=(1,), ttft=2.0, total_seconds=2.0, seconds=2.0, steps=one)
        for m in (PLAIN, DRAFTER)
    ]
    found = figures(document(*SPEEDS, *both), DRAFTER)
    assert (found.S, found.speedup) == (1.0, Range(1.0, 0.0))
    assert [
        found.decode_speedup,
        found.itl,
        found.rows_per_pass,
        found.verify_cost,
        found.over_floor,
    ] == [None] * 5
    assert found.split == Split(0.0, 0.5, 0.5)


def test_a_peer_has_no_figures_of_steps() -> None:
    """After its ttft the peer needs 6/3 seconds per token, plain decoding 10/3 and 15/3."""
    plain = [s for s in SAMPLES if s.method == PLAIN and s.id == "a"]
    own = [
        sample("openvino", "a", r, A, engine="openvino", seconds=8, total_seconds=8, ttft=2.0)
        for r in (0, 1)
    ]
    found = figures(document(*SPEEDS, *plain, *own, of=model(PLAIN, "openvino")), "openvino")
    assert found.engine == "openvino"
    assert_range(found.speedup, (2 + 2.5) / 2, 0.25)
    assert_range(found.decode_speedup, (5 / 3 + 5 / 2) / 2, 5 / 12)
    assert found.peak_memory is None
    absent = (
        "steps S alpha drafted accepted over_floor rows_per_pass cost_coefficient expected_speedup "
        "verify_cost"
    )
    assert [getattr(found, name) for name in [*absent.split(), "itl", "split"]] == [None] * 12
    assert (found.acceptance, found.same, found.compared) == ((), 1, 1)

    silent = [replace(s, ttft=None) for s in own]
    found = figures(document(*plain, *silent, of=model(PLAIN, "openvino")), "openvino")
    assert (found.ttft, found.decode_speedup) == (None, None)
    assert_range(found.speedup, 2.25, 0.25)


def test_sampled_outputs_of_a_peer_are_not_compared() -> None:
    records = [
        sample(method, temperature=t, tokens=tokens, engine=engine)
        for t in (0.0, 0.8)
        for method, engine, tokens in (
            (PLAIN, "pronk", A),
            (DRAFTER, "pronk", A),
            ("openvino", "openvino", B),
        )
    ]
    found = document(*records, of=model(PLAIN, DRAFTER, "openvino"))
    assert figures(found, "openvino").compared == 1
    assert figures(found, "openvino").same == 0
    assert figures(found, "openvino", temperature=0.8).compared is None
    assert figures(found, DRAFTER, temperature=0.8).same == 1


@pytest.mark.parametrize("other", [A[:-1], (*A, 9), (), (1, 2, 3, 9)])
@pytest.mark.parametrize("repeat", [0, 1])
def test_an_output_is_equal_in_every_repeat_or_not(other: tuple[int, ...], repeat: int) -> None:
    changed = [
        replace(s, tokens=other) if (s.method, s.id, s.repeat) == (DRAFTER, "a", repeat) else s
        for s in SAMPLES
    ]
    found = figures(document(*changed), DRAFTER)
    assert (found.same, found.compared, found.near_ties) == (1, 2, 0)


def test_near_ties_are_counted_for_their_own_output() -> None:
    other = (1, 2, 3, 9)
    changed = [
        replace(s, tokens=other) if (s.method, s.id) == (DRAFTER, "a") else s for s in SAMPLES
    ]

    def ties(*divergences: DivergenceRecord) -> int | None:
        return figures(document(*changed, *divergences), DRAFTER).near_ties

    tie = DivergenceRecord("code", "a", DRAFTER, 0.0, 3, 0.01, near_tie=True)
    assert ties(tie) == 1
    assert ties(replace(tie, near_tie=False)) == 0
    for elsewhere in ({"temperature": 0.8}, {"method": "openvino"}, {"id": "b"}, {"task": "maths"}):
        assert ties(replace(tie, **elsewhere)) == 0  # type: ignore[arg-type]


def test_what_failed_once_is_left_out_on_both_sides() -> None:
    """Prompt ``a`` failed once, so only ``b`` counts: 2 tokens in 8 and 5 seconds, by plain
    decoding in 8 and 10.
    """
    records = [
        replace(s, tokens=(), steps=None, ttft=None, seconds=0.0, error="out of memory")
        if (s.method, s.id, s.repeat) == (DRAFTER, "a", 1)
        else s
        for s in SAMPLES
    ]
    found = figures(document(*records), DRAFTER)
    assert (found.prompts, found.asked, found.tokens) == (1, 2, 2)
    assert found.failures == (Failure("code/a", "out of memory"),)
    assert_range(found.speedup, 1.5, 0.5)
    assert (found.S, found.compared) == (1.0, 1)
    assert figures(document(*records), PLAIN).prompts == 2


def test_a_repeat_that_only_plain_decoding_finished() -> None:
    """A prompt counts only if plain decoding and the drafter have finished all its repeats."""
    records = [s for s in SAMPLES if (s.method, s.repeat) != (DRAFTER, 1)]
    found = figures(document(*records), DRAFTER)
    assert (found.prompts, found.asked, found.speedup) == (0, 2, None)
    assert figures(document(*records), PLAIN).prompts == 2


def test_prompts_without_plain_decoding_do_not_count() -> None:
    records = [
        replace(s, tokens=(), steps=None, ttft=None, error="broken")
        if (s.method, s.id) == (PLAIN, "b")
        else s
        for s in SAMPLES
    ]
    found = figures(document(*records), DRAFTER)
    assert (found.prompts, found.asked, found.tokens) == (1, 2, 4)
    assert [(f.id, "plain decoding" in f.reason) for f in found.failures] == [("code/b", True)]
    assert figures(document(*records), PLAIN).failures == (Failure("code/b", "broken"),)


def test_a_method_that_fails_everywhere() -> None:
    failed = [
        replace(
            s,
            method="openvino",
            engine="openvino",
            tokens=(),
            steps=None,
            ttft=None,
            error=f"no package {s.repeat}",
        )
        for s in SAMPLES
        if s.method == DRAFTER
    ]
    found = document(*SPEEDS, *SAMPLES, *failed, of=model(PLAIN, DRAFTER, "openvino"))
    theirs = figures(found, "openvino")
    assert (theirs.prompts, theirs.asked, theirs.tokens) == (0, 2, 0)
    assert [f.reason for f in theirs.failures] == ["no package 0", "no package 0"]
    absent = (
        theirs.speedup,
        theirs.tokens_per_second,
        theirs.same,
        theirs.repeated,
        theirs.S,
        theirs.ttft,
    )
    assert absent == (None,) * 6
    assert figures(found, DRAFTER).prompts == 2


def test_repetition_of_own_outputs() -> None:
    """An output of 12 tokens has 9 four-grams: 8 of them repeat in :data:`LOOP`, none in
    :data:`VARIED`.
    """
    records = [
        sample(method, id_, tokens=tokens)
        for method, outputs in ((PLAIN, (VARIED, VARIED)), (DRAFTER, (LOOP, VARIED)))
        for id_, tokens in zip("ab", outputs, strict=True)
    ]
    found = document(*records)
    assert found.degenerate_above == 0.5
    assert figures(found, DRAFTER).repeated == pytest.approx(4 / 9)
    assert (figures(found, DRAFTER).degenerated, figures(found, PLAIN).degenerated) == (1, 0)


def test_a_half_repeated_output_is_not_yet_a_loop() -> None:
    """Three of six four-grams are repetitions, a share of 0.5; a loop has a larger share than this
    threshold.
    """
    half = (1, 2, 3, 1, 2, 3, 1, 2, 3)
    found = document(sample(PLAIN, tokens=half), sample(DRAFTER, tokens=half))
    assert figures(found, PLAIN).repeated == 0.5
    assert figures(found, PLAIN).degenerated == 0
    assert figures(found, DRAFTER, "sound").prompts == 1


def test_sound_leaves_out_what_plain_decoding_loops_on() -> None:
    """Plain decoding loops on ``a`` at temperature 0. ``b`` counts although the drafter loops on
    it.
    """
    outputs = {
        (PLAIN, "a", 0.0): LOOP,
        (DRAFTER, "a", 0.0): VARIED,
        (PLAIN, "b", 0.0): VARIED,
        (DRAFTER, "b", 0.0): LOOP[:6],
    }
    records = [
        sample(method, id_, task=task, temperature=t, tokens=outputs.get((method, id_, t), VARIED))
        for t in (0.0, 0.8)
        for id_, task in (("a", "code"), ("b", "chat"))
        for method in (PLAIN, DRAFTER)
    ]
    found = document(*records)
    for method, tokens in ((PLAIN, 12), (DRAFTER, 6)):
        assert (figures(found, method, "sound").asked, figures(found, method, "sound").tokens) == (
            1,
            tokens,
        )
        assert figures(found, method, "sound", 0.8).asked == 2
        assert figures(found, method, "all").asked == 2
    order = [each.task for each in found.models[0].figures]
    assert list(dict.fromkeys(order)) == ["code", "chat", "all", "sound"]
    assert len(order) == 4 * 2 * 2


def test_the_time_of_waiting_for_workers_is_a_share() -> None:
    samples = [sample(PLAIN, id, waited=0.0) for id in "ab"] + [  # noqa: A001
        sample(DRAFTER, id, waited=0.2)
        for id in "ab"  # noqa: A001
    ]
    found = document(
        *samples, sample("peer", "a"), sample("peer", "b"), of=model(PLAIN, DRAFTER, "peer")
    )
    shares = [figures(found, method).waited for method in (PLAIN, DRAFTER, "peer")]
    assert shares == [0.0, pytest.approx(0.2), None]


def test_if_everything_loops_nothing_is_sound() -> None:
    found = document(sample(PLAIN, tokens=LOOP), sample(DRAFTER, tokens=LOOP))
    assert {each.task for each in found.models[0].figures} == {"code", "all"}


def test_the_rest_of_the_document() -> None:
    found = document(
        *SPEEDS,
        PassTime(1, 0.5), PassTime(8, 3.0), PassTime(1, 0.3), PassTime(8, 0.6), PassTime(1, 0.4), PassTime(8, 0.8),
        PeerRecord("openvino", {"openvino": "2026.1"}),
        Skip("long", "code", "too long"), Skip("long", "code", "too long"), Skip("long", "chat", "too long"),
        *SAMPLES,
        End(interrupted=False),
        of=model(inflated={"source": "tiny"}, kernels="avx2"),
    )  # fmt: skip
    assert (found.interrupted, found.arguments) == (False, {"seed": 7})
    (one,) = found.models
    assert one.bandwidth == Range(10e3, 3e3)
    assert one.pass_cost == (PassCost(1, 0.4, 1.0), PassCost(8, 0.8, 2.0))
    assert one.peers == {"openvino": {"openvino": "2026.1"}}
    assert one.skipped == (Failure("code/long", "too long"), Failure("chat/long", "too long"))
    assert (one.name, one.parameters, one.dtype, one.inflated) == (
        "m",
        500,
        "bfloat16",
        {"source": "tiny"},
    )
    as_json = asdict(found)
    assert as_json["format"] == FORMAT
    assert as_json["models"][0]["kernels"] == one.kernels == "avx2"
    assert as_json["models"][0]["figures"][0]["tokens_per_second"].keys() == {"median", "spread"}


def test_each_model_has_its_own_records() -> None:
    second = [replace(s, tokens=(1,)) for s in SAMPLES]
    records = [
        start(),
        model(),
        *SAMPLES,
        Bandwidth(1.0),
        replace(model(), name="n"),
        Bandwidth(2.0),
        *second,
    ]
    found = summarize(records)
    assert [one.name for one in found.models] == ["m", "n"]
    assert [one.figures[-1].tokens for one in found.models] == [6, 2]
    assert [one.bandwidth for one in found.models] == [Range(1.0, 0.0), Range(2.0, 0.0)]


def test_a_trace_without_its_end_was_interrupted() -> None:
    """The trace lacks the drafter's second run of ``b``: ``a`` counts, and ``b`` is listed as a
    failure.
    """
    found = document(*SPEEDS, *SAMPLES[:-1])
    assert found.interrupted
    assert (figures(found, DRAFTER).prompts, figures(found, DRAFTER).asked) == (1, 2)
    assert [f.id for f in figures(found, DRAFTER).failures] == ["code/b"]
    assert summarize([start()]).models == ()
    assert summarize([start(), End(interrupted=True)]).interrupted
    assert document(Bandwidth(1.0)).models[0].figures == ()


def test_records_may_come_in_any_order() -> None:
    def comparable(records: list[Sample]) -> list[object]:
        one = document(*SPEEDS, *records).models[0]
        return sorted((repr(each) for each in one.figures if each.task == "all"), key=str)

    shuffled = sorted(SAMPLES, key=lambda s: (s.repeat, s.id, math.sin(s.seconds)))
    assert comparable(shuffled) == comparable(SAMPLES)
