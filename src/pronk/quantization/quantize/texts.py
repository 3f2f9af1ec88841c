"""What a model is calibrated and measured with: token ids of a text in sequences of one length.

Without a text of the user's, perplexity is that of a few solved problems in Python and sums in words, which come with
pronk (``evaluation.jsonl``).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from importlib.resources import as_file, files
from pathlib import Path

import torch
from torch import Tensor

from pronk.errors import OptionError
from pronk.models.loader import read_config
from pronk.quantization.quantize.methods import CalibrationTexts
from pronk.tokenization.tokenizer import Tokenizer
from pronk.train.data import collect, pack
from pronk.train.encoder import Encoder
from pronk.train.options import DataOptions
from pronk.train.sources import SourceSpec, read_source, spec_of

__all__ = ["LENGTH", "read_texts"]

# Tokens of a sequence, if the model has as many positions.
LENGTH = 512
# Tokens to measure with, at most; and of each text at least.
_EVALUATION, _LEAST = 8192, 128
# Characters of the pieces whose order is random, so that the start of a long text does not stand for all of it.
_PIECE = 4096


def read_texts(folder: Path, text: Path | None = None, tokens: int = 32_768) -> CalibrationTexts:
    """Texts for a model.

    Args:
        folder: of the model.
        text: to calibrate with: a file or folder as training reads them. One document in 100, or the end of the
            longest one, is held out to measure with. ``None`` is the bundled text, and no calibration.
        tokens: most to calibrate with.

    Raises:
        OptionError: there is no such text, it cannot be read, or is too short.
        CheckpointError: the model's configuration or tokenizer cannot be read.
    """
    config = read_config(folder)
    encoder = Encoder.of_target(Tokenizer.load(folder, config.vocab_size), config)
    length = min(LENGTH, config.context)
    if text is None:
        with as_file(files("pronk.quantization.quantize") / "evaluation.jsonl") as path:
            bundled = [each.text for each in read_source(SourceSpec("evaluation", "jsonl", path, 1.0))]
        return CalibrationTexts(_sequences(encoder, bundled, _EVALUATION, length, "bundled text"))
    (pool, *_) = collect(DataOptions((spec_of(text, "calibrate"),), dialogues=0.0)).pools
    return CalibrationTexts(
        _sequences(encoder, pool.held_out, _EVALUATION, length, f"calibrate: held-out part of {text}"),
        _sequences(encoder, _shuffled(pool.documents), tokens, length, f"calibrate: rest of {text}"),
    )


def _shuffled(documents: Iterable[str]) -> Iterator[str]:
    pieces = [text[at : at + _PIECE] for text in documents for at in range(0, len(text), _PIECE)]
    yield from random.Random(0).sample(pieces, len(pieces))  # noqa: S311 - not for secrets


def _sequences(encoder: Encoder, texts: Iterable[str], tokens: int, length: int, what: str) -> Tensor:
    """Ids ``[sequences, length]`` of the first ``tokens``; one shorter sequence if there is no more."""
    ids = torch.from_numpy(pack(encoder, iter(texts), tokens).astype("int64"))
    if len(ids) < min(_LEAST, length):
        msg = f"{what}: expected at least {min(_LEAST, length)} tokens, found {len(ids)}; give more text"
        raise OptionError(msg)
    if len(ids) < length:
        return ids[None]
    return ids[: len(ids) // length * length].view(-1, length)
