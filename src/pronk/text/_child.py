"""Encoding and decoding of texts in a limited child process.

:mod:`pronk.text.guarded` starts this program, which imports no module of pronk. Requests (``>``)
and replies (``<``) are lines of JSON::

    > {"load": "{…}"}
    < {}
    > {"encode": "ab", "special": true, "plain": false, "offsets": false}
    < {"ids": [5], "offsets": [], "mask": []}
    > {"encode": "ab", "special": true, "plain": false, "offsets": true}
    < {"ids": [5], "offsets": [[0, 2]], "mask": [0]}
    > {"decode": [5], "skip": true}
    < {"text": "ab"}
    > {}
    < {}

The first request is ``load``, with the text of a ``tokenizer.json``. ``special`` stands for the
argument ``add_special_tokens`` of the tokenizers package, ``plain`` for ``encode_special_tokens``,
and ``skip`` for ``skip_special_tokens``. The reply to a request that fails is ``{"error": "…"}``.
After an error of ``load``, this is the reply to all later requests.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from tokenizers import Tokenizer

_MAX_ERROR = 300  # maximum characters of an error message in a reply
_MAX_TRIED = 256  # number of token ids that are decoded on trial when the tokenizer is loaded
# Limits of a reply: number of tokens, more than any context window has, and characters of text.
_MAX_IDS = 2**21
_MAX_TEXT = 2**25
# A text with most kinds of characters, alone and repeated. It is encoded when the tokenizer is
# loaded: a tokenizer that fails or is slow for common texts then fails at once.
_TRIAL = "".join(map(chr, range(1, 256))) + "\n\n    \t" + "a" * 64 + "e\u0301 ﷺ 漢字 한글 🙂 ▁ <s>"

_loaded: list[Tokenizer] = []  # the tokenizer as the only element, once it is loaded
_failure: list[dict[str, str]] = []  # reply to all requests if the tokenizer cannot be loaded


def _load(text: str) -> dict[str, Any]:
    """Load a tokenizer from the text of its ``tokenizer.json``, and convert trial texts with it."""
    tokenizer = Tokenizer.from_str(text)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None
    _try(partial(tokenizer.encode, _TRIAL))
    ids = sorted(tokenizer.get_vocab(with_added_tokens=True).values())[:_MAX_TRIED]
    for tried in (ids, *([each] for each in ids)):
        _try(partial(tokenizer.decode, tried, skip_special_tokens=False))
    _loaded[:] = [tokenizer]
    return {}


def _try(call: Callable[[], object]) -> None:
    """Call a function and ignore an Exception, with which a tokenizer refuses a text.

    For example, the vocabulary may lack a token for unknown characters. A panic, which is a
    BaseException, means that the tokenizer itself is broken, and is raised.
    """
    with suppress(Exception):
        call()


def _encode(request: dict[str, Any]) -> dict[str, Any]:
    tokenizer = _loaded[0]
    tokenizer.encode_special_tokens = request["plain"]
    encoding = tokenizer.encode(request["encode"], add_special_tokens=request["special"])
    if len(encoding.ids) > _MAX_IDS:
        raise MemoryError
    if not request["offsets"]:  # offsets need much memory, so they are left out unless requested
        return {"ids": encoding.ids, "offsets": [], "mask": []}
    return {"ids": encoding.ids, "offsets": encoding.offsets, "mask": encoding.special_tokens_mask}


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    if "load" in request:
        return _load(request["load"])
    if not request:
        return {}
    if "encode" in request:
        return _encode(request)
    text = _loaded[0].decode(request["decode"], skip_special_tokens=request["skip"])
    if len(text) > _MAX_TEXT:
        raise MemoryError
    return {"text": text}


def answer(line: bytes) -> bytes:
    """Return the reply to a request.

    ``line`` and the reply are JSON in UTF-8, as described at the top of this file.
    """
    request = json.loads(line.decode("utf-8", "surrogatepass"))
    reply: dict[str, Any]
    try:
        reply = _failure[0] if _failure else _answer(request)
    except MemoryError:
        raise  # a panic of the tokenizers package ends the process
    except BaseException as error:  # noqa: BLE001 - panics of the tokenizers package are such
        reply = {"error": " ".join(str(error).split())[:_MAX_ERROR] or type(error).__name__}
        if "load" in request:
            _failure.append(reply)
    return json.dumps(reply).encode()
