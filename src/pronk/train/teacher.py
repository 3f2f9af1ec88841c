"""The target of a distillation: loaded once, it writes text, teaches, and verifies guesses."""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path

import torch

from pronk.llm import LLM
from pronk.model.decoder import Decoder
from pronk.model.loader import parse_dtype
from pronk.train.encoder import Encoder

__all__ = ["Teacher"]

_BATCH = 32  # requests in one pass, when it writes


class Teacher:
    """A frozen model.

    ``name`` is its id on the Hub, or that of its folder; ``encoder`` turns text into its tokens.

    Args:
        model: folder or id on the Hub; ``None`` is the bundled one.
        device: where it runs.
        threads: of the process.
    """

    def __init__(self, model: str | Path | None, device: str = "cpu", threads: int | None = None) -> None:
        hub = model is not None and not Path(model).expanduser().is_dir()
        self.llm = LLM(model, drafter="autoregressive", device=device, threads=threads, max_batch=_BATCH, budget="all")
        self.name = str(model) if hub else self.llm.path.resolve().name
        self.encoder = Encoder.of_target(self.llm.tokenizer, self.llm.config)

    @property
    def folder(self) -> Path:
        """Its checkpoint."""
        return self.llm.path

    @property
    def decoder(self) -> Decoder:
        """The model itself."""
        return self.llm.engine.target.decoder

    @property
    def dtype(self) -> torch.dtype:
        """Its own, in which it also teaches."""
        return parse_dtype("auto", self.llm.config)

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """SHA-256 sums that tell its tokenizer and its weights (with ``config.json``) from others."""
        weights = hashlib.sha256()
        for file in (self.folder / "config.json", *sorted(self.folder.glob("*.safetensors"))):
            with file.open("rb") as content:
                weights.update(hashlib.file_digest(content, "sha256").digest())
        return {"tokenizer": self.llm.tokenizer.fingerprint, "weights": weights.hexdigest()}
