"""From a name to a running decoder: find the folder, read its config, put its weights in.

Weights are placed part by part. At any moment the process owns what has been placed so far plus the copies that the
current part needs, so a checkpoint costs its own size in the loaded dtype and little more. On a CPU the embedding
is not copied at all: its rows are read from the mapped file.
"""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from pronk.architecture.config import ModelConfig, parse_config
from pronk.errors import CheckpointError, ConfigError, OptionError
from pronk.gguf.checkpoint import GgufCheckpoint, is_gguf
from pronk.gguf.config import parse_gguf
from pronk.kernels.library import Kernels
from pronk.model.checkpoint import Checkpoint, read_json
from pronk.model.decoder import Decoder, Layer
from pronk.model.families import FAMILY_NAMES, FamilyNames, Part, Piece, plan_tensors
from pronk.model.linear import Layout, LinearFactory, choose_linear

__all__ = ["computed_in", "covers", "load_decoder", "parse_dtype", "read_config", "resolve_model"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Bytes from which a matrix is worth an allocation of its own.
_OWN_PAGES = 1 << 20

# Everything a model needs, and nothing that could run. Mistral's repositories hold a second copy of the weights.
_WANTED = ["*.json", "*.safetensors", "*.txt", "*.jinja", "tokenizer.model"]
_UNWANTED = ["*/*", "consolidated*.safetensors"]


def resolve_model(name: str | Path, *, revision: str | None = None) -> Path:
    """The folder of a model: an existing one, or a model of the Hugging Face Hub (``owner/name``), downloaded.

    A GGUF file is a model, too.

    Raises:
        CheckpointError: no such folder or file, no such model, or it cannot be downloaded.
    """
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
        return parse_config(raw)
    except ConfigError as error:
        msg = f"{folder}: {error}"
        raise ConfigError(msg) from error


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
    on_progress: Callable[[int, int], None] | None = None,
) -> Decoder:
    """A decoder with the weights of ``folder``, in ``dtype`` on ``device``.

    On a CPU the embedding and learned positions stay in the file's dtype, mapped.

    Args:
        folder: a model folder with safetensors files.
        config: what :func:`read_config` says about it.
        dtype: of the weights and the computation.
        device: where the weights go.
        kernels: who will compute with the weights; ``None`` is torch.
        weights: ``"plain"`` as they are stored; ``"int8"`` and ``"int4"`` round them as they are loaded.
        on_progress: called with the bytes read so far and in total.

    Raises:
        CheckpointError: tensors are missing, left over, wrongly shaped, not floating point or damaged.
        OptionError: ``weights`` is neither, or the device has no products for it.
    """
    linear = choose_linear(kernels, device, weights, dtype)
    checkpoint = Checkpoint(folder)
    names = FAMILY_NAMES[config.family]
    parts = list(plan_tensors(config))
    stored = _match(checkpoint, names, config, [piece for part in parts for piece in part.pieces])
    with torch.device("meta"):
        decoder = Decoder(config)
    placer = _Placer(decoder, checkpoint, stored, dtype, device, linear)
    sizes = [sum(checkpoint.nbytes(stored[piece.name]) for piece in part.pieces) for part in parts]
    done, total = 0, sum(sizes)
    for part, size in zip(parts, sizes, strict=True):
        placer.place(part)
        done += size
        if on_progress is not None and size:
            on_progress(done, total)
    return decoder.requires_grad_(False).eval()


