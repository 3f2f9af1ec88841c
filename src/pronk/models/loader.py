"""Loading of a model: read its config and its fingerprint, and load its weights into a decoder.

Weights are loaded part by part, so peak memory is little more than their size in the loaded dtype.
An unquantized embedding is not copied, nor are embeddings of single layers: their rows are read
from the mapped file. Quantized weights stay quantized.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from pronk.base.arrays import DTYPES, FLOAT32, DType
from pronk.base.checks import check_choice, check_integer
from pronk.base.errors import ConfigError, OptionError, locate_error, refuse
from pronk.base.files.regular import is_folder
from pronk.checkpoint.config import ModelConfig
from pronk.checkpoint.embedding import gguf_embedding_defaults, read_embedding_defaults
from pronk.checkpoint.formats.scheme import parse_scheme
from pronk.checkpoint.gguf.checkpoint import GgufCheckpoint, is_gguf
from pronk.checkpoint.tensors import open_checkpoint, read_json
from pronk.kernels.library import MAX_HEAD_DIM, Kernels
from pronk.kernels.weight_cache import WeightCache
from pronk.models.decoder import Decoder
from pronk.models.families import parse_config, parse_gguf
from pronk.models.inventory import Inventory, tensor_names
from pronk.models.linear import LinearFactory, choose_linear
from pronk.models.placer import WeightPlacer
from pronk.models.split import TensorSplit
from pronk.models.tensor_plan import plan_tensors
from pronk.sampling.defaults import GGUF_KEYS, recommended_sampling

# Minimum number of values of a tensor that enter a fingerprint, evenly spaced. Of a smaller tensor,
# all values do.
_SAMPLES = 4096
# Older checkpoints have the quantization config in a separate file, whose name implies the
# ``quant_method``.
_QUANTIZATION_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}

# Options of transformers in ``generation_config.json`` that pronk ignores, with the value of each
# that changes nothing. Any other value raises a warning.
_OTHER_GENERATION_KEYS: dict[str, float | None] = {
    **dict.fromkeys(
        (
            "suppress_tokens",
            "begin_suppress_tokens",
            "bad_words_ids",
            "sequence_bias",
            "stop_strings",
        )
    ),
    **dict.fromkeys(
        ("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty")
    ),
    **dict.fromkeys(
        ("min_length", "min_new_tokens", "no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff"), 0
    ),
    **dict.fromkeys(("num_beams", "typical_p", "guidance_scale"), 1),
    "penalty_alpha": 0,
}


def read_config(
    folder: Path, opened: GgufCheckpoint | None = None, context: int | None = None
) -> ModelConfig:
    """Read the config of a model folder or GGUF file.

    ``eos_token_id`` in ``generation_config.json`` overrides that in ``config.json``. The field
    ``sampling`` has the sampling options that ``generation_config.json`` or the GGUF file
    recommends. The field ``name`` is ``general.name`` of a GGUF file, or the last part of
    ``_name_or_path`` in ``config.json``. The field ``embedding`` has what the files of
    sentence-transformers or the GGUF file say about embeddings.

    Args:
        folder: model folder, or GGUF file.
        opened: the GGUF file, if it is open already.
        context: maximum number of tokens of a text, prompt and output; ``None``: that of the
            model.

    Raises:
        CheckpointError: the config is invalid or not supported.
        OptionError: ``context`` exceeds that of the model, or the model has learned positions.
    """
    config = _read_full_config(folder, opened)
    if context is not None:
        check_integer("context", context, 1, config.context)
        if config.norm == "layer":
            msg = (
                f"context: expected no limit with learned positions, found {context}; "
                "leave the option out"
            )
            raise OptionError(msg)
    return config.for_context(context)


def _read_full_config(folder: Path, opened: GgufCheckpoint | None) -> ModelConfig:
    """Return the config of a model without a limit of the context by the user."""
    if is_gguf(folder):
        opened = opened or GgufCheckpoint(folder)
        values = {name: opened.header.get(key) for key, name in GGUF_KEYS.items()}
        sampling = recommended_sampling(values, str(folder))
        return replace(
            parse_gguf(opened),
            name=_as_name(opened.header.get("general.name")),
            sampling=sampling,
            embedding=gguf_embedding_defaults(opened.header.get),
        )
    if not is_folder(folder):
        msg = (
            f"no such folder: {str(folder)!r}; expected a folder with config.json, *.safetensors "
            "and tokenizer.json"
        )
        raise ConfigError(msg)
    if not (folder / "config.json").is_file():
        refuse(
            folder,
            "expected a model folder with config.json, found none; is this the right folder?",
            ConfigError,
        )
    raw = read_json(folder / "config.json", ConfigError)
    file = folder / "generation_config.json"
    generation = read_json(file, ConfigError) if file.is_file() else {}
    if generation.get("eos_token_id") is not None:
        raw |= {"eos_token_id": generation["eos_token_id"]}
    _warn_of_other_options(generation, file)
    sampling = recommended_sampling(generation, str(file))
    with locate_error(folder, ConfigError, ConfigError):
        config = parse_config(raw | _separate_quantization(folder, raw))
        if config.quantization is not None:
            parse_scheme(config.quantization)  # raises a ConfigError if the format is not supported
    return replace(
        config,
        name=_as_name(raw.get("_name_or_path")),
        sampling=sampling,
        embedding=read_embedding_defaults(folder),
    )


def _as_name(value: object) -> str:
    """Return the last part of a name ``owner/name``; empty if ``value`` is no text."""
    if not isinstance(value, str):
        return ""
    _, _, name = value.rstrip("/").rpartition("/")
    return name


def _warn_of_other_options(generation: dict[str, Any], file: Path) -> None:
    """Warn of options in ``generation_config.json`` that transformers honours and pronk ignores."""
    values = {key: generation.get(key) for key in _OTHER_GENERATION_KEYS}
    found = [
        key
        for key, value in values.items()
        if value not in (None, False, [], {}, _OTHER_GENERATION_KEYS[key])
    ]
    if found:
        warnings.warn(
            f"{file}: {', '.join(found)}: ignored; give options of requests instead", stacklevel=2
        )


def _separate_quantization(folder: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """Return ``{"quantization_config": …}`` from a separate file of an older checkpoint.

    ``{}`` if the config ``raw`` already has one, or no such file exists.
    """
    for name, method in _QUANTIZATION_FILES.items():
        if (
            not (raw.get("quantization_config") or raw.get("compression_config"))
            and (folder / name).is_file()
        ):
            return {
                "quantization_config": {
                    "quant_method": method,
                    **read_json(folder / name, ConfigError),
                }
            }
    return {}


def has_quantized_weights(config: ModelConfig, opened: GgufCheckpoint | None) -> bool:
    """Return whether a checkpoint has quantized weights; ``opened``: a GGUF file, if it is one."""
    if opened is None:
        return config.quantization is not None
    return any(opened.has_blocks(name) for name in opened)


def parse_dtype(name: str, config: ModelConfig) -> DType:
    """Return the NumPy dtype called ``name``; ``auto`` means the dtype that ``config`` has.

    Raises:
        OptionError: there is no such dtype.
    """
    check_choice("dtype", name, ("auto", *DTYPES))
    return DTYPES[config.dtype if name == "auto" else name]


def load_decoder(
    source: Path | GgufCheckpoint,
    config: ModelConfig,
    *,
    dtype: DType,
    kernels: Kernels,
    weights: str | LinearFactory = "plain",
    split: TensorSplit | None = None,
    cache: WeightCache | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Decoder:
    """Return a decoder with the weights of a model folder or GGUF file, packed for the kernels.

    An unquantized embedding and learned positions are views of the mapped file, with the file's
    dtype.

    Args:
        source: path of the model, or an open GGUF file.
        config: config of the model.
        dtype: data type of the unquantized weights.
        kernels: the kernels that compute the model.
        weights: ``plain``, or ``int8`` or ``int4`` to quantize what the checkpoint does not
            (:func:`~pronk.models.linear.choose_linear`). Or the function that builds the linear
            layers, for another device than the CPU.
        split: shard of this process in tensor parallelism.
        cache: packed weights of earlier loads; weights that it lacks are added and saved.
        on_progress: called with the number of bytes read so far, and the total.

    Raises:
        CheckpointError: tensors are missing, unexpected, damaged, of a wrong shape or dtype, or
            quantized in a format that tensor parallelism cannot split.
        ConfigError: the kernels lack attention heads of the model's sizes.
        OptionError: ``weights`` is unknown.
    """
    _check_heads(config, kernels)
    checkpoint = open_checkpoint(source) if isinstance(source, Path) else source
    if isinstance(weights, str):
        linear = choose_linear(kernels, weights, checkpoint.release, cache)
    else:
        linear = weights
    parts = list(plan_tensors(config, tensor_names(checkpoint, config)))
    inventory = Inventory(checkpoint, config, parts)
    # Order of loading: first embeddings, which a tied LM head needs; then the tied LM head; then
    # the other parts, the largest first, while most memory is free.
    lookups = {"table", "mapped"}
    parts.sort(
        key=lambda part: (part.kind not in lookups, bool(part.weight), -inventory.nbytes(part))
    )
    decoder = Decoder(config, kernels, None if split is None else split.shard_config)
    placer = WeightPlacer(decoder, inventory, dtype, linear, split)
    sizes = [0 if part.kind == "mapped" else inventory.nbytes(part) for part in parts]
    loaded = 0
    stored = 0
    total = sum(sizes)
    for part, size in zip(parts, sizes, strict=True):
        placer.place(part)
        loaded += size
        stored += (
            size if part.kind != "table" or (config.tied and part.target == "embedding") else 0
        )
        if on_progress is not None and size:
            on_progress(loaded, total)
    decoder.stored_bytes = stored
    if cache is not None:
        cache.save()
    notes = [*inventory.notes, *placer.notes]
    if notes:
        warnings.warn(f"{checkpoint.folder.name}: {'; '.join(notes)}", stacklevel=2)
    return decoder


def _check_heads(config: ModelConfig, kernels: Kernels) -> None:
    """Raise a ConfigError if the kernels lack attention heads of the model's sizes."""
    unsupported = [size for size in config.head_dims if not kernels.supports_head_dim(size)]
    if unsupported:
        refuse(
            "head_dim",
            f"expected an even number of at most {MAX_HEAD_DIM}, found {max(unsupported)}; "
            "use another model",
            ConfigError,
        )


