"""Token files of a run: collect the documents, mix the sources by weight, tokenize.

The result is a folder with the whole text of a run in a fixed order, so that a checkpoint stores
only a position::

    train.bin          token ids (uint16, or uint32 for large vocabularies), with an end-of-text
                       token after each document
    valid-NAME.bin     the held-out text of one source
    tokenizer.json     and the other tokenizer files, if the run trains a tokenizer
    sources.json       documents, bytes and licence per origin; written last
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pronk import OptionError, TokenizerError
from pronk.base import (
    convert_write_errors,
    describe_error,
    refuse,
    size_texts,
    write_json,
    write_text,
    write_tokens,
)
from pronk.base.checks import check_integer
from pronk.train.checkpoint import check_unchanged
from pronk.train.corpus.collection import Collection, Pool, collect, pack
from pronk.train.corpus.encoder import (
    ASSISTANT,
    CHAT_TEMPLATE,
    END,
    END_OF_TEXT,
    SPECIAL_TOKENS,
    USER,
    Encoder,
)
from pronk.train.corpus.sources import SourceSpec, json_lines_name, read_source
from pronk.train.options import DataOptions

# Size of a vocabulary without merges: the special tokens and the 256 bytes.
BYTE_VOCAB = len(SPECIAL_TOKENS) + 256


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Return a byte-level BPE tokenizer, as that of GPT-2, learned from ``texts``.

    Ids 0..3 are the special tokens, ids 4..259 the 256 bytes. Raises OptionError if ``vocab_size``
    is below ``BYTE_VOCAB`` or above 65,536 (16-bit ids), or the text has too few different pairs to
    merge.
    """
    check_integer("vocabulary size", vocab_size, BYTE_VOCAB, 65536)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    size = tokenizer.get_vocab_size()
    if size != vocab_size:
        msg = (
            f"vocabulary size: the text yields only {size} tokens, expected {vocab_size}; ask for "
            "fewer or add text"
        )
        raise OptionError(msg)
    # Encode text such as "<|end|>" as ordinary text, never as the special token.
    tokenizer.encode_special_tokens = True
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write the files of a tokenizer that :func:`train_tokenizer` returned.

    They are ``tokenizer.json``, ``tokenizer_config.json`` and ``special_tokens_map.json``.
    ``context`` is the model's context length in tokens.
    """
    write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    names = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "unk_token": END_OF_TEXT}
    extra = [USER, ASSISTANT, END]
    flags = {
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": True,
    }
    special = {str(i): {"content": token, **flags} for i, token in enumerate(SPECIAL_TOKENS)}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": special,
        "extra_special_tokens": extra,
        "chat_template": CHAT_TEMPLATE,
        **names,
    }
    write_json(folder / "tokenizer_config.json", config, indent=2)
    special_map = {**names, "additional_special_tokens": extra}
    write_json(folder / "special_tokens_map.json", special_map, indent=2)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a run; raise TokenizerError if the file is missing or damaged."""
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the package tokenizers raises plain Exceptions
        msg = f"{path}: expected a tokenizer, found {describe_error(error)}"
        raise TokenizerError(msg) from error
    # as in train_tokenizer, text such as "<|end|>" is ordinary text
    tokenizer.encode_special_tokens = True
    return tokenizer


def mix(
    pools: Sequence[Pool], seed: int, size: Callable[[str], int] = lambda text: len(text.encode())
) -> Iterator[str]:
    """Yield documents of all pools without end, mixed by the weights of the pools.

    The next document is from the pool for which the size of its documents so far, divided by its
    weight, is smallest. When all documents of a pool have been yielded, they are shuffled and
    repeated.

    Args:
        pools: the documents and weights.
        seed: seed of the order of the documents.
        size: returns the size of a document; by default in bytes, which need no tokenizer.
    """
    streams = [_shuffled(pool.documents, f"{seed}/{pool.name}") for pool in pools]
    sizes = [0.0] * len(pools)
    while True:
        next_pool = min(range(len(pools)), key=lambda i: sizes[i] / pools[i].weight)
        text = next(streams[next_pool])
        sizes[next_pool] += size(text)
        yield text


def _shuffled(documents: Sequence[str], seed: str) -> Iterator[str]:
    generator = random.Random(seed)  # noqa: S311 - not for secrets
    while True:
        yield from generator.sample(documents, len(documents))


