"""The benchmark's loop: order of runs, conversations, skipped prompts, failures."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest

from lab.bench.bench_cases import Fake, Meter, document, figures, model, pronk_tiny
from pronk.base.errors import PromptError
from pronk.engine.stats import Stats
from pronk.lab.bench import measure
from pronk.lab.bench.measure import Bench, Options
from pronk.lab.bench.methods import DrafterMethod, Item
from pronk.lab.bench.prompts import Prompt, encode
from pronk.lab.bench.records import (
    PLAIN,
    Bandwidth,
    DivergenceRecord,
    PassTime,
    Sample,
    Skip,
    Trace,
)
from pronk.llm import LLM
from pronk.sampling.params import SamplingParams

SHORT = Prompt("short", "code", text="def f(x):")
OTHER = Prompt("other", "code", text="def g(x, y):")
TALK = Prompt("talk", "chat", turns=("How are you?", "And then?"))
LONG = Prompt("long", "code", text="word " * 3000)

Log = list[tuple[str, Item]]
Answer = Callable[[Item], Sequence[int]]


@pytest.fixture(autouse=True)
def no_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the costs of forward passes, which ``test_passes.py`` covers."""
    monkeypatch.setattr(measure, "pass_times", lambda llm, ids: iter([PassTime(1, 0.5)]))


