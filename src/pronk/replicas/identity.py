"""Identity of a replica: JSON text of everything that its generated texts depend on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pronk.architecture.config import ModelConfig
from pronk.errors import OptionError
from pronk.kernels.library import installed_library
from pronk.llm import LLM
from pronk.models.loader import Fingerprint
from pronk.tokenization.tokenizer import Tokenizer


def identity(llm: LLM, options: Mapping[str, Any]) -> tuple[str, str]:
    """Return the fields ``identity`` and ``model`` of :class:`~pronk.replicas.messages.ReplicaInfo`.

    ``options`` are the arguments of :class:`pronk.LLM` with which ``llm`` was created.
    """
    model = _model_entries(llm.path, llm.config, llm.tokenizer) | {
        "dtype": str(llm.dtype),
        "kv_dtype": options.get("kv_dtype", "auto"),
        "weights": options.get("weights", "plain"),
        "parts": options.get("workers", 1) if options.get("parallel") == "tensor" else 1,
        "adapters": {name: adapter.digest.hex() for name, adapter in llm.adapters.items()},
        "guides": _version("llguidance"),
    }
    kernels = f"torch {_version('torch')}" if llm.kernels == "torch" else f"{llm.kernels} {_library_digest()}"
    return json.dumps({**model, "kernels": kernels}), json.dumps(model)


def check_model(path: Path, config: ModelConfig, tokenizer: Tokenizer, model: str) -> None:
    """Raise ``OptionError`` if the model files of the server and of the replicas differ.

    ``path``, ``config`` and ``tokenizer`` describe the server's files. ``model`` is ``ReplicaInfo.model`` of a replica.
    """
    entries = json.loads(model)
    for name, value in _model_entries(path, config, tokenizer).items():
        if entries.get(name) != value:
            msg = f"replicas: expected the server's {name}, {value}; found {entries.get(name)}; use the same files"
            raise OptionError(msg)


def _model_entries(path: Path, config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the part of an identity that needs no weights: versions, and digests of the model files."""
    from pronk import __version__  # noqa: PLC0415 - the package imports its subpackages

    return {
        "version": __version__,
        "model": str(Fingerprint.of(path)),
        "config": config.digest,
        "tokenizer": f"{tokenizer.digest} by {_version('tokenizers')}",
    }


def _library_digest() -> str:
    file = installed_library()
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12] if file.is_file() else "none"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
