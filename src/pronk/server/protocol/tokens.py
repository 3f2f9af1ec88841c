"""Texts, bytes and log-probabilities of tokens in replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pronk.tokenization.spelling import spell
from pronk.tokenization.tokenizer import Tokenizer

Report = Mapping[int, float]  # token id to log-probability at one position; the first id is the text's token


@dataclass(frozen=True)
class TokenTexts:
    """Text and bytes of each token in a tokenizer's vocabulary."""

    tokenizer: Tokenizer

    @cached_property
    def _spelled(self) -> Mapping[int, bytes]:
        return spell(self.tokenizer).texts

    def bytes(self, token: int) -> bytes:
        """Return the bytes of a token: of a special token, its name; of an unassigned id, ``b""``."""
        spelled = self._spelled.get(token)
        return (self.tokenizer.backend.id_to_token(token) or "").encode() if spelled is None else spelled

    def name(self, token: int) -> str:
        r"""Return the text of a token; like OpenAI, ``bytes:\xe2\x82`` if the bytes (E2 82) are not UTF-8."""
        data = self.bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(texts: TokenTexts, reports: Sequence[Report], top: int) -> dict[str, Any]:
    """Return ``logprobs`` of ``/v1/chat/completions``: an entry per token, with the ``top`` likeliest."""
    return {"content": [_report_entry(texts, report, top) for report in reports], "refusal": None}


def _report_entry(texts: TokenTexts, report: Report, top: int) -> dict[str, Any]:
    token = next(iter(report))
    likeliest = sorted(report.items(), key=lambda item: -item[1])[:top]
    return {
        **_token_entry(texts, token, report[token]),
        "top_logprobs": [_token_entry(texts, *item) for item in likeliest],
    }


def _token_entry(texts: TokenTexts, token: int, logprob: float) -> dict[str, Any]:
    data = texts.bytes(token)
    return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}
