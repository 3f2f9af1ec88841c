"""What :mod:`pronk.structured.trial_compile` runs in a process of its own; it needs llguidance alone, and not pronk."""

from __future__ import annotations

import json
import os
import sys
import threading
from time import perf_counter
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# Less than the threads have that will compile what survives here, and follow it, and throw it away.
_STACK = 4 << 20


def _try(given: dict[str, Any]) -> dict[str, Any]:
    tokenizer = LLTokenizer(given["tokenizer"], n_vocab=given["vocab_size"], eos_token=given["ends"])
    began = perf_counter()
    matcher = LLMatcher(tokenizer, given["grammar"], log_level=0, limits=LLParserLimits(**given["limits"]))
    other = matcher.deep_copy()
    if not other.is_error():
        other.compute_bitmask()
        other.compute_ff_tokens()
    return {"seconds": perf_counter() - began}


def _main() -> None:
    if hasattr(os, "nice"):
        os.nice(10)  # whoever decodes meanwhile goes first
    given, found = json.load(sys.stdin), list[dict[str, Any]]()
    threading.stack_size(_STACK)
    thread = threading.Thread(target=lambda: found.append(_try(given)))
    thread.start()
    thread.join()
    json.dump(found[0], sys.stdout)


if __name__ == "__main__":
    _main()
