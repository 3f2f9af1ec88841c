"""Biases of keys that an int4 KV cache does not store."""

import random
from typing import Any

import numpy as np
import pytest

from oracle import dense_logits
from pronk.base.arrays import BFLOAT16, FLOAT32, INT4, DType
from pronk.models import layer_executor
from pronk.models.key_biases import find_key_biases
from tiny_models import text_logits, tiny_decoder, tiny_module

SHAPE: dict[str, Any] = {"special": "biases", "head_dim": 32}
TOKENS = random.Random(0).choices(range(131), k=90)


def test_large_pairs_are_found() -> None:
    decoder = tiny_decoder(FLOAT32, **SHAPE)
    config = decoder.config
    biases = find_key_biases(decoder)
    assert [*biases] == [*range(config.num_layers)]
    for number, bias in biases.items():
        stored = tiny_module(FLOAT32, **SHAPE).layers[number].qkv.bias.numpy()
        heads = stored.reshape(-1, config.head_dim)[config.num_heads :][: config.num_kv_heads]
        lengths = np.hypot(heads[:, :16], heads[:, 16:])
        large = [pair for pair in range(16) if lengths[:, pair].max() >= 6.0]
        assert bias.pairs.tolist() == large
        elements = [*large, *(pair + 16 for pair in large)]
        assert np.array_equal(bias.values[:, elements], heads[:, elements])
        others = [element for element in range(32) if element not in elements]
        assert not bias.values[:, others].any()


@pytest.mark.parametrize("shape", [{}, {"classic": True, "heads": 4, "kv_heads": 4}], ids=str)
def test_other_models_have_none(shape: dict[str, Any]) -> None:
    assert not find_key_biases(tiny_decoder(FLOAT32, **shape))


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_an_int4_cache_needs_them(dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them, logits are more than twice as far from those of dense attention."""
    want = dense_logits(tiny_module(FLOAT32, **SHAPE), TOKENS)
    decoder = tiny_decoder(dtype, **SHAPE)

    def error() -> float:
        found = text_logits(decoder, TOKENS, dtype, INT4)
        return float(np.abs(found - want).mean())

    with_biases = error()
    monkeypatch.setattr(layer_executor, "find_key_biases", lambda _: {})
    assert error() > 2 * with_biases