@dataclass(frozen=True)
class Fingerprint:
    """Identity of a checkpoint: family and sizes in words, and a hash of 16 hexadecimal digits.

    A trained drafter has the fingerprint of its target, so that it is not used with another model.
    The hash covers a sample of every tensor, so that it is fast for any size, and does not depend
    on the distribution of the tensors over files.
    """

    architecture: str
    weights: str

    @classmethod
    def of(cls, folder: Path) -> Fingerprint:
        """Compute the fingerprint of the model in a folder or a GGUF file."""
        architecture = describe_architecture(read_config(folder))
        checkpoint = open_checkpoint(folder)
        digest = sha256(architecture.encode())
        for name in sorted(checkpoint):
            if isinstance(checkpoint, GgufCheckpoint):
                values = checkpoint.raw_bytes(name)  # quantized blocks as they are, not dequantized
            else:
                values = checkpoint.tensor(name).reshape(-1)
            sample = values[:: max(1, len(values) // _SAMPLES)].astype(FLOAT32)
            digest.update(f"{name} {checkpoint.shape(name)}".encode() + sample.tobytes())
            checkpoint.release()
        return cls(architecture, digest.hexdigest()[:16])

    def __str__(self) -> str:
        return f"{self.architecture}, weights {self.weights}"


def describe_architecture(config: ModelConfig) -> str:
    """Return family and sizes of a model in words: "llama of 30 layers, hidden size 576, …"."""
    return (
        f"{config.family} of {config.num_layers} layers, hidden size {config.hidden_size}, "
        f"{config.num_heads} "
        f"heads of {config.head_dim} over {config.num_kv_heads}, vocabulary {config.vocab_size}"
    )
