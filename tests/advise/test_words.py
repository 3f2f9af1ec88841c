"""Advice follows from the facts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pronk.advise.facts import Facts, Memory, Passes, Raced, Rounded, Span, Trainable, ratios, resampled
from pronk.advise.words import advice, command, duration, size

AUTO = Raced("auto", Span(1.5, 1.4, 1.6), 2.0, 5)
OTHER = Raced("suffix", Span(1.52, 1.3, 1.7), 2.0, 5)
PASSES = Passes({1: 0.1, 2: 0.11}, 0.09, 1e9, 1e9, {1: 0.2, 2: 0.1}, 2)
FACTS = Facts(
    model="folder with spaces",
    parameters=10**9,
    dtype="bfloat16",
    hardware={"processor": "P", "cores": 2},
    kernels="avx2",
    temperature=0.0,
    raced=(OTHER, AUTO),
    trainable=(Trainable("draft", Span(1.55, 1.2, 2.0), 3, 10**7, 7200.0, 2 * 10**6, 0.2),),
    passes=PASSES,
    rounded=(),
    unrounded={},
    memory=Memory(2 * 10**9, 10**4, 6000, 2048, 10**10),
    looped=0,
    texts=5,
    interrupted=False,
)


def said(facts: Facts) -> str:
    return "\n".join(advice(facts))


def test_auto_stays_unless_somebody_is_clearly_ahead() -> None:
    assert "leave it at auto, which is 1.50 (1.40 to 1.60) times" in said(FACTS)
    assert command(FACTS) == "pronk serve --model 'folder with spaces'"
    assert command(FACTS, ["--dtype", "float32"]).endswith("--dtype float32")
    ahead = replace(FACTS, raced=(Raced("suffix(max_match=4)", Span(2.0, 1.6, 2.4), 2.0, 5), AUTO))
    assert "if all your texts are like these, suffix(max_match=4): 2.00" in said(ahead)
    assert command(ahead).endswith("--drafter 'suffix(max_match=4)'")
    lucky = replace(FACTS, raced=(Raced("suffix", Span(2.0, 1.6, 2.4), 1.0, 5), AUTO))  # it guesses nothing
    assert "--drafter" not in command(lucky)
    unsure = replace(FACTS, raced=(Raced("suffix", Span(2.0, 1.2, 2.4), 2.0, 5), AUTO))
    assert "--drafter" not in command(unsure)


def test_where_nothing_pays_that_is_said() -> None:
    slow = replace(FACTS, raced=(Raced("auto", Span(0.99, 0.97, 1.01), 1.0, 5),))
    assert "nothing at hand is faster" in said(slow)


def test_loops_are_no_promise() -> None:
    assert "repeat themselves" not in said(FACTS)
    assert "4 of the 5 texts repeat themselves" in said(replace(FACTS, looped=4))


@pytest.mark.parametrize(
    ("span", "words"),
    [
        (Span(2.5, 2.0, 3.0), "pronk train draft would pay: about 2.50 (2.00 to 3.00)"),
        (Span(2.0, 1.2, 3.0), "pronk train draft may pay"),
        (Span(1.55, 1.2, 2.0), "does not promise more than there is"),
    ],
)
def test_training(span: Span, words: str) -> None:
    (trainable,) = FACTS.trainable
    found = said(replace(FACTS, trainable=(replace(trainable, times=span),)))
    assert words in found
    assert "2 hours on this machine" in found
    assert "Training" not in said(replace(FACTS, trainable=()))


def test_threads_are_the_fewest_that_are_as_fast() -> None:
    assert "Threads: as they are" in said(FACTS)
    even = replace(FACTS, passes=replace(PASSES, threads={1: 0.101, 2: 0.1}))
    assert "--threads 1" in said(even)
    assert command(even).endswith("--threads 1")
    assert "1.4 times what reading" in said(replace(FACTS, passes=replace(PASSES, floor=0.07)))


def test_weights_of_fewer_bits_have_to_be_faster_and_alike() -> None:
    good, bad = Rounded("int8", Span(1.5, 1.4, 1.6), 1.001, 10**9), Rounded("int4", Span(2.5, 2.4, 2.6), 1.2, 10**8)
    facts = replace(FACTS, rounded=(good, bad))
    assert "--weights int8, if" in said(facts)
    assert command(facts).endswith("--weights int8")
    assert "leave them as they are" in said(replace(FACTS, rounded=(bad,)))
    assert "int4 was not measured: no room" in said(replace(FACTS, unrounded={"int4": "no room"}))


def test_memory() -> None:
    assert "2 GB of weights, and 20.5 MB of keys and values for a text of 2,048 tokens; 10 GB are free" in said(FACTS)
    tight = replace(FACTS, memory=replace(FACTS.memory, free=10**7))
    assert "--kv-dtype int8 needs 12.3 MB" in said(tight)


def test_an_early_end_leaves_what_is_known() -> None:
    early = replace(FACTS, passes=None, trainable=(), raced=(AUTO,), interrupted=True)
    assert "auto" in said(early)
    assert "Threads" not in said(early)
    assert command(early).startswith("pronk serve")


def test_units() -> None:
    assert [duration(seconds) for seconds in (5, 80, 600, 7200, 200_000)] == [
        "5 seconds", "80 seconds", "10 minutes", "2 hours", "2.3 days",
    ]  # fmt: skip
    assert [size(number) for number in (5, 5e3, 1.25e6, 3e9)] == ["5 B", "5 kB", "1.25 MB", "3 GB"]


def test_spans_are_of_resampled_items() -> None:
    assert resampled([3.0, 3.0, 3.0], lambda each: sum(each) / len(each)) == Span(3.0, 3.0, 3.0)
    span = resampled([1.0, 2.0, 3.0, 4.0], lambda each: sum(each) / len(each))
    assert 1.0 < span.low < span.middle == 2.5 < span.high < 4.0
    assert ratios([1.0, 2.0], [3.0, 6.0]) == Span(3.0, 3.0, 3.0)
