"""Opens the prompt cache of a model on disk, for stored keys and values of its prompts.

Stored blocks are found only by a model whose files, config, kernels and options are the same.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from pronk import BITS, __version__
from pronk.base.errors import OptionError, refuse
from pronk.cache.block_store import BlockStore
from pronk.cache.budget import parse_memory
from pronk.cache.options import CacheOptions
from pronk.cache.prompt_cache import PromptCache
from pronk.checkpoint.config import ModelConfig
from pronk.checkpoint.gguf.checkpoint import GgufCheckpoint, file_identity
from pronk.kernels.library import Kernels, arithmetic_digest
from pronk.models.key_biases import SHORTEST_PAIR

_DEFAULT_SIZE = "4GiB"
_READ_BYTES = 1 << 24  # bytes of a file that are read at a time


def open_prompt_cache(
    options: CacheOptions,
    model: Path | GgufCheckpoint,
    config: ModelConfig,
    kernels: Kernels,
    *,
    split: bool,
    **settings: object,
) -> PromptCache | None:
    """Return the prompt cache that the options ask for; ``None`` without one.

    ``model`` is the folder of the checkpoint, or its opened GGUF file. ``split``: whether several
    processes share the heads, so that no process has whole blocks. ``settings`` are other options
    on which keys and values depend.

    Raises:
        OptionError: an option is malformed, the folder is not writable, or the model's blocks
            cannot be stored.
    """
    folder = options.prompt_cache
    size = options.prompt_cache_size
    if folder is None:
        if size is not None:
            msg = (
                f"prompt_cache_size: expected prompt_cache with it, found {size!r} alone; "
                "name a folder"
            )
            raise OptionError(msg)
        return None
    if not (isinstance(folder, str | Path) and str(folder)):
        refuse("prompt_cache", f"expected a folder, found {folder!r}", OptionError)
    num_bytes = parse_memory(_DEFAULT_SIZE if size is None else size, "prompt_cache_size")
    if split:
        msg = (
            "prompt_cache: expected a process that has whole blocks, found tensor parallelism; "
            "leave the option out"
        )
        raise OptionError(msg)
    try:
        store = BlockStore(Path(folder).expanduser(), num_bytes)
    except RuntimeError as error:
        msg = (
            f"prompt_cache: expected a home folder for {str(folder)!r}, found none; "
            "name another folder"
        )
        raise OptionError(msg) from error
    # The context changes no block: the divisors of longrope that it selects are in the RoPE
    # configuration.
    identity = replace(config, context=0).digest
    parts = {
        "version": __version__,
        "config": identity,
        "arithmetic": _arithmetic(kernels),
        "biases left out of int4 keys": SHORTEST_PAIR,
    } | settings
    key = repr([_content_digest(store, model), *sorted(parts.items())])
    return PromptCache(store, key)


def _arithmetic(kernels: Kernels) -> str:
    """Return what determines the bits of keys and values besides the model.

    Portable bits do not depend on the processor.
    """
    if kernels.bits == "portable":
        return f"portable bits of version {BITS}"
    return arithmetic_digest(kernels)


def _content_digest(store: BlockStore, model: Path | GgufCheckpoint) -> str:
    """Return a digest of the content of the model's files.

    It is stored in the database by the files' sizes and times, so that unchanged files are not read
    again.
    """
    if isinstance(model, GgufCheckpoint):
        states = model.identity
    else:  # the files of a checkpoint's weights and of its config
        paths = sorted([*model.glob("*.safetensors"), *model.glob("*config.json")])
        states = [file_identity(path.resolve()) for path in paths]
    # Tools can keep the time of modification of a file that they replace, but not the time of its
    # last change (ctime).
    times = [Path(path).stat().st_ctime_ns for path, *_ in states]
    name = sha256(repr([states, times]).encode()).hexdigest()
    known = store.find_note(name)
    if known is not None:
        return known
    digest = sha256()
    for path, _, size, _ in states:
        digest.update(f"{size} bytes: ".encode())
        with Path(path).open("rb") as file:
            while part := file.read(_READ_BYTES):
                digest.update(part)
    if states != [file_identity(Path(path)) for path, *_ in states]:
        refuse(
            states[0][0],
            "expected files that do not change while they are read, found others; load again",
        )
    store.add_note(name, digest.hexdigest())
    return digest.hexdigest()
