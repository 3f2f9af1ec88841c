"""The target in training: it writes text, provides distributions and verifies draft tokens.

The engine has weights in a form of its own. A second copy of the weights, a module of torch, computes the distributions
for the loss.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from pronk.corpus.encoder import Encoder
from pronk.hub.resolve import resolve_model
from pronk.llm import LLM
from pronk.models.clone_models import tiny_model
from pronk.models.fingerprint import Fingerprint
from pronk.models.loader import parse_dtype
from pronk.quantization.gguf.checkpoint import is_gguf
from pronk.torch_backend.convert import torch_dtype
from pronk.train.loop import find_device, set_all_threads
from pronk.train.modules.decoder import DecoderModule
from pronk.train.modules.load import load_module

__all__ = ["Teacher"]

_BATCH = 32  # maximum requests in one forward pass


class Teacher:
    """A frozen target from a folder or the Hub; ``None``: ``pronk-tiny``, which a git clone contains.

    :attr:`name` is the model's id on the Hub or its folder's name. With several processes, device ``cuda`` is this
    process's own GPU. The engine computes with a GGUF file on the processor, as when the file is served; a second copy
    of its weights, dequantized, is on ``device``.

    Raises:
        OptionError: ``model`` is ``None`` and this installation is not a git clone.
    """

    def __init__(self, model: str | Path | None, device: str = "cpu", threads: int | None = None) -> None:
        path = tiny_model("--target") if model is None else resolve_model(model)
        hub = model is not None and not Path(model).expanduser().exists()
        self.device = find_device(device)
        set_all_threads(threads)
        deployed = "cpu" if is_gguf(path) else str(self.device)
        self.llm = LLM(path, drafter="autoregressive", device=deployed, max_batch=_BATCH, budget="all")
        self.name = str(model) if hub else self.llm.path.resolve().name
        self.encoder = Encoder.of_target(self.llm.tokenizer, self.llm.config)

    @property
    def folder(self) -> Path:
        """Folder or GGUF file of the checkpoint."""
        return self.llm.path

    @cached_property
    def decoder(self) -> DecoderModule:
        """The target as a module of torch."""
        return load_module(self.folder, self.llm.config, self.dtype, self.device)

    @property
    def dtype(self) -> torch.dtype:
        """The checkpoint's dtype; the target distributions of the loss are computed in it."""
        return torch_dtype(parse_dtype("auto", self.llm.config))

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint that the files of this target's drafters store."""
        return Fingerprint.of(self.folder)

    @property
    def unembedding(self) -> Tensor:
        """Weight of the LM head, ``[vocab, hidden]``."""
        return self.decoder.head.get_parameter("weight").detach()

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """Two hashes: of the tokenizer, and of ``config.json`` with all weights or of a GGUF file.

        A resumed run compares these; a :class:`Fingerprint` covers only samples of the weights.
        """
        weights = hashlib.sha256()
        folder = self.folder
        files = [folder] if is_gguf(folder) else [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
        for file in files:
            with file.open("rb") as content:
                weights.update(hashlib.file_digest(content, "sha256").digest())
        return {"tokenizer": self.llm.tokenizer.fingerprint, "weights": weights.hexdigest()}
