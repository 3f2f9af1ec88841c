"""Compiled guides: refused guides, time limits, and allowed tokens.

Masks are compared with a loop over the vocabulary: a token is allowed if its bytes continue one of
the texts.
"""

import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from checkpoints import MakeCheckpoint
from pronk.base.errors import GuideError, OptionError, PronkError
from pronk.llm import LLM
from pronk.sampling.grammar_processor import GrammarProcessor
from pronk.sampling.grammars import Grammars
from pronk.text.guide import Guide
from pronk.text.tokenizer import Tokenizer
from waiting import processor_limit


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(threads=1)


@pytest.fixture(scope="module")
def grammars(llm: LLM) -> Grammars:
    return llm.request_factory.grammars


def allowed(follower: GrammarProcessor, vocab: int) -> set[int]:
    """Return the allowed token ids; check that the mask changes neither other logits nor its
    argument.
    """
    logits = np.arange(vocab, dtype=np.float32)
    masked = follower.mask(logits)
    assert masked.dtype == np.float32
    assert np.array_equal(logits, np.arange(vocab))
    kept = np.flatnonzero(masked > -np.inf)
    assert np.array_equal(masked[kept], logits[kept])
    return set(kept.tolist())


def spelled(tokenizer: Tokenizer, vocab: int) -> dict[int, bytes]:
    """Return the bytes of each token that has text; byte-level BPE writes a byte as one
    character.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }
    found = {}
    for token in range(vocab):
        name = tokenizer.backend.id_to_token(token)
        if name is not None and tokenizer.token_text(token) is not None:
            found[token] = bytes(table[character] for character in name)
    return found


TEXTS = ("yes", "yes, of course", "no", "nö", "no way\n", "\tindented")


def expected(
    spellings: dict[int, bytes], texts: Sequence[str], prefix: bytes, ends: set[int]
) -> set[int]:
    rest = [text.encode()[len(prefix) :] for text in texts if text.encode().startswith(prefix)]
    found = {
        token for token, own in spellings.items() if any(text.startswith(own) for text in rest)
    }
    return found | (ends if b"" in rest else set())


def test_masks_are_those_of_a_loop_over_the_vocabulary(llm: LLM, grammars: Grammars) -> None:
    vocab = llm.config.vocab_size
    ends = set(llm.config.eos_ids)
    spellings = spelled(llm.tokenizer, vocab)
    dice = random.Random(0)
    counts = Counter[str]()
    for _ in range(30):
        follower = grammars.compile(Guide(choice=TEXTS)).new_processor()
        prefix = b""
        while True:
            want = expected(spellings, TEXTS, prefix, ends)
            if (forced := follower.forced()) and forced[0] not in ends:
                # If the next characters are certain, the mask allows only the token of the
                # tokenizer's encoding.
                assert forced[0] in want
                rest = next(
                    text.encode()[len(prefix) :]
                    for text in TEXTS
                    if text.encode().startswith(prefix)
                )
                if rest[0] < 128:  # from 128 on, the rest may begin within a UTF-8 character
                    assert (
                        forced[0]
                        == llm.tokenizer.encode(rest.decode(), add_special_tokens=False)[0]
                    )
                want = {forced[0]}
                counts["forced"] = counts["forced"] + 1
            assert allowed(follower, vocab) == want
            assert all(
                follower.allows(token) == (token in want)
                for token in [*dice.sample(range(vocab), 40), *want]
            )
            counts["all"] += 1
            token = dice.choice(sorted(want))
            follower.advance(token)
            if token in ends:
                break
            prefix += spellings[token]
    assert counts["all"] > 100
    assert counts["forced"] > 20


def test_rollback_restores_the_mask(llm: LLM, grammars: Grammars) -> None:
    """The removed tokens include forbidden ones, and tokens after a stop token."""
    vocab = llm.config.vocab_size
    dice = random.Random(1)
    follower = grammars.compile(
        Guide(json={"type": "array", "items": {"type": "integer"}})
    ).new_processor()
    certain: list[int] = []
    for _ in range(40):
        before = allowed(follower, vocab)
        tried = [
            dice.choice([*before, dice.randrange(vocab), *llm.config.eos_ids])
            for _ in range(dice.randint(0, 6))
        ]
        for token in tried:
            follower.advance(token)
        back = dice.randint(0, len(tried))
        follower.rollback(back)
        follower.rollback(len(tried) - back)
        assert allowed(follower, vocab) == before
        inner = sorted(before - set(llm.config.eos_ids))
        if not inner:
            break
        certain.append(dice.choice(inner))
        follower.advance(certain[-1])
        fresh = grammars.compile(
            Guide(json={"type": "array", "items": {"type": "integer"}})
        ).new_processor(certain)
        assert allowed(fresh, vocab) == allowed(follower, vocab)


def test_nothing_is_masked_after_a_stop_token(llm: LLM, grammars: Grammars) -> None:
    follower = grammars.compile(Guide(choice=["a"])).new_processor()
    (a,) = llm.tokenizer.encode("a", add_special_tokens=False)
    follower.advance(a)
    assert allowed(follower, llm.config.vocab_size) == set(llm.config.eos_ids)
    assert follower.forced() == [min(llm.config.eos_ids)]
    follower.advance(llm.config.eos_ids[0])
    assert len(allowed(follower, llm.config.vocab_size)) == llm.config.vocab_size
    assert follower.forced() == []
    assert follower.allows(5)


def test_forced_text_is_spelled_as_the_tokenizer_does(llm: LLM, grammars: Grammars) -> None:
    text = "Dear reader, this text is what it is: forced."
    follower = grammars.compile(Guide(choice=[text])).new_processor()
    forced = follower.forced()
    assert forced == llm.tokenizer.encode(text, add_special_tokens=False)[: len(forced)]
    assert len(forced) > 5
    # A last token that the next, free characters may lengthen is not forced.
    follower = grammars.compile(Guide(regex="The number is [0-9]+")).new_processor()
    assert llm.tokenizer.decode(follower.forced()).startswith("The number")
    for token in follower.forced():
        follower.advance(token)
    assert follower.forced() == []


class TestErrors:
    @pytest.mark.parametrize(
        ("guide", "message"),
        [
            (Guide(regex="(a"), "unclosed group"),
            (Guide(regex="(?=a)b"), "look-around"),
            (Guide(regex=r"(a)\1"), "backreferences"),
            (Guide(grammar='start: "a" b'), "b"),
            (Guide(grammar="start: ("), "1"),
            (Guide(grammar='begin: "a"'), "start"),
            (
                Guide(json={"not": {}}),
                "json: expected keywords that can be checked from left to right, found 'not'",
            ),
            (
                Guide(json={"properties": {"m": {"uniqueItems": True}}}),
                "json: properties.m: expected keywords",
            ),
            (Guide(json={"type": "strin"}), "strin"),
            (Guide(json={"$ref": "http://example.com/schema.json"}), "example.com"),
            (Guide(json={"$ref": "#/$defs/nobody"}), "nobody"),
            (Guide(json={"$ref": "#"}), "found '$ref'"),
            (Guide(json={"enum": []}), "empty"),
            (
                Guide(json={"type": "string", "pattern": "("}),
                "pattern: expected a parenthesis ')' for each '('",
            ),
            (Guide(json={"type": "integer", "multipleOf": 1000003}), "multipleOf"),
            (Guide(json={"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}), "multipleOf"),
            (
                Guide(grammar='start: %json {"type": "integer", "multip\\u006ceOf": 1000003}'),
                "multipleOf",
            ),
            (Guide(json={"x-guidance": {"lenient": True}, "not": {}}), "not"),
        ],
        ids=lambda value: value.source[:40] if isinstance(value, Guide) else None,
    )
    def test_say_where_it_is(self, grammars: Grammars, guide: Guide, message: str) -> None:
        with pytest.raises(OptionError, match="guide") as raised:
            grammars.compile(guide)
        assert message in str(raised.value)
        assert "\n" not in str(raised.value)
        assert len(str(raised.value)) < 500

    def test_without_the_extra(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "llguidance", None)
        with pytest.raises(
            OptionError, match=r"run pip install '\.\[guided\]' in a clone of pronk"
        ):
            Grammars(llm.tokenizer, llm.config.vocab_size, [0]).compile(Guide(regex="a"))

    def test_a_model_without_an_end(self, llm: LLM) -> None:
        with pytest.raises(OptionError, match="a token that ends a text"):
            Grammars(llm.tokenizer, llm.config.vocab_size, []).compile(Guide(regex="a"))

    def test_characters_without_tokens(self, tokenizer: Tokenizer) -> None:
        """A guide that requires a character for which the tokenizer has no token raises."""
        incomplete = Tokenizer(
            _without(tokenizer, "Z"), special_tokens={"eos_token": "<|endoftext|>"}
        )
        grammars = Grammars(incomplete, tokenizer.vocab_size, list(tokenizer.eos_ids))
        for guide in (Guide(choice=["Zebra"]), Guide(regex="Z[ab]")):
            with pytest.raises(OptionError, match="the tokenizer has no token for"):
                grammars.compile(guide)
        follower = grammars.compile(Guide(choice=["aZ"])).new_processor()
        for token in incomplete.encode("a", add_special_tokens=False):
            follower.advance(token)
        with pytest.raises(PronkError, match="guide"):
            follower.mask(np.zeros(tokenizer.vocab_size, np.float32))


def _without(tokenizer: Tokenizer, character: str) -> Any:
    """Return a copy of the tokenizer without tokens for the character."""
    import json

    import tokenizers

    data = json.loads(tokenizer.backend.to_str())
    vocab = data["model"]["vocab"]
    data["model"]["vocab"] = {
        (name if character not in name else f"{name}☃"): i for name, i in vocab.items()
    }
    data["model"]["merges"] = [m for m in data["model"]["merges"] if character not in "".join(m)]
    return tokenizers.Tokenizer.from_str(json.dumps(data))


def references(levels: int, width: int) -> dict[str, Any]:
    """Return nested objects: each level has ``width`` properties, which all refer to the next
    level.
    """
    defs: dict[str, Any] = {
        f"d{i}": {
            "type": "object",
            "properties": {f"p{j}": {"$ref": f"#/$defs/d{i + 1}"} for j in range(width)},
        }
        for i in range(levels)
    }
    return {"$ref": "#/$defs/d0", "$defs": defs | {f"d{levels}": {"type": "string"}}}


def combinations(count: int) -> dict[str, Any]:
    either = [
        {
            "anyOf": [
                {"properties": {f"a{i}": {"type": "integer"}}},
                {"properties": {f"b{i}": {"type": "string"}}},
            ]
        }
        for i in range(count)
    ]
    return {"type": "object", "allOf": either}


HOSTILE: dict[str, Callable[[], Guide]] = {
    "catastrophic": lambda: Guide(regex="(a+)+$"),
    "alternatives": lambda: Guide(regex="(a|aa)+b"),
    "repetitions": lambda: Guide(regex="((a{1,1000}){1,1000}){1,1000}"),
    "states": lambda: Guide(regex="(a|b)*a(a|b){25}"),
    "words": lambda: Guide(regex=r"(\w{1,500}\s){500}"),
    "parentheses": lambda: Guide(regex="(" * 5000 + "a" + ")" * 5000),
    "pattern": lambda: Guide(json={"type": "string", "pattern": "^(([a-z]+)+)+$"}),
    "references": lambda: Guide(json=references(20, 3)),
    "combinations": lambda: Guide(json=combinations(20)),
    "recursive": lambda: Guide(
        json={"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}}]}
    ),
    "circle": lambda: Guide(json={"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    "long array": lambda: Guide(
        json={"type": "array", "items": {}, "minItems": 10**7, "maxItems": 10**9}
    ),
    "long string": lambda: Guide(json={"type": "string", "minLength": 10**7}),
    "many properties": lambda: Guide(
        json={"properties": {f"p{i}": {"pattern": "^[a-z]{3,50}$"} for i in range(2000)}}
    ),
    "many values": lambda: Guide(json={"enum": [f"value {i}" * 3 for i in range(8000)]}),
    "numbers": lambda: Guide(json={"type": "number", "minimum": -1e300, "maximum": 1.2345e300}),
    "multiples": lambda: Guide(json={"type": "integer", "multipleOf": 9973}),
    "ambiguous": lambda: Guide(grammar='start: a\na: a a | "x"\n'),
    "left alone": lambda: Guide(grammar="start: a{1,10000}\na: b{1,10000}\nb: /x/ | c\nc: a\n"),
    "long rule": lambda: Guide(grammar="start: " + '"a" ' * 60_000),
    "deep rule": lambda: Guide(grammar="start: " + "(" * 5000 + '"a"' + ")" * 5000),
}


@pytest.mark.few(7)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_guides_cost_little(grammars: Grammars, llm: LLM, name: str) -> None:
    """The guide is refused or masks 30 tokens in time; without limits, this could take hours."""
    vocab = llm.config.vocab_size
    dice = random.Random(0)
    with processor_limit(60), suppress(PronkError):
        follower = grammars.compile(HOSTILE[name]()).new_processor()
        for _ in range(30):
            token = dice.choice(sorted(allowed(follower, vocab)))
            follower.forced()
            follower.advance(token)


def chain(length: int, step: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Return a schema of ``length`` definitions; ``step`` makes a definition that refers to the
    next one.
    """
    defs = {f"d{i}": step(f"#/$defs/d{i + 1}") for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": defs | {f"d{length}": {"type": "integer"}}}


def rules(length: int, rule: str) -> str:
    """Return a grammar of ``length`` rules, each of which refers to the next one."""
    return (
        f"start: {rule[0]}0\n"
        + "".join(f"{rule[0]}{i}: {rule[0]}{i + 1}{rule[1:]}\n" for i in range(length))
        + f'{rule[0]}{length}: "y"\n'
    )


def ambiguous(size: int) -> str:
    names = [f"r{i}" for i in range(size)]
    bodies = (f'r{i}: start "x" | r{(i * 7 + 1) % size} "z" | "y"' for i in range(size))
    return "start: " + " | ".join(names) + "\n" + "\n".join(bodies) + "\n"


# Guides that crash llguidance or keep it busy for minutes; on a fast machine, some end earlier by
# llguidance's limits.
DEADLY: dict[str, Callable[[], Guide]] = {
    "objects": lambda: Guide(
        json=chain(
            1000,
            lambda to: {"type": "object", "properties": {"a": {"$ref": to}}, "required": ["a"]},
        )
    ),
    "references": lambda: Guide(json=chain(5000, lambda to: {"$ref": to})),
    "intersections": lambda: Guide(
        json=chain(3500, lambda to: {"allOf": [{"$ref": to}, {"minimum": 1}]})
    ),
    "rules": lambda: Guide(grammar=rules(5000, 'a "x"')),
    "terminals": lambda: Guide(grammar=rules(4000, 'T "x"')),
    "intersected terminals": lambda: Guide(grammar=rules(5000, "T & /[a-z]*/")),
    "left recursion": lambda: Guide(grammar=ambiguous(1600)),
    "nothing": lambda: Guide(grammar="start: " + "e " * 50_000 + '\ne: "" | "x"\n'),
}
ENDLESS = {"left recursion", "nothing"}  # they take minutes, until the child process is killed


@pytest.mark.few(3)
@pytest.mark.parametrize("name", DEADLY)
def test_guides_that_crash_the_compiler_are_refused(
    grammars: Grammars, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in ENDLESS:
        monkeypatch.setattr("pronk.text.json_schema.trial.TIMEOUT", 0.5)
    message = r"expected (one|a grammar|a schema) that"
    with processor_limit(60), pytest.raises(GuideError, match=message):
        grammars.compile(DEADLY[name]())


def test_long_guides_that_are_harmless_are_compiled(grammars: Grammars, llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {f"property_{i}": {"type": "integer"} for i in range(300)},
    }
    follower = grammars.compile(Guide(json=schema)).new_processor()
    assert follower.allows(llm.tokenizer.encode("{", add_special_tokens=False)[0])


def test_masks_after_a_rollback_are_those_of_a_new_processor(llm: LLM, grammars: Grammars) -> None:
    """llguidance's cached results for removed tokens must not be used for the tokens in their
    place.
    """
    loose = Guide(
        json={"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "integer"}}},
        whitespace=True,
    )
    lark = Guide(
        grammar='start: a | b\na: "p" EQ NUM\nb: "q" EQ W\nNUM: /[0-9]{1,2}/\nW: /[a-z]+/\nEQ: '
        "/= */\n"
    )
    cases = [
        (loose, "{", '"b": ', '"a": '),
        (loose, "{", '"a": ', '"b": '),
        (lark, "", "q= ", "p= "),
    ]
    for guide, before, one, other in cases:
        ids = [
            llm.tokenizer.encode(text, add_special_tokens=False) for text in (before, one, other)
        ]
        follower, fresh = (grammars.compile(guide).new_processor(ids[0]) for _ in range(2))
        for token in ids[1]:
            follower.advance(token)
        allowed(follower, llm.config.vocab_size)
        follower.rollback(len(ids[1]))
        for token in ids[2]:
            follower.advance(token)
            fresh.advance(token)
        assert allowed(follower, llm.config.vocab_size) == allowed(fresh, llm.config.vocab_size)


def test_allows_agrees_with_the_mask(llm: LLM, grammars: Grammars) -> None:
    vocab = llm.config.vocab_size
    dice = random.Random(4)
    seen = 0
    for guide in (
        Guide(choice=["forced text", "free"]),
        Guide(json={"enum": ["ab", 12]}),
        Guide(regex="[a-c]{2,}x+"),
    ):
        follower = grammars.compile(guide).new_processor()
        for _ in range(12):
            may = allowed(follower, vocab)
            assert {token for token in range(vocab) if follower.allows(token)} == may
            token = dice.choice(sorted(may))
            seen += 1
            if token in llm.config.eos_ids:
                break
            follower.advance(token)
    assert seen > 10


def test_a_stop_token_with_text_is_allowed_only_at_the_end(llm: LLM) -> None:
    (letter,) = llm.tokenizer.encode("f", add_special_tokens=False)
    ends = {*llm.config.eos_ids, letter}
    vocab = llm.config.vocab_size
    follower = (
        Grammars(llm.tokenizer, vocab, [*ends]).compile(Guide(regex="[e-g]{2}")).new_processor()
    )
    for _ in range(2):
        may = allowed(follower, vocab)
        assert not may & ends
        follower.advance(min(may, key=lambda token: len(llm.tokenizer.decode([token]))))
    assert allowed(follower, vocab) == ends


def test_stop_tokens_beyond_the_vocabulary_of_the_tokenizer(llm: LLM) -> None:
    vocab = llm.config.vocab_size + 10
    follower = (
        Grammars(llm.tokenizer, vocab, [*llm.config.eos_ids, vocab - 1])
        .compile(Guide(choice=["a"]))
        .new_processor()
    )
    assert follower.allows(llm.tokenizer.encode("a", add_special_tokens=False)[0])


@pytest.mark.parametrize("schema", [True, "true", {}])
def test_any_value(llm: LLM, grammars: Grammars, schema: Any) -> None:
    follower = grammars.compile(Guide(json=schema)).new_processor()
    for text in ("{", "[", '"', "1", "true"):
        assert follower.allows(llm.tokenizer.encode(text, add_special_tokens=False)[0])


class TestCache:
    def test_compiled_once(self, llm: LLM) -> None:
        grammars = Grammars(llm.tokenizer, llm.config.vocab_size, llm.config.eos_ids)
        first = grammars.compile(Guide(regex="[ab]+"))
        assert grammars.compile(Guide(regex="[ab]+")) is first
        assert first.seconds > 0
        for number in range(64):
            grammars.compile(Guide(choice=[str(number)]))
        assert grammars.compile(Guide(regex="[ab]+")) is not first

    def test_threads(self, llm: LLM) -> None:
        grammars = Grammars(llm.tokenizer, llm.config.vocab_size, llm.config.eos_ids)
        found: list[Any] = []
        threads = [
            threading.Thread(
                target=lambda: found.append(grammars.compile(Guide(json={"type": "object"})))
            )
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 8
        assert len(set(map(id, found))) == 1


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_tokenizers_of_other_families(checkpoint: MakeCheckpoint, family: str) -> None:
    llm = LLM(checkpoint(family), threads=1)
    vocab = llm.config.vocab_size
    follower = llm.request_factory.grammars.compile(Guide(choice=["yes", "no"])).new_processor()
    text = b""
    for _ in range(8):
        may = sorted(allowed(follower, vocab))
        follower.advance(may[0])
        if may[0] in llm.config.eos_ids:
            break
        text += llm.tokenizer.decode([may[0]]).encode()
    assert text in (b"yes", b"no")


def test_separators_are_those_of_json_dumps(llm: LLM, grammars: Grammars) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"const": 1}, "b": {"const": [1, 2]}},
        "required": ["a", "b"],
    }
    schema["additionalProperties"] = False
    schema["x-guidance"] = {"item_separator": ";", "whitespace_flexible": True}
    follower = grammars.compile(Guide(json=schema)).new_processor()
    text = list[int]()
    while not text or text[-1] not in llm.config.eos_ids:
        text.append(min(allowed(follower, llm.config.vocab_size)))
        follower.advance(text[-1])
    assert llm.tokenizer.decode(text) == '{"a": 1, "b": [1, 2]}'
    loose = grammars.compile(Guide(json={"type": "array"}, whitespace=True)).new_processor()
    assert llm.tokenizer.encode("\n", add_special_tokens=False)[0] not in allowed(
        loose, llm.config.vocab_size
    )
    loose.advance(llm.tokenizer.encode("[", add_special_tokens=False)[0])
    assert llm.tokenizer.encode("\n", add_special_tokens=False)[0] in allowed(
        loose, llm.config.vocab_size
    )
