"""Copies of pronk-tiny with chat templates that render tools."""

import json
import shutil
from pathlib import Path

from pronk.llm import LLM
from pronk.models.clone_models import tiny_model
from tokenization.chat.tool_templates import TEMPLATES

TINY = tiny_model()


def tool_model(folder: Path, family: str) -> LLM:
    """Return a copy of pronk-tiny with the template of a family.

    For Mistral, the special token ``<|user|>`` is renamed ``[TOOL_CALLS]``, which begins calls.
    """
    for path in TINY.iterdir():
        if path.is_file():
            shutil.copy(path, folder / path.name)
    for path in (folder / "tokenizer.json", folder / "tokenizer_config.json", folder / "special_tokens_map.json"):
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace("<|user|>", "[TOOL_CALLS]") if family == "mistral" else text, encoding="utf-8")
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["chat_template"] = TEMPLATES[family]
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return LLM(folder, prefix_cache=True, max_batch=8, threads=1, budget="all")
