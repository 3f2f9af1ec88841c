"""Guides, compiled for one model by llguidance.

What may follow a text is a question about bytes; llguidance answers it for all tokens at once: a lexer of derivatives,
an Earley parser above it, and a trie of the vocabulary that both walk along. It takes no expression that would have to
backtrack, and counts what it does, so that a grammar costs what it is allowed to cost, when it is compiled and in every
step after that.

**JSON schemas** are of drafts 4 to 2020-12, less what cannot be told from left to right (``not``, ``uniqueItems``,
``if``): a schema that asks for such a thing is refused by its name, never followed in part. ``$ref`` stays within the
schema. Properties come in the order of the schema. White space is that of Python's ``json.dumps``, unless the guide
says otherwise.

**Regular expressions** have Rust's syntax, and match the whole text. **Grammars** are of llguidance's dialect of Lark:
rules ``a: b "x" c*``, terminals ``A: /[a-z]+/``, ``%json {…}`` for a schema within.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from functools import cached_property
from math import lcm
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING, Any

from pronk.errors import GuideError
from pronk.sampling.guide import WRITTEN, Guide
from pronk.structured.grammar_processor import GrammarProcessor, said
from pronk.structured.trial_compile import HARMLESS, try_out
from pronk.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["CompiledGrammar", "Grammars"]

_KEPT = 64  # compiled guides: some megabytes each, and with the bounds below 40 at worst
_SHOWN = 300  # characters of what is said of a tokenizer

# llguidance's own bounds are for those who trust their grammars. A state of its lexer takes up to 2 KB, and what a
# token may take keeps its mask, on a slow machine, under some 40 ms.
_LIMITS: Mapping[str, Any] = {
    "max_grammar_size": 100_000,
    "max_lexer_states": 20_000,
    "step_max_items": 5_000,
    "step_lexer_fuel": 50_000,
    "max_items_in_row": 500,
    "verbose_errors": False,
}
# "A multiple of" is an automaton with so many states.
_MOST_MULTIPLE = 10_000
_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*([-+0-9.eE]+)')


@dataclass(frozen=True)
class CompiledGrammar:
    """One guide, compiled.

    Attributes:
        seconds: that it took.
    """

    seconds: float
    _matcher: LLMatcher = field(repr=False)
    _ends: tuple[int, ...]

    def follower(self, text: Sequence[int] = ()) -> GrammarProcessor:
        """What follows one text, behind the tokens ``text`` that it has already."""
        made = GrammarProcessor(self._matcher, self._ends)
        for token in text:
            made.advance(token)
        return made


class Grammars:
    """Compiles guides for one model, each once, in any number of threads.

    Args:
        tokenizer: the model's.
        vocab_size: ids that it has logits for.
        stop_token_ids: token ids that end its texts.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_token_ids: Sequence[int]) -> None:
        self._model_tokenizer, self._vocab_size = tokenizer, vocab_size
        self._ends = tuple(sorted(end for end in stop_token_ids if tokenizer.backend.id_to_token(end) is not None))
        self._kept: OrderedDict[Guide, CompiledGrammar] = OrderedDict()
        self._table, self._compiling = Lock(), Lock()

    def compile(self, guide: Guide) -> CompiledGrammar:
        """The guide for this model; the ones asked for last are kept.

        Raises:
            GuideError: llguidance is not installed, or cannot use the tokenizer; the model has no token that ends a
                text; or the guide is damaged, asks for what there is not, or is fit by no text.
        """
        found = self._find(guide)
        if found is not None:
            return found
        with self._compiling:  # one at a time: whoever sends many takes their turn, and not all of the machine
            found = self._find(guide)
            if found is None:
                began = perf_counter()
                matcher = self._compile(guide)
                found = CompiledGrammar(perf_counter() - began, matcher, self._ends)
                with self._table:
                    self._kept[guide] = found
                    while len(self._kept) > _KEPT:
                        self._kept.popitem(last=False)
        return found

    def submit(self, guide: Guide) -> Future[CompiledGrammar]:
        """The same in a thread of its own, where those who have no guide need not wait for it."""
        found, future = self._find(guide), Future[CompiledGrammar]()
        if found is None:
            return self._thread.submit(self.compile, guide)
        future.set_result(found)
        return future

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "pronk-guides")

    def _find(self, guide: Guide) -> CompiledGrammar | None:
        with self._table:
            found = self._kept.get(guide)
            if found is not None:
                self._kept.move_to_end(guide)
            return found

    def _compile(self, guide: Guide) -> LLMatcher:
        tokenizer = self._tokenizer
        from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415 - an extra

        _check_multiples(guide)
        grammar = _lark(guide)
        if guide.kind != "choice" and len(guide.source) > HARMLESS:
            self._try_out(guide.kind, grammar)
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**_LIMITS))
        if matcher.is_error():
            msg = f"guide: {guide.kind}: expected one that can be followed, found: {said(matcher)}"
            raise GuideError(msg)
        try:
            GrammarProcessor(matcher, self._ends).check()
        except GuideError as error:
            raise _of(guide.kind, error) from error
        return matcher

    def _try_out(self, kind: str, grammar: str) -> None:
        try:
            try_out(grammar, self._model_tokenizer.backend.to_str(), self._vocab_size, self._ends, _LIMITS)
        except GuideError as error:
            raise _of(kind, error) from error

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        try:
            from llguidance import LLTokenizer  # noqa: PLC0415 - an extra
        except ModuleNotFoundError as error:
            msg = "guide: it needs llguidance, which is not installed: pip install 'pronk[guided]'"
            raise GuideError(msg) from error
        if not self._ends:
            msg = "guide: expected a model with a token that ends a text, found none in its config.json"
            raise GuideError(msg)
        try:
            return LLTokenizer(
                self._model_tokenizer.backend.to_str(), n_vocab=self._vocab_size, eos_token=[*self._ends]
            )
        except ValueError as error:
            reason = str(error).splitlines()[0][:_SHOWN]
            msg = f"guide: expected a tokenizer whose tokens are bytes, found one that is none ({reason})"
            raise GuideError(msg) from error


