"""A model of few layers whose vocabulary has tokens for filling in the middle."""

from pathlib import Path

from server.tool_models import FEW_LAYERS, write_layers

# Special tokens of pronk-tiny that become the tokens before the parts.
MARKS = {
    "<|user|>": "<|fim_prefix|>",
    "<|assistant|>": "<|fim_middle|>",
    "<|end|>": "<|fim_suffix|>",
}


def write_coder(folder: Path) -> Path:
    """Write the model to a new folder; return the folder."""
    folder.mkdir(exist_ok=True)
    write_layers(folder, FEW_LAYERS)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        text = (folder / name).read_text(encoding="utf-8")
        for old, new in MARKS.items():
            text = text.replace(old, new)
        (folder / name).write_text(text, encoding="utf-8")
    return folder
