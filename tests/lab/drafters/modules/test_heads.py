"""Multi-token heads: their order, their norms and sizes, by torch and by the core's programs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lab.drafters.modules.programs import export_weights, run_program
from lab.drafters.trained_multi_token import make_heads
from pronk.base.arrays import Array
from pronk.base.convert import to_array, to_tensor
from pronk.base.errors import OptionError
from pronk.lab.drafters.modules.heads import HeadsShape, MultiTokenHeads, heads_config
from pronk.train.attention import DenseAttention
from pronk.train.modules.decoder import Rotations
from pronk.train.modules.drafters import HeadsModule
from tiny_models import tiny_config

CONFIG = tiny_config()
VARIANTS = [
    (kind, order)
    for kind in ("transformer", "linear")
    for order in ("parallel", "causal", "anticausal")
]


def some_rows(count: int) -> Tensor:
    return torch.randn(count, CONFIG.hidden_size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("kind", "order"), VARIANTS)
@torch.no_grad()
def test_heads_are_applied_in_the_order_of_the_paper(kind: str, order: str, tmp_path: Path) -> None:
    shape = HeadsShape(4, 2, 24, kind, order)
    module = make_heads(shape, CONFIG)
    weights = export_weights(module, tmp_path / "drafter")
    heads = MultiTokenHeads(shape, CONFIG, weights)
    weights.check_all_read()
    z = some_rows(6)
    attend = DenseAttention(1, 6)
    rope = Rotations(CONFIG.rope)(torch.arange(6), torch.float32)

    def h(index: int, x: Tensor) -> Tensor:
        layer: Any = module.layers[index]
        return layer(x, rope, index, attend) if kind == "transformer" else x @ layer.weight.T

    def by_torch(index: int, x: Array) -> Array:
        return to_array(module.run_part(index, to_tensor(x), rope, attend))

    def by_core(index: int, x: Array) -> Array:
        return run_program(lambda program: heads.compile_part(index, program), heads.config, x)

    expected = {
        "parallel": [h(0, z), h(1, z), h(2, z), h(3, z)],
        "causal": [h(0, z), h(1, h(0, z)), h(2, h(1, h(0, z))), h(3, h(2, h(1, h(0, z))))],
        "anticausal": [h(0, h(1, h(2, h(3, z)))), h(1, h(2, h(3, z))), h(2, h(3, z)), h(3, z)],
    }[order]
    for count in (1, 2, 4):
        made, own = (dict(heads.run(to_array(z), apply, count)) for apply in (by_torch, by_core))
        assert set(made) == set(own) == set(range(4 if order == "anticausal" else count))
        for index in range(count):
            want = expected[index].numpy()
            assert np.array_equal(made[index], want)
            np.testing.assert_allclose(
                own[index], want, rtol=1e-4, atol=1e-4 * float(np.abs(want).max())
            )
    assert not torch.allclose(expected[0], expected[1], atol=0.1)


def test_norms_and_unembeddings_of_heads(tmp_path: Path) -> None:
    assert not make_heads(HeadsShape(2, 2, 24), CONFIG).unembeddings
    shape = HeadsShape(2, 2, 24, unembeddings="replicated")
    module = make_heads(shape, CONFIG)
    x = some_rows(3)
    with torch.no_grad():
        module.norms[1].get_parameter("weight").mul_(3.0)
        assert torch.allclose(module.norms[1](x), 3 * module.norms[0](x))
    heads = MultiTokenHeads(shape, CONFIG, export_weights(module, tmp_path / "drafter"))
    for index in range(2):
        assert np.array_equal(
            heads.norms[index].weight, to_array(module.norms[index].get_parameter("weight"))
        )
        own = to_array(module.unembeddings[index].get_parameter("weight"))
        assert np.array_equal(heads.unembeddings[index].packed.unpack(), own)


def test_initial_weights_are_the_targets() -> None:
    heads = HeadsModule(HeadsShape(2, 2, 24, "linear", unembeddings="replicated"), CONFIG)
    norm = torch.nn.RMSNorm(CONFIG.hidden_size)
    head = torch.rand(CONFIG.vocab_size, CONFIG.hidden_size)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
    heads.initialize(torch.Generator().manual_seed(0), norm, head)
    z = some_rows(2)
    for index in range(2):
        assert torch.equal(heads.norms[index].get_parameter("weight"), norm.weight)
        assert torch.equal(heads.unembeddings[index].get_parameter("weight"), head)
        assert (
            torch.nn.functional.cosine_similarity(
                heads.run_part(index, z, None, DenseAttention(1, 2)), z
            ).min()
            > 0.9
        )


def test_heads_have_the_targets_largest_window() -> None:
    shape = HeadsShape(3, 1, 24)
    assert heads_config(shape, tiny_config(windows=(8, 16))).windows == (16, 16, 16)
    assert heads_config(shape, tiny_config(windows=(8, None))).windows == (None, None, None)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_heads": 0}, "num-heads: expected an integer in 1..63, found 0"),
        ({"num_heads": 64}, "num-heads: expected an integer in 1..63, found 64"),
        ({"layer": 0}, "layer: expected an integer of at least 1, found 0"),
        ({"mlp": 0}, "mlp: expected an integer of at least 1, found 0"),
        ({"kind": "x"}, "kind: expected one of transformer, linear, found 'x'"),
        ({"order": "x"}, "order: expected one of parallel, causal, anticausal, found 'x'"),
        ({"unembeddings": "x"}, "unembeddings: expected one of shared, replicated, found 'x'"),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        HeadsShape(**{"num_heads": 2, "layer": 1, **values})


def test_a_missing_layer_is_refused() -> None:
    with pytest.raises(OptionError, match="layer: expected 1 to 2, the target's layers, found 3"):
        HeadsModule(HeadsShape(2, 3, 24), CONFIG)
