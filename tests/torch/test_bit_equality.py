"""Logits by torch: close for chunks of prompts, token trees and scattered blocks, and reported as
inexact.
"""

import random

import numpy as np

from engine.test_bit_equality import (
    DTYPES,
    Texts,
    cut,
    paths_alone,
    plain,
    random_cut,
    random_tree,
    some_text,
)
from pronk.base.arrays import FLOAT32, DType
from pronk.cache.blocks import BlockTable
from tiny_models import make_engine, tiny_decoder


@DTYPES
def test_torch_is_close_and_reports_that_it_is_not_exact(dtype: DType) -> None:
    decoder = tiny_decoder(dtype, packed=False)
    want = plain(tiny_decoder(dtype), 300)[0]
    tokens = some_text(decoder, length=300)
    near = {"rtol": 0.0, "atol": 2e-4 if dtype == FLOAT32 else 1.0}
    for parts in ([300], cut(300, 33), random_cut(300, 0)):
        texts = Texts(decoder, scattered=len(parts) > 1)
        block_table = BlockTable()
        np.testing.assert_allclose(texts.read(block_table, tokens, parts), want, **near)
    tree = random_tree(random.Random(0), decoder.config.vocab_size, 60)
    alone = paths_alone(texts, block_table, tree)
    np.testing.assert_allclose(texts.compute(block_table, tree, (20, 30)), alone, **near)
    assert not texts.runner.exact
    assert not make_engine(decoder).exact
    assert make_engine(tiny_decoder(dtype)).exact
