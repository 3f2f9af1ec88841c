"""Loading of an engine: weights and adapters of the model, its KV cache, and worker processes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pronk.architecture.config import ModelConfig
from pronk.arrays import INT8, DType
from pronk.checks import check_integer
from pronk.drafters.proposer_cache import ProposerCache
from pronk.engine.engine import Engine
from pronk.errors import OptionError
from pronk.kernels.weight_cache import WeightCache
from pronk.kv_cache.budget import KVBudget
from pronk.kv_cache.prompt_cache import PromptCache
from pronk.models.adapters import Adapters
from pronk.models.backend import Backend
from pronk.models.loader import compute_dtype, load_decoder
from pronk.models.prompt_cache import open_prompt_cache
from pronk.parallel.worker_group import SingleProcess, start_workers
from pronk.quantization.gguf.checkpoint import GgufCheckpoint
from pronk.speculation.proposer import Drafter

if TYPE_CHECKING:
    from pronk.parallel.processes import WorkerGroup


class EngineSource(NamedTuple):
    """A model to load: its files, config, backend, adapters and default drafter."""

    path: Path  # folder or GGUF file
    opened: GgufCheckpoint | None  # the GGUF file
    config: ModelConfig
    dtype: DType
    backend: Backend
    adapters: Adapters
    drafter: Drafter  # default drafter


def prefill_size(prefill_chunk: int | Literal["window"], config: ModelConfig) -> int:
    """Return the maximum number of prompt tokens per pass; ``"window"`` is the largest sliding window.

    Raises ``OptionError`` if the number is not in 16..8192, or no layer has a sliding window. With chunks of one window
    (Jiang et al. 2023, figure 3) a chunk sees itself and the chunk before it.
    """
    if prefill_chunk != "window":
        return check_integer("prefill_chunk", prefill_chunk, 16, 8192)
    windows = [size for size in config.windows if size is not None]
    if not windows:
        msg = "prefill_chunk: expected a model with a sliding window, found none; give a number in 16..8192"
        raise OptionError(msg)
    return min(max(16, *windows), 8192)


def load_engine(  # noqa: PLR0913 - independent options
    source: EngineSource,
    *,
    weights: str,
    weight_cache: bool | str | Path,
    context: int | None,
    kv_memory: str | int | None,
    kv_dtype: str,
    prefix_cache: bool,
    prompt_cache: str | Path | None,
    prompt_cache_size: str | int | None,
    workers: int,
    parallel: str,
    progress: Callable[[int, int], None] | None,
    **engine: Any,
) -> tuple[Engine, ProposerCache, SingleProcess | WorkerGroup, PromptCache | None]:
    """Load a model and build its engine; return the engine and the objects that belong to it.

    Arguments are those of :class:`pronk.LLM` and :class:`Engine`. Raises ``CheckpointError`` if the model cannot be
    loaded, ``OptionError`` if an option does not fit it.
    """
    path, opened, config, dtype, backend, adapters, drafter = source
    is_split = parallel == "tensor" and workers > 1
    cacheable = None if opened is None or backend.kernels is None or is_split else opened.identity
    cache_file = WeightCache.open(weight_cache, cacheable)
    settings = {"model": path, "dtype": dtype, "weights": weights, "kv_dtype": kv_dtype}
    prompts = open_prompt_cache(
        prompt_cache, prompt_cache_size, opened or path, config, backend, split=is_split, weights=weights
    )
    kv_budget = KVBudget(kv_memory, engine["max_batch"], workers, backend.memory)
    team = start_workers(workers, parallel, config, backend.kernels, context=context, **settings)
    with ExitStack() as on_error:
        on_error.callback(team.end)
        how: dict[str, Any] = {"dtype": dtype, "backend": backend, "weights": weights, "split": team.split}
        decoder = load_decoder(path, config, **how, opened=opened, cache=cache_file, on_progress=progress)
        adapters.attach(decoder)
        cache = kv_budget.add(
            team.shard_config,
            compute_dtype(dtype, backend),
            backend.make_cache if team.pool is None else partial(backend.make_cache, cache_class=team.pool),
            INT8 if kv_dtype == "int8" else None,
            share_prefixes=prefix_cache or prompts is not None,
        )
        if prompts is not None:
            prompts.attach(cache)
        runner = team.make_runner(decoder, cache)
        loaded = Engine(decoder, cache, kv_budget=kv_budget, folder=path, runner=runner, **engine)
        proposers = ProposerCache(loaded.target, drafter)
        on_error.pop_all()  # no error: keep the workers running
    return loaded, proposers, team, prompts