def prepare(  # noqa: PLR0917 - the last four have defaults
    options: DataOptions,
    folder: Path,
    tokens: int,
    context: int,
    say: Callable[[str], None],
    encoder: Encoder | None = None,
    also: Callable[[Collection], None] = lambda _: None,
    min_source_tokens: int = 0,
    enough: Callable[[int], bool] = lambda _: False,
) -> None:
    """Write the token files of a run into ``folder``, unless they exist.

    Args:
        options: sources of the text, and their mixture.
        folder: folder of the token files; see the module's docstring.
        tokens: number of tokens of the training text.
        context: the model's context length in tokens, for the tokenizer's files.
        say: prints a line of progress.
        encoder: converter of text to token ids; without one, a tokenizer is trained and saved in
            ``folder``.
        also: called with the collected documents after the training text is written; it may write
            further files into ``folder``.
        min_source_tokens: minimum number of tokens of all sources together, without repetitions.
        enough: called with the number of tokens so far; the training text ends when it returns
            True.

    Raises:
        OptionError: ``folder`` was made with other options, or the text is too short; see also
            :func:`collect` and :func:`train_tokenizer`.
        CheckpointError: the files cannot be written.
    """
    recipe = _recipe(options, tokens, context, encoder)
    if (folder / "sources.json").exists():
        old_recipe = json.loads((folder / "sources.json").read_text(encoding="utf-8"))["recipe"]
        check_unchanged(folder.parent, _readable(old_recipe), _readable(recipe))
        return
    say("reading sources")
    collection = collect(options.sources, dialogues=options.dialogues, exclude=options.exclude)
    num_bytes = sum(record.bytes for record in collection.origins)
    (size_text,) = size_texts(num_bytes)
    dropped = f"{collection.duplicates} copies, {collection.excluded} excluded documents"
    say(f"read {size_text}; dropped {dropped}")
    with convert_write_errors(folder, "the training text"):
        folder.mkdir(parents=True, exist_ok=True)
    if encoder is None:
        size = min(options.tokenizer_bytes, num_bytes)
        beginning = _until(mix(collection.pools, options.seed), size)
        tokenizer = train_tokenizer(beginning, options.vocab_size)
        # The package tokenizers raises plain Exceptions.
        with convert_write_errors(folder, "the tokenizer", Exception):
            save_tokenizer(tokenizer, folder, context)
        encoder = Encoder.of_run(tokenizer)
        say("trained the tokenizer")
    _check_length(collection, encoder, min_source_tokens)
    again = ", going through the text again and again" if tokens > num_bytes else ""
    say(f"tokenizing {tokens / 1e6:.1f} M tokens{again}")
    _write_held_out(collection, options, encoder, folder)
    packed = pack(encoder, mix(collection.pools, options.seed), tokens, enough)
    if len(packed) < tokens:
        say(f"tokenized {len(packed) / 1e6:.1f} M tokens, for want of time")
    write_tokens(folder / "train.bin", packed)
    also(collection)
    summary = {
        "recipe": recipe,
        "weights": {pool.name: pool.weight for pool in collection.pools},
        "duplicates": collection.duplicates,
        "excluded": collection.excluded,
        "origins": [asdict(record) for record in collection.origins],
    }
    # This file is written last: its presence marks the folder as complete.
    write_json(folder / "sources.json", summary, indent=1)


def _check_length(collection: Collection, encoder: Encoder, min_source_tokens: int) -> None:
    """Raise OptionError if all documents together have fewer than ``min_source_tokens`` tokens.

    Documents that are repeated to fill the training text count once.
    """
    texts = iter([text for pool in collection.pools for text in pool.documents])
    found = len(pack(encoder, texts, min_source_tokens))
    if found < min_source_tokens:
        msg = (
            f"text: expected at least {min_source_tokens} tokens, for one sequence and the token "
            f"after it, found {found}; give more text, or a smaller --length and --final-length"
        )
        raise OptionError(msg)


def _write_held_out(
    collection: Collection, options: DataOptions, encoder: Encoder, folder: Path
) -> None:
    """Write the held-out token files: one for each source, and for each of ``options.valid``."""
    held_out = {pool.name: iter(pool.held_out) for pool in collection.pools if pool.held_out}
    for file in options.valid:
        name = json_lines_name(file)
        documents = read_source(SourceSpec(name, "jsonl", file, 1.0))
        held_out[name] = (document.text for document in documents)
    for name, texts in held_out.items():
        tokens = pack(encoder, texts, options.valid_tokens)
        if len(tokens) < 2:
            refuse("valid", f"expected text to measure on in {name!r}, found none", OptionError)
        write_tokens(folder / f"valid-{name}.bin", tokens)


def _recipe(
    options: DataOptions, tokens: int, context: int, encoder: Encoder | None
) -> dict[str, Any]:
    """Return the options that determine the token files, by name.

    A run may use existing token files if they were made with equal options. The contents of the
    sources are not compared.
    """
    recipe: dict[str, Any] = {"vocab": options.vocab_size}
    if encoder is not None:
        recipe = {"tokenizer": encoder.fingerprint}
    return recipe | {
        "sources": [[spec.name, spec.weight] for spec in options.sources],
        "valid": [file.name for file in options.valid],
        "exclude": [file.name for file in options.exclude],
        "dialogues": options.dialogues,
        "seed": options.seed,
        "tokens": tokens,
        "context": context,
    }


def _readable(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe of :func:`_recipe` with names of the command line, for error messages."""
    names = {"tokens": "tokens of text (steps times batch)"}
    return {names.get(key, key): value for key, value in recipe.items()}


def _until(texts: Iterator[str], size: int) -> Iterator[str]:
    """Yield texts until they have ``size`` bytes of UTF-8 together."""
    for text in texts:
        if size <= 0:
            return
        size -= len(text.encode())
        yield text
