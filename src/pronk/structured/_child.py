"""Child process of :mod:`pronk.structured.trial_compile`; it imports llguidance but not pronk."""

from __future__ import annotations

import json
import os
import sys
import threading
from time import perf_counter
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# Stack size in bytes, smaller than that of pronk's threads: what compiles here overflows no stack there.
_STACK = 4 << 20


def _compile(request: dict[str, Any]) -> dict[str, Any]:
    tokenizer = LLTokenizer(request["tokenizer"], n_vocab=request["vocab_size"], eos_token=request["stop_token_ids"])
    start = perf_counter()
    matcher = LLMatcher(tokenizer, request["grammar"], log_level=0, limits=LLParserLimits(**request["limits"]))
    trial = matcher.deep_copy()
    if not trial.is_error():
        trial.compute_bitmask()
        trial.compute_ff_tokens()
    return {"seconds": perf_counter() - start}


def _main() -> None:
    if hasattr(os, "nice"):
        os.nice(10)  # prefer running requests
    request, result = json.load(sys.stdin), list[dict[str, Any]]()
    threading.stack_size(_STACK)
    thread = threading.Thread(target=lambda: result.append(_compile(request)))
    thread.start()
    thread.join()
    json.dump(result[0], sys.stdout)


if __name__ == "__main__":
    _main()
