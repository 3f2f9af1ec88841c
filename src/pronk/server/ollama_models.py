"""Descriptions of a server's models in the form of Ollama's API.

A model that is not loaded is described by its name alone. ``digest`` is empty: Ollama's is the hash
of a manifest, which models of pronk do not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic, time
from typing import Any

from pronk.checkpoint import weight_files
from pronk.server.model_pool import ModelPool, PooledModel
from pronk.server.protocol.ollama import to_time

# The time of what has none, as Ollama writes it; and the time at which a model that is never
# unloaded expires.
_NO_TIME = "0001-01-01T00:00:00Z"
_NEVER = "9999-12-31T23:59:59Z"


def list_tags(models: ModelPool) -> list[dict[str, Any]]:
    """Return the field ``models`` of ``/api/tags``: all models and adapters."""
    return [_entry(model, name) for model in models.models for name in model.names.all]


def list_loaded(models: ModelPool) -> list[dict[str, Any]]:
    """Return the field ``models`` of ``/api/ps``: the loaded models."""
    entries = list[dict[str, Any]]()
    for model in models.models:
        if model.service is None:
            continue
        entry = _entry(model, model.name)
        del entry["modified_at"]
        entry["expires_at"] = _NEVER
        if models.idle_seconds is not None and not model.pinned:
            idle = monotonic() - model.last_use
            entry["expires_at"] = to_time(time() + models.idle_seconds - idle)
        entry["size_vram"] = 0
        entry["context_length"] = model.service.engine.llm.config.context
        entries.append(entry)
    return entries


def describe(model: PooledModel) -> dict[str, Any]:
    """Return the reply of ``/api/show``: template, sizes and abilities of a model."""
    entry = _entry(model, model.name)
    reply: dict[str, Any] = {
        "modelfile": "",
        "parameters": "",
        "template": "",
        "details": entry["details"],
        "model_info": {},
        "capabilities": ["completion"],
        "modified_at": entry["modified_at"],
    }
    if model.service is None:
        return reply
    llm = model.service.engine.llm
    config = llm.config
    family = config.family
    sampling = model.details["sampling"]
    reply["parameters"] = "\n".join(f"{name} {value:g}" for name, value in sampling.items())
    reply["template"] = llm.tokenizer.chat_template or ""
    reply["model_info"] = {
        "general.architecture": family,
        "general.basename": config.name,
        f"{family}.context_length": config.context,
        f"{family}.embedding_length": config.hidden_size,
        f"{family}.block_count": config.num_layers,
        f"{family}.attention.head_count": config.num_heads,
        f"{family}.attention.head_count_kv": config.num_kv_heads,
    }
    answers = llm.request_factory.answer_format
    allow_generic = model.service.settings.generic_tools
    abilities = {
        "embedding": True,
        "tools": answers.problem_with_tools(allow_generic=allow_generic) is None,
        "thinking": answers.reasoning is not None,
    }
    reply["capabilities"] += [name for name, has in abilities.items() if has]
    return reply


def loaded_reply(name: str, empty: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reply to a request that only loads a model; ``empty`` is its empty answer."""
    head = {"model": name, "created_at": to_time(time())}
    return {**head, **empty, "done": True, "done_reason": "load"}


def _entry(model: PooledModel, name: str) -> dict[str, Any]:
    """Return the entry of a model or an adapter in a list of models."""
    details = {
        "parent_model": "" if name == model.name else model.name,
        "format": "",
        "family": "",
        "families": [],
        "parameter_size": "",
        "quantization_level": "",
    }
    size = 0
    modified = _NO_TIME
    if model.service is not None:
        llm = model.service.engine.llm
        path = llm.path
        size = sum(file.stat().st_size for file in weight_files(path))
        modified = to_time(path.stat().st_mtime)
        family = llm.config.family
        details["format"] = "safetensors" if path.is_dir() else "gguf"
        details["family"] = family
        details["families"] = [family]
    return {
        "name": name,
        "model": name,
        "modified_at": modified,
        "size": size,
        "digest": "",
        "details": details,
    }
