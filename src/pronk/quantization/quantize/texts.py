"""Texts for calibration and perplexity, as token ids in sequences of equal length.

By default, perplexity is measured on ``evaluation.jsonl`` of this package: solved Python problems and arithmetic word
problems.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np

from pronk.arrays import Array
from pronk.checks import require_extra
from pronk.corpus.collection import collect, pack
from pronk.corpus.encoder import Encoder
from pronk.corpus.sources import SourceSpec, read_source, spec_of
from pronk.errors import OptionError
from pronk.models.loader import read_config
from pronk.quantization.quantize.methods import CalibrationTexts
from pronk.tokenization.tokenizer import Tokenizer

__all__ = ["LENGTH", "read_texts"]

LENGTH = 512  # number of tokens per sequence; fewer if the model's context is shorter
_MAX_EVALUATION_TOKENS = 8192  # number of tokens after which the evaluation text is cut
_MIN_TOKENS = 128  # a text with fewer tokens is refused
# Calibration texts are cut into chunks of this size and shuffled, so that all parts of a long text can be used.
_CHUNK_CHARACTERS = 4096


def read_texts(folder: Path, text: Path | None = None, tokens: int = 32_768) -> CalibrationTexts:
    """Read the texts to calibrate a model with and to measure its perplexity on.

    Args:
        folder: folder of the model.
        text: file or folder with the calibration text, in the formats of ``pronk train``. One document in 100, or the
            end of the longest document, is held out to measure perplexity on. ``None`` means no calibration, and the
            evaluation text of this package.
        tokens: maximum number of tokens to calibrate with.

    Raises:
        OptionError: the text is missing, unreadable or too short, or torch, with which to calibrate, is missing.
        CheckpointError: the model's configuration or tokenizer cannot be read.
    """
    if text is not None:
        require_extra("calibrate", "train", "torch")
    config = read_config(folder)
    encoder = Encoder.of_target(Tokenizer.load(folder, config.vocab_size), config)
    length = min(LENGTH, config.context)
    if text is None:
        with as_file(files("pronk.quantization.quantize") / "evaluation.jsonl") as path:
            documents = [document.text for document in read_source(SourceSpec("evaluation", "jsonl", path, 1.0))]
        return CalibrationTexts(_tokenize(encoder, documents, _MAX_EVALUATION_TOKENS, length, "evaluation text"))
    (pool, *_) = collect([spec_of(text, "calibrate")]).pools
    return CalibrationTexts(
        _tokenize(encoder, pool.held_out, _MAX_EVALUATION_TOKENS, length, f"calibrate: held-out part of {text}"),
        _tokenize(encoder, _shuffled(pool.documents), tokens, length, f"calibrate: rest of {text}"),
    )


def _shuffled(documents: Iterable[str]) -> Iterator[str]:
    """Yield chunks of the documents in random order, which is the same in every run."""
    chunks = [text[i : i + _CHUNK_CHARACTERS] for text in documents for i in range(0, len(text), _CHUNK_CHARACTERS)]
    yield from random.Random(0).sample(chunks, len(chunks))  # noqa: S311 - not for secrets


def _tokenize(encoder: Encoder, texts: Iterable[str], max_tokens: int, length: int, text_name: str) -> Array:
    """Return token ids ``[sequences, length]``; a text of fewer tokens is one sequence of its own length."""
    ids = pack(encoder, iter(texts), max_tokens).astype(np.int64)
    if len(ids) < min(_MIN_TOKENS, length):
        msg = f"{text_name}: expected at least {min(_MIN_TOKENS, length)} tokens, found {len(ids)}; give more text"
        raise OptionError(msg)
    if len(ids) < length:
        return ids[None]
    return ids[: len(ids) // length * length].reshape(-1, length)
