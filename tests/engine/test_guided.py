"""Guided texts fit their guide, have the tokens of plain decoding and the masked distribution.

References are ``jsonschema``, plain decoding of each request alone, and the masked and renormalized
distribution token by token. The guide of :mod:`guides` is also an option of ``test_equality.py``.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from chi_square import p_value_of
from drafting.trees import TreeDrafter, drawn_trees
from engine.cases import (
    ENDS,
    PROMPTS,
    ask,
    assert_same,
    drafter,
    params,
    plain,
    step_until_ended,
    total,
)
from engine.test_rejection_distribution import BATCH, PROMPT, SMALL, bushy, logits_of
from guides import TOY, ToyFollower, allowed
from guides import fits as table_fits
from pronk.base.arrays import FLOAT32, Array
from pronk.base.errors import GuideError, OptionError, PronkError
from pronk.drafting.registry import DRAFTERS
from pronk.engine.outputs import Completion
from pronk.engine.request import Request
from pronk.llm import LLM
from pronk.sampling.params import Rule, SamplingParams
from pronk.text.guide import Guide
from schemas import fits, is_checkable, random_schema
from softmax import softmax
from tiny_models import VOCAB, make_engine, make_request, run, tiny_decoder

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["customer", "supplier"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
TEXTS = ("A person: ", "def add(a, b):\n    return", "for i in range(10):\n    print(i)\n", "{")
CLOSE = ("autoregressive", "suffix", "draft_model", "merged")
# Drafters that have what they need for pronk-tiny.
NAMES = [name for name in DRAFTERS if name not in ("eagle3", "mtp", "gemma4_assistant")]
WARM = {"greedy": 0.0, "warm": 0.8, "hot": 1.5}


@pytest.fixture(scope="module")
def llm() -> LLM:
    # draft tokens do not depend on measured time
    return LLM(threads=1, prefix_cache=True, budget="all")


def guided(index: int, temperature: float = 0.8, **more: Any) -> SamplingParams:
    options = {
        "max_tokens": 100,
        "temperature": temperature,
        "seed": 50 + index,
        "guide": Guide(json=PERSON),
    }
    return SamplingParams(**(options | more))


@cache
def alone(temperature: float) -> list[Completion]:
    """Return the completions of plain decoding, one text after the other."""
    model = LLM(threads=1, drafter="autoregressive")
    asked = [guided(i, temperature, guide_mode="plain", logprobs=1) for i in range(len(TEXTS))]
    return [model.generate(text, each) for text, each in zip(TEXTS, asked, strict=True)]


@pytest.mark.few(4)
@pytest.mark.parametrize("name", NAMES)
def test_every_drafter_gives_the_same_guided_tokens(llm: LLM, name: str) -> None:
    for temperature in WARM.values() if name in CLOSE else [WARM["warm"]]:
        want = alone(temperature)
        free = SamplingParams(max_tokens=20, seed=9, temperature=0.7)
        asked = [guided(i, temperature, logprobs=1) for i in range(len(TEXTS))]
        got = llm.generate([*TEXTS, "Once"], [*asked, free], drafter=name)
        for one, other in zip(got[:-1], want, strict=True):
            assert (one.token_ids, one.finish_reason) == (other.token_ids, "stop")
            assert one.logprobs == other.logprobs
            assert fits(one.text, PERSON)
            assert one.stats.draft_error is None
            assert one.stats.target_steps < 0.7 * other.stats.target_steps
            assert one.stats.sources["grammar"].accepted > 5
        assert got[-1].token_ids == llm.generate("Once", free, drafter="autoregressive").token_ids
    assert len({tuple(each.token_ids) for heat in WARM.values() for each in alone(heat)}) > len(
        TEXTS
    )


@pytest.mark.few(2)
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("name", ["draft_model", "suffix", "threshold"])
def test_texts_fit_by_every_rule(llm: LLM, name: str, rule: str) -> None:
    asked = [guided(i, 1.0, rule=rule) for i in range(len(TEXTS))]
    for done in llm.generate([*TEXTS], asked, drafter=name):
        assert fits(done.text, PERSON)
        assert done.stats.draft_error is None
        assert done.stats.accepted > 0


def assert_fits(llm: LLM, done: Completion, params: SamplingParams, schema: dict[str, Any]) -> None:
    """Check that a text fits the schema; a truncated text is first continued to its end."""
    if done.finish_reason == "stop":
        assert fits(done.text, schema)
        return
    assert done.finish_reason == "length"
    most = replace(
        params,
        max_tokens=min(len(done.token_ids) + 400, llm.config.context - len(done.prompt_token_ids)),
    )
    request = llm.request_factory.create_request(
        done.prompt_token_ids,
        most,
        llm.get_proposer("suffix"),
        seed=done.seed,
        output=done.token_ids,
    )
    llm.engine.run([request])
    if request.result.finish_reason == "stop":
        assert fits(done.text + request.result.text, schema)


def check_schemas(llm: LLM, found: Sequence[dict[str, Any]], names: Sequence[str]) -> Counter[str]:
    """Check texts for every schema at three temperatures, in batches with an unguided request."""
    counts = Counter[str]()
    for number, schema in enumerate(found):
        try:
            guide = Guide(json=schema)
            llm.request_factory.grammars.compile(guide)
        except OptionError:
            counts["refused"] += 1
            continue
        if not is_checkable(schema):
            counts["not checkable"] += 1
            continue
        counts["schemas"] += 1
        asked = [
            SamplingParams(max_tokens=most, temperature=heat, seed=number, guide=guide)
            for most, heat in zip((120, 120, 120, 7), (*WARM.values(), 1.0), strict=True)
        ]
        free = SamplingParams(max_tokens=8, seed=1)
        done = llm.generate(
            ["JSON: "] * 4 + ["free"], [*asked, free], drafter=names[number % len(names)]
        )
        leapt = llm.generate(
            "JSON: ", replace(asked[1], guide_mode="jump"), drafter=names[number % len(names)]
        )
        assert leapt.token_ids[:-1] == done[1].token_ids[:-1]
        for one, options in zip(done, asked, strict=False):
            assert_fits(llm, one, options, schema)
            counts[one.finish_reason] += 1
            counts["forced"] += (
                one.stats.sources["grammar"].accepted if "grammar" in one.stats.sources else 0
            )
    return counts


@cache
def plain_tokens(prompt: str, case: Callable[[int], SamplingParams], seed: int) -> list[int]:
    """Return the tokens of plain decoding, computed once for all drafters."""
    return [*reference().generate(prompt, case(seed)).token_ids]


@cache
def reference() -> LLM:
    return LLM(threads=1, prefix_cache=True, drafter="autoregressive")


def ending(seed: int) -> SamplingParams:
    guide = Guide(json={"type": "array", "items": {"type": ["object", "integer", "string"]}})
    return SamplingParams(max_tokens=24, temperature=1.5, seed=seed, guide=guide, guide_mode="jump")


@pytest.mark.parametrize("name", ["auto", "suffix"])
def test_texts_have_one_end_without_the_model(llm: LLM, name: str) -> None:
    """With ``jump``, the end of a text that must end is not the model's choice, drafted or not."""
    prompt = "ab abb ab acd ab x "
    num_ended = 0
    ends = llm.config.eos_ids
    assert len(ends) > 1
    for seed in range(24):
        want = plain_tokens(prompt, ending, seed)
        assert llm.generate(prompt, ending(seed), drafter=name).token_ids == want, seed
        num_ended += want[-1] == min(ends)
    assert num_ended > 8


