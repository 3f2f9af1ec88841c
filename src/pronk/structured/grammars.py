"""Guides compiled for one model by llguidance.

A grammar constrains bytes. llguidance computes the allowed tokens for the whole vocabulary at once, with a
derivative-based lexer, an Earley parser and a trie of the vocabulary. It supports no expression that needs
backtracking, and limits its work in compilation and in each step.

**JSON schemas** follow drafts 4 to 2020-12, without keywords that cannot be checked from left to right (``not``,
``uniqueItems``, ``if``). A schema with such a keyword is refused with an error that names it. ``$ref`` must stay within
the schema. Properties are written in the order of the schema. White space is that of Python's ``json.dumps``, unless
the guide allows more.

**Regular expressions** have Rust's syntax, and match the whole text. **Grammars** use llguidance's dialect of Lark:
rules ``a: b "x" c*``, terminals ``A: /[a-z]+/``, ``%json {…}`` for an embedded schema.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from functools import cached_property
from math import lcm
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING, Any

from pronk.errors import GuideError
from pronk.sampling.guide import JSON_DUMPS_STYLE, Guide
from pronk.structured.grammar_processor import GrammarProcessor, error_message
from pronk.structured.trial_compile import MAX_UNTRIED_CHARS, trial_compile
from pronk.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["CompiledGrammar", "Grammars"]

_CACHE_SIZE = 64  # compiled guides; a few megabytes each, at most 40 with the limits below
_MAX_MESSAGE = 300  # characters of a tokenizer's error message

# llguidance's defaults suit trusted grammars. Here a lexer state takes up to 2 KB, and the limits per token keep the
# time for one mask below about 40 ms on a slow machine.
_LIMITS: Mapping[str, Any] = {
    "max_grammar_size": 100_000,
    "max_lexer_states": 20_000,
    "step_max_items": 5_000,
    "step_lexer_fuel": 50_000,
    "max_items_in_row": 500,
    "verbose_errors": False,
}
# Largest multipleOf: llguidance compiles it to an automaton with that many states.
_MAX_MULTIPLE = 10_000
_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*([-+0-9.eE]+)')


@dataclass(frozen=True)
class CompiledGrammar:
    """A compiled guide; the compilation took ``seconds``."""

    seconds: float
    _matcher: LLMatcher = field(repr=False)
    _stop_token_ids: tuple[int, ...]

    def new_processor(self, text: Sequence[int] = ()) -> GrammarProcessor:
        """Return a processor for a new text, advanced over ``text``."""
        processor = GrammarProcessor(self._matcher, self._stop_token_ids)
        for token in text:
            processor.advance(token)
        return processor


class Grammars:
    """Compile and cache guides for one model; thread-safe. ``vocab_size`` is its number of logits."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_token_ids: Sequence[int]) -> None:
        self._model_tokenizer, self._vocab_size = tokenizer, vocab_size
        self._stop_token_ids = tuple(
            sorted(end for end in stop_token_ids if tokenizer.backend.id_to_token(end) is not None)
        )
        self._cache: OrderedDict[Guide, CompiledGrammar] = OrderedDict()
        self._cache_lock, self._compile_lock = Lock(), Lock()

    def compile(self, guide: Guide) -> CompiledGrammar:
        """Return the compiled guide, from the cache if possible.

        Raises:
            GuideError: llguidance is missing or does not support the tokenizer; the model has no stop token; or the
                guide is invalid, uses an unsupported feature, or allows no text.
        """
        found = self._find(guide)
        if found is not None:
            return found
        with self._compile_lock:  # one at a time, so that many guides do not occupy all cores
            found = self._find(guide)
            if found is None:
                start = perf_counter()
                matcher = self._compile(guide)
                found = CompiledGrammar(perf_counter() - start, matcher, self._stop_token_ids)
                with self._cache_lock:
                    self._cache[guide] = found
                    while len(self._cache) > _CACHE_SIZE:
                        self._cache.popitem(last=False)
        return found

    def submit(self, guide: Guide) -> Future[CompiledGrammar]:
        """Compile in a background thread, so that requests without a guide do not wait."""
        found, future = self._find(guide), Future[CompiledGrammar]()
        if found is None:
            return self._executor.submit(self.compile, guide)
        future.set_result(found)
        return future

    @cached_property
    def _executor(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "pronk-guides")

    def _find(self, guide: Guide) -> CompiledGrammar | None:
        with self._cache_lock:
            found = self._cache.get(guide)
            if found is not None:
                self._cache.move_to_end(guide)
            return found

    def _compile(self, guide: Guide) -> LLMatcher:
        tokenizer = self._tokenizer
        from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415 - an extra

        _check_multiples(guide)
        grammar = _to_grammar(guide)
        with _naming(guide.kind):
            if guide.kind != "choice" and len(guide.source) > MAX_UNTRIED_CHARS:
                serialized = self._model_tokenizer.backend.to_str()
                trial_compile(grammar, serialized, self._vocab_size, self._stop_token_ids, _LIMITS)
            matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**_LIMITS))
            if matcher.is_error():
                msg = f"guide: expected one that can be followed, found: {error_message(matcher)}"
                raise GuideError(msg)
            GrammarProcessor(matcher, self._stop_token_ids).check()
        return matcher

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        try:
            from llguidance import LLTokenizer  # noqa: PLC0415 - an extra
        except ModuleNotFoundError as error:
            msg = "guide: expected llguidance, found it not installed; run pip install 'pronk[guided]'"
            raise GuideError(msg) from error
        if not self._stop_token_ids:
            msg = "guide: expected a model with a token that ends a text, found none in its config.json"
            raise GuideError(msg)
        try:
            return LLTokenizer(
                self._model_tokenizer.backend.to_str(), n_vocab=self._vocab_size, eos_token=[*self._stop_token_ids]
            )
        except ValueError as error:
            reason = str(error).splitlines()[0][:_MAX_MESSAGE]
            msg = f"guide: expected a tokenizer whose tokens are bytes, found a different one ({reason})"
            raise GuideError(msg) from error


