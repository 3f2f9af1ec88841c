"""Forward passes of the deployed target over given texts, for features and distributions.

The engine's own runner computes them, with the weights as they are served: a quantized target is not dequantized.
With a folder, the results of a text are kept in a file of it, and later epochs and other runs read that file.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from pronk.errors import OptionError
from pronk.execution.forward_job import ForwardJob
from pronk.execution.segment import Segment
from pronk.files.atomic import convert_write_errors, replace_file
from pronk.kv_cache.blocks import BlockTable
from pronk.speculation.target import Target
from pronk.speculation.tree import TokenTree
from pronk.torch_backend.convert import to_tensor

__all__ = ["StateSource", "TargetStates", "target_states"]

_CHUNK = 512  # tokens of a forward pass


class TargetStates(NamedTuple):
    """Results of the target for a text of ``n`` tokens."""

    hidden: Tensor  # ``[n, layers * size]``: outputs of the layers, one after the other
    last: Tensor  # ``[n - first, size]``: outputs of the last layer after the tokens from ``first`` on
    likeliest: Tensor  # ``[n - first]``, int32: the likeliest token after each of them


def target_states(target: Target, ids: Sequence[int], layers: Sequence[int], first: int) -> TargetStates:
    """Compute the outputs of ``layers`` (from 1) of all tokens, and the others from token ``first`` on.

    Outputs are float32.

    Raises:
        CacheFullError: the text does not fit into the target's KV cache.
    """
    assert target.runner is not None
    cache, table, num_layers = target.cache, BlockTable(), target.decoder.config.num_layers
    parts = [list[Tensor](), list[Tensor](), list[Tensor]()]
    try:
        for start in range(0, len(ids), _CHUNK):
            chunk = ids[start : start + _CHUNK]
            cache.prepare(table, start + len(chunk))
            nodes = range(min(len(chunk), max(0, first - start)), len(chunk))
            job = ForwardJob(Segment(table, TokenTree.chain(chunk)), nodes, len(ids))
            result = target.runner.forward([job], frozenset((*layers, num_layers)))
            cache.commit(table, range(len(chunk)))
            outputs = {layer: to_tensor(rows[0]).float() for layer, rows in result.hidden.items()}
            parts[0].append(torch.cat([outputs[layer] for layer in layers], dim=-1))
            parts[1].append(outputs[num_layers][nodes.start :])
            if nodes:
                parts[2].append(to_tensor(result.logits[0][:]).argmax(-1).int())
    finally:
        cache.release(table)
    return TargetStates(*map(torch.cat, parts))


class StateSource:
    """Outputs of a target for texts, in two bytes a number; ``last`` is the output of the final norm.

    Args:
        target: the target in the engine.
        layers: layers whose outputs are wanted.
        norm: the target's final norm.
        weights: hash of the target's weights.
        folder: where the results are kept, one file per text; ``None``: nowhere.
    """

    def __init__(
        self, target: Target, layers: Sequence[int], norm: nn.Module, weights: str, folder: Path | None
    ) -> None:
        self._target, self._layers, self._norm = target, tuple(layers), norm
        self._folder = folder and folder / f"{weights}-layers-{'-'.join(map(str, layers))}"

    def check_space(self, num_tokens: int) -> int:
        """Return the bytes that texts of ``num_tokens`` tokens in all take at most.

        Raises:
            OptionError: they do not fit on the disk.
        """
        size = num_tokens * self._target.decoder.config.hidden_size * 2 * (len(self._layers) + 1)
        if self._folder is not None:
            with convert_write_errors(self._folder, "the target's outputs"):
                self._folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self._folder).free
            missing = size - sum(file.stat().st_size for file in self._folder.iterdir())
            if missing > free:
                msg = (
                    f"states: expected {missing / 1e9:.1f} GB free in {self._folder.parent}, found {free / 1e9:.1f}; "
                    "give another folder, or leave the option out: the target then reads the text in every epoch"
                )
                raise OptionError(msg)
        return size

    @torch.no_grad()
    def __call__(self, ids: Sequence[int], first: int) -> TargetStates:
        """Return the results for a text, from its file if there is one; see :func:`target_states`."""
        if self._folder is None:
            return self._compute(ids, first)
        digest = hashlib.blake2b(np.array([first, *ids], np.int64).tobytes(), digest_size=16)
        file = self._folder / f"{digest.hexdigest()}.safetensors"
        try:
            return TargetStates(**load_file(file))
        except (OSError, SafetensorError):  # absent, or damaged by a crash of the machine
            states = self._compute(ids, first)
        with convert_write_errors(file, "the target's outputs"):
            self._folder.mkdir(parents=True, exist_ok=True)
            with replace_file(file, shared=True) as content:
                content.write(save({name: value.contiguous() for name, value in states._asdict().items()}))
        return states

    def _compute(self, ids: Sequence[int], first: int) -> TargetStates:
        hidden, last, likeliest = target_states(self._target, ids, self._layers, first)
        return TargetStates(hidden.bfloat16(), self._norm(last).half(), likeliest)
