"""Child process that compiles a grammar on trial; it imports llguidance but not pronk."""

from __future__ import annotations

import json
import os
import sys
import threading
from time import process_time
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# Stack size in bytes. Threads of pronk have larger stacks, so a grammar that compiles here does not
# overflow theirs.
_STACK_SIZE = 4 << 20


def _compile(request: dict[str, Any]) -> dict[str, Any]:
    """Return the processor time of compilation and first mask, and whether there was no error."""
    tokenizer = LLTokenizer(
        request["tokenizer"], n_vocab=request["vocab_size"], eos_token=request["stop_token_ids"]
    )
    start = process_time()  # not the time of a clock: the machine may be busy
    matcher = LLMatcher(
        tokenizer, request["grammar"], log_level=0, limits=LLParserLimits(**request["limits"])
    )
    trial = matcher.deep_copy()
    if not trial.is_error():
        trial.compute_bitmask()
        trial.compute_ff_tokens()
    return {"seconds": process_time() - start, "accepted": not trial.is_error()}


def _main() -> None:
    if hasattr(os, "nice"):
        os.nice(10)  # a lower priority than the running requests
    request = json.load(sys.stdin)
    results = list[dict[str, Any]]()
    threading.stack_size(_STACK_SIZE)
    thread = threading.Thread(target=lambda: results.append(_compile(request)))
    thread.start()
    thread.join()
    json.dump(results[0], sys.stdout)  # empty if _compile raised: IndexError, exit code 1


if __name__ == "__main__":
    _main()
