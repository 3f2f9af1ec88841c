"""Position of each token in a text: the character at which the token's text begins, from 0.

A token without text, such as one that the tokenizer adds before a prompt, has the position at which
the next text begins. Each of several tokens that make up one character has the position of this
character.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tokenizers

from pronk.text.guarded import GuardedEncoding
from pronk.text.score_tokenizer import ScoreEncoding
from pronk.text.stream import IncrementalDecoder
from pronk.text.tokenizer import Tokenizer

# function that returns the text of one token alone, with a space at its beginning if it has one
Name = Callable[[int], str]


class TokenOffsets:
    """Computes the position in a text of each of successive tokens.

    Args:
        decoder: decoder of the tokens.
        name: function that returns the text of a token alone.
        position: position at which the text of the first token begins.
    """

    def __init__(self, decoder: IncrementalDecoder, name: Name, position: int = 0) -> None:
        self._decoder = decoder
        self._name = name
        self.position = position  # number of characters of the text so far

    def push(self, token: int) -> int:
        """Add the next token, and return the position at which its text begins."""
        start = self.position
        text = self._decoder.push(token)
        name = self._name(token)
        self.position += len(text)
        # ``text`` may begin with text of earlier tokens, if these were an incomplete character.
        return self.position - len(name) if text.endswith(name) else start


def output_offsets(
    tokenizer: Tokenizer, name: Name, prompt: Sequence[int], position: int
) -> TokenOffsets:
    """Return an object that computes the positions of generated tokens.

    ``prompt`` are the token ids before these tokens, and ``position`` is the number of characters
    of the prompt's text.
    """
    return TokenOffsets(IncrementalDecoder(tokenizer, prompt), name, position)


def prompt_text(tokenizer: Tokenizer, prompt: str | Sequence[int]) -> str:
    """Return the text of a prompt.

    The text of token ids includes the names of special tokens, such as ``<|im_end|>``.
    """
    if isinstance(prompt, str):
        return prompt
    decoder = IncrementalDecoder(tokenizer, shows_names=True)
    return "".join([*map(decoder.push, prompt), decoder.flush()])


def prompt_offsets(tokenizer: Tokenizer, name: Name, prompt: str | Sequence[int]) -> list[int]:
    """Return the position of each token of a prompt.

    A position counts characters of :func:`prompt_text`, in which the token's text begins.
    """
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
    prompt: str, encoding: tokenizers.Encoding | GuardedEncoding | ScoreEncoding, name: Name
) -> list[int]:
    """Return the position of each token of a prompt, from the offsets that the tokenizer states.

    These offsets serve if the tokenizer changes the text, for example to Unicode NFC: then the
    decoded tokens are another text than the prompt. The tokenizer's offsets count characters of the
    prompt, but leave out the space at the beginning of a token; here, the space belongs to the
    token.
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