class Ran:
    """A finished benchmark of fakes: its calls without the warm-up, and its records."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        answers: dict[str, Answer],
        engines: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        self.log: Log = []
        self.trace = Trace()
        self.progress: list[tuple[int, int]] = []
        methods = [
            Fake(name, answer, self.log, (engines or {}).get(name, "pronk"))
            for name, answer in answers.items()
        ]
        values = {"max_tokens": 16, "temperatures": (0.0,), "repeats": 1} | options
        bench = Bench(pronk_tiny(), methods, Options(**values), bandwidth=Meter(), trace=self.trace)  # type: ignore[arg-type]
        tasks = {task: list(some) for task, some in groupby(prompts, lambda prompt: prompt.task)}
        bench.run(tasks, lambda done, total: self.progress.append((done, total)))
        self.warm_up = self.log[: len(methods)]
        self.calls = self.log[len(methods) :]

    def of(self, kind: type[Any]) -> list[Any]:
        return [record for record in self.trace.records if isinstance(record, kind)]


def always(*tokens: int) -> Answer:
    return lambda item: tokens


def answer_text(text: str) -> Answer:
    return lambda item: pronk_tiny().tokenizer.encode(text, add_special_tokens=False)


def fail(error: BaseException, *, on: str | None = None, repeat: int | None = None) -> Answer:
    def answer(item: Item) -> Sequence[int]:
        if on in (None, item.sample.id) and repeat in (None, item.sample.repeat):
            raise error
        return (1, 2)

    return answer


THREE = {PLAIN: always(1, 2), "x": always(1, 2), "y": always(1, 2)}


def test_each_repeat_begins_with_another_method() -> None:
    ran = Ran([SHORT, OTHER], THREE, repeats=4)
    orders = [[PLAIN, "x", "y"], ["x", "y", PLAIN], ["y", PLAIN, "x"], [PLAIN, "x", "y"]]
    expected = [
        (p, repeat, name)
        for p in ("short", "other")
        for repeat, order in enumerate(orders)
        for name in order
    ]
    assert [(item.sample.id, item.sample.repeat, name) for name, item in ran.calls] == expected
    assert [(s.id, s.repeat, s.method) for s in ran.of(Sample)] == expected


def test_each_prompt_runs_at_all_temperatures() -> None:
    ran = Ran([SHORT, OTHER], {PLAIN: always(1)}, temperatures=(0.0, 0.8))
    expected = [("short", 0.0), ("short", 0.8), ("other", 0.0), ("other", 0.8)]
    assert [(item.sample.id, item.params.temperature) for _, item in ran.calls] == expected
    assert [(s.id, s.temperature) for s in ran.of(Sample)] == expected
    # one for each prompt and temperature
    assert [b.bytes_per_second for b in ran.of(Bandwidth)] == [1e9] * 4


def test_batches_of_prompts() -> None:
    prompts = [Prompt(f"p{i}", "code", text="x") for i in range(3)]
    ran = Ran(prompts, {PLAIN: always(1), "x": always(1)}, batch=2)
    assert [(name, item.sample.id) for name, item in ran.calls] == [
        (PLAIN, "p0"), (PLAIN, "p1"), ("x", "p0"), ("x", "p1"), (PLAIN, "p2"), ("x", "p2"),
    ]  # fmt: skip
    assert len(ran.of(Bandwidth)) == 2


def test_batches_do_not_mix_tasks() -> None:
    ran = Ran([SHORT, Prompt("t", "chat", text="x")], {PLAIN: always(1)}, batch=2)
    assert len(ran.of(Bandwidth)) == 2
    assert [s.task for s in ran.of(Sample)] == ["code", "chat"]


def test_the_warm_up_is_not_recorded() -> None:
    ran = Ran([SHORT], THREE)
    assert [name for name, _ in ran.warm_up] == list(THREE)
    assert len(ran.of(Sample)) == 3
    assert len(ran.of(PassTime)) == 1
    assert all(record.id for record in ran.of(Sample))


def test_requests_have_the_options() -> None:
    ran = Ran([SHORT], {PLAIN: always(1)}, max_tokens=9, ignore_eos=True)
    ((_, item),) = ran.calls
    assert (item.params.max_tokens, item.params.ignore_eos) == (9, True)
    assert item.ids == pronk_tiny().tokenizer.encode("def f(x):")


def test_each_prompt_has_its_own_seed() -> None:
    prompts = [SHORT, OTHER, Prompt("short", "chat", text="x"), TALK]
    ran = Ran(prompts, THREE, repeats=2)
    seeds: dict[tuple[str, str], set[int | None]] = {}
    for _, item in ran.calls:
        assert item.params.seed == item.sample.seed
        seeds.setdefault((item.sample.task, item.sample.id), set()).add(item.params.seed)
    assert len(seeds) == 5
    assert all(len(each) == 1 for each in seeds.values())
    assert len(set.union(*seeds.values())) == 5

    again = Ran(prompts[::-1], {PLAIN: always(3)})
    assert {item.params.seed for _, item in again.calls} == set.union(*seeds.values())
    others = Ran(prompts, {PLAIN: always(1)}, seed=8)
    assert not {item.params.seed for _, item in others.calls} & set.union(*seeds.values())


def test_conversations_continue_with_answers_of_plain_decoding() -> None:
    """Each temperature has its own conversation; answers of other methods do not matter."""
    texts = {0.0: " Fine.", 0.8: " Not so fine."}
    answers: dict[str, Answer] = {
        PLAIN: lambda item: answer_text(texts[item.params.temperature])(item),
        "x": answer_text(" Whatever."),
    }
    ran = Ran([TALK], answers, {"x": "other"}, temperatures=(0.0, 0.8), repeats=2)
    asked: dict[tuple[str, float], list[list[int]]] = {}
    for _, item in ran.calls:
        asked.setdefault((item.sample.id, item.params.temperature), []).append(item.ids)
    for temperature, text in texts.items():
        first = encode(pronk_tiny(), TALK)
        second = encode(pronk_tiny(), TALK, [text])
        assert asked["talk", temperature] == [first] * 4
        assert asked["talk turn 2", temperature] == [second] * 4
        assert first != second
    assert ran.progress[-1] == (16, 16)


def test_conversations_of_different_lengths_in_a_batch() -> None:
    talk = [Prompt(f"t{n}", "chat", turns=("Hi",) * n) for n in (1, 3, 2)]
    ran = Ran(talk, {PLAIN: always(50, 51)}, batch=3)
    ids = [item.sample.id for _, item in ran.calls]
    assert ids == ["t1", "t3", "t2", "t3 turn 2", "t2 turn 2", "t3 turn 3"]
    assert len(ran.of(Bandwidth)) == 3
    assert ran.progress[-1] == (6, 6)


def test_a_conversation_ends_where_plain_decoding_failed() -> None:
    ran = Ran([TALK, SHORT], {PLAIN: fail(RuntimeError("no"), on="talk"), "x": always(1)})
    assert [s.id for s in ran.of(Sample)] == ["talk", "talk", "short", "short"]
    assert ran.progress[-1] == (6, 6)


def test_a_failure_is_recorded_and_other_methods_go_on() -> None:
    answers = THREE | {"x": fail(ValueError("no\n room"), on="short", repeat=1)}
    ran = Ran([SHORT, OTHER], answers, repeats=2)
    failed = [s for s in ran.of(Sample) if s.error is not None]
    assert [(s.method, s.id, s.repeat, s.error, s.tokens) for s in failed] == [
        ("x", "short", 1, "no room", ())
    ]
    assert len(ran.of(Sample)) == 2 * 2 * 3
    assert ran.progress[-1] == (12, 12)
    found = document(*ran.trace.records, of=model(PLAIN, "x", "y"))
    assert [figures(found, name).prompts for name in THREE] == [2, 1, 2]


def test_a_failure_without_a_message_has_its_type() -> None:
    ran = Ran([SHORT], {PLAIN: always(1), "x": fail(ValueError())})
    assert [s.error for s in ran.of(Sample)] == [None, "ValueError without a message"]


def test_a_whole_batch_fails_together() -> None:
    ran = Ran([SHORT, OTHER], {PLAIN: always(1), "x": fail(ValueError("no"), on="other")}, batch=2)
    assert [(s.id, s.error) for s in ran.of(Sample) if s.method == "x"] == [
        ("short", "no"),
        ("other", "no"),
    ]


def test_an_interrupt_is_raised() -> None:
    with pytest.raises(KeyboardInterrupt):
        Ran([SHORT], {PLAIN: always(1), "x": fail(KeyboardInterrupt(), on="short")})


def test_too_long_prompts_are_skipped_and_counted() -> None:
    ran = Ran([SHORT, LONG, OTHER], THREE, repeats=2, temperatures=(0.0, 0.8))
    assert Counter(s.id for s in ran.of(Sample)) == {"short": 12, "other": 12}
    assert ran.progress[-1] == (36, 36)
    assert [done for done, _ in ran.progress] == sorted(done for done, _ in ran.progress)
    (skipped,) = document(*ran.trace.records).models[0].skipped  # one record for all temperatures
    assert skipped.id == "code/long"
    count = len(pronk_tiny().tokenizer.encode("word " * 3000))
    assert all(str(number) in skipped.reason for number in (count, 16, 2048))


def test_the_longest_prompt_that_fits() -> None:
    def measured(tokens: int) -> int:
        return len(
            Ran(
                [Prompt("x", "code", text="word")], {PLAIN: always(1)}, max_tokens=2048 - tokens
            ).calls
        )

    count = len(pronk_tiny().tokenizer.encode("word"))
    assert (measured(count), measured(count - 1)) == (1, 0)


def test_later_turns_of_a_too_long_conversation_are_skipped() -> None:
    ran = Ran([TALK], {PLAIN: lambda item: [50] * 2040, "x": always(1)}, temperatures=(0.0, 0.8))
    assert Counter(s.id for s in ran.of(Sample)) == {"talk": 4}
    assert {(s.id, s.task) for s in ran.of(Skip)} == {("talk turn 2", "chat")}
    assert ran.progress[-1] == (8, 8)


def test_fit_keeps_the_beginning_and_the_end() -> None:
    ran = Ran([LONG, SHORT], {PLAIN: always(1)}, fit=True)
    whole = encode(pronk_tiny(), LONG)
    ids = {item.sample.id: item.ids for _, item in ran.calls}
    assert ids["long"] == whole[:1016] + whole[-1016:]
    assert ids["short"] == encode(pronk_tiny(), SHORT)
    assert not ran.of(Skip)


def test_no_prompt_fits_if_the_output_takes_the_whole_context() -> None:
    for fit in (False, True):
        for max_tokens in (2048, 3000):
            ran = Ran([SHORT], {PLAIN: always(1)}, max_tokens=max_tokens, fit=fit)
            assert not ran.calls
            assert [s.id for s in ran.of(Skip)] == ["short"]
            assert ran.progress[-1] == (1, 1)


def test_a_prompt_that_cannot_be_encoded_is_skipped() -> None:
    """JSON allows a lone surrogate; UTF-8 does not. The bad prompt comes first, where the warm-up
    reads it too.
    """
    bad = Prompt("bad", "code", text="x\ud800")
    ran = Ran([bad, SHORT], {PLAIN: always(1)})
    assert [s.id for s in ran.of(Sample)] == ["short"]
    assert [s.id for s in ran.of(Skip)] == ["bad"]
    assert "\n" not in ran.of(Skip)[0].reason
    assert ran.progress[-1] == (2, 2)
    assert not Ran([bad], {PLAIN: always(1)}).calls


def test_a_conversation_refused_by_the_template_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: LLM, messages: object) -> list[int]:
        raise PromptError("the template refuses a system's message")

    monkeypatch.setattr(LLM, "chat_ids", refuse)
    ran = Ran([TALK, SHORT], {PLAIN: always(1)})
    assert [(s.id, s.reason) for s in ran.of(Skip)] == [
        ("talk", "the template refuses a system's message"),
        ("talk turn 2", "an earlier turn has no answer"),
    ]
    assert [s.id for s in ran.of(Sample)] == ["short"]
    assert ran.progress[-1] == (3, 3)


def test_each_different_output_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter's outputs are compared at every temperature, a peer's at temperature 0 only: its
    noise differs.
    """
    monkeypatch.setattr(
        measure,
        "find_divergence",
        lambda llm, item, plain, other: (
            None
            if plain.tokens == other.tokens
            else DivergenceRecord(
                other.task,
                other.id,
                other.method,
                other.temperature,
                item.sample.repeat,
                None,
                near_tie=False,
            )
        ),
    )
    answers = {
        PLAIN: always(1, 2),
        "same": always(1, 2),
        "ours": always(1, 3),
        "openvino": always(1, 4),
    }
    ran = Ran(
        [SHORT, OTHER],
        answers,
        {"openvino": "openvino"},
        temperatures=(0.0, 0.8),
        repeats=2,
        batch=2,
    )
    found = Counter((d.id, d.method, d.temperature) for d in ran.of(DivergenceRecord))
    expected = [("ours", 0.0), ("ours", 0.8), ("openvino", 0.0)]
    assert found == Counter((id_, *which) for id_ in ("short", "other") for which in expected)


