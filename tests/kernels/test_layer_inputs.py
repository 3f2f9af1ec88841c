"""Inputs of layers: what a program must have, and the formula in float64."""

import numpy as np
import pytest

from pronk.base.arrays import FLOAT32, Array
from pronk.cache.blocks import BlockTable
from pronk.kernels.library import Kernels, candidates
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.models.program import Program
from pronk.sampling.tree import TokenTree
from tiny_models import make_cache, tiny_decoder

DECODER = {"special": "gemma4", "windows": (50, None, 50, None)}
TOKENS = [3, 77, 3, 130]
EVERY = pytest.mark.parametrize("kernels", candidates(), ids=lambda kernels: kernels.name)


def program_of(kernels: Kernels) -> Program:
    decoder = tiny_decoder(**DECODER)
    cache = make_cache(decoder.config, FLOAT32)
    return Program(kernels, decoder.config.hidden_size, FLOAT32, cache, ())


def batch_of(program: Program) -> ForwardBatch:
    assert program.cache is not None
    table = BlockTable()
    program.cache.prepare(table, len(TOKENS))
    return ForwardBatch([BatchEntry(table, TokenTree.chain(TOKENS))])


@EVERY
def test_inputs_must_be_computed_first(kernels: Kernels) -> None:
    decoder = tiny_decoder(**DECODER)
    stream = np.zeros((len(TOKENS), decoder.config.hidden_size), np.float32)
    missing = program_of(kernels)
    missing.layer_input(decoder.layers[0], 0)
    too_far = program_of(kernels)
    too_far.layer_inputs(decoder)
    too_far.layer_input(decoder.layers[0], decoder.config.num_layers)
    for program in (missing, too_far):
        with pytest.raises(AssertionError, match="unsupported shape"):
            program.run(batch_of(program), stream)


@EVERY
def test_formula(kernels: Kernels) -> None:
    """A layer adds ``norm(W2 (gelu(W1 x) · inputs))`` to the stream."""
    decoder = tiny_decoder(**DECODER)
    config = decoder.config
    inputs = decoder.layer_inputs
    assert inputs is not None
    index = 2
    layer = decoder.layers[index]
    program = program_of(kernels)
    program.embed(decoder)
    program.layer_inputs(decoder)
    program.layer_input(layer, index)
    stream = np.zeros((len(TOKENS), config.hidden_size), np.float32)
    program.run(batch_of(program), stream)
    x = decoder.embedding[TOKENS].astype(np.float64) * 3.0  # embedding_scale
    size = config.layer_input_size
    assert layer.input_gate is not None
    weights = inputs.projection.packed.unpack().astype(np.float64)
    projected = (x @ weights.T * config.hidden_size**-0.5).reshape(len(TOKENS), -1, size)
    table = np.asarray(inputs.table, np.float64)[TOKENS].reshape(len(TOKENS), -1, size)
    every = (rms(projected, inputs.norm.weight) + table * size**0.5) / 2**0.5
    gates = x @ layer.input_gate.packed.unpack().T.astype(np.float64)
    gelu = 0.5 * gates * (1 + np.tanh((2 / np.pi) ** 0.5 * (gates + 0.044715 * gates**3)))
    added = (gelu * every[:, index]) @ layer.input_projection.packed.unpack().T.astype(np.float64)
    want = x + rms(added, layer.input_norm.weight)
    assert np.abs(stream - want).max() < 1e-4


def rms(x: Array, weight: Array) -> Array:
    """Return rows divided by the root of their mean square, times ``weight``."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight
