"""Encoding and decoding of texts in a limited child process.

This is the program of :mod:`pronk.text.guarded`. It imports no module of pronk. Requests and
replies are lines of JSON::

    {"load": "{…}"}                                                       ->  {}
    {"encode": "ab", "special": true, "plain": false, "offsets": false}   ->  {"ids": [5], "offsets": [], "mask": []}
    {"encode": "ab", "special": true, "plain": false, "offsets": true}    ->  {"ids": [5], "offsets": [[0, 2]], …}
    {"decode": [5], "skip": true}                                         ->  {"text": "ab"}
    {}                                                                    ->  {}

``load``, the first request, has the text of a ``tokenizer.json``, ``special`` stands for
``add_special_tokens``, ``plain`` for ``encode_special_tokens`` and ``skip`` for
``skip_special_tokens``. An error gives ``{"error": "…"}``; that of ``load`` is the reply to all
later requests.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from tokenizers import Tokenizer

_MAX_ERROR = 300  # characters of an error message
_MAX_TRIED = 256  # ids that are decoded on trial
# Limits of replies: more tokens than any context window, and their text.
_MAX_IDS = 2**21
_MAX_TEXT = 2**25
# Most kinds of characters, alone and repeated: what fails or takes long for common texts is found
# before a request.
_TRIAL = "".join(map(chr, range(1, 256))) + "\n\n    \t" + "a" * 64 + "e\u0301 ﷺ 漢字 한글 🙂 ▁ <s>"

_loaded: list[Tokenizer] = []  # the tokenizer, once it is loaded
_failure: list[dict[str, str]] = []  # the reply if it cannot be loaded


def _load(text: str) -> dict[str, Any]:
    """Load a tokenizer and try it."""
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
    """Call a function.

    An Exception means that the tokenizer refuses a text, other ones that it fails.
    """
    with suppress(Exception):  # a tokenizer may lack a token for unknown characters
        call()


def _encode(request: dict[str, Any]) -> dict[str, Any]:
    tokenizer = _loaded[0]
    tokenizer.encode_special_tokens = request["plain"]
    encoding = tokenizer.encode(request["encode"], add_special_tokens=request["special"])
    if len(encoding.ids) > _MAX_IDS:
        raise MemoryError
    if not request["offsets"]:  # they need much memory
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
    """Return the reply to a request."""
    request = json.loads(line.decode("utf-8", "surrogatepass"))
    reply: dict[str, Any]
    try:
        reply = _failure[0] if _failure else _answer(request)
    except MemoryError:
        raise  # ends the process
    except BaseException as error:  # noqa: BLE001 - a panic of the tokenizers package is a BaseException
        reply = {"error": " ".join(str(error).split())[:_MAX_ERROR] or type(error).__name__}
        if "load" in request:
            _failure.append(reply)
    return json.dumps(reply).encode()
