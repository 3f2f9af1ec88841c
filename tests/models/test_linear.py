"""Linear layers: the form of each kind of weights; close logits of kernels, torch and 8-bit
weights.

Products of the kernels are in ``tests/kernels``.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import MakeCheckpoint, transformers_logits
from oracle import torch_dtype
from pronk.base.arrays import BFLOAT16, FLOAT32, DType
from pronk.base.errors import OptionError
from pronk.checkpoint.hub.clone_models import tiny_model
from pronk.kernels.library import CODED_TYPES
from pronk.kernels.weights import PackedMatrix
from pronk.models.decoder import Decoder
from pronk.models.linear import WeightLayout, choose_linear
from pronk.models.loader import load_decoder, read_config
from pronk.text.tokenizer import Tokenizer
from tiny_models import kernels, text_logits

DTYPES = [FLOAT32, BFLOAT16]
TINY = tiny_model()


def test_choice_of_the_layer() -> None:
    weight = np.zeros((32, 8), np.float32)
    for layout in (WeightLayout(), WeightLayout(unit=16), WeightLayout(gated=True)):
        made = choose_linear(kernels())(weight, None, layout)
        assert made.layout == layout
        assert isinstance(made.packed, PackedMatrix)
        assert made.packed.data.dtype == FLOAT32
        for weights, types in (("int8", (8, 8)), ("int4", (4, 8))):
            for head, bits in zip((False, True), types, strict=True):
                small = choose_linear(kernels(), weights)(weight, None, layout._replace(head=head))
                assert isinstance(small.packed, PackedMatrix)
                assert small.packed.struct.type == CODED_TYPES[bits]


def test_invalid_choices_are_refused() -> None:
    with pytest.raises(
        OptionError,
        match=r"^weights: expected one of plain, int8, int4, found 'int2'; "
        r"did you mean int8 or int4\?$",
    ):
        choose_linear(kernels(), "int2")


def in_8_bits(folder: Path, dtype: DType) -> Decoder:
    """Return the model with weights of 8 bits."""
    return load_decoder(folder, read_config(folder), dtype=dtype, kernels=kernels(), weights="int8")


@pytest.mark.parametrize("tied", [False, True])
def test_int8_decoder(tied: bool, checkpoint: MakeCheckpoint) -> None:
    folder = checkpoint("llama", tie_word_embeddings=tied, attention_bias=True)
    tokens = list(range(40))
    small = in_8_bits(folder, FLOAT32)
    every: list[Any] = [small.head]
    every += [
        getattr(layer, name) for layer in small.layers for name in ("qkv", "out", "up", "down")
    ]
    assert set(every) == set(small.linears())
    assert all(linear.packed.struct.type == CODED_TYPES[8] for linear in every)
    exact = transformers_logits(folder, tokens)
    found = text_logits(small, tokens)
    assert 0 < np.linalg.norm(found - exact) / np.linalg.norm(exact) < 0.1


def test_int8_predicts_the_same_tokens_as_a_trained_model() -> None:
    text = "def add(a, b):\n    return a + b\n\nThe cat sat in the sun, and then it went home."
    tokens = Tokenizer.load(TINY).encode(text)
    small = in_8_bits(TINY, BFLOAT16)
    exact = transformers_logits(TINY, tokens, torch_dtype(BFLOAT16))
    found = text_logits(small, tokens, BFLOAT16)
    assert (exact.argmax(-1) == found.argmax(-1)).mean() > 0.9
