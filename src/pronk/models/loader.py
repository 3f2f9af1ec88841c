"""Loading of a model: find its folder, read its config, and load its weights into a decoder.

Weights are loaded module by module, so peak memory is little more than their size in the loaded dtype. On a CPU, an
unquantized embedding is not copied: its rows are read from the mapped file. Quantized weights stay quantized for the
kernels, and are dequantized for torch.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pronk.architecture.config import ModelConfig, parse_config
from pronk.errors import CheckpointError, ConfigError, OptionError
from pronk.kernels.library import Kernels
from pronk.kernels.weight_cache import WeightCache
from pronk.models.checkpoint import open_checkpoint, read_json
from pronk.models.clone_models import clone_model, default_model
from pronk.models.decoder import Decoder
from pronk.models.families import plan_tensors
from pronk.models.inventory import Inventory, tensor_names
from pronk.models.linear import choose_linear
from pronk.models.placer import WeightPlacer
from pronk.models.split import TensorSplit
from pronk.quantization.formats.formats import parse_scheme
from pronk.quantization.gguf.checkpoint import GgufCheckpoint, is_gguf
from pronk.quantization.gguf.config import parse_gguf

__all__ = ["compute_dtype", "kernels_support", "load_decoder", "parse_dtype", "read_config", "resolve_model"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Older checkpoints have the quantization config in a separate file, whose name implies the ``quant_method``.
_QUANTIZATION_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}

# Download no executable code, and not ``consolidated*``, a second copy of the weights in Mistral's repositories.
_ALLOW_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.jinja", "tokenizer.model"]
_IGNORE_PATTERNS = ["*/*", "consolidated*.safetensors"]


def resolve_model(name: str | Path | None, *, revision: str | None = None) -> Path:
    """Return the folder or GGUF file of a model, downloaded from the Hugging Face Hub if needed.

    Args:
        name: a folder, a GGUF file, ``owner/name`` of a model on the Hub, or, in a clone of the repository, the name of
            a folder in its ``models/``. ``None`` means the clone's ``models/pronk-tiny``.
        revision: branch, tag or commit on the Hub.

    Raises:
        CheckpointError: there is no such folder, file or model, or the download fails.
        OptionError: ``name`` is ``None`` without a clone.
    """
    if name is None:
        return default_model()
    text = str(name)
    try:
        folder = Path(name).expanduser()
        if folder.is_dir() or is_gguf(folder):
            return folder
    except (RuntimeError, OSError, ValueError) as error:
        msg = f"no such folder: {text[:80]!r}; expected a model folder, or owner/name of a model on the Hub"
        raise CheckpointError(msg) from error
    if folder.exists():
        msg = f"{text}: expected a folder with config.json, *.safetensors and tokenizer.json, or *.gguf, found a file"
        raise CheckpointError(msg)
    if folder.suffix.lower() == ".gguf":
        msg = f"no such file: {text!r}; expected a GGUF file, or a model folder"
        raise CheckpointError(msg)
    if (clone_folder := clone_model(text)) is not None:
        return clone_folder
    if isinstance(name, Path) or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", text):
        msg = f"no such folder: {text!r}; expected a model folder, or owner/name of a model on the Hugging Face Hub"
        raise CheckpointError(msg)
    return _download(text, revision)


def _download(repo: str, revision: str | None) -> Path:
    # Imported here, because the import takes 0.25 s and local models do not need it.
    from huggingface_hub import errors, snapshot_download  # noqa: PLC0415

    try:
        return Path(
            snapshot_download(repo, revision=revision, allow_patterns=_ALLOW_PATTERNS, ignore_patterns=_IGNORE_PATTERNS)
        )
    except errors.GatedRepoError as error:
        msg = f"{repo}: access to this model is restricted; accept its terms on huggingface.co and run `hf auth login`"
        raise CheckpointError(msg) from error
    except errors.RevisionNotFoundError as error:
        msg = f"{repo}: found no revision {revision!r} on the Hugging Face Hub; expected a branch, tag or commit"
        raise CheckpointError(msg) from error
    except errors.RepositoryNotFoundError as error:
        msg = f"{repo}: found neither such a folder nor such a model on the Hugging Face Hub; check the spelling"
        raise CheckpointError(msg) from error
    except (errors.HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        msg = f"{repo}: no such folder, and it cannot be downloaded from the Hugging Face Hub: {reason}"
        raise CheckpointError(msg) from error


def read_config(folder: Path, opened: GgufCheckpoint | None = None) -> ModelConfig:
    """Read the config of a model folder or GGUF file; raise a CheckpointError if it is invalid.

    ``opened`` is the GGUF file, if it is open already.
    End-of-text ids in ``generation_config.json`` override those in ``config.json``.
    """
    if is_gguf(folder):
        return parse_gguf(opened or GgufCheckpoint(folder))
    if not folder.is_dir():
        msg = f"no such folder: {str(folder)!r}; expected a folder with config.json, *.safetensors and tokenizer.json"
        raise ConfigError(msg)
    if not (folder / "config.json").is_file():
        msg = f"{folder}: expected a model folder with config.json, found none; is this the right folder?"
        raise ConfigError(msg)
    raw = read_json(folder / "config.json", ConfigError)
    generation = folder / "generation_config.json"
    if generation.is_file():
        eos = read_json(generation, ConfigError).get("eos_token_id")
        raw = raw if eos is None else raw | {"eos_token_id": eos}
    try:
        config = parse_config(raw | _separate_quantization(folder, raw))
        if config.quantization is not None:
            parse_scheme(config.quantization)  # raises a ConfigError if the format is not supported
        return config
    except ConfigError as error:
        msg = f"{folder}: {error}"
        raise ConfigError(msg) from error


def _separate_quantization(folder: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """Return the quantization config from its own file; ``{}`` if it is in ``raw`` or does not exist."""
    for name, method in _QUANTIZATION_FILES.items():
        if not (raw.get("quantization_config") or raw.get("compression_config")) and (folder / name).is_file():
            return {"quantization_config": {"quant_method": method, **read_json(folder / name, ConfigError)}}
    return {}


def parse_dtype(name: str, config: ModelConfig) -> torch.dtype:
    """Return the torch dtype called ``name``; ``auto`` is the dtype in the config."""
    dtype = _DTYPES.get(config.dtype if name == "auto" else name)
    if dtype is None:
        msg = f"dtype: expected auto, {', '.join(_DTYPES)}; found {name!r}"
        raise OptionError(msg)
    return dtype


def kernels_support(kernels: Kernels | None, config: ModelConfig) -> bool:
    """Return whether ``kernels`` are given and support the head size of the model."""
    return kernels is not None and kernels.supports_head_dim(config.head_dim)


def compute_dtype(dtype: torch.dtype, kernels: Kernels | None) -> torch.dtype:
    """Return the dtype of activations: that of the weights, or float32 for kernels with float16 weights."""
    return torch.float32 if kernels is not None and dtype == torch.float16 else dtype


def load_decoder(
    folder: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels | None = None,
    weights: str = "plain",
    split: TensorSplit | None = None,
    opened: GgufCheckpoint | None = None,
    cache: WeightCache | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Decoder:
    """Return a decoder with the weights of a model folder or GGUF file, in ``dtype`` on ``device``.

    On a CPU, an unquantized embedding and learned positions are views of the mapped file, with the file's dtype.
    For ``weights``, see :func:`~pronk.models.linear.choose_linear`. ``split`` selects the shard of this process in
    tensor parallelism. ``opened`` is the GGUF file, if it is open already. ``cache`` has packed weights of earlier
    loads, and is saved if it lacked some. ``on_progress`` receives the number of bytes read so far, and the total.

    Raises:
        CheckpointError: tensors are missing, unexpected, damaged, of a wrong shape or dtype, or quantized in a format
            that tensor parallelism cannot split.
        OptionError: ``weights`` is unknown, or quantizes without ``kernels``.
    """
    checkpoint = opened or open_checkpoint(folder)
    linear = choose_linear(kernels, device, weights, dtype, checkpoint.release, cache)
    parts = list(plan_tensors(config, tensor_names(checkpoint, config)))
    inventory = Inventory(checkpoint, config, parts)
    # Embeddings; then a tied LM head, which refers to one; then other parts, the largest first, while memory is free.
    parts.sort(key=lambda part: (part.kind != "table", bool(part.weight), -inventory.nbytes(part)))
    with torch.device("meta"):
        decoder = Decoder(config, None if split is None else split.shard_config)
    placer = WeightPlacer(decoder, inventory, dtype, device, linear, split, keep_quantized=kernels is not None)
    sizes = [inventory.nbytes(part) for part in parts]
    loaded, total = 0, sum(sizes)
    for part, size in zip(parts, sizes, strict=True):
        placer.place(part)
        loaded += size
        if on_progress is not None and size:
            on_progress(loaded, total)
    looked_up = [part.kind == "table" and not (config.tied and part.target == "embedding") for part in parts]
    decoder.stored_bytes = sum(size for size, lookup in zip(sizes, looked_up, strict=True) if not lookup)
    if cache is not None:
        cache.save()
    notes = [*inventory.notes, *placer.notes]
    if notes:
        warnings.warn(f"{folder.name}: {'; '.join(notes)}", stacklevel=2)
    return decoder.requires_grad_(False).eval()
