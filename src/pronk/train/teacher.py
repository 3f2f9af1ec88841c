"""The target in training: it writes text, provides distributions, and verifies draft tokens.

The target is loaded twice. The engine has the weights in the form of the kernels, and writes text.
A module of torch has a second copy, dequantized, and computes the distributions for the loss. For
EAGLE-3 and MTP heads, the engine computes the features (:func:`target_states`) with the weights as
they are served.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from pronk import LLM, OptionError, TokenTree
from pronk.backends import BatchEntry, BlockTable, ForwardBatch
from pronk.base import convert_write_errors, replace_file, size_texts
from pronk.checkpoint import Fingerprint, is_gguf, parse_dtype, resolve_model, tiny_model
from pronk.drafting import Target
from pronk.torch import to_tensor, torch_dtype
from pronk.train.corpus.encoder import Encoder
from pronk.train.loop import find_device, set_all_threads
from pronk.train.modules.decoder import DecoderModule, load_module

_BATCH = 32  # maximum number of requests in one forward pass
_CHUNK = 512  # maximum number of tokens of a forward pass


class Teacher:
    """A frozen target, which a drafter learns from.

    ``model`` is a folder or a name on the Hub; ``None`` is ``pronk-tiny`` in a clone of the
    repository. The engine computes a GGUF file on the processor, as when the file is served; a
    second copy of the weights, dequantized, is on ``device``. With several processes, the device
    ``cuda`` is this process's own GPU. Raises OptionError for ``None`` without a clone.
    """

    def __init__(
        self, model: str | Path | None, device: str = "cpu", threads: int | None = None
    ) -> None:
        path = tiny_model("--target") if model is None else resolve_model(model)
        hub = model is not None and not Path(model).expanduser().exists()
        self.device = find_device(device)
        set_all_threads(threads)
        deployed = "cpu" if is_gguf(path) else str(self.device)
        self.llm = LLM(
            path, drafter="autoregressive", device=deployed, max_batch=_BATCH, budget="all"
        )
        self.folder = self.llm.path  # folder of the checkpoint, or GGUF file
        # The model's name on the Hub, or the name of its folder.
        self.name = str(model) if hub else self.folder.resolve().name
        self.encoder = Encoder.of_target(self.llm.tokenizer, self.llm.config)
        # The dtype in which the target's distributions are computed: that of the checkpoint.
        self.dtype = torch_dtype(parse_dtype("auto", self.llm.config))

    @cached_property
    def decoder(self) -> DecoderModule:
        """The second copy of the weights, as a frozen module of torch."""
        return load_module(self.folder, self.llm.config, self.dtype, self.device)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Identity of the target, which the files of its drafters store."""
        return Fingerprint.of(self.folder)

    @property
    def unembedding(self) -> Tensor:
        """Weight of the LM head, ``[vocab, hidden]``."""
        return self.decoder.head.get_parameter("weight").detach()

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """Hashes of the ``tokenizer`` and of the ``weights``, which a resumed run compares.

        The hash of the weights covers ``config.json`` and all weights, or a GGUF file; a
        :class:`Fingerprint` covers only samples of the weights.
        """
        weights = hashlib.sha256()
        folder = self.folder
        files = [folder]
        if not is_gguf(folder):
            files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
        for file in files:
            with file.open("rb") as content:
                weights.update(hashlib.file_digest(content, "sha256").digest())
        return {"tokenizer": self.llm.tokenizer.fingerprint, "weights": weights.hexdigest()}


class TargetStates(NamedTuple):
    """Outputs of the target for a text of ``n`` tokens."""

    hidden: Tensor  # outputs of the layers, side by side, ``[n, layers * size]``
    last: (
        Tensor  # outputs of the last layer for the tokens from ``first`` on, ``[n - first, size]``
    )
    likeliest: Tensor  # the likeliest token after each of these tokens, int32 ``[n - first]``


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
            nodes = range(min(len(chunk), max(0, first - start)), len(chunk))
            entry = BatchEntry(table, TokenTree.chain(chunk), nodes, len(ids), num_final=len(ids))
            result = target.runner.forward(ForwardBatch([entry]), frozenset((*layers, num_layers)))
            cache.commit_slots(table, range(len(chunk)))
            outputs = {layer: to_tensor(rows[0]).float() for layer, rows in result.hidden.items()}
            hidden.append(torch.cat([outputs[layer] for layer in layers], dim=-1))
            last.append(outputs[num_layers][nodes.start :])
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
        self._target = target
        self._layers = tuple(layers)
        self._norm = norm
        self._folder = folder and folder / f"{weights}-layers-{'-'.join(map(str, layers))}"

    def check_space(self, num_tokens: int) -> int:
        """Return the bytes that the stored outputs of ``num_tokens`` tokens take.

        Raises OptionError if the disk has less space.
        """
        size = num_tokens * self._target.decoder.config.hidden_size * 2 * (len(self._layers) + 1)
        if self._folder is not None:
            with convert_write_errors(self._folder, "the target's outputs"):
                self._folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self._folder).free
            missing = size - sum(file.stat().st_size for file in self._folder.iterdir())
            if missing > free:
                needed, found = size_texts(missing, free)
                msg = (
                    f"states: expected {needed} free in {self._folder.parent}, found {found}; "
                    "give another folder, or leave the option out: the target then reads the text "
                    "in every epoch"
                )
                raise OptionError(msg)
        return size

    @torch.no_grad()
    def __call__(self, ids: Sequence[int], first: int) -> TargetStates:
        """Return the outputs of the target for a text; read them from their file if there is one.

        The arguments and the result are those of `target_states`.
        """
        if self._folder is None:
            return self._compute(ids, first)
        digest = hashlib.blake2b(np.array([first, *ids], np.int64).tobytes(), digest_size=16)
        file = self._folder / f"{digest.hexdigest()}.safetensors"
        try:
            return TargetStates(**load_file(file))
        # there is no file, or a crash of the machine has damaged it
        except (OSError, SafetensorError):
            states = self._compute(ids, first)
        with convert_write_errors(file, "the target's outputs"):
            self._folder.mkdir(parents=True, exist_ok=True)
            tensors = {name: value.contiguous() for name, value in states._asdict().items()}
            with replace_file(file, shared=True) as content:
                content.write(save(tensors))
        return states

    def _compute(self, ids: Sequence[int], first: int) -> TargetStates:
        hidden, last, likeliest = target_states(self._target, ids, self._layers, first)
        return TargetStates(hidden.bfloat16(), self._norm(last).half(), likeliest)
