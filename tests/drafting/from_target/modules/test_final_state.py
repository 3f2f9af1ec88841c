"""The target's final state of a token, saved by the target's own forward pass."""

import numpy as np
import pytest

from checkpoints import MakeCheckpoint
from models.test_loader import load
from pronk.base.arrays import Array
from pronk.cache.blocks import BlockTable
from pronk.drafting.from_target.modules.final_state import FinalState
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.models.layer_executor import LayerExecutor
from pronk.models.model_runner import ModelRunner
from pronk.sampling.tree import TokenTree
from tiny_models import kernels, make_cache

TEXT = [7 * index % 300 for index in range(40)]


@pytest.mark.parametrize("only_logits_rows", [True, False])
def test_states_are_those_of_the_last_layer(
    only_logits_rows: bool, checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows without logits end after the layers that store keys, unless they need a state."""
    shortened = list[ForwardBatch]()
    run_shortened = LayerExecutor._run_shortened

    def watched(self: LayerExecutor, batch: ForwardBatch, collect: list[int]) -> object:
        shortened.append(batch)
        return run_shortened(self, batch, collect)

    monkeypatch.setattr(LayerExecutor, "_run_shortened", watched)
    decoder = load(checkpoint("gemma4_text"), kernels=kernels())
    num_layers = decoder.config.num_layers
    assert decoder.config.num_storing_layers < num_layers
    runner = ModelRunner(decoder, make_cache(decoder.config, decoder.embedding.dtype))
    cache = runner.cache
    feature = FinalState(decoder, cache.dtype, only_logits_rows=only_logits_rows)
    cache.save_feature(feature, runner)

    def batch_of(table: BlockTable, logits: range) -> ForwardBatch:
        cache.prepare(table, len(TEXT))
        return ForwardBatch([BatchEntry(table, TokenTree.chain(TEXT), logits)])

    table = BlockTable()
    last = len(TEXT) - 1
    runner.forward(batch_of(table, range(last, len(TEXT))))
    assert bool(shortened) == only_logits_rows
    table.length = len(TEXT)
    found = cache.read_feature(feature, table, 0, len(TEXT))
    outputs: Array = runner.run_first_layers(batch_of(BlockTable(), range(0)), num_layers)[0]
    wanted = runner.final_norm(outputs)
    first = last if only_logits_rows else 0
    np.testing.assert_array_equal(found[first:], wanted[first:])
