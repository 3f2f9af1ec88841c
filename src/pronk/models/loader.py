"""From a name to a running decoder: find the folder, read its config, put its weights in.

Weights are placed part by part. At any moment the process owns what has been placed so far plus the copies that the
current part needs, so a checkpoint costs its own size in the loaded dtype and little more. On a CPU the embedding
is not copied at all: its rows are read from the mapped file. Quantized weights stay so where there are kernels for
them; torch gets what they stand for.
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
from pronk.models.checkpoint import open_checkpoint, read_json
from pronk.models.clone_models import clone_model, default_model
from pronk.models.decoder import Decoder
from pronk.models.families import plan_tensors
from pronk.models.inventory import Inventory, names_of
from pronk.models.linear import choose_linear
from pronk.models.placer import WeightPlacer
from pronk.models.split import TensorSplit
from pronk.quantization.formats.formats import scheme_of
from pronk.quantization.gguf.checkpoint import GgufCheckpoint, is_gguf
from pronk.quantization.gguf.config import parse_gguf

__all__ = ["computed_in", "covers", "load_decoder", "parse_dtype", "read_config", "resolve_model"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Where the formats said what they are before config.json did, and which format that is.
_OLDER = {"quantize_config.json": "gptq", "quant_config.json": "awq"}

# Everything a model needs, and nothing that could run. Mistral's repositories hold a second copy of the weights.
_WANTED = ["*.json", "*.safetensors", "*.txt", "*.jinja", "tokenizer.model"]
_UNWANTED = ["*/*", "consolidated*.safetensors"]


def resolve_model(name: str | Path | None, *, revision: str | None = None) -> Path:
    """Return the folder or GGUF file of a model; a model of the Hugging Face Hub is downloaded.

    Args:
        name: a folder, a GGUF file, ``owner/name`` of a model on the Hub, or in a clone the name of a folder in
            ``models/``; ``None`` is the clone's ``pronk-tiny``.
        revision: branch, tag or commit on the Hub.

    Raises:
        CheckpointError: there is no such folder, file or model, or the download fails.
        OptionError: no name is given outside a clone.
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
    if (found := clone_model(text)) is not None:
        return found
    if isinstance(name, Path) or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", text):
        msg = f"no such folder: {text!r}; expected a model folder, or owner/name of a model on the Hugging Face Hub"
        raise CheckpointError(msg)
    return _download(text, revision)


def _download(repo: str, revision: str | None) -> Path:
    # A quarter of a second that models on disk need not wait for.
    from huggingface_hub import errors, snapshot_download  # noqa: PLC0415

    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
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


def read_config(folder: Path) -> ModelConfig:
    """``config.json`` of a model folder; the end-of-text ids of ``generation_config.json`` win, where it has some.

    A GGUF file has the same in its metadata.

    Raises:
        ConfigError: no folder, no or damaged ``config.json``, or a model that is not supported.
        CheckpointError: a damaged GGUF file.
    """
    if is_gguf(folder):
        return parse_gguf(GgufCheckpoint(folder))
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
        config = parse_config(raw | _older(folder, raw))
        if config.quantization is not None:
            scheme_of(config.quantization)  # what cannot be loaded is refused before anything else is done
        return config
    except ConfigError as error:
        msg = f"{folder}: {error}"
        raise ConfigError(msg) from error


def _older(folder: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """The ``quantization_config`` of a folder that has it in a file of its own."""
    for name, method in _OLDER.items():
        if not (raw.get("quantization_config") or raw.get("compression_config")) and (folder / name).is_file():
            return {"quantization_config": {"quant_method": method, **read_json(folder / name, ConfigError)}}
    return {}


def parse_dtype(name: str, config: ModelConfig) -> torch.dtype:
    """The dtype that an option names; ``auto`` is the checkpoint's own.

    Raises:
        OptionError: not one of the supported names.
    """
    dtype = _DTYPES.get(config.dtype if name == "auto" else name)
    if dtype is None:
        msg = f"dtype: expected auto, {', '.join(_DTYPES)}; found {name!r}"
        raise OptionError(msg)
    return dtype


def covers(kernels: Kernels | None, config: ModelConfig) -> bool:
    """Whether there are kernels, and they cover a model of this shape."""
    return kernels is not None and kernels.covers(config.head_dim)


def computed_in(dtype: torch.dtype, kernels: Kernels | None) -> torch.dtype:
    """What a model is computed in whose weights are of ``dtype``: the kernels widen float16 as they read it."""
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
    on_progress: Callable[[int, int], None] | None = None,
) -> Decoder:
    """A decoder with the weights of ``folder``, in ``dtype`` on ``device``.

    On a CPU the embedding and learned positions stay in the file's dtype, mapped; an embedding of codes stays codes,
    where there are kernels.

    Args:
        folder: a model folder with safetensors files, or a GGUF file.
        config: what :func:`read_config` says about it.
        dtype: of the weights and the computation.
        device: where the weights go.
        kernels: who will compute with the weights; ``None`` is torch.
        weights: ``"plain"`` as they are stored; ``"int8"`` and ``"int4"`` round them as they are loaded.
        split: which part of it, where other processes have the rest.
        on_progress: called with the bytes read so far and in total.

    Raises:
        CheckpointError: tensors are missing, left over, wrongly shaped, of a wrong type or damaged; or quantized in a
            form that cannot be split so.
        OptionError: ``weights`` is neither, or the device has no products for it.
    """
    checkpoint = open_checkpoint(folder)
    linear = choose_linear(kernels, device, weights, dtype, checkpoint.release)
    parts = list(plan_tensors(config, names_of(checkpoint, config)))
    inventory = Inventory(checkpoint, config, parts)
    # Tables first, then the head that is one of them; then what is large, while there is little beside it.
    parts.sort(key=lambda part: (part.kind != "table", bool(part.weight), -inventory.nbytes(part)))
    with torch.device("meta"):
        decoder = Decoder(config, None if split is None else split.share)
    placer = WeightPlacer(decoder, inventory, dtype, device, linear, split, quantized=kernels is not None)
    sizes = [inventory.nbytes(part) for part in parts]
    done, total = 0, sum(sizes)
    for part, size in zip(parts, sizes, strict=True):
        placer.place(part)
        done += size
        if on_progress is not None and size:
            on_progress(done, total)
    notes = [*inventory.notes, *placer.notes]
    if notes:
        warnings.warn(f"{folder.name}: {'; '.join(notes)}", stacklevel=2)
    return decoder.requires_grad_(False).eval()
