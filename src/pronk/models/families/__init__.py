"""The families of models, one module for each: adding a family is adding a module.

A module has a tuple ``FAMILIES`` of :class:`~pronk.models.family.Family`. This package imports
every module in its folder, so a new one needs no registration.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, TypeVar

from pronk.base.errors import ConfigError, refuse
from pronk.checkpoint.config import ModelConfig
from pronk.checkpoint.gguf.checkpoint import GgufCheckpoint
from pronk.checkpoint.rope import refuse_config
from pronk.models.config_reader import UNSUPPORTED_KEYS, ConfigReader
from pronk.models.family import Family, GgufArchitecture, RefusedFamily
from pronk.models.gguf_config import parse_architecture

# Keys that the ``text_config`` of a multimodal model may leave to the config of the whole model.
_SHARED_KEYS = (
    "bos_token_id",
    "eos_token_id",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "compression_config",
)


T = TypeVar("T")
AnyFamily = Family | RefusedFamily
Architecture = tuple[Family, GgufArchitecture]


def index_model_types(families: Sequence[AnyFamily]) -> dict[str, AnyFamily]:
    """Return families by the values of ``model_type`` in ``config.json`` that select them.

    The values are a family's own and, for multimodal models, that of the whole model. Raise a
    ValueError if two families claim the same one.
    """
    own = [(family.model_type, family) for family in families]
    supported = [family for family in families if isinstance(family, Family)]
    outer = [(name, family) for family in supported for name in family.multimodal]
    return _unique("model_type", [*own, *outer])


def index_architectures(families: Sequence[AnyFamily]) -> dict[str, Architecture]:
    """Return pairs of family and GGUF architecture, by the architecture's name.

    The name is the value of ``general.architecture``. Raise a ValueError if two families claim the
    same one.
    """
    supported = [family for family in families if isinstance(family, Family)]
    pairs = [(family, architecture) for family in supported for architecture in family.gguf]
    return _unique("architecture", [(pair[1].name, pair) for pair in pairs])


def _unique(kind: str, claims: Iterable[tuple[str, T]]) -> dict[str, T]:
    found: dict[str, T] = {}
    for name, claimed in claims:
        if name in found:
            msg = f"{kind} {name!r}: expected one family with this name, found two"
            raise ValueError(msg)
        found[name] = claimed
    return found


def discover() -> Iterator[AnyFamily]:
    """Yield the families of all modules of this package."""
    for module in pkgutil.iter_modules(__path__):
        yield from import_module(f"{__name__}.{module.name}").FAMILIES


FAMILIES = tuple(discover())
_BY_MODEL_TYPE = index_model_types(FAMILIES)
ARCHITECTURES = index_architectures(FAMILIES)
# Supported values of ``model_type``, sorted.
SUPPORTED = sorted(name for name, each in _BY_MODEL_TYPE.items() if isinstance(each, Family))


def get_family(model_type: object) -> Family:
    """Return the family with a ``model_type``; raise a ConfigError if pronk does not support it."""
    family = _BY_MODEL_TYPE.get(model_type) if isinstance(model_type, str) else None
    where = f"config.json has model_type {model_type!r}"
    if isinstance(family, RefusedFamily):
        refuse(where, family.reason, ConfigError)
    if family is None or family.model_type != model_type:
        supported = ", ".join(SUPPORTED)
        refuse("unknown architecture", f"{where}; supported are {supported}", ConfigError)
    return family


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Parse a ``config.json`` document; raise a ConfigError if it is invalid or not supported.

    The config is for the longest context of the model; :meth:`ModelConfig.for_context` shortens it.
    """
    raw = _text_config(raw)
    family = get_family(raw.get("model_type"))
    # Early versions of compressed-tensors wrote compression_config.
    quantization = raw.get("quantization_config") or raw.get("compression_config")
    if quantization and not isinstance(quantization, Mapping):
        refuse_config(f"expected an object as quantization_config, found {quantization!r:.80}")
    keys = ConfigReader({**family.defaults, **raw}, family.model_type)
    config = family.parse(keys)
    unsupported = [key for key in UNSUPPORTED_KEYS if raw.get(key) and key not in keys.used]
    unsupported += ["is_causal"] * (raw.get("is_causal") is False)
    if unsupported:
        found = f"{unsupported[0]} = {raw[unsupported[0]]!r}"
        refuse_config(f"{found} is not supported; expected a plain {family.model_type} model")
    for layer in range(config.num_layers):
        kv_heads = config.shape_of(layer).num_kv_heads
        if config.num_heads % kv_heads:
            found = f"{config.num_heads} attention heads cannot share {kv_heads}"
            refuse_config(f"{found} key/value heads; expected a divisor")
    mixture = config.mixture
    if mixture is not None and not mixture.has_valid_groups:
        found = f"{mixture.experts} experts in {mixture.groups} groups"
        chosen = f"{mixture.per_row} experts of {mixture.row_groups} groups"
        refuse_config(f"expected groups of one size, from which a row has {chosen}, found {found}")
    return replace(config, quantization=quantization or None)


def _text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config that describes the language model, for a multimodal model.

    Keys that this part lacks are taken from the config of the whole model. The config of another
    model is returned as it is.
    """
    model_type = raw.get("model_type")
    family = _BY_MODEL_TYPE.get(model_type) if isinstance(model_type, str) else None
    if not isinstance(family, Family) or model_type not in family.multimodal:
        return raw
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        refuse_config(f"expected an object as text_config, found {text!r:.80}")
    inherited = {key: raw[key] for key in _SHARED_KEYS if raw.get(key) is not None}
    tied = raw.get("tie_word_embeddings")
    overriding = {} if tied is None else {"tie_word_embeddings": tied}
    return {"model_type": family.model_type, **inherited, **text, **overriding}


def get_architecture(checkpoint: GgufCheckpoint) -> Architecture:
    """Return the family and the architecture of the model in a GGUF file.

    A ConfigError is raised if the architecture is not supported.
    """
    name = checkpoint.header.get("general.architecture")
    # The names of GGUF architectures have hyphens where ``model_type`` has underscores.
    refused = _BY_MODEL_TYPE.get(str(name).replace("-", "_"))
    if isinstance(refused, RefusedFamily) and name not in ARCHITECTURES:
        refuse(checkpoint.folder, f"architecture {name}: {refused.reason}", ConfigError)
    if not isinstance(name, str) or name not in ARCHITECTURES:
        supported = ", ".join(sorted(ARCHITECTURES))
        found = f"unknown architecture {name!r:.40}; supported in GGUF files are {supported}"
        refuse(checkpoint.folder, found, ConfigError)
    return ARCHITECTURES[name]


def parse_gguf(checkpoint: GgufCheckpoint) -> ModelConfig:
    """Return the configuration of the model in a GGUF file.

    The field ``dtype`` is bfloat16 if the weights are quantized.

    Raises:
        ConfigError: the architecture or a value is not supported, or a value is missing or wrong.
        TokenizerError: the tokens of the file are inconsistent.
    """
    family, architecture = get_architecture(checkpoint)
    return parse_architecture(checkpoint, architecture, family.model_type)
