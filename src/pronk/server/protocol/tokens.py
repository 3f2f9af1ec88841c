"""Texts, bytes and log-probabilities of tokens in replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pronk.tokenization.spelling import spell
from pronk.tokenization.tokenizer import Tokenizer

__all__ = ["TokenTexts", "chat_logprobs"]

Report = Mapping[int, float]  # log-probabilities at one place of the text by token id: the text's token, then others


@dataclass(frozen=True)
class TokenTexts:
    """Text and bytes of each token in a tokenizer's vocabulary."""

    tokenizer: Tokenizer

    @cached_property
    def _spelled(self) -> Mapping[int, bytes]:
        return spell(self.tokenizer).texts

    def bytes(self, token: int) -> bytes:
        """Return the bytes of a token; for a special token, of its name; for an unassigned id, ``b""``."""
        spelled = self._spelled.get(token)
        return (self.tokenizer.backend.id_to_token(token) or "").encode() if spelled is None else spelled

    def name(self, token: int) -> str:
        r"""Return the text of a token; for bytes that are no UTF-8, such as E2 82, ``bytes:\xe2\x82`` like OpenAI."""
        data = self.bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(texts: TokenTexts, reports: Sequence[Report], top: int) -> dict[str, Any]:
    """Return the ``logprobs`` of ``/v1/chat/completions``: one entry per report, with its ``top`` likeliest tokens."""
    return {"content": [_entry(texts, report, top) for report in reports], "refusal": None}


def _entry(texts: TokenTexts, report: Report, top: int) -> dict[str, Any]:
    token = next(iter(report))
    likeliest = sorted(report.items(), key=lambda item: -item[1])[:top]
    return {**_one(texts, token, report[token]), "top_logprobs": [_one(texts, *item) for item in likeliest]}


def _one(texts: TokenTexts, token: int, logprob: float) -> dict[str, Any]:
    data = texts.bytes(token)
    return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}
