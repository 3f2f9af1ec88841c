"""Paths of the API, and the paths that clients with another base URL send instead."""

from __future__ import annotations

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
)
OTHER_PATHS = ("/tokenize", "/detokenize", "/tokenizer_info", "/health", "/ready", "/metrics")
_VERSION = "/v1"


def canonical_path(path: str) -> str:
    """Return the path of the API that is meant.

    A client's base URL may lack ``/v1``, have it twice, or end with a slash.
    """
    short = path.rstrip("/")
    while short.startswith(_VERSION * 2):
        short = short.removeprefix(_VERSION)
    for candidate in (short, f"{_VERSION}{short}"):
        if candidate in API_PATHS or candidate.startswith("/v1/models/"):
            return candidate
    return path


def near_path(path: str) -> str | None:
    """Return the path of the server that is most like an unknown one, if any is."""
    known = (*API_PATHS, *OTHER_PATHS)
    same_end = [each for each in known if path.rstrip("/").endswith(each.removeprefix(_VERSION))]
    if same_end:
        return max(same_end, key=len)
    return next(iter(get_close_matches(path, known, 1)), None)
