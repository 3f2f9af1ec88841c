"""The target of a distillation: it writes text, teaches, and verifies guesses.

Where it writes and verifies with the kernels, whose weights only they can read, it teaches with plain ones beside them.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from pronk.errors import OptionError
from pronk.llm import LLM
from pronk.models.clone_models import default_model
from pronk.models.decoder import Decoder
from pronk.models.fingerprint import Fingerprint
from pronk.models.loader import load_decoder, parse_dtype
from pronk.quantization.gguf.checkpoint import is_gguf
from pronk.train.encoder import Encoder
from pronk.train.loop import find_device

__all__ = ["Teacher"]

_BATCH = 32  # requests in one pass, when it writes


class Teacher:
    """A frozen model.

    ``name`` is its id on the Hub, or that of its folder; ``encoder`` turns text into its tokens.

    Args:
        model: folder or id on the Hub; ``None`` is the clone's ``pronk-tiny``.
        device: where it runs; ``cuda`` is this process's GPU.
        threads: of the process.

    Raises:
        OptionError: a GGUF file, which has none of the files that drafters are written with; or no model outside a
            clone.
    """

    def __init__(self, model: str | Path | None, device: str = "cpu", threads: int | None = None) -> None:
        if model is not None and is_gguf(Path(model).expanduser()):
            msg = (
                f"target: expected a model folder, found the GGUF file {model}; train with the folder that it was made "
                "from: what is trained there guesses for the file, too"
            )
            raise OptionError(msg)
        model = default_model("--target") if model is None else model
        hub = model is not None and not Path(model).expanduser().is_dir()
        device = str(find_device(device))
        self.llm = LLM(model, drafter="autoregressive", device=device, threads=threads, max_batch=_BATCH, budget="all")
        self.name = str(model) if hub else self.llm.path.resolve().name
        self.encoder = Encoder.of_target(self.llm.tokenizer, self.llm.config)

    @property
    def folder(self) -> Path:
        """Its checkpoint."""
        return self.llm.path

    @cached_property
    def decoder(self) -> Decoder:
        """The model itself, with plain weights."""
        decoder = self.llm.engine.target.decoder
        if decoder.kernels is None:
            return decoder
        return load_decoder(self.folder, self.llm.config, dtype=self.dtype, device=decoder.embedding.device)

    @property
    def dtype(self) -> torch.dtype:
        """Its own, in which it also teaches."""
        return parse_dtype("auto", self.llm.config)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """What its drafters carry, to be refused by other targets: quick to find again, whenever one is loaded."""
        return Fingerprint.of(self.folder)

    @property
    def unembedding(self) -> Tensor:
        """``[vocab, hidden]`` of its head."""
        return self.decoder.head.get_parameter("weight").detach()

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """Sums over all its bytes, the tokenizer's and those of its weights with ``config.json``.

        What a resumed run must find as before, to the last bit; a :class:`Fingerprint` looks at samples alone.
        """
        weights = hashlib.sha256()
        for file in (self.folder / "config.json", *sorted(self.folder.glob("*.safetensors"))):
            with file.open("rb") as content:
                weights.update(hashlib.file_digest(content, "sha256").digest())
        return {"tokenizer": self.llm.tokenizer.fingerprint, "weights": weights.hexdigest()}