def test_first_repeats_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int, tuple[int, ...]]] = []
    monkeypatch.setattr(
        measure,
        "find_divergence",
        lambda llm, item, plain, other: compared.append((plain.repeat, other.repeat, other.tokens)),
    )
    Ran([SHORT], {PLAIN: always(1), "x": lambda item: (item.sample.repeat,)}, repeats=3)
    assert compared == [(0, 0, (1,)), (0, 0, (0,))]


def test_each_repeat_has_its_own_proposer() -> None:
    """A drafter's memory of earlier outputs must not contain the same prompt's output from another
    repeat.
    """
    seen: list[Any] = []

    def generate(prompts: list[list[int]], _: object, drafter: Any) -> list[SimpleNamespace]:
        seen.append(drafter)
        return [SimpleNamespace(token_ids=[1], stats=Stats()) for _ in prompts]

    peak = SimpleNamespace(reset=lambda: None, read=lambda: None)
    decoder = SimpleNamespace(config=SimpleNamespace(vocab_size=10))
    target = SimpleNamespace(tokenizer_fingerprint=None, decoder=decoder)
    engine = SimpleNamespace(runner=SimpleNamespace(communication_seconds=0.0))
    llm = SimpleNamespace(generate=generate, target=target, engine=engine, workers=1)
    method = DrafterMethod(llm, "suffix", peak)  # type: ignore[arg-type]
    for temperature, repeat in ((0.0, -1), (0.0, 0), (0.0, 1), (0.8, 0), (0.0, 0)):
        method.run(
            [Item([1], SamplingParams(), Sample("", "", "suffix", "pronk", temperature, 0, repeat))]
        )
    assert len({id(drafter) for drafter in seen}) == 4
    assert seen[1] is seen[4]


def test_a_forward_pass_warms_the_caches_before_plain_decoding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bandwidth is measured before plain decoding and empties the processor's caches."""
    log: list[Any] = []
    meter = Meter()

    def logged(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            log.append((name, None))
            return original(*args, **more)

        return call

    monkeypatch.setattr(pronk_tiny(), "generate", logged("pass", pronk_tiny().generate))
    monkeypatch.setattr(meter, "measure", logged("bandwidth", meter.measure))
    bench = Bench(
        pronk_tiny(),
        [Fake(PLAIN, lambda _: [1], log)],
        Options(max_tokens=2, temperatures=(0.0,), repeats=1),
        bandwidth=meter,  # type: ignore[arg-type]
        trace=Trace(),
    )
    bench.run({"code": [SHORT]})
    assert [name for name, _ in log[-3:]] == ["bandwidth", "pass", PLAIN]