class _Placer:
    """Builds one part after the other."""

    def __init__(
        self,
        decoder: Decoder,
        checkpoint: Checkpoint,
        stored: dict[str, str],
        dtype: torch.dtype,
        device: torch.device,
        linear: LinearFactory,
    ) -> None:
        self.decoder, self.checkpoint, self.stored = decoder, checkpoint, stored
        self.dtype, self.device, self.linear = dtype, device, linear

    def place(self, part: Part) -> None:
        path, _, name = part.target.rpartition(".")
        parent = self.decoder.get_submodule(path)
        if part.kind == "table":
            table = self._read(part.weight[0])
            table = table if self.device.type == "cpu" else table.to(self.device, self.dtype)
            setattr(parent, name, nn.Parameter(table, requires_grad=False))
        elif part.kind == "linear":
            tied = [self.decoder.embedding.detach()]
            weight = self._stack([self._read(piece) for piece in part.weight] or tied, transposed=part.transposed)
            layout = parent.layout(name) if isinstance(parent, Layer) else Layout(head=True)
            setattr(parent, name, self.linear(weight, self._vector(part.bias), layout))
        else:
            for key, pieces in (("weight", part.weight), ("bias", part.bias)):
                vector = self._vector(pieces)
                if vector is not None:
                    setattr(parent.get_submodule(name), key, nn.Parameter(vector, requires_grad=False))
        self.checkpoint.release()

    def _vector(self, pieces: tuple[Piece, ...]) -> Tensor | None:
        return self._stack([self._read(piece) for piece in pieces]) if pieces else None

    def _stack(self, tensors: list[Tensor], *, transposed: bool = False) -> Tensor:
        """The tensors on top of each other, in the loaded dtype; a single one is not copied without need."""
        if len(tensors) == 1 and not transposed and (self.device.type != "cpu" or tensors[0].dtype == self.dtype):
            return tensors[0].to(self.device, self.dtype)
        tensors = [tensor.t() if transposed else tensor for tensor in tensors]
        rows = [tensor.shape[0] for tensor in tensors]
        # One allocation in which every piece is converted in place: the converted pieces never exist beside it.
        stacked = self._empty(sum(rows), *tensors[0].shape[1:])
        for target, tensor in zip(stacked.split(rows), tensors, strict=True):
            target.copy_(tensor)
        return stacked

    def _empty(self, *shape: int) -> Tensor:
        """A large matrix on a CPU gets pages of its own: a packed copy that replaces it leaves no hole in the heap."""
        size = math.prod(shape) * self.dtype.itemsize
        if self.device.type != "cpu" or size < _OWN_PAGES:
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        return torch.frombuffer(mmap.mmap(-1, size), dtype=self.dtype).view(shape)

    def _read(self, piece: Piece) -> Tensor:
        return self.checkpoint.tensor(self.stored[piece.name])


def _match(checkpoint: Checkpoint, names: FamilyNames, config: ModelConfig, pieces: list[Piece]) -> dict[str, str]:
    """Name without prefix to name in the file, once every tensor is accounted for."""
    stored: dict[str, str] = {}
    for name in checkpoint:
        plain = names.canonical(name)
        if plain in stored:
            msg = f"{checkpoint.folder}: expected one tensor {plain}, found two: {stored[plain]} and {name}"
            raise CheckpointError(msg)
        stored[plain] = name
    if config.tied:
        _check_tied(checkpoint, names, stored)
    wanted = {piece.name: piece.shape for piece in pieces}
    extra = [stored[name] for name in stored if name not in wanted and not names.ignored.fullmatch(name)]
    missing = [name for name in wanted if name not in stored]
    for kind, found in (("missing", missing), ("unexpected", extra)):
        if found:
            listed = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
            msg = (
                f"{checkpoint.folder}: {kind} tensors: {listed}; expected the {len(wanted)} tensors that config.json "
                f"asks for, found {len(checkpoint)}; check that the files are complete and belong together"
            )
            raise CheckpointError(msg)
    for name, shape in wanted.items():
        _check_shape(checkpoint, stored[name], shape)
    return stored


def _check_shape(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> None:
    found = checkpoint.shape(name)
    if found != shape:
        msg = (
            f"{checkpoint.folder}: tensor {name}: expected shape {list(shape)} from config.json, found {list(found)}; "
            "check that config.json and the weights belong together"
        )
        raise CheckpointError(msg)
    checkpoint.check_dtype(name)


def _check_tied(checkpoint: Checkpoint, names: FamilyNames, stored: dict[str, str]) -> None:
    """Drop a head that repeats the embedding; a head of its own contradicts the config."""
    head, embedding = stored.pop(f"{names.head}.weight", None), stored.get(f"{names.embedding}.weight")
    if head is None or embedding is None:
        return
    _check_shape(checkpoint, head, checkpoint.shape(embedding))
    if not torch.equal(checkpoint.tensor(head), checkpoint.tensor(embedding)):
        msg = (
            f"{checkpoint.folder}: expected {head} to equal {embedding}, as tie_word_embeddings in config.json says, "
            "found different values; set tie_word_embeddings to false to use both"
        )
        raise CheckpointError(msg)
