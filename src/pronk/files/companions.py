"""Files beside the weights that a derived checkpoint takes over."""

from __future__ import annotations

import shutil
from pathlib import Path

__all__ = ["copy_companions"]

_COPIED = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json tokenizer.model vocab.json "
    "merges.txt chat_template.jinja chat_template.json generation_config.json LICENSE LICENSE.txt LICENSE.md NOTICE"
).split()


def copy_companions(source: Path, folder: Path) -> None:
    """Copy the tokenizer, chat template, generation defaults and licence from ``source`` to ``folder``."""
    for file in _COPIED:
        if (source / file).is_file():
            shutil.copyfile(source / file, folder / file)
