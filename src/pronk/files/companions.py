"""Copy the tokenizer, licence and similar files of a checkpoint to a checkpoint derived from it."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

__all__ = ["TOKENIZER_FILES", "copy_companions"]

TOKENIZER_FILES = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json tokenizer.model vocab.json "
    "merges.txt chat_template.jinja"
).split()
_OTHER_FILES = "chat_template.json generation_config.json LICENSE LICENSE.txt LICENSE.md NOTICE".split()


def copy_companions(source: Path, folder: Path, files: Iterable[str] = (*TOKENIZER_FILES, *_OTHER_FILES)) -> None:
    """Copy ``files`` from the folder ``source`` to ``folder``; skip files that ``source`` does not have."""
    for file in files:
        if (source / file).is_file():
            shutil.copyfile(source / file, folder / file)
