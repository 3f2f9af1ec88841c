"""Grammars that may be hostile are compiled in a process of their own first.

llguidance counts its work, but not all of it: its compiler calls itself along chains of rules and references, as deep
as they are, which ends the process if its stack does, and some grammars take it a time that grows with the cube of
their rules. What is written in a few thousand characters can do neither. The rest is tried where it can be stopped, and
what survives is compiled again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pronk.errors import GuideError

__all__ = ["HARMLESS", "try_out"]

HARMLESS = 2**12  # characters of a grammar that needs no trial
_WITHIN = 10.0  # seconds, with those that Python and the tokenizer take to be read
_COMPILED = 2.0  # seconds that it may take to compile, and for a first mask


def try_out(
    grammar: str, tokenizer: str, vocab_size: int, stop_token_ids: Sequence[int], limits: Mapping[str, int | bool]
) -> None:
    """Compile a grammar elsewhere.

    Args:
        grammar: as llguidance takes it.
        tokenizer: its JSON.
        vocab_size: ids that the model has logits for.
        stop_token_ids: token ids that end a text.
        limits: of llguidance's parser.

    Raises:
        GuideError: it takes too long, or does not survive it.
    """
    given = {
        "grammar": grammar, "tokenizer": tokenizer, "vocab_size": vocab_size, "ends": [*stop_token_ids], "limits": {**limits},
    }  # fmt: skip
    try:
        done = subprocess.run(  # noqa: S603 - our own file, by our own interpreter
            [sys.executable, "-P", str(Path(__file__).with_name("_child.py"))],
            input=json.dumps(given).encode(),
            capture_output=True,
            timeout=_WITHIN,
            check=False,
        )
        seconds = json.loads(done.stdout)["seconds"] if done.returncode == 0 else None
    except subprocess.TimeoutExpired:
        seconds = _WITHIN
    if seconds is None:
        msg = "guide: expected one that can be compiled, found chains of rules or references that are too long"
        raise GuideError(msg)
    if seconds > _COMPILED:
        msg = (
            f"guide: expected one that is compiled within {_COMPILED:g} s, found one that takes longer; make it simpler"
        )
        raise GuideError(msg)
