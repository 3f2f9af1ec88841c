"""``pronk info``: what the header of a model says about it, without reading its weights."""

import json
from collections import defaultdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pronk.base.errors import PromptError, TokenizerError
from pronk.base.quantities import size_texts
from pronk.cli.panels import option

if TYPE_CHECKING:
    from pronk.checkpoint.gguf.checkpoint import GgufCheckpoint
    from pronk.text.tokenizer import Tokenizer


def info(
    path: Annotated[str, typer.Argument(help="GGUF file, or a name of one", show_default=False)],
    *,
    context: Annotated[
        int | None,
        option("Tokens for which memory is stated.", "--context", show_default="that of the model"),
    ] = None,
    as_json: Annotated[bool, option("Print one JSON document.", "--json", metavar="")] = False,
) -> None:
    """Describe a GGUF model: family, sizes, quantization, chat template, memory.

    Only the headers of its files are read.

    [bold]Examples[/]

    pronk info smollm2
    """
    from pronk.base.errors import refuse
    from pronk.checkpoint.gguf.checkpoint import GgufCheckpoint, is_gguf
    from pronk.models.resolve import resolve_model

    file = resolve_model(path)
    if not is_gguf(file):
        refuse(file, "expected a GGUF file, found a model folder; pronk info reads GGUF files only")
    facts = _facts(GgufCheckpoint(file), context)
    if as_json:
        typer.echo(json.dumps(facts, ensure_ascii=False))
        return
    for name, value in facts.items():
        if isinstance(value, dict):
            for kind, part in value.items():
                typer.echo(
                    f"  {kind:14}{part['tensors']:6} tensors  {size_texts(part['bytes'])[0]}"
                )
        elif name.endswith("bytes"):
            label = name.replace("_", " ").removesuffix(" bytes")
            typer.echo(f"{label:16}{size_texts(value)[0]}")
        elif value is not None:
            typer.echo(f"{name.replace('_', ' '):16}{value}")


def _facts(checkpoint: "GgufCheckpoint", context: int | None) -> dict[str, Any]:
    """Return the facts about a model by name; a name that ends in ``bytes`` is a size in bytes."""
    from pronk.base.arrays import FLOAT32
    from pronk.cache.layout import kv_bytes_per_token, state_bytes
    from pronk.cache.states import state_size
    from pronk.models.loader import parse_dtype, read_config
    from pronk.text.chat.dialects import REASONING_FORMATS
    from pronk.text.tokenizer import Tokenizer

    header = checkpoint.header
    config = read_config(checkpoint.folder, checkpoint, context)
    dtype = parse_dtype("auto", config)
    kinds: dict[str, dict[str, int]] = defaultdict(lambda: {"tensors": 0, "bytes": 0})
    for name in checkpoint:
        kind = kinds[checkpoint.type(name)]
        kind["tensors"] += 1
        kind["bytes"] += checkpoint.nbytes(name)
    weights = sum(kind["bytes"] for kind in kinds.values())
    states = 0
    if config.recurrent is not None:
        per_layer = state_size(config.recurrent) * FLOAT32.itemsize
        states = sum(config.recurrent.layers) * per_layer
    per_token = kv_bytes_per_token(config, dtype) + state_bytes(config, dtype)
    tokenizer = Tokenizer.load(checkpoint.folder, opened=checkpoint)
    template = tokenizer.chat_template or ""
    thoughts = next((each for each in REASONING_FORMATS if each.template in template), None)
    heads = header.get(f"{header.get('general.architecture')}.nextn_predict_layers") or 0
    return {
        "name": header.get("general.name"),
        "family": config.family,
        "license": header.get("general.license"),
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "vocabulary": config.vocab_size,
        "context": config.context,
        "weights_bytes": weights,
        "kinds": dict(sorted(kinds.items())),
        "kv_cache_bytes": per_token * config.context,
        "request_state_bytes": states,
        "memory_bytes": weights + per_token * config.context + states,
        "tool_calls": _tool_dialect(tokenizer),
        "thoughts": thoughts.name if thoughts else "no known format",
        "mtp_heads": heads,
    }


def _tool_dialect(tokenizer: "Tokenizer") -> str:
    """Return the name of the format of tool calls, or why there is none."""
    from pronk.text.chat.dialects import find_tool_dialect

    try:
        return find_tool_dialect(tokenizer).name
    except TokenizerError:
        return "no chat template"
    except PromptError:
        return "no known format"
