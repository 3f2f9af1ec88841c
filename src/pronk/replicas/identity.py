"""What a replica is: whatever its texts depend on, in words that can be compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from pronk.architecture.config import ModelConfig
from pronk.errors import OptionError
from pronk.kernels.library import installed
from pronk.llm import LLM
from pronk.models.fingerprint import Fingerprint
from pronk.tokenization.tokenizer import Tokenizer

__all__ = ["check_model", "identity"]


def identity(llm: LLM, options: Mapping[str, Any]) -> tuple[str, str]:
    """Of whatever the tokens of a model depend on, with what computes and without it, as JSON.

    Args:
        llm: the model.
        options: with which it was loaded.
    """
    said = _model(llm.path, llm.config, llm.tokenizer) | {
        "dtype": str(llm.dtype).removeprefix("torch."),
        "kv_dtype": options.get("kv_dtype", "auto"),
        "weights": options.get("weights", "plain"),
        "parts": options.get("workers", 1) if options.get("parallel") == "tensor" else 1,
        "guides": _version("llguidance"),
    }
    computing = f"torch {torch.__version__}" if llm.kernels == "torch" else f"{llm.kernels} {_library()}"
    return json.dumps({**said, "kernels": computing}), json.dumps(said)


def check_model(path: Path, config: ModelConfig, tokenizer: Tokenizer, model: str) -> None:
    """Hold the files of a model to what a replica says of its own.

    Args:
        path: where they are.
        config: what they say of its shape.
        tokenizer: theirs.
        model: what :func:`identity` says without what computes.

    Raises:
        OptionError: they are another model's.
    """
    theirs = json.loads(model)
    for what, own in _model(path, config, tokenizer).items():
        if theirs.get(what) != own:
            msg = f"replicas: expected the same {what} as here, {own}; found {theirs.get(what)}"
            raise OptionError(msg)


def _model(path: Path, config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Which model it is, in whatever form it is loaded."""
    from pronk import __version__  # noqa: PLC0415 - the package is above its rooms

    return {
        "version": __version__,
        "model": str(Fingerprint.of(path)),
        "config": config.digest,
        "tokenizer": f"{tokenizer.digest} by {_version('tokenizers')}",
    }


def _library() -> str:
    file = installed()
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12] if file.is_file() else "none"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
