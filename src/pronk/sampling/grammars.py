"""Guides compiled for one model by llguidance.

A grammar constrains bytes. llguidance computes the allowed tokens for the whole vocabulary at once,
with a derivative-based lexer, an Earley parser and a trie of the vocabulary. llguidance supports no
expression that needs backtracking, and limits its work in compilation and in each step.

**JSON schemas** may be of any draft from 4 to 2020-12. Each text of the grammar fits the schema:
keywords that cannot be checked from left to right (``not``, ``uniqueItems``, ``if``) are refused
with an error that names path and keyword, and so are invalid keywords and a ``$ref`` that leaves
the schema. (Schemas of tools are relaxed instead, before they become part of a grammar: see
:mod:`pronk.text.json_schema`.) ``format`` is enforced if a regular expression describes the format,
and ignored otherwise. Properties are written in the order of the schema. White space is that of
Python's ``json.dumps``, unless the guide allows more.

**Regular expressions** have Rust's syntax, and match the whole text.

**Grammars** use llguidance's dialect of Lark: rules ``a: b "x" c*``, terminals ``A: /[a-z]+/``,
``%json {…}`` for an embedded schema.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from functools import cached_property
from math import lcm
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING

from pronk.base.checks import install_extra
from pronk.base.errors import GuideError, describe_error
from pronk.base.fair_executor import FairExecutor
from pronk.sampling.grammar_processor import MAX_MESSAGE, GrammarProcessor, error_message
from pronk.text.guide import Guide
from pronk.text.json_schema.relax import check
from pronk.text.json_schema.scalars import MAX_MULTIPLE
from pronk.text.json_schema.trial import LIMITS, MAX_UNTRIED_CHARS, try_in_child
from pronk.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Maximum number of compiled guides in the cache. A guide usually takes a few MB of memory, and at
# most 40 MB.
_CACHE_SIZE = 64

# Pattern of the keyword multipleOf in a schema within a grammar. Its group is the value: 0.25 in
# '"multipleOf": 0.25'.
_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*([-+0-9.eE]+)')


@dataclass(frozen=True)
class CompiledGrammar:
    """A guide that llguidance has compiled for one model.

    ``seconds`` is the time that the compilation took.
    """

    seconds: float
    _matcher: LLMatcher = field(repr=False)
    _stop_token_ids: tuple[int, ...]

    def new_processor(self, text: Sequence[int] = (), *, one_end: bool = False) -> GrammarProcessor:
        """Return a logits processor for a request that has generated the token ids ``text``.

        ``one_end`` says whether only the stop token with the smallest id may end the text where the
        grammar allows nothing but the end
        (:class:`~pronk.sampling.grammar_processor.GrammarProcessor`).
        """
        return GrammarProcessor(self._matcher, self._stop_token_ids, text, one_end=one_end)


class Grammars:
    """Compiler and cache of the guides for one model; thread-safe.

    Args:
        tokenizer: tokenizer of the model.
        vocab_size: number of the model's logits.
        stop_token_ids: tokens that end a text.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, stop_token_ids: Sequence[int]
    ) -> None:
        self._model_tokenizer = tokenizer
        self._vocab_size = vocab_size
        id_to_token = tokenizer.backend.id_to_token
        known_ends = [end for end in stop_token_ids if id_to_token(end) is not None]
        self._stop_token_ids = tuple(sorted(known_ends))
        self._cache: OrderedDict[Guide, CompiledGrammar] = OrderedDict()
        self._cache_lock = Lock()
        self._compile_lock = Lock()
        self._executor = FairExecutor(1, "pronk-guides")

    def compile(self, guide: Guide) -> CompiledGrammar:
        """Return the compiled guide, from the cache if possible.

        Raises:
            GuideError: llguidance is missing or does not support the tokenizer; the model has no
                stop token; or the guide is invalid, uses an unsupported feature, or allows no text.
        """
        compiled = self._find(guide)
        if compiled is not None:
            return compiled
        with self._compile_lock:  # one compilation at a time, to leave cores to running requests
            compiled = self._find(guide)
            if compiled is None:
                start = perf_counter()
                matcher = self._compile(guide)
                compiled = CompiledGrammar(perf_counter() - start, matcher, self._stop_token_ids)
                with self._cache_lock:
                    self._cache[guide] = compiled
                    while len(self._cache) > _CACHE_SIZE:
                        self._cache.popitem(last=False)
        return compiled

    def submit(self, guide: Guide, tenant: str = "") -> Future[CompiledGrammar]:
        """Return a future of the compiled guide.

        The compilation runs in a background thread, unless the guide is cached. If several tenants
        wait for compilations, the thread serves the tenants in turns. The future raises the errors
        of :meth:`compile`.
        """
        compiled = self._find(guide)
        future = Future[CompiledGrammar]()
        if compiled is None:
            return self._executor.submit(tenant, lambda: self.compile(guide))
        future.set_result(compiled)
        return future

    def _find(self, guide: Guide) -> CompiledGrammar | None:
        with self._cache_lock:
            compiled = self._cache.get(guide)
            if compiled is not None:
                self._cache.move_to_end(guide)
            return compiled

    def _compile(self, guide: Guide) -> LLMatcher:
        tokenizer = self._tokenizer
        from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415 - an extra

        _check_multiples(guide)
        grammar = _to_grammar(guide)
        with _kind_in_errors(guide.kind):
            if guide.kind != "choice" and len(guide.source) > MAX_UNTRIED_CHARS:
                serialized = self._model_tokenizer.vocabulary_json
                try_in_child(grammar, serialized, self._vocab_size, self._stop_token_ids)
            matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
            if matcher.is_error():
                found = error_message(matcher)
                # llguidance's message would show parts of the translated schema
                if guide.kind == "json":
                    found = "one that is too complex"
                msg = f"guide: expected one that can be followed, found: {found}"
                raise GuideError(msg)
            # Computing the first mask raises a GuideError if the grammar allows no text.
            GrammarProcessor(matcher, self._stop_token_ids).allowed_tokens()
        return matcher

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        try:
            from llguidance import LLTokenizer  # noqa: PLC0415 - an extra
        except ModuleNotFoundError as error:
            msg = f"guide: expected llguidance, found it not installed; {install_extra('guided')}"
            raise GuideError(msg) from error
        if not self._stop_token_ids:
            msg = (
                "guide: expected a model with a token that ends a text, "
                "found none in its config.json"
            )
            raise GuideError(msg)
        try:
            return LLTokenizer(
                self._model_tokenizer.vocabulary_json,
                n_vocab=self._vocab_size,
                eos_token=[*self._stop_token_ids],
            )
        except ValueError as error:
            reason = describe_error(error)[:MAX_MESSAGE]
            msg = (
                "guide: expected a tokenizer whose tokens are bytes, "
                f"found a different one ({reason})"
            )
            raise GuideError(msg) from error


def _to_grammar(guide: Guide) -> str:
    """Return a guide as a grammar in llguidance's own format (JSON)."""
    from llguidance import LLMatcher  # noqa: PLC0415 - an extra

    if guide.choice is not None:
        literals = [json.dumps(text, ensure_ascii=False) for text in guide.choice]
        return LLMatcher.grammar_from_lark("start: " + " | ".join(literals))
    if guide.regex is not None:
        return LLMatcher.grammar_from_regex(guide.regex)
    if guide.grammar is not None:
        return LLMatcher.grammar_from_lark(guide.grammar)
    schema = check(json.loads(guide.source), whitespace=guide.whitespace)
    return LLMatcher.grammar_from_json_schema(json.dumps(schema))


@contextmanager
def _kind_in_errors(kind: str) -> Iterator[None]:
    """Insert ``kind`` into the message of a GuideError raised in the block: ``guide: json: …``."""
    try:
        yield
    except GuideError as error:
        raise GuideError(str(error).replace("guide: ", f"guide: {kind}: ", 1)) from error


def _check_multiples(guide: Guide) -> None:
    """Raise a GuideError if ``multipleOf`` in a grammar has values with a large common multiple.

    The common multiple is that of the values' digits without the decimal point: 75 for 0.25 and 3.
    llguidance would need as many states; at most ``MAX_MULTIPLE`` are allowed.
    """
    common_multiple = lcm(*_multiples(guide.source)) if guide.kind == "grammar" else 1
    if common_multiple > MAX_MULTIPLE:
        msg = (
            f"guide: {guide.kind}: expected digits of multipleOf with a common multiple up to "
            f"{MAX_MULTIPLE}"
        )
        raise GuideError(msg)


def _multiples(grammar: str) -> Iterator[int]:
    """Yield the digits of each value of ``multipleOf`` in a grammar as an integer: 25 for 0.25."""
    # Decode escapes, which may occur in the key: "\u006d" is "m".
    source = re.sub(r"\\u([0-9a-fA-F]{4})", lambda code: chr(int(code[1], 16)), grammar)
    for number in _MULTIPLE.findall(source):
        try:
            digits = Decimal(number).as_tuple().digits
            yield abs(int("".join(map(str, digits)))) or 1
        except (InvalidOperation, ValueError):
            continue  # llguidance reports a value that is no number
