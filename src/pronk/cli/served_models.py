"""The models of ``pronk serve``: from its options to a pool."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pronk.errors import OptionError

if TYPE_CHECKING:
    from pronk.cli.console import TerminalOutput
    from pronk.server.model_pool import ModelPool
    from pronk.server.settings import ServerSettings

__all__ = ["open_models"]

_MEMORY_FRACTION = 0.75  # share of the machine's memory that several models may use by default
_ASSUMED_MEMORY = 8 << 30  # bytes of the machine's memory, if the system does not report them


def open_models(
    screen: "TerminalOutput",
    values: Sequence[str],
    options: dict[str, Any],
    settings: "ServerSettings",
    template: str,
    *,
    pins: Sequence[str] = (),
    memory: str | None = None,
    idle_minutes: float | None = None,
) -> "ModelPool":
    """Return the models to serve; the pinned ones and the first one are loaded.

    The others load at their first request. A single model is pinned, unless ``idle_minutes`` is set.

    Args:
        screen: shows the progress of the loading.
        values: values of ``--model``.
        options: arguments of :class:`pronk.LLM` for each model, without the model.
        settings: settings of the server; a name in them is that of the only model.
        template: prompt of ``/v1/moderations``.
        pins: names of the models that are never unloaded.
        memory: maximum memory of all loaded models, as in ``2GiB``; ``None``: for several models, most of the
            machine's; for a single one, no limit.
        idle_minutes: time without a request after which a model is unloaded; ``None``: never.

    Raises:
        CheckpointError: there is no such model, or the first or a pinned one cannot be loaded.
        OptionError: two models have one name, or an option does not fit the models.
    """
    from pronk.kv_cache.budget import machine_memory, parse_memory
    from pronk.server.adapter_names import AdapterNames
    from pronk.server.model_loader import ModelLoader
    from pronk.server.model_names import find_models
    from pronk.server.model_pool import ModelPool, PooledModel
    from pronk.server.settings import model_key

    options = {name: value for name, value in options.items() if name != "model"}
    with screen.loading() as bar:
        found = find_models(values, progress=bar)
        if len(found) > 1:
            _check_options(len(found), settings.name, options)
        elif settings.name:
            found = [(settings.name, path) for _, path in found]
        limit = None if memory is None else parse_memory(memory, "memory")
        if limit is None and len(found) > 1:
            limit = int(_MEMORY_FRACTION * (machine_memory() or _ASSUMED_MEMORY))
        models = [
            PooledModel(
                AdapterNames(name, options["adapters"]),
                ModelLoader(path, options, replace(settings, name=name), template, limit),
            )
            for name, path in found
        ]
        by_key = {model_key(model.name): model for model in models}
        for name in pins:
            if model_key(name) not in by_key:
                msg = f"pin: expected one of {', '.join(model.name for model in models)}; found {name!r}"
                raise OptionError(msg)
            by_key[model_key(name)].pinned = True
        models[0].pinned |= len(models) == 1 and idle_minutes is None
        idle_seconds = None if idle_minutes is None else 60.0 * idle_minutes
        pool = ModelPool(models, replace(settings, name=found[0][0]), memory=limit, idle_seconds=idle_seconds)
        for model in sorted(models, key=lambda model: not model.pinned):
            if model.pinned or model is models[0]:
                pool.preload(model, bar)
    return pool


def _check_options(count: int, name: str, options: dict[str, Any]) -> None:
    """Raise OptionError for options that only a single model can have."""
    if name:
        msg = f"name: expected one model, found {count}; name each: --model NAME=MODEL"
        raise OptionError(msg)
    if options["adapters"]:
        msg = f"adapter: expected one model, found {count}; serve the adapters' model with a server of its own"
        raise OptionError(msg)
    if options["workers"] > 1:
        msg = f"workers: expected 1 with several models, found {options['workers']}; leave it out"
        raise OptionError(msg)
    if not isinstance(options["calibration"], bool):
        found = options["calibration"]
        msg = f"calibration: expected on or off with several models, found {found}; leave the file out"
        raise OptionError(msg)
