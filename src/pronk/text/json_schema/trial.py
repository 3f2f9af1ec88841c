"""Trial compilation of grammars by llguidance, in this process or in a child process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pronk.base.errors import GuideError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# Limits of llguidance. They are stricter than its defaults, which suit grammars of trusted authors.
# max_lexer_states limits memory: a state takes up to 2 KB. step_max_items, step_lexer_fuel and
# max_items_in_row limit the work per token: a mask takes at most about 40 ms on a slow machine.
LIMITS: Mapping[str, Any] = {
    "max_grammar_size": 100_000,
    "max_lexer_states": 20_000,
    "step_max_items": 5_000,
    "step_lexer_fuel": 50_000,
    "max_items_in_row": 2_000,
    "verbose_errors": False,
}
# Maximum characters of a grammar that is compiled without a previous trial in a child process.
MAX_UNTRIED_CHARS = 2**12
# Seconds from the start of the child process until it is killed and the grammar is refused. The
# limit is larger than MAX_SECONDS, because the child process also starts Python, loads the
# tokenizer, and waits for busy processors.
TIMEOUT = 10.0
# Maximum seconds of processor time for compilation, first mask and first forced tokens, without the
# time of loading the tokenizer.
MAX_SECONDS = 2.0
_CACHE_SIZE = 2048  # number of schemas for which it is cached whether llguidance accepts them
BYTES = "byte"  # tokenizer whose tokens are single bytes, by its name in llguidance


def try_in_child(
    grammar: str,
    tokenizer: str = BYTES,
    vocab_size: int | None = None,
    stop_token_ids: Sequence[int] | None = None,
) -> bool:
    """Compile a long grammar in a child process; return whether llguidance accepts it.

    llguidance limits most of its work, with two exceptions. Its compiler recurses without a limit
    along chains of rules and references, and a stack overflow ends the process. For some grammars,
    the compilation time grows with the cube of the number of rules. Only grammars of several
    thousand characters and more can cause either.

    Args:
        grammar: grammar for llguidance's matcher.
        tokenizer: text of a ``tokenizer.json``, or ``BYTES``.
        vocab_size: number of tokens; by default, that of the tokenizer.
        stop_token_ids: tokens that end a text; by default, those of the tokenizer.

    Raises:
        GuideError: the compilation takes more than ``MAX_SECONDS`` of processor time, the child
            process takes more than ``TIMEOUT``, or it crashes.
    """
    request = {
        "grammar": grammar,
        "tokenizer": tokenizer,
        "vocab_size": vocab_size,
        "stop_token_ids": None if stop_token_ids is None else [*stop_token_ids],
        "limits": {**LIMITS},
    }
    try:
        process = subprocess.run(  # noqa: S603 - the package's own file and interpreter
            [sys.executable, "-P", str(Path(__file__).with_name("_child.py"))],
            input=json.dumps(request).encode(),
            capture_output=True,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _too_slow() from None
    if process.returncode != 0:
        msg = (
            "guide: expected one that can be compiled, found chains of rules or references that "
            "are too long"
        )
        raise GuideError(msg)
    result = json.loads(process.stdout)
    if result["seconds"] > MAX_SECONDS:
        raise _too_slow()
    return bool(result["accepted"])


def _too_slow() -> GuideError:
    msg = (
        f"guide: expected one that is compiled within {MAX_SECONDS:g} s, found one that takes "
        "longer; make it simpler"
    )
    return GuideError(msg)


def accepts(schema: Mapping[str, Any]) -> bool:
    """Return whether llguidance compiles a translated schema and computes its first mask.

    The schema has llguidance's options under the key ``x-guidance``. Without llguidance, which is
    an optional dependency, the result is True.
    """
    return _accepts_text(json.dumps(schema))


@lru_cache(_CACHE_SIZE)
def _accepts_text(schema: str) -> bool:
    try:
        from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415 - an extra
    except ModuleNotFoundError:
        return True
    grammar = LLMatcher.grammar_from_json_schema(schema)
    if len(grammar) > MAX_UNTRIED_CHARS:
        try:
            return try_in_child(grammar)
        except GuideError:
            return False
    matcher = LLMatcher(_byte_tokenizer(), grammar, log_level=0, limits=LLParserLimits(**LIMITS))
    if not matcher.is_error():
        matcher.compute_bitmask()
    return not matcher.is_error()


@cache
def _byte_tokenizer() -> LLTokenizer:
    from llguidance import LLTokenizer  # noqa: PLC0415 - an extra

    return LLTokenizer(BYTES)
