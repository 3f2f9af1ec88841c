"""Positions of tokens in a text: where the text of each token begins, in characters.

A token without text, such as one that the tokenizer adds before a prompt, has the position at which
the next text begins. Several tokens may make up one character: each of them has the position of
this character.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tokenizers

from pronk.text.guarded import GuardedEncoding
from pronk.text.stream import IncrementalDecoder
from pronk.text.tokenizer import Tokenizer

Name = Callable[[int], str]  # text of a token by itself, with the space at its beginning


class TokenOffsets:
    """Positions of successive tokens in the text of ``decoder``, which begins at ``position``."""

    def __init__(self, decoder: IncrementalDecoder, name: Name, position: int = 0) -> None:
        self._decoder = decoder
        self._name = name
        self.position = position  # after the text so far

    def push(self, token: int) -> int:
        """Return the position of the next token."""
        start = self.position
        text = self._decoder.push(token)
        name = self._name(token)
        self.position += len(text)
        # The text of earlier tokens, an incomplete character, may become final together with that
        # of this token.
        return self.position - len(name) if text.endswith(name) else start


def output_offsets(
    tokenizer: Tokenizer, name: Name, prompt: Sequence[int], position: int
) -> TokenOffsets:
    """Return the counter of tokens that are generated after ``prompt``, whose text ends at ``position``."""
    return TokenOffsets(IncrementalDecoder(tokenizer, prompt), name, position)


def prompt_text(tokenizer: Tokenizer, prompt: str | Sequence[int]) -> str:
    """Return the text of a prompt: of token ids, as a stream shows it, with the names of special tokens."""
    if isinstance(prompt, str):
        return prompt
    decoder = IncrementalDecoder(tokenizer, shows_names=True)
    return "".join([*map(decoder.push, prompt), decoder.flush()])


def prompt_offsets(tokenizer: Tokenizer, name: Name, prompt: str | Sequence[int]) -> list[int]:
    """Return the position of each token of a prompt in its :func:`prompt_text`."""
    decoder = IncrementalDecoder(tokenizer, shows_names=True)
    offsets = TokenOffsets(decoder, name)
    if not isinstance(prompt, str):
        return [offsets.push(token) for token in prompt]
    encoding = tokenizer.backend.encode(prompt)
    is_added = [bool(flag) for flag in encoding.special_tokens_mask]
    tokens = [*zip(encoding.ids, is_added, strict=True)]
    text = tokenizer.decode(
        [token for token, added in tokens if not added], skip_special_tokens=False
    )
    if text != prompt:
        return _stated_offsets(prompt, encoding, name)
    return [offsets.position if added else offsets.push(token) for token, added in tokens]


def _stated_offsets(
    prompt: str, encoding: tokenizers.Encoding | GuardedEncoding, name: Name
) -> list[int]:
    """Return positions as a tokenizer states them that changes the text, for example to NFC.

    The position is that of the characters that a token stands for. A space that belongs to a token
    is one of them.
    """
    positions = list[int]()
    end = 0
    for token, (begin, stop), is_added in zip(
        encoding.ids, encoding.offsets, encoding.special_tokens_mask, strict=True
    ):
        if is_added or begin == stop:
            positions.append(end)
            continue
        has_space = (
            begin > end
            and name(token).startswith(" ")
            and prompt.startswith(name(token), begin - 1)
        )
        positions.append(begin - 1 if has_space else begin)
        end = max(end, stop)
    return positions
