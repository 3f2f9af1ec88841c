"""Which model a folder or file contains: the names that the tables of pronk find it by.

A model is found by the name in its own files (``ModelConfig.name``), and by the name of its
repository on the Hub, of its folder or of its file. Neither hashes nor sizes identify it: a
quantization has other weights than its original, and a fine-tuned model has the same sizes. Names
are compared by their letters and digits, without case, other characters, and a quantization at the
end: ``Qwen2.5 Coder 7B Instruct GGUF`` and ``qwen2.5-coder-7b-instruct-q4_k_m`` are
``Qwen2.5-Coder-7B-Instruct``. ``Qwen3-4B-Instruct-2507`` is another model than ``Qwen3-4B``. All
names in a row of ``known_models.json`` are of one model.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from pronk.checkpoint.config import ModelConfig
from pronk.checkpoint.hub.cache import repository_of
from pronk.checkpoint.hub.names import known_models

# Words at the end of a simplified name that say how weights are stored.
_STORAGE = re.compile(
    r"(-(gguf|awq|gptq|qat|bnb|mlx|exl[23]|quantized|dynamic|static|imatrix|i1|ud|bf16|fp16|f16|f32"
    r"|fp8|nvfp4|mxfp4|int[48]|w\d+a\d+|[3-8]-?bit|i?q\d(-[01])?(-k)?(-(xxs|xs|s|m|l|xl|nl))?))+$"
)
# Pattern of the end of a part's file name: ``-00001-of-00003``.
_PART = re.compile(r"-\d{5}-of-\d{5}$")


def simplify_name(name: str) -> str:
    """Return the part of a model's name that is compared, such as ``qwen2-5-coder-7b-instruct``.

    Two names are of the same model if their results are equal. The result is empty if the name has
    no letters and digits.
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    return _STORAGE.sub("", "-" + "-".join(words)).removeprefix("-")


@cache
def equal_names(name: str) -> frozenset[str]:
    """Return all simplified names of the model with the name ``name``, this one included."""
    simplified = simplify_name(name)
    names = {simplified}
    for known in known_models().values():
        row = frozenset(map(simplify_name, known.names))
        if simplified in row:
            names |= row
    return frozenset(names) - {""}


def model_names(path: Path | None, config: ModelConfig) -> frozenset[str]:
    """Return all simplified names of the model in a folder or GGUF file.

    Args:
        path: folder or GGUF file of the model; ``None`` if it is not known.
        config: config of the model.
    """
    names = equal_names(config.name)
    return names if path is None else names | equal_names(place_name(path))


def place_name(path: Path) -> str:
    """Return the simplified name of a model's repository on the Hub, of its folder or GGUF file."""
    repository = repository_of(path)
    if repository is not None:
        return simplify_name(repository.rpartition("/")[2])
    is_file = path.suffix.lower() == ".gguf"
    return simplify_name(_PART.sub("", path.stem) if is_file else path.name)
