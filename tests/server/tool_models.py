"""Copies of pronk-tiny, or of some of its layers, with chat templates that render tools and
thoughts.
"""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors.torch import load_file, save_file

from pronk.checkpoint.hub.clone_models import tiny_model
from pronk.llm import LLM
from text.chat.tool_templates import PLAIN, TEMPLATES

TINY = tiny_model()
QWEN3 = (Path(__file__).parents[1] / "text/chat/templates/qwen3.jinja").read_text(encoding="utf-8")
# A template that begins the thoughts in the prompt, like that of DeepSeek-R1.
OPENED = QWEN3.replace(
    "{{- '<think>\\n\\n</think>\\n\\n' }}\n    {%- endif %}", "{%- endif %}{{- '<think>\\n' }}"
)
assert OPENED != QWEN3
SOURCES = {**TEMPLATES, "generic": PLAIN, "qwen3": QWEN3, "deepseek": OPENED}
# Special tokens of pronk-tiny that become markers. True: the marker stays special, so that decoded
# texts lack it.
RENAMED: Mapping[str, Mapping[str, tuple[str, bool]]] = {
    "mistral list": {"<|user|>": ("[TOOL_CALLS]", True)},
    "mistral": {"<|user|>": ("[TOOL_CALLS]", True), "<|assistant|>": ("[ARGS]", True)},
    "channels": {
        "<|user|>": ("<|channel|>", True),
        "<|assistant|>": ("<|message|>", True),
        "<|end|>": ("<|return|>", True),
    },
    "qwen3": {"<|user|>": ("<think>", False), "<|assistant|>": ("</think>", False)},
}
ALL_LAYERS = range(8)  # of pronk-tiny
# enough for texts that depend on the prompt; a forward pass takes a third of the time
FEW_LAYERS = (0, 7)
# token ids of <think> and </think> in "qwen3"
BEGIN_THOUGHT = 1
END_THOUGHT = 2


def tool_model(folder: Path, family: str, layers: Sequence[int] = ALL_LAYERS) -> LLM:
    """Return a copy of pronk-tiny with the template of a family; "deepseek" has no tokens for its
    markers.
    """
    write_tool_model(folder, family, layers=layers)
    return LLM(folder, prefix_cache=True, max_batch=8, threads=1, budget="all")


def write_layers(folder: Path, layers: Sequence[int]) -> None:
    """Write a copy of pronk-tiny with some of its layers into a folder."""
    for path in TINY.iterdir():
        if path.is_file():
            shutil.copy(path, folder / path.name)
    kept = {}
    for name, tensor in load_file(TINY / "model.safetensors").items():
        beginning, number, end = re.fullmatch(r"(?:(.*layers\.)(\d+))?(.*)", name).groups()  # type: ignore[union-attr]
        if number is None:
            kept[name] = tensor
        elif int(number) in layers:
            kept[f"{beginning}{layers.index(int(number))}{end}"] = tensor
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = len(layers)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def write_tool_model(
    folder: Path, family: str, context: int = 2048, layers: Sequence[int] = ALL_LAYERS
) -> None:
    """Write the copy of :func:`tool_model` into a folder; ``context`` is in tokens."""
    write_layers(folder, layers)
    for path in (
        folder / "tokenizer.json",
        folder / "tokenizer_config.json",
        folder / "special_tokens_map.json",
    ):
        text = path.read_text(encoding="utf-8")
        for old, (new, _) in RENAMED.get(family, {}).items():
            text = text.replace(old, new)
        path.write_text(text, encoding="utf-8")
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    special = dict(RENAMED.get(family, {}).values())
    for token in tokenizer["added_tokens"]:
        token["special"] = special.get(token["content"], token["special"])
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["chat_template"] = SOURCES[family]
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    shape = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape["max_position_embeddings"] = context
    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