def _to_grammar(guide: Guide) -> str:
    from llguidance import LLMatcher  # noqa: PLC0415 - an extra

    if guide.choice is not None:
        literals = [json.dumps(text, ensure_ascii=False) for text in guide.choice]
        return LLMatcher.grammar_from_lark("start: " + " | ".join(literals))
    if guide.regex is not None:
        return LLMatcher.grammar_from_regex(guide.regex)
    if guide.grammar is not None:
        return LLMatcher.grammar_from_lark(guide.grammar)
    schema = json.loads(guide.source)
    options: Any = {**JSON_DUMPS_STYLE}
    if guide.whitespace:
        options = {"whitespace_flexible": True, "whitespace_pattern": None, "lenient": False}
    return LLMatcher.grammar_from_json_schema(json.dumps({} if schema is True else schema), overrides=options)


@contextmanager
def _naming(kind: str) -> Iterator[None]:
    """Insert the kind of the guide into the errors of a block."""
    try:
        yield
    except GuideError as error:
        raise GuideError(str(error).replace("guide: ", f"guide: {kind}: ", 1)) from error


def _check_multiples(guide: Guide) -> None:
    """Refuse ``multipleOf`` values whose common multiple is too large: joint checks need that many states."""
    found = lcm(*_multiples(guide)) if guide.choice is None else 1
    if found > _MAX_MULTIPLE:
        msg = f"guide: {guide.kind}: expected digits of multipleOf with a common multiple up to {_MAX_MULTIPLE}"
        raise GuideError(msg)


def _multiples(guide: Guide) -> Iterator[int]:
    """Iterate over the digits of each ``multipleOf`` as integers: 0.25 counts in steps of 25 hundredths."""
    if guide.kind == "json":
        given = [str(value) for value in _values(json.loads(guide.source), "multipleOf")]
    else:
        given = _MULTIPLE.findall(re.sub(r"\\u([0-9a-fA-F]{4})", lambda code: chr(int(code[1], 16)), guide.source))
    for text in given:
        try:
            yield abs(int("".join(map(str, Decimal(text).as_tuple().digits)))) or 1
        except (InvalidOperation, ValueError):
            continue  # llguidance reports the error


def _values(value: Any, name: str) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key == name:
                yield inner
            yield from _values(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _values(inner, name)
