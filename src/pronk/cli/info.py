"""``pronk info``: what the headers of a model say about it, without reading its weights."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pronk.base.errors import PromptError, TokenizerError
from pronk.base.files.regular import read_input
from pronk.base.quantities import count_text, size_texts
from pronk.cli.panels import option

if TYPE_CHECKING:
    from pronk.checkpoint.config import ModelConfig
    from pronk.checkpoint.gguf.checkpoint import GgufCheckpoint
    from pronk.checkpoint.tensors import AnyCheckpoint
    from pronk.text.tokenizer import Tokenizer

_LABEL_WIDTH = 13  # characters before the values
# Files of a folder that begin with the name of a license, and the number of bytes to read of each.
_LICENSE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "COPYING")
_MAX_LICENSE_BYTES = 1 << 16
# Pattern of the keys of a model card's front matter that state its license.
_LICENSE_KEYS = re.compile(r"^(license|license_name): *(\S.*)$", re.MULTILINE)


def info(
    path: Annotated[
        str,
        typer.Argument(
            help="Folder, GGUF file, or a name of a model on this machine", show_default=False
        ),
    ],
    *,
    context: Annotated[
        int | None,
        option("Tokens for which memory is stated.", "--context", show_default="that of the model"),
    ] = None,
    as_json: Annotated[bool, option("Print one JSON document.", "--json", metavar="")] = False,
) -> None:
    """Describe a model: family, sizes, quantization, memory, chat template, drafters.

    Only the headers of its files are read, and nothing is downloaded.

    [bold]Examples[/]

    pronk info smollm2

    pronk info Qwen/Qwen3-4B-GGUF:Q4_K_M --context 8192
    """
    from pronk.cli.console import TerminalOutput
    from pronk.models.resolve import resolve_model

    facts = _facts(resolve_model(path, may_download=False), context)
    if as_json:
        typer.echo(json.dumps(facts, ensure_ascii=False))
        return
    TerminalOutput().facts(_lines(facts), _LABEL_WIDTH)


def _facts(path: Path, context: int | None) -> dict[str, Any]:
    """Return the facts about a model by name; a name that ends in ``bytes`` is a size in bytes."""
    from pronk.cache.budget import request_memory
    from pronk.checkpoint.gguf.checkpoint import GgufCheckpoint, is_gguf
    from pronk.checkpoint.hub.cache import model_label
    from pronk.checkpoint.tensors import Checkpoint
    from pronk.drafting.known_drafters import list_drafters
    from pronk.engine.engine import prefill_size
    from pronk.engine.options import BatchOptions
    from pronk.models.loader import parse_dtype, read_config
    from pronk.models.tensor_groups import OTHER
    from pronk.text.chat.dialects import REASONING_FORMATS
    from pronk.text.tokenizer import Tokenizer

    opened = GgufCheckpoint(path) if is_gguf(path) else None
    config = read_config(path, opened, context)
    checkpoint = opened or Checkpoint(path)
    dtype = parse_dtype("auto", config)
    weights = _weights(checkpoint, config)
    used = sum(row["bytes"] for row in weights if row["part"] != OTHER)
    prefill_chunk = prefill_size(BatchOptions().prefill_chunk, config)
    request = request_memory(config, dtype, config.context, prefill_chunk)
    templates = Tokenizer.load_templates(path, opened)
    template = templates.chat_template or ""
    thoughts = next((each for each in REASONING_FORMATS if each.template in template), None)
    return {
        "name": config.name or model_label(path),
        "path": str(path),
        "format": "safetensors" if opened is None else "GGUF",
        "family": config.family,
        "license": _license(path, opened),
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "vocabulary": config.vocab_size,
        "context": config.context,
        "weights_bytes": sum(row["bytes"] for row in weights),
        "weights": weights,
        "tied_output": config.tied,
        "kv_cache_bytes": request.kv_bytes,
        "request_state_bytes": request.state_bytes,
        "memory_bytes": used + sum(request),
        "tool_calls": _tool_dialect(templates),
        "thoughts": thoughts.name if thoughts else "no known format",
        "drafters": [each._asdict() for each in list_drafters(path, config)],
    }


def _weights(checkpoint: "AnyCheckpoint", config: "ModelConfig") -> list[dict[str, Any]]:
    """Return number and bytes of the tensors of each group and type, in the order of the model."""
    from pronk.models.tensor_groups import GROUPS, tensor_groups

    counts: dict[tuple[str, str], int] = defaultdict(int)
    sizes: dict[tuple[str, str], int] = defaultdict(int)
    for name, group in tensor_groups(checkpoint, config):
        key = (group, checkpoint.type(name))
        counts[key] += 1
        sizes[key] += checkpoint.nbytes(name)
    keys = sorted(sizes, key=lambda key: (GROUPS.index(key[0]), -sizes[key]))
    return [
        {"part": group, "type": kind, "tensors": counts[group, kind], "bytes": sizes[group, kind]}
        for group, kind in keys
    ]


def _license(path: Path, opened: "GgufCheckpoint | None") -> str | None:
    """Return the license that a GGUF file, a folder or the table of short names states."""
    from pronk.checkpoint.hub.cache import model_label
    from pronk.checkpoint.hub.names import known_models

    stated = None if opened is None else opened.header.get("general.license")
    if isinstance(stated, str):
        return stated
    known = known_models().get(model_label(path))
    if known is not None:
        return known.license
    return _folder_license(path) if opened is None else None


def _folder_license(folder: Path) -> str | None:
    """Return the license that a folder's model card states, or the first line of its LICENSE."""
    for card in _read_texts(folder, ["README.md"]):
        head = re.match(r"---\n(.*?)\n---", card, re.DOTALL)
        front_matter = head[1] if head else ""
        values = dict(_LICENSE_KEYS.findall(front_matter))
        stated = values.get("license")
        # Model cards have "other" if the license has no identifier of SPDX.
        if stated == "other":
            stated = values.get("license_name", stated)
        if stated is not None:
            return _as_line(stated.strip(" \"'"))
    for text in _read_texts(folder, _LICENSE_FILES):
        line = next(filter(None, map(_as_line, text.splitlines())), None)
        if line is not None:
            return line
    return None


