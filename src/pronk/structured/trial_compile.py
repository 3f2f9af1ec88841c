"""Trial compilation of long grammars in a child process, as a protection against hostile grammars.

llguidance limits most of its work, with two exceptions. Its compiler recurses without a limit along chains of rules and
references, and a stack overflow ends the process. For some grammars, the compilation time grows with the cube of the
number of rules. Both need more than a few thousand characters. Longer grammars are therefore compiled first in a child
process with a time limit, and in this process only after a success.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pronk.errors import GuideError

__all__ = ["MAX_UNTRIED_CHARS", "trial_compile"]

MAX_UNTRIED_CHARS = 2**12  # longest grammar that is compiled without a trial in a child process
_TIMEOUT = 10.0  # seconds until the child process is killed, counted from its start
_MAX_COMPILE_SECONDS = 2.0  # limit for compilation, first mask and first forced tokens, without loading the tokenizer


def trial_compile(
    grammar: str, tokenizer: str, vocab_size: int, stop_token_ids: Sequence[int], limits: Mapping[str, int | bool]
) -> None:
    """Compile a grammar in a child process; raise a ``GuideError`` if it takes too long or crashes."""
    # ``tokenizer`` is the text of a tokenizer.json; ``limits`` are the keyword arguments of LLParserLimits.
    request = {
        "grammar": grammar, "tokenizer": tokenizer, "vocab_size": vocab_size, "stop_token_ids": [*stop_token_ids],
        "limits": {**limits},
    }  # fmt: skip
    try:
        process = subprocess.run(  # noqa: S603 - the package's own file and interpreter
            [sys.executable, "-P", str(Path(__file__).with_name("_child.py"))],
            input=json.dumps(request).encode(),
            capture_output=True,
            timeout=_TIMEOUT,
            check=False,
        )
        seconds = json.loads(process.stdout)["seconds"] if process.returncode == 0 else None
    except subprocess.TimeoutExpired:
        seconds = _TIMEOUT
    if seconds is None:
        msg = "guide: expected one that can be compiled, found chains of rules or references that are too long"
        raise GuideError(msg)
    if seconds > _MAX_COMPILE_SECONDS:
        limit = f"{_MAX_COMPILE_SECONDS:g} s"
        msg = f"guide: expected one that is compiled within {limit}, found one that takes longer; make it simpler"
        raise GuideError(msg)
