"""Tokens that end a generation.

A model's files often state only one end-of-text token. But models for code also end a text with a
token of *fill in the middle* (FIM), for example with the token that begins another file. Tokens
with well-known names therefore end a generation, too, in GGUF files and in model folders.

Source: ``special_eog_ids`` in ``llama-vocab.cpp`` of llama.cpp. Unlike there, a token ends a
generation only if it is an *added* token: one that the tokenizer finds in a text before it splits
the text into words.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

# Names of tokens that end a text or a message.
_TEXT_ENDS = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> "
    "<|endoftext|> </s> <|eom_id|> <EOT> _<EOT> \u2581<EOT> [EOT] [EOS] <|end_of_text|> "
    "<end_of_utterance> <eos> <turn|> <|tool_response> "
    "<\uff5cend\u2581of\u2581sentence\uff5c> [e~["
).split()
# Names of tokens of *fill in the middle*, after which the answer has ended: padding, and the
# beginning of another repository or of another file.
_FIM_ENDS = (
    "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] "
    "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> "
    "<|file_sep|>"
).split()
_END_NAMES = frozenset(_TEXT_ENDS + _FIM_ENDS)
# Exceptions: the first token does not end a generation if the vocabulary has all tokens of the set.
# Such vocabularies belong to models that write several messages per answer, and end each of them
# with this token: in the harmony format (gpt-oss) and in Solar's, ``<|end|>`` ends a message, after
# which the model begins the next one.
_NO_ENDS = (
    ("<|end|>", {"<|return|>", "<|call|>"}),
    ("<|end|>", {"<|call|>", "<|flush|>"}),
    ("<|end|>", {"<|calls|>", "<|flush|>"}),
    ("</s>", {"<|tool_response>"}),
)


def find_end_tokens(added: Mapping[int, str], stated: Iterable[int]) -> tuple[int, ...]:
    """Return the ids of the tokens that end a generation, each once, the stated ones first.

    Args:
        added: names of the vocabulary's added tokens, by id.
        stated: ids of end tokens that the model's files state.
    """
    present = set(added.values())
    no_ends = {name for name, others in _NO_ENDS if others <= present}
    by_name = [token for token, name in sorted(added.items()) if name in _END_NAMES]
    tokens = dict.fromkeys([*stated, *by_name])
    return tuple(token for token in tokens if added.get(token) not in no_ends)


def stated_token(where: str, value: object, vocab_size: int) -> int | None:
    """Return the id of a special token that a model's files state; ``None`` if it is no valid id.

    A model with an invalid id is usable, so the id is ignored with a warning, as in llama.cpp.

    Args:
        where: place of the id in the files, for the warning.
        value: the id; ``None`` if the files state none.
        vocab_size: number of tokens; valid ids are 0 to ``vocab_size - 1``.
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
