"""Paths of the HTTP API, and hints for the paths of other servers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches

API_PATHS = (
    "/v1/models",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/moderations",
    "/v1/rerank",
)
_OLLAMA = (
    "/api/tags",
    "/api/ps",
    "/api/show",
    "/api/chat",
    "/api/generate",
    "/api/embed",
    "/api/embeddings",
    "/api/version",
)
# Paths with which Ollama's clients download, change and delete models. A server does none of this,
# except for /api/pull with --allow-pull: its operator does, with commands of pronk.
_OLLAMA_CHANGES = (
    "/api/pull",
    "/api/push",
    "/api/create",
    "/api/copy",
    "/api/delete",
    "/api/blobs",
)
# Paths with errors in Ollama's format.
OLLAMA_PATHS = (*_OLLAMA, *_OLLAMA_CHANGES)
OTHER_PATHS = (
    "/infill",
    "/tokenize",
    "/detokenize",
    "/tokenizer_info",
    "/health",
    "/ready",
    "/metrics",
    *_OLLAMA,
    # paths of llama-server
    "/props",
    "/slots",
)
_VERSION = "/v1"
# Paths of other servers whose requests are those of one of pronk's routes.
_SAME_REQUESTS: Mapping[str, str] = {
    "/v2/rerank": "/v1/rerank",  # Cohere
    "/reranking": "/v1/rerank",  # llama-server
    "/v1/reranking": "/v1/rerank",
}


def canonical_path(path: str) -> str:
    """Return the API path that a client means: ``/v1/models`` for ``/v1/v1/models/``.

    A client's base URL may lack ``/v1``, have it twice, or end with a slash. A path of another
    server that takes the same requests is replaced by pronk's. Other paths are returned unchanged.
    """
    short = path.rstrip("/")
    if short in _SAME_REQUESTS:
        return _SAME_REQUESTS[short]
    while short.startswith(_VERSION * 2):
        short = short.removeprefix(_VERSION)
    for candidate in (short, f"{_VERSION}{short}"):
        if candidate in API_PATHS or candidate.startswith("/v1/models/"):
            return candidate
    return path


# Paths of other servers that pronk lacks, each with the most similar path of pronk, or None.
_CHAT = "/v1/chat/completions"
_TEXT = "/v1/completions"
_VECTORS = "/v1/embeddings"
_LIST = "/v1/models"
_FOREIGN: Mapping[str, str | None] = {
    # paths of Ollama
    **dict.fromkeys(_OLLAMA_CHANGES, None),
    # paths of llama-server
    "/completion": _TEXT,
    "/embedding": _VECTORS,
    "/apply-template": "/tokenize",
    "/lora-adapters": _LIST,
    # paths of Text Embeddings Inference
    "/embed": _VECTORS,
    "/embed_all": _VECTORS,
    "/decode": "/detokenize",
    "/info": _LIST,
    **dict.fromkeys(("/embed_sparse", "/predict", "/similarity"), None),
    # paths of Text Generation Inference
    "/generate": _TEXT,
    "/generate_stream": _TEXT,
    "/chat_tokenize": "/tokenize",
    # paths of vLLM
    "/ping": "/health",
    "/version": "/health",
    "/load": "/metrics",
    "/server_info": _LIST,
    "/inference/v1/generate": _TEXT,
    "/get_tokenizer_info": "/tokenizer_info",
    **dict.fromkeys(
        ("/score", "/pooling", "/classify", "/invocations", "/sleep", "/wake_up"), None
    ),
    **dict.fromkeys(("/load_lora_adapter", "/unload_lora_adapter", "/reset_prefix_cache"), None),
    # paths of the APIs of OpenAI and Anthropic
    "/engines": _TEXT,
    "/edits": _CHAT,
    "/complete": "/v1/messages",
    "/responses/input_tokens": "/v1/messages/count_tokens",
    "/messages/batches": "/v1/messages",
    "/batches": _CHAT,
    "/conversations": "/v1/responses",
    **dict.fromkeys(
        ("/audio", "/images", "/videos", "/files", "/uploads", "/fine_tuning", "/vector_stores"),
        None,
    ),
    **dict.fromkeys(
        ("/assistants", "/threads", "/realtime", "/evals", "/containers", "/organization"), None
    ),
    **dict.fromkeys(("/skills", "/chatkit", "/graders"), None),
}
_VERSIONS = re.compile(r"^(/(v\d+|openai))+(?=/)")  # prefixes such as /v1 or /openai/v1


def near_path(path: str) -> str | None:
    """Return the path of this server that is most similar to an unknown path, or ``None``.

    The unknown path may be one of another server (``/api/chat``), have another base
    (``/openai/v1/responses``), or a typing error.
    """
    foreign = foreign_path(path)
    if foreign is not None:
        return _FOREIGN[foreign]
    known = (*API_PATHS, *OTHER_PATHS)
    short = path.rstrip("/")
    same_end = [each for each in known if short.endswith(each.removeprefix(_VERSION))]
    if same_end:
        return max(same_end, key=len)
    close = get_close_matches(path, known, 1, cutoff=0.8)
    return close[0] if close else None


def foreign_path(path: str) -> str | None:
    """Return the known path of another server with which a path begins, or ``None``."""
    short = _VERSIONS.sub("", path.rstrip("/"))
    found = [each for each in _FOREIGN if f"{short}/".startswith(f"{each}/")]
    return max(found, key=len, default=None)


def unknown_path_message(path: str) -> str:
    """Return the error message for a path that this server does not have."""
    near = near_path(path)
    if foreign_path(path) is None:
        hint = f"did you mean {near}?" if near else "see /openapi.json"
        return f"path: expected one of this server, found {path!r:.80}; {hint}"
    hint = "no other route does the same, see /openapi.json"
    if foreign_path(path) in _OLLAMA_CHANGES:
        hint = "run `pronk pull NAME` where the server runs, and serve it with --model NAME"
    if foreign_path(path) == "/api/pull":
        hint = "run `pronk pull NAME` where the server runs, or start it with --allow-pull"
    if near:
        hint = f"use {near} for the nearest"
    return f"path: pronk has no route {path!r:.80}; {hint}"