def _lark(guide: Guide) -> str:
    """The guide as llguidance reads it."""
    from llguidance import LLMatcher  # noqa: PLC0415 - an extra

    if guide.choice is not None:
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(_literal, guide.choice)))
    if guide.regex is not None:
        return LLMatcher.grammar_from_regex(guide.regex)
    if guide.grammar is not None:
        return LLMatcher.grammar_from_lark(guide.grammar)
    schema = json.loads(guide.source)
    return LLMatcher.grammar_from_json_schema(json.dumps({} if schema is True else schema), overrides=_json_form(guide))


def _json_form(guide: Guide) -> Any:
    """How JSON is written, whatever the schema says of it, and that no part of a schema is passed over."""
    if guide.whitespace:
        return {"whitespace_flexible": True, "whitespace_pattern": None, "lenient": False}
    return {**WRITTEN}


def _of(kind: str, error: GuideError) -> GuideError:
    """The error, with the kind of guide that it is of."""
    return GuideError(str(error).replace("guide: ", f"guide: {kind}: ", 1))


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _check_multiples(guide: Guide) -> None:
    """No schema counts modulo more than there may be states: its numbers do so together, where it joins them."""
    found = lcm(*_multiples(guide)) if guide.choice is None else 1
    if found > _MOST_MULTIPLE:
        msg = f"guide: {guide.kind}: expected digits of multipleOf with a common multiple up to {_MOST_MULTIPLE}"
        raise GuideError(msg)


def _multiples(guide: Guide) -> Iterator[int]:
    """The digits of each ``multipleOf`` as a whole number: 0.25 counts in steps of 25 hundredths."""
    if guide.kind == "json":
        given = [str(value) for value in _values(json.loads(guide.source), "multipleOf")]
    else:
        given = _MULTIPLE.findall(re.sub(r"\\u([0-9a-fA-F]{4})", lambda code: chr(int(code[1], 16)), guide.source))
    for text in given:
        try:
            yield abs(int("".join(map(str, Decimal(text).as_tuple().digits)))) or 1
        except (InvalidOperation, ValueError):
            continue  # llguidance says what is wrong with it


def _values(value: Any, name: str) -> Iterator[Any]:
    """Whatever is called by a name, at any depth."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key == name:
                yield inner
            yield from _values(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _values(inner, name)