def _read_texts(folder: Path, names: Sequence[str]) -> Iterator[str]:
    """Yield the first bytes of the files of a folder that exist, with plain ends of lines."""
    for name in names:
        with suppress(OSError):
            data = read_input(folder / name, _MAX_LICENSE_BYTES)
            yield "\n".join(data.decode(errors="replace").splitlines())


def _as_line(text: str) -> str:
    """Return a text without control characters, outer spaces and marks of headings, cut to 80."""
    printable = "".join(character for character in text if character.isprintable())
    return printable.strip("#* ")[:80]


def _tool_dialect(templates: "Tokenizer") -> str:
    """Return the name of the format of tool calls, or why there is none."""
    from pronk.text.chat.dialects import find_tool_dialect

    try:
        return find_tool_dialect(templates).name
    except TokenizerError:
        return "no chat template"
    except PromptError:
        return "no known format"


def _drafter_lines(drafters: list[dict[str, Any]]) -> list[str]:
    """Return a line for each trained drafter or draft model that fits a model."""
    from pronk.drafting.known_drafters import KnownDrafter

    known = [KnownDrafter(**each) for each in drafters]
    lines = [each.label if each.here else f"{each.label}, not here" for each in known]
    return lines or ["none trained for this model"]


def _lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the facts as pairs of a label and a text, in the order in which they are shown."""
    weights = defaultdict[str, list[str]](list)
    for row in facts["weights"]:
        weights[row["part"]].append(f"{row['type']} {size_texts(row['bytes'])[0]}")
    if facts["tied_output"]:
        weights["output"] = ["the embedding"]
    lines = [
        ("name", facts["name"]),
        ("format", facts["format"]),
        ("family", facts["family"]),
        ("license", facts["license"] or "not stated"),
        ("layers", str(facts["layers"])),
        ("hidden size", str(facts["hidden_size"])),
        ("vocabulary", count_text(facts["vocabulary"], "token")),
        ("context", count_text(facts["context"], "token")),
        ("weights", size_texts(facts["weights_bytes"])[0]),
        *((f"  {part}", ", ".join(types)) for part, types in weights.items()),
        ("KV cache", f"{size_texts(facts['kv_cache_bytes'])[0]} for the context"),
    ]
    if facts["request_state_bytes"]:
        lines.append(("states", f"{size_texts(facts['request_state_bytes'])[0]} for each request"))
    lines += [
        ("memory", f"{size_texts(facts['memory_bytes'])[0]} for one request of the whole context"),
        ("tool calls", facts["tool_calls"]),
        ("thoughts", facts["thoughts"]),
    ]
    lines += [("drafters", text) for text in _drafter_lines(facts["drafters"])]
    return lines
