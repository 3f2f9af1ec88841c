"""Outputs of the target's layers for the text that EAGLE-3 and MTP heads learn from."""

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

from pronk import OptionError, TokenTree
from pronk.backends import BatchEntry, BlockTable, ForwardBatch
from pronk.base import convert_write_errors, replace_file, size_texts
from pronk.base.convert import to_tensor
from pronk.drafting import Target

_CHUNK = 512  # maximum number of tokens of a forward pass


class TargetStates(NamedTuple):
    """Outputs of the target for a text of ``n`` tokens."""

    # outputs of the layers, side by side, ``[n, layers * size]``
    hidden: Tensor
    # outputs of the last layer for the tokens from ``first`` on, ``[n - first, size]``
    last: Tensor
    # the likeliest token after each of these tokens, int32 ``[n - first]``
    likeliest: Tensor


def target_states(
    target: Target, ids: Sequence[int], layers: Sequence[int], first: int
) -> TargetStates:
    """Run the target over the text ``ids``, and return its outputs in float32.

    ``layers`` are the numbers (from 1) of the layers whose outputs are returned. The fields
    ``last`` and ``likeliest`` begin at token ``first``. Raises CacheFullError if the text does not
    fit into the target's KV cache.
    """
    cache = target.cache
    table = BlockTable()
    num_layers = target.decoder.config.num_layers
    hidden = list[Tensor]()
    last = list[Tensor]()
    likeliest = list[Tensor]()
    try:
        for start in range(0, len(ids), _CHUNK):
            chunk = ids[start : start + _CHUNK]
            cache.prepare(table, start + len(chunk))
            first_node = min(len(chunk), max(0, first - start))
            nodes = range(first_node, len(chunk))
            entry = BatchEntry(table, TokenTree.chain(chunk), nodes, len(ids), num_final=len(ids))
            collect = frozenset((*layers, num_layers))
            result = target.runner.forward(ForwardBatch([entry]), collect)
            cache.commit_slots(table, range(len(chunk)))
            outputs = {layer: to_tensor(rows[0]).float() for layer, rows in result.hidden.items()}
            hidden.append(torch.cat([outputs[layer] for layer in layers], dim=-1))
            last.append(outputs[num_layers][first_node:])
            if nodes:
                likeliest.append(to_tensor(result.logits[0][:]).argmax(-1).int())
    finally:
        cache.release(table)
    return TargetStates(torch.cat(hidden), torch.cat(last), torch.cat(likeliest))


class StateSource:
    """Computes outputs of the target for texts, or reads them from a folder; in 16-bit numbers."""

    def __init__(
        self,
        target: Target,
        layers: Sequence[int],
        norm: nn.Module,
        weights: str,
        folder: Path | None,
    ) -> None:
        """Create a source of the outputs of ``layers``.

        Args:
            target: the target.
            layers: numbers (from 1) of the layers.
            norm: the target's final norm, which is applied to the last layer's outputs.
            weights: hash of the target's weights, in the name of the folder.
            folder: folder in which outputs are stored; ``None``: they are computed each time.
        """
        self._target = target
        self._layers = tuple(layers)
        self._norm = norm
        self._folder: Path | None = None
        if folder is not None:
            layer_numbers = "-".join(map(str, layers))
            self._folder = folder / f"{weights}-layers-{layer_numbers}"

    def check_space(self, num_tokens: int) -> int:
        """Return the bytes that the stored outputs of ``num_tokens`` tokens take.

        Raises OptionError if the disk has less space.
        """
        num_rows = num_tokens * (len(self._layers) + 1)
        size = num_rows * self._target.decoder.config.hidden_size * 2
        if self._folder is None:
            return size
        with convert_write_errors(self._folder, "the target's outputs"):
            self._folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._folder).free
        missing = size - sum(file.stat().st_size for file in self._folder.iterdir())
        if missing > free:
            needed, found = size_texts(missing, free)
            msg = (
                f"states: expected {needed} free in {self._folder.parent}, found {found}; give "
                "another folder, or leave the option out: the target then reads the text in every "
                "epoch"
            )
            raise OptionError(msg)
        return size

    @torch.no_grad()
    def __call__(self, ids: Sequence[int], first: int) -> TargetStates:
        """Return the outputs of the target for a text; read them from their file if there is one.

        The arguments and the result are those of :func:`target_states`.
        """
        if self._folder is None:
            return self._compute(ids, first)
        text = np.array([first, *ids], np.int64)
        digest = hashlib.blake2b(text.tobytes(), digest_size=16)
        file = self._folder / f"{digest.hexdigest()}.safetensors"
        try:
            return TargetStates(**load_file(file))
        except (OSError, SafetensorError):
            # there is no file, or a crash of the machine has damaged it
            states = self._compute(ids, first)
        tensors = {name: value.contiguous() for name, value in states._asdict().items()}
        with convert_write_errors(file, "the target's outputs"):
            self._folder.mkdir(parents=True, exist_ok=True)
            with replace_file(file, shared=True) as content:
                content.write(save(tensors))
        return states

    def _compute(self, ids: Sequence[int], first: int) -> TargetStates:
        hidden, last, likeliest = target_states(self._target, ids, self._layers, first)
        return TargetStates(hidden.bfloat16(), self._norm(last).half(), likeliest)
