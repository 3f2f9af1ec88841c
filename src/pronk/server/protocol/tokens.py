"""Tokens as clients see them: their text, their bytes, their log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from pronk.tokenization.spelling import spell
from pronk.tokenization.tokenizer import Tokenizer

__all__ = ["TokenTexts", "chat_logprobs"]

Report = Mapping[int, float]


@dataclass(frozen=True)
class TokenTexts:
    """What a model's tokens read as, one at a time."""

    tokenizer: Tokenizer

    @cached_property
    def _spelled(self) -> Mapping[int, bytes]:
        return spell(self.tokenizer).texts

    def bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; a special one's are its name's, an unassigned id has none."""
        spelled = self._spelled.get(token)
        if spelled is not None:
            return spelled
        return (self.tokenizer.backend.id_to_token(token) or "").encode()

    def name(self, token: int) -> str:
        r"""The same as text; bytes that are no UTF-8 by themselves read as OpenAI writes them: ``bytes:\xe2\x82``."""
        data = self.bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(texts: TokenTexts, reports: Sequence[Report], top: int) -> dict[str, Any]:
    """Log-probabilities as chats have them.

    Args:
        texts: of the model.
        reports: of each token; it comes first in its own.
        top: how many of the likeliest were asked for.
    """
    return {"content": [_entry(texts, report, top) for report in reports], "refusal": None}


def _entry(texts: TokenTexts, report: Report, top: int) -> dict[str, Any]:
    token = next(iter(report))
    likeliest = sorted(report.items(), key=lambda item: -item[1])
    return {
        **_one(texts, token, report[token]),
        "top_logprobs": [_one(texts, *item) for item in islice(likeliest, top)],
    }


def _one(texts: TokenTexts, token: int, logprob: float) -> dict[str, Any]:
    data = texts.bytes(token)
    return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}
