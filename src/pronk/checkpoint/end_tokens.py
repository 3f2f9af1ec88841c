"""Tokens that end a generation: those that a model's files state, and tokens with well-known names.

Files often state one end-of-text token only, and models for code also end a text with a token of
*fill in the middle* (FIM), for example one that begins another file. Therefore names count as well,
in GGUF files and in model folders.

Source: ``special_eog_ids`` in ``llama-vocab.cpp`` of llama.cpp. There the type of a token does not
matter; here only
*added* tokens count, which the tokenizer finds in a text before it splits the text into words.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

_END_NAMES = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> "
    "<|endoftext|> </s> "
    "<|eom_id|> <EOT> _<EOT> \u2581<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> "
    "<turn|> "
    "<|tool_response> <\uff5cend\u2581of\u2581sentence\uff5c> [e~[ "
    "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] "  # FIM tokens: padding,
    # the beginning of another repository,
    "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> "
    "<|file_sep|>".split()  # and of another file
)
# Tokens that do not end a generation if the vocabulary has all of the other tokens. ``<|end|>``
# ends a message of the harmony format (gpt-oss) or of Solar, after which the next message begins.
_NO_ENDS = (
    ("<|end|>", {"<|return|>", "<|call|>"}),
    ("<|end|>", {"<|call|>", "<|flush|>"}),
    ("<|end|>", {"<|calls|>", "<|flush|>"}),
    ("</s>", {"<|tool_response>"}),
)


def find_end_tokens(added: Mapping[int, str], stated: Iterable[int]) -> tuple[int, ...]:
    """Return the ids of the tokens that end a generation, each once, and the stated ones first.

    ``added`` has the names of the added tokens, by id. ``stated`` are the ids of end tokens in the
    model's files.
    """
    present = {*added.values()}
    no_ends = {name for name, others in _NO_ENDS if others <= present}
    by_name = [token for token, name in sorted(added.items()) if name in _END_NAMES]
    return tuple(
        token for token in dict.fromkeys([*stated, *by_name]) if added.get(token) not in no_ends
    )


def stated_token(where: str, value: object, vocab_size: int) -> int | None:
    """Return the id of a special token in a model's files; ``None`` if it is no id of a token.

    Such an id does not make a model unusable, so that it is ignored with a warning, as in
    llama.cpp. ``where`` names the place of the id. Tokens have the ids 0 to ``vocab_size - 1``; the
    files state no token with the value ``None``.
    """
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size:
        return value
    msg = (
        f"{where}: expected the id of a token in 0..{vocab_size - 1}, found {value!r:.40}; "
        "it is ignored"
    )
    warnings.warn(msg, stacklevel=3)
    return None
