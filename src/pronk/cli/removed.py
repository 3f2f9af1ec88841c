"""Replacements of commands and options that version 0.1 had; remove this module in the next version."""

from collections.abc import Sequence

from pronk.errors import OptionError

__all__ = ["refuse_removed"]

# Options of ``pronk bench`` that measured servers.
_SERVER_OPTIONS = (
    "server server-model api-key endpoint extra-body concurrency rate requests warmup timeout goodput unique"
).split()

_REPLACEMENTS = {
    "advise": "pronk explain, which shows the choices of the drafter auto, or pronk bench, which compares drafters",
    "inflate": "python benchmarks/inflate.py of the source tree, or measure a real model",
    **dict.fromkeys(
        [f"bench --{option}" for option in _SERVER_OPTIONS],
        "GuideLLM, as in docs/benchmarks.md: guidellm run --backend kind=openai_http,target=URL",
    ),
    **dict.fromkeys(
        ["bench --peer-source", "bench --peer-cache"],
        "a GGUF file, which peers and pronk read alike: pronk bench --model model.gguf --peer all",
    ),
}


def refuse_removed(arguments: Sequence[str]) -> None:
    """Raise ``OptionError`` if the words after ``pronk`` name a removed command or option."""
    command = next((word for word in arguments if not word.startswith("-")), "")
    words = {word.partition("=")[0] for word in arguments}
    for removed, replacement in _REPLACEMENTS.items():
        name, _, option = removed.partition(" ")
        if name == command and (not option or option in words):
            msg = f"pronk {removed}: removed; use {replacement}"
            raise OptionError(msg)
