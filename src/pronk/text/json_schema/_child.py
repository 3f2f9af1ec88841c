"""Child process that compiles a grammar, to see whether llguidance accepts it in limited time.

:mod:`pronk.text.json_schema.trial` starts this program, which imports llguidance but not pronk. The
request on its standard input and the reply on its standard output are JSON.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from time import process_time
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# Stack size in bytes of the thread that compiles. Threads of pronk have larger stacks, so a grammar
# that compiles here does not overflow theirs.
_STACK_SIZE = 4 << 20


def _compile(request: dict[str, Any]) -> dict[str, Any]:
    """Compile the grammar of a request, and compute its first mask and first forced tokens.

    Returns:
        ``seconds``, the processor time of this work, without that of loading the tokenizer; and
        ``accepted``, whether llguidance reported no error.
    """
    tokenizer = LLTokenizer(
        request["tokenizer"], n_vocab=request["vocab_size"], eos_token=request["stop_token_ids"]
    )
    # time of this process's work: unlike a clock, the same on a busy machine
    start = process_time()
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
        os.nice(10)  # run with a lower priority than the running requests
    request = json.load(sys.stdin)
    results = list[dict[str, Any]]()
    threading.stack_size(_STACK_SIZE)
    thread = threading.Thread(target=lambda: results.append(_compile(request)))
    thread.start()
    thread.join()
    json.dump(results[0], sys.stdout)  # if _compile() raised, an IndexError ends the process


if __name__ == "__main__":
    _main()
