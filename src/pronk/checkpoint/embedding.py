"""How the files of a model say that its hidden states become the embedding of a text.

A folder says it in the files of sentence-transformers: ``modules.json`` lists the modules that
compute an embedding, and the folder of the module ``Pooling`` has a ``config.json``. A GGUF file
says it in ``ARCHITECTURE.pooling_type``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pronk.base.errors import ConfigError, refuse
from pronk.checkpoint.config import EmbeddingDefaults
from pronk.checkpoint.gguf.reader import GgufFile
from pronk.checkpoint.hub.names import POOLING_FILE
from pronk.checkpoint.tensors import read_json, read_json_list

MODULES_FILE = "modules.json"
# Names of poolings, by the keys of the module's config, of which one is true.
_POOLING_KEYS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
# Names of poolings by llama.cpp's numbers. A model that ranks (4) has no pooling of its own.
_GGUF_POOLINGS = {1: "mean", 2: "cls", 3: "last"}


def read_embedding_defaults(folder: Path) -> EmbeddingDefaults:
    """Return what a model folder says about embeddings; the defaults if it has no modules.

    Raises:
        ConfigError: a file of sentence-transformers is damaged.
    """
    file = folder / MODULES_FILE
    if not file.is_file():
        return EmbeddingDefaults()
    kinds = list[str]()
    pooling = EmbeddingDefaults.pooling
    for module in read_json_list(file, ConfigError):
        if not isinstance(module, Mapping) or not isinstance(module.get("type"), str):
            refuse(file, f"expected modules with a type, found {module!r:.80}", ConfigError)
        # A type is the path of a class, such as sentence_transformers.models.Pooling.
        kind = module["type"].rpartition(".")[2]
        kinds.append(kind)
        if kind == "Pooling":
            pooling = _read_pooling(folder / POOLING_FILE)
    known = ("Transformer", "Pooling", "Normalize")
    others = tuple(kind for kind in kinds if kind not in known)
    return EmbeddingDefaults(pooling, "Normalize" in kinds, others)


def _read_pooling(file: Path) -> str:
    """Return the name of the pooling in the config of the module ``Pooling``.

    Several poolings, whose results sentence-transformers concatenates, are joined by ``+``.
    """
    config = read_json(file, ConfigError)
    mode = config.get("pooling_mode")  # key of newer versions of sentence-transformers
    if isinstance(mode, str):
        return {"lasttoken": "last"}.get(mode, mode)
    chosen = [name for key, name in _POOLING_KEYS.items() if config.get(key) is True]
    return "+".join(chosen) or EmbeddingDefaults.pooling


def gguf_embedding_defaults(header: GgufFile) -> EmbeddingDefaults:
    """Return what the metadata of a GGUF file say about embeddings.

    llama.cpp normalizes every embedding, so that a file does not say it.
    """
    kind = header.get(f"{header.get('general.architecture')}.pooling_type")
    pooling = _GGUF_POOLINGS.get(kind) if isinstance(kind, int) else None
    return EmbeddingDefaults(pooling or EmbeddingDefaults.pooling)