NESTED = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "array", "items": {"type": "integer"}},
        "any": {},
    },
    "required": ["city", "days", "any"],
    "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
}
CALL = f'start: " [{{\\"name\\": \\"f\\", \\"arguments\\": " %json {json.dumps(NESTED)} "}}]"'


def nested(seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=90, temperature=1.0, seed=seed, guide=Guide(grammar=CALL))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "seeds", [range(24, 30), pytest.param(range(30, 40), marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("name", ["recycling", "merged(recycling, suffix)", "auto"])
def test_texts_of_nested_grammars_are_those_of_plain_decoding(
    llm: LLM, name: str, seeds: range
) -> None:
    """Trees of draft tokens make the grammar go back and forth between open values."""
    num_accepted = 0
    for seed in seeds:
        got = llm.generate("{", nested(seed), drafter=name)
        assert got.token_ids == plain_tokens("{", nested, seed), seed
        num_accepted += got.stats.accepted
    assert num_accepted > 3 * len(seeds)


def test_texts_fit_schemas_at_random(llm: LLM) -> None:
    dice = random.Random(1)
    counts = check_schemas(llm, [random_schema(dice) for _ in range(8)], NAMES)
    assert counts["stop"] > 12
    assert counts["length"] > 3
    assert counts["forced"] > 100
    assert counts["refused"] < 2


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
def test_texts_fit_many_schemas(llm: LLM, part: int) -> None:
    dice = random.Random(part + 2)
    counts = check_schemas(llm, [random_schema(dice) for _ in range(100)], NAMES)
    assert counts["stop"] > 200
    assert counts["refused"] < 10


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
def test_texts_fit_the_schemas_of_a_file(
    llm: LLM, schemas: Sequence[dict[str, Any]], part: int
) -> None:
    if not schemas:
        pytest.skip("no file of --schemas")
    counts = check_schemas(llm, schemas[part::3], NAMES)
    print(dict(counts))  # noqa: T201 - a summary of the run
    assert counts["stop"] > 0


@pytest.mark.parametrize("mode", ["forced", "jump"])
def test_preemption_and_prefix_hits(mode: str) -> None:
    small = LLM(threads=1, prefix_cache=True, max_batch=2, budget="all")
    asked = [
        guided(i, guide_mode=mode, logprobs=1 if mode == "forced" else None)
        for i in range(len(TEXTS))
    ]
    texts = [text * 12 for text in TEXTS]
    want = [
        small.generate(text, each, drafter="suffix")
        for text, each in zip(texts, asked, strict=True)
    ]
    proposer = small.get_proposer("suffix")
    factory = small.request_factory
    requests = [
        factory.create_request(factory.encode_prompt(text), each, proposer, seed=each.seed or 0)
        for text, each in zip(texts, asked, strict=True)
    ]
    for number, request in enumerate(requests):
        request.priority = number // 2  # later requests preempt the first two
        small.engine.add(request)
        for _ in range(number * 2):
            small.engine.step()
    step_until_ended(small.engine, requests)
    assert total(requests, "preemptions") > 0
    assert total(requests, "cached_tokens") > 0
    for request, done in zip(requests, want, strict=True):
        assert request.output == done.token_ids
        assert mode == "jump" or request.result.logprobs == done.logprobs
        small.engine.abort(request)


def test_forced_text_is_drafted_to_its_end() -> None:
    """Forced text fills whole proposals, in which the policy does not consider the drafter beside
    the guide.
    """
    text = " ".join(str(number) for number in range(150))
    done = LLM(threads=1).generate(
        "x", guided(0, guide=Guide(json={"const": text}), max_tokens=700), drafter="auto"
    )
    assert json.loads(done.text) == text
    assert len(done.token_ids) > 200
    assert done.stats.step_compression > 4


def test_samples_of_one_prompt(llm: LLM) -> None:
    done = llm.generate(TEXTS[0], guided(0, n=3), drafter="suffix")
    every = [done, *done.others]
    assert all(fits(each.text, PERSON) for each in every)
    assert len({each.text for each in every}) == 3
    assert done.token_ids == alone(0.8)[0].token_ids


class TestJump:
    @pytest.mark.parametrize("name", ["autoregressive", "suffix", "draft_model"])
    def test_texts_fit_in_fewer_passes(self, llm: LLM, name: str) -> None:
        asked = [guided(i, guide_mode="jump") for i in range(len(TEXTS))]
        free = SamplingParams(max_tokens=20, seed=9, temperature=0.7)
        *got, other = llm.generate([*TEXTS, "Once"], [*asked, free], drafter=name)
        for done, plainly in zip(got, alone(0.8), strict=True):
            assert fits(done.text, PERSON)
            assert done.token_ids[:-1] == plainly.token_ids[:-1]  # several tokens may end a text
            assert done.stats.draft_error is None
            assert done.stats.jumped > 0
            assert done.stats.target_steps < plainly.stats.target_steps - 10
            assert sum(step.tokens for step in done.stats.steps) == len(done.token_ids)
        assert other.token_ids == llm.generate("Once", free, drafter="autoregressive").token_ids

    def test_forced_text_has_the_ids_of_the_tokenizer(self, llm: LLM) -> None:
        done = llm.generate(
            "x", guided(0, guide=Guide(regex="a fixed text of the guide[.]"), guide_mode="jump")
        )
        assert done.text == "a fixed text of the guide."
        rest = llm.tokenizer.encode(done.text, add_special_tokens=False)
        assert done.token_ids[-8:-1] == rest[-7:]
        assert done.finish_reason == "stop"

    @pytest.mark.parametrize("most", [1, 2, 5, 9, 17])
    def test_no_more_tokens_than_asked_for(self, llm: LLM, most: int) -> None:
        done = llm.generate(TEXTS[0], guided(0, guide_mode="jump", max_tokens=most))
        assert len(done.token_ids) == most
        assert done.finish_reason == "length"

    def test_pieces_report_the_source_of_tokens(self, llm: LLM) -> None:
        pieces = [*llm.stream(TEXTS[0], guided(0, guide_mode="jump"))]
        assert (
            sum(piece.source == "guide" for piece in pieces) == pieces[-1].completion.stats.jumped
        )  # type: ignore[union-attr]
        assert fits("".join(piece.text for piece in pieces), PERSON)

    def test_penalties_count_forced_tokens(self, llm: LLM) -> None:
        asked = guided(
            0,
            guide=Guide(regex="aaaa[ab]{30}"),
            guide_mode="jump",
            frequency_penalty=2.0,
            temperature=0.0,
        )
        got = llm.generate("x", asked, drafter="autoregressive")
        request = llm.request_factory.create_request(
            got.prompt_token_ids, asked, llm.get_proposer("autoregressive")
        )
        llm.engine.run([request])
        (penalties, *_) = request.sampler.processors
        assert penalties.counts.tolist() == [
            request.output.count(i) for i in range(llm.config.vocab_size)
        ]  # type: ignore[attr-defined]


class TestBesideOtherOptions:
    def test_stop_strings(self, llm: LLM) -> None:
        done = llm.generate(TEXTS[0], guided(0, stop=['"age"']))
        assert done.stop_reason == '"age"'
        assert '"age"' not in done.text
        assert done.text == alone(0.8)[0].text[: len(done.text)]

    def test_min_tokens_beyond_the_guide_are_refused(self, llm: LLM) -> None:
        with pytest.raises(OptionError, match="together with the guide"):
            llm.generate("x", guided(0, guide=Guide(choice=["yes"]), min_tokens=50))

    def test_bad_words_demanded_by_the_guide_are_refused(self, llm: LLM) -> None:
        with pytest.raises(OptionError, match="together with the guide"):
            llm.generate("x", guided(0, guide=Guide(regex="[0-9]"), bad_words=[*"0123456789"]))

    def test_logprobs_are_those_of_the_model_without_the_guide(self, llm: LLM) -> None:
        done = llm.generate(TEXTS[0], guided(0, logprobs=3, max_tokens=30))
        whole = SamplingParams(max_tokens=1, prompt_logprobs=3)
        ids = [*done.prompt_token_ids, *done.token_ids]
        again = llm.generate(ids, whole, drafter="autoregressive").prompt_logprobs
        assert again is not None
        assert done.logprobs == again[-len(done.token_ids) :]

    @pytest.mark.parametrize("mode", ["forced", "jump"])
    def test_a_forced_stop_token_ends_the_text(self, llm: LLM, mode: str) -> None:
        (brace,) = llm.tokenizer.encode("{", add_special_tokens=False)
        done = llm.generate(
            "x", guided(0, guide=Guide(regex="ab[{]cd"), guide_mode=mode, stop_token_ids=[brace])
        )
        assert done.text == "ab"
        assert done.stop_reason == brace


STRING = 6
SAMPLES = 300
SAMPLED = SamplingParams(
    temperature=2.0, max_tokens=STRING + 1, guide=TOY, top_p=0.95, presence_penalty=0.3
)


def continuations(
    output: tuple[int, ...] = (), chance: float = 1.0
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield every allowed string with its probability: masked, cut to top-p and renormalized at
    each token.
    """
    if len(output) == STRING:
        yield output, chance
        return
    logits = logits_of(tiny_decoder(vocab=SMALL), [*PROMPT, *output], len(PROMPT))[-1].astype(
        np.float64
    )
    for token in set(output):
        logits[token] -= 0.3
    follower = ToyFollower(SMALL)
    for token in output:
        follower.advance(token)
    state = follower.states[-1]
    assert state is not None
    may = sorted(allowed(state, SMALL, frozenset()))
    shares = softmax(logits[may] / 2.0).tolist()
    kept = dict[int, float]()
    reached = 0.0
    for share, token in sorted(zip(shares, may, strict=True), key=lambda pair: (-pair[0], pair[1])):
        if reached < 0.95:
            kept[token] = share
        reached += share
    for token, share in kept.items():
        yield from continuations((*output, token), chance * share / sum(kept.values()))


@cache
def exact_distribution() -> dict[tuple[int, ...], float]:
    return dict(continuations())


TREES = {
    "point masses": TreeDrafter(bushy, vocab=SMALL),
    "drawn chain": TreeDrafter(drawn_trees((-1, 0, 1, 2)), vocab=SMALL),
    "drawn tree": TreeDrafter(drawn_trees((-1, 0, 1, 2, 0, 1, 4, 0)), vocab=SMALL),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("trees", "rule"),
    [
        ("point masses", "coupled"),
        ("point masses", "rejection"),
        ("drawn tree", "rejection"),
        ("drawn chain", "block"),
        pytest.param("drawn tree", "block", marks=pytest.mark.slow),
        pytest.param("point masses", "block", marks=pytest.mark.slow),
    ],
)
def test_strings_have_the_masked_distribution(trees: str, rule: Rule) -> None:
    """The trees also contain forced draft tokens, and tokens that the guide forbids."""
    given = [replace(SAMPLED, rule=rule, seed=seed) for seed in range(SAMPLES)]
    asked = [make_request(PROMPT, each, TREES[trees], vocab=SMALL) for each in given]
    run(make_engine(tiny_decoder(vocab=SMALL), max_batch=BATCH, num_blocks=16 * BATCH), asked)
    strings = [tuple(request.output[:STRING]) for request in asked]
    assert p_value_of(strings, exact_distribution(), least_cells=11) > 1e-4
    assert total(asked, "accepted") > SAMPLES
    assert sum(request.stats.sources["grammar"].accepted for request in asked) > SAMPLES / 2


def test_the_exact_distribution_sums_to_1() -> None:
    assert abs(sum(exact_distribution().values()) - 1.0) < 1e-9
    assert len(exact_distribution()) > 20


def test_forbidden_draft_tokens_take_no_rows() -> None:
    want = plain(FLOAT32, "guided")
    by = drafter("random", want)
    engine = make_engine(tiny_decoder())
    verified: list[tuple[list[int], Any]] = []
    process = engine.output_processor.process

    def watched(step: Any, result: Any, index: int) -> Any:
        verified.append((list(step.request.output), step.draft))
        return process(step, result, index)

    engine.output_processor.process = watched  # type: ignore[method-assign]
    got = [ask(prompt, params("guided", i), by) for i, prompt in enumerate(PROMPTS)]  # type: ignore[arg-type]
    run(engine, got)
    assert_same(got, want)
    draft_tokens = 0
    for output, tree in verified:
        for node in range(1, len(tree)):
            if tree.acceptable[node]:
                path = [tree.tokens[step] for step in tree.path(node)]
                # the guide forbids nothing after the end
                behind_an_end = not {*path[:-1]}.isdisjoint(ENDS)
                assert behind_an_end or table_fits([*output, *path], VOCAB, ENDS)
                draft_tokens += 1
    assert draft_tokens > 100


class Collapse(ToyFollower):
    """A guide that fails after 12 tokens, like a grammar that needs too much work."""

    def mask(self, logits: Array) -> Array:
        if len(self.states) > 12:
            msg = "guide: expected a grammar that can be followed to the end"
            raise PronkError(msg)
        return super().mask(logits)


def test_a_guide_that_fails_ends_its_own_request() -> None:
    want = plain(FLOAT32, "guided")
    engine = make_engine(tiny_decoder())
    by = drafter("oracle", want)
    got: list[Request] = [ask(prompt, params("guided", i), by) for i, prompt in enumerate(PROMPTS)]  # type: ignore[arg-type]
    sampler = got[2].sampler
    sampler.guide = Collapse(VOCAB, (7, 90))
    sampler.processors = (*sampler.processors[:-1], sampler.guide)
    for request in got:
        engine.add(request)
    step_until_ended(engine, got)
    assert isinstance(got[2].result.error, PronkError)
    assert 0 < len(got[2].output) <= 12
    assert_same([*got[:2], *got[3:]], [*want[:2], *want[3:]])


def test_texts_fit_other_guides(llm: LLM) -> None:
    guides = {
        "regex": Guide(regex=r"[A-Z][a-z]{2,8} [0-9]{1,3}(\.[0-9])?"),
        "choice": Guide(choice=["yes", "no", "maybe not", "né"]),
        "grammar": Guide(
            grammar='start: sum\nsum: NUMBER | sum "+" NUMBER\nNUMBER: /[0-9]{1,3}/\n'
        ),
        "object": Guide(json={"type": "object"}),
    }
    for heat in WARM.values():
        for name, guide in guides.items():
            done = llm.generate(
                ["It is "] * 2, guided(1, heat, guide=guide, max_tokens=60), drafter="suffix"
            )
            for each in done:
                if name == "regex":
                    assert re.fullmatch(str(guide.regex), each.text)
                elif name == "choice":
                    assert each.text in (guide.choice or ())
                elif name == "grammar":
                    assert re.fullmatch(r"\d{1,3}(\+\d{1,3})*\+?", each.text)
                elif each.finish_reason == "stop":
                    assert fits(each.text, {"type": "object"})


class FailingMask(ToyFollower):
    """A guide that fails in states divisible by 5, like a grammar that needs too much work after
    some texts.
    """

    def mask(self, logits: Array) -> Array:
        if self.states[-1] is not None and self.states[-1] % 5 == 0:
            msg = "guide: too much"
            raise GuideError(msg)
        return super().mask(logits)


def test_a_mask_that_fails_ends_the_chain_of_draft_tokens() -> None:
    """The proposal must not fail depending on sampled draft tokens, so the chain ends before the
    failing mask.
    """
    for rule in ("coupled", "block"):
        request = make_request((1, 2, 3), SamplingParams(temperature=1.0, guide=TOY, rule=rule))  # type: ignore[arg-type]
        request.sampler.guide = guide = FailingMask(VOCAB)
        request.sampler.processors = (guide,)
        assert request.sampler.draft_token(np.zeros(VOCAB, np.float32), 2) is None
        with pytest.raises(GuideError):
            request.sampler.scores(np.zeros(VOCAB, np.float32))
        guide.states[-1] = 3
        assert request.sampler.draft_token(np.zeros(VOCAB, np.float32), 2) is not None
