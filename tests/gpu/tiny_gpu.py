"""Tiny models on the runner of :mod:`pronk.gpu`: on a GPU, or on the CPU by Triton's interpreter."""

from typing import Any

import pytest
import torch

from oracle import DenseModel
from pronk.base.arrays import FLOAT32, Array, DType
from pronk.base.convert import to_tensor
from pronk.drafting.target import Target
from pronk.engine.engine import Engine
from pronk.engine.options import BatchOptions
from pronk.gpu.model import GpuModel
from pronk.gpu.pool import GpuPool
from pronk.gpu.runner import GpuRunner
from pronk.gpu.weights import gpu_linear
from pronk.sampling.tree_size import DEFAULT_MAX_TREE
from tiny_models import POISON, decoder_of, kernels, tiny_module

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def put(array: Array) -> torch.Tensor:
    """Copy an array to the device of the tests."""
    return to_tensor(array).to(DEVICE)


def gpu_runner(
    dtype: DType = FLOAT32,
    *,
    weights: str = "plain",
    share_prefixes: bool = False,
    num_blocks: int = 64,
    module: DenseModel | None = None,
    **shape: Any,
) -> GpuRunner:
    """Return the runner of a tiny model.

    It has the weights of ``module``, or the ``shape`` of :func:`tiny_models.tiny_config`.
    """
    module = module or tiny_module(dtype, **shape)
    pool = GpuPool(
        module.config,
        device=DEVICE,
        kernels=kernels(),
        num_blocks=num_blocks,
        block_size=16,
        dtype=dtype,
        poison=POISON,
        share_prefixes=share_prefixes,
    )
    for layer in range(module.config.num_layers):
        for tensor in pool.layer(layer):
            tensor.fill_(POISON)
    on_device = decoder_of(module, kernels(), linear=gpu_linear(kernels(), weights, dtype, DEVICE))
    return GpuRunner(decoder_of(module, kernels(), weights), GpuModel(on_device, pool))


def gpu_engine(
    dtype: DType = FLOAT32,
    *,
    prefill_chunk: int = 64,
    max_batch: int = 8,
    max_tree: int = DEFAULT_MAX_TREE,
    **options: Any,
) -> Engine:
    """Return an engine of :func:`gpu_runner`."""
    target = Target(gpu_runner(dtype, **options), max_tree=max_tree)
    return Engine(target, BatchOptions(prefill_chunk=prefill_chunk, max_batch=max_batch))


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[None]:
    """Return a list that gets an item for each call of a function."""
    function = getattr(owner, name)
    calls = list[None]()

    def counted(*arguments: Any) -> Any:
        calls.append(None)
        return function(*arguments)

    monkeypatch.setattr(owner, name, counted)
    return calls
