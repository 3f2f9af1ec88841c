"""The core's modules, with the weights of modules of torch, and their programs on one text."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from pronk.base.arrays import FLOAT32, Array
from pronk.cache.blocks import BlockTable
from pronk.checkpoint.config import ModelConfig
from pronk.checkpoint.tensors import Checkpoint
from pronk.lab.drafters.modules.files import DrafterWeights
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.models.program import Program
from pronk.sampling.tree import TokenTree
from pronk.train.export import export_drafter
from tiny_models import kernels, make_cache


def export_weights(module: nn.Module, folder: Path) -> DrafterWeights:
    """Write the weights of a module, which are rounded to bfloat16, and return them for the
    core.
    """
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.bfloat16())
    export_drafter(folder, module, {}, "")
    return DrafterWeights(Checkpoint(folder), kernels(), FLOAT32)


def run_program(compile_into: Callable[[Program], None], config: ModelConfig, x: Array) -> Array:
    """Return the stream after a program ran on the rows ``x`` ``[tokens, hidden]`` of a text."""
    cache = make_cache(config, FLOAT32, num_blocks=4)
    block_table = BlockTable()
    cache.prepare(block_table, len(x))
    program = Program(kernels(), x.shape[1], FLOAT32, cache)
    compile_into(program)
    tokens = [0] * len(x)
    batch = ForwardBatch([BatchEntry(block_table, TokenTree.chain(tokens))])
    stream = x.copy()
    program.run(batch, stream)
    assert np.isfinite(stream).all()
    return stream
