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
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from functools import cached_property
from math import lcm
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING, Any

from pronk.errors import GuideError, describe_error
from pronk.sampling.guide import JSON_DUMPS_STYLE, Guide
from pronk.structured.grammar_processor import MAX_MESSAGE, GrammarProcessor, error_message
from pronk.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_CACHE_SIZE = 64  # maximum number of cached guides; one usually takes a few MB of memory, and at most 40 MB

# Stricter than llguidance's defaults, which suit trusted grammars. max_lexer_states limits memory: a state takes up to
# 2 KB. step_max_items, step_lexer_fuel and max_items_in_row limit the work per token: one mask takes at most about
# 40 ms on a slow machine.
_LIMITS: Mapping[str, Any] = {
    "max_grammar_size": 100_000,
    "max_lexer_states": 20_000,
    "step_max_items": 5_000,
    "step_lexer_fuel": 50_000,
    "max_items_in_row": 500,
    "verbose_errors": False,
}
# Maximum of the least common multiple of a guide's multipleOf values: llguidance's automaton may have that many states.
_MAX_MULTIPLE = 10_000
_MAX_UNTRIED_CHARS = 2**12  # longest grammar that is compiled without a trial in a child process
_TRIAL_TIMEOUT = 10.0  # seconds until the child process is killed, counted from its start
_MAX_COMPILE_SECONDS = 2.0  # limit for compilation, first mask and first forced tokens, without loading the tokenizer
# Finds the value of multipleOf in a schema within a grammar, for example "0.25" in '"multipleOf": 0.25'.
_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*([-+0-9.eE]+)')


@dataclass(frozen=True)
class CompiledGrammar:
    """A compiled guide; ``seconds`` is the duration of the compilation."""

    seconds: float
    _matcher: LLMatcher = field(repr=False)
    _stop_token_ids: tuple[int, ...]

    def new_processor(self, text: Sequence[int] = ()) -> GrammarProcessor:
        """Return a logits processor for a new request that has generated the token ids ``text``."""
        return GrammarProcessor(self._matcher, self._stop_token_ids, text)


class Grammars:
    """Compile and cache guides for one model with ``vocab_size`` logits; thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_token_ids: Sequence[int]) -> None:
        self._model_tokenizer, self._vocab_size = tokenizer, vocab_size
        self._stop_token_ids = tuple(
            sorted(end for end in stop_token_ids if tokenizer.backend.id_to_token(end) is not None)
        )
        self._cache: OrderedDict[Guide, CompiledGrammar] = OrderedDict()
        self._cache_lock, self._compile_lock = Lock(), Lock()
        self._executor = ThreadPoolExecutor(1, "pronk-guides")

    def compile(self, guide: Guide) -> CompiledGrammar:
        """Return the compiled guide, from the cache if possible.

        Raises ``GuideError`` if llguidance is missing or does not support the tokenizer; the model has no stop token;
        or the guide is invalid, uses an unsupported feature, or allows no text.
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

    def submit(self, guide: Guide) -> Future[CompiledGrammar]:
        """Return a future of :meth:`compile`, called in a background thread if the guide is not cached."""
        compiled, future = self._find(guide), Future[CompiledGrammar]()
        if compiled is None:
            return self._executor.submit(self.compile, guide)
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
            if guide.kind != "choice" and len(guide.source) > _MAX_UNTRIED_CHARS:
                serialized = self._model_tokenizer.backend.to_str()
                _trial_compile(grammar, serialized, self._vocab_size, self._stop_token_ids)
            matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**_LIMITS))
            if matcher.is_error():
                msg = f"guide: expected one that can be followed, found: {error_message(matcher)}"
                raise GuideError(msg)
            GrammarProcessor(matcher, self._stop_token_ids).allowed_tokens()  # raises for a grammar that allows no text
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
            reason = describe_error(error)[:MAX_MESSAGE]
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
def _kind_in_errors(kind: str) -> Iterator[None]:
    """Insert ``kind`` into the message of a ``GuideError`` raised in the ``with`` block: "guide: json: …"."""
    try:
        yield
    except GuideError as error:
        raise GuideError(str(error).replace("guide: ", f"guide: {kind}: ", 1)) from error


def _check_multiples(guide: Guide) -> None:
    """Raise a ``GuideError`` if the least common multiple of all ``multipleOf`` values is too large."""
    common_multiple = lcm(*_multiples(guide)) if guide.choice is None else 1
    if common_multiple > _MAX_MULTIPLE:
        msg = f"guide: {guide.kind}: expected digits of multipleOf with a common multiple up to {_MAX_MULTIPLE}"
        raise GuideError(msg)


def _multiples(guide: Guide) -> Iterator[int]:
    """Yield each value of ``multipleOf`` without its decimal point, for example 25 for 0.25."""
    if guide.kind == "json":
        numbers = [str(value) for value in _values(json.loads(guide.source), "multipleOf")]
    else:
        # Decode escapes, which may occur in the key: "\u006d" is "m".
        source = re.sub(r"\\u([0-9a-fA-F]{4})", lambda code: chr(int(code[1], 16)), guide.source)
        numbers = _MULTIPLE.findall(source)
    for number in numbers:
        try:
            yield abs(int("".join(map(str, Decimal(number).as_tuple().digits)))) or 1
        except (InvalidOperation, ValueError):
            continue  # not a number, which llguidance will report


def _values(document: Any, name: str) -> Iterator[Any]:
    """Yield the values of the key ``name`` at any depth of a JSON document."""
    if isinstance(document, Mapping):
        for key, value in document.items():
            if key == name:
                yield value
            yield from _values(value, name)
    elif isinstance(document, list):
        for value in document:
            yield from _values(value, name)


def _trial_compile(grammar: str, tokenizer: str, vocab_size: int, stop_token_ids: Sequence[int]) -> None:
    """Compile a long grammar in a child process; raise a ``GuideError`` if it takes too long or crashes.

    llguidance limits most of its work, with two exceptions. Its compiler recurses without a limit along chains of rules
    and references, and a stack overflow ends the process. For some grammars, the compilation time grows with the cube
    of the number of rules. Both need more than a few thousand characters.
    """
    # ``tokenizer`` is the text of a tokenizer.json.
    request = {
        "grammar": grammar, "tokenizer": tokenizer, "vocab_size": vocab_size, "stop_token_ids": [*stop_token_ids],
        "limits": {**_LIMITS},
    }  # fmt: skip
    try:
        process = subprocess.run(  # noqa: S603 - the package's own file and interpreter
            [sys.executable, "-P", str(Path(__file__).with_name("_child.py"))],
            input=json.dumps(request).encode(),
            capture_output=True,
            timeout=_TRIAL_TIMEOUT,
            check=False,
        )
        seconds = json.loads(process.stdout)["seconds"] if process.returncode == 0 else None
    except subprocess.TimeoutExpired:
        seconds = _TRIAL_TIMEOUT
    if seconds is None:
        msg = "guide: expected one that can be compiled, found chains of rules or references that are too long"
        raise GuideError(msg)
    if seconds > _MAX_COMPILE_SECONDS:
        limit = f"{_MAX_COMPILE_SECONDS:g} s"
        msg = f"guide: expected one that is compiled within {limit}, found one that takes longer; make it simpler"
        raise GuideError(msg)
