"""A whole benchmark: models, one after the other, and all that is measured on each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pronk.bench.host import versions
from pronk.bench.machine import BandwidthMeter, PeakMemory, hardware
from pronk.bench.measure import Bench, Options, Timer
from pronk.bench.methods import Drafting, Method, Missing, PeerMethod
from pronk.bench.peers import Peer, PeerError, PeerSpec
from pronk.bench.prompts import Prompt
from pronk.bench.records import PLAIN, Model, PeerRecord, Start, StepTrace
from pronk.drafters import make_drafter
from pronk.errors import OptionError
from pronk.kv_cache.layout import kv_bytes_per_token
from pronk.llm import LLM
from pronk.models.checkpoint import read_json
from pronk.models.loader import read_config
from pronk.models.weights import count_parameters, pass_weights
from pronk.quantization.gguf.checkpoint import is_gguf

__all__ = ["PeerOptions", "Plan", "Progress", "check", "peer_source", "run"]

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class PeerOptions:
    """Which peers take part, and how.

    Attributes:
        specs: their methods and weights.
        draft: folder of the draft model, for those that need one.
        source: the plain checkpoint that a quantized model was made from, for peers that cannot take the model itself.
        pythons: engine to the interpreter that it is installed for, where that is not ours.
        cache: where converted models are kept.
    """

    specs: tuple[PeerSpec, ...] = ()
    draft: Path | None = None
    source: Path | None = None
    pythons: Mapping[str, str] = field(default_factory=dict)
    cache: Path = Path.home() / ".cache" / "pronk" / "peers"


@dataclass(frozen=True)
class Plan:
    """What to measure: drafters and peers on all prompts; plain decoding is always there and comes first."""

    drafters: tuple[str, ...]
    peers: PeerOptions
    tasks: Mapping[str, Sequence[Prompt]]
    options: Options

    @property
    def methods(self) -> tuple[str, ...]:
        """All methods in the order in which they are shown."""
        return tuple(dict.fromkeys((PLAIN, *self.drafters, *map(str, self.peers.specs))))


def check(plan: Plan) -> None:
    """Find mistakes before a model is loaded.

    Raises:
        OptionError: a drafter or a peer that there is not, or that cannot be measured this way.
    """
    for drafter in plan.drafters:
        make_drafter(drafter)
    if plan.peers.specs and plan.options.batch > 1:
        msg = f"peers are measured one prompt at a time; expected --batch 1, found {plan.options.batch}"
        raise OptionError(msg)
    _check_peers(plan.peers)


def _check_peers(peers: PeerOptions) -> None:
    engines = {spec.mode.engine for spec in peers.specs}
    for spec in peers.specs:
        if spec.mode.needs_draft and peers.draft is None:
            msg = f"peer {spec}: expected --peer-draft with the folder of a draft model, found none"
            raise OptionError(msg)
    for option, folder in (("peer-draft", peers.draft), ("peer-source", peers.source)):
        if folder is not None and not (folder / "config.json").is_file():
            msg = f"{option}: expected a folder with a checkpoint, found {folder}"
            raise OptionError(msg)
    for engine in peers.pythons:
        if engine not in engines:
            known = ", ".join(sorted(engines)) or "none"
            msg = f"peer-python: expected an engine that is measured ({known}), found {engine}"
            raise OptionError(msg)
    if peers.draft is not None and not any(spec.mode.needs_draft for spec in peers.specs):
        msg = "peer-draft: expected a peer that takes a draft model, such as transformers_assisted, found none"
        raise OptionError(msg)
    if peers.source is not None and not peers.specs:
        msg = "peer-source: expected a peer to make of it, such as openvino, found none"
        raise OptionError(msg)


def run(
    loaders: Mapping[str, Callable[[Callable[[int, int], None] | None], LLM]],
    plan: Plan,
    trace: StepTrace,
    arguments: dict[str, Any],
    progress: Progress | None = None,
) -> None:
    """Measure every model; ``trace`` has all that was measured, even if this ends early.

    Args:
        loaders: the models, by the names they are shown with; each is told where to report its progress.
        plan: what to measure.
        trace: where the records go.
        arguments: what the user asked for, for the document.
        progress: told what is going on, the runs that are through, and all runs.

    Raises:
        PronkError: a model that cannot be loaded.
    """
    timer = Timer()
    finished = False
    try:
        for number, (name, load) in enumerate(loaders.items()):
            with timer.preparing():
                llm = load(None if progress is None else partial(progress, f"loading {name}"))
            if number == 0:
                started = datetime.now(UTC).isoformat(timespec="seconds")
                trace.add(Start(started, arguments, versions(), hardware(llm.device)))
            _measure(name, llm, plan, trace, timer, progress)
            del llm  # its memory, before the next one is loaded
        finished = True
    finally:
        if trace.records:
            trace.add(timer.end(interrupted=not finished))


def _measure(name: str, llm: LLM, plan: Plan, trace: StepTrace, timer: Timer, progress: Progress | None) -> None:
    with ExitStack() as stack:
        with timer.preparing():
            trace.add(_model(name, llm, plan))
            bandwidth = BandwidthMeter(llm.device)
            peak = PeakMemory(llm.device, bandwidth.nbytes)
            methods: list[Method] = [Drafting(llm, drafter, peak) for drafter in dict.fromkeys((PLAIN, *plan.drafters))]
            sources = [peer_source(spec, llm, plan.peers.source) for spec in plan.peers.specs]
            for spec, source in zip(plan.peers.specs, sources, strict=True):
                if progress is not None:
                    progress(f"loading {spec}", 0, 0)
                methods.append(_start_peer(spec, source, llm, plan.peers, trace))
                stack.callback(methods[-1].close)
        bench = Bench(llm, methods, plan.options, bandwidth=bandwidth, trace=trace, timer=timer)
        bench.run(plan.tasks, None if progress is None else partial(progress, name))


def _model(name: str, llm: LLM, plan: Plan) -> Model:
    raw = {} if is_gguf(llm.path) else read_json(llm.path / "config.json")
    weights = pass_weights(llm.engine.runner.decoder)
    return Model(
        name=name,
        parameters=count_parameters(llm.config),
        pass_bytes=weights.nbytes,
        kv_bytes_per_token=kv_bytes_per_token(llm.config, llm.engine.cache.kv_dtype),
        dtype=str(llm.dtype).removeprefix("torch."),
        context=llm.config.context,
        methods=plan.methods,
        inflated=raw.get("pronk_inflated"),
        kernels=llm.kernels,
        weights=weights.kinds,
        weight_bits=weights.bits,
        kv_dtype=str(llm.engine.cache.kv_dtype).removeprefix("torch."),
    )


def peer_source(spec: PeerSpec, llm: LLM, source: Path | None) -> Path:
    """What a peer computes with, or is converted from: the model itself, or the plain checkpoint that it was made of.

    llama.cpp takes a GGUF file as it is, unless other weights are asked for: nothing is fairer than the same file.

    Raises:
        OptionError: the model is quantized, and there is no such checkpoint of it.
    """
    if is_gguf(llm.path) and spec.mode.engine == "llama_cpp" and spec.weights is None:
        return llm.path
    if not is_gguf(llm.path) and llm.config.quantization is None:
        return llm.path
    if source is None:
        msg = (
            f"peer {spec}: expected a plain checkpoint, found {llm.path}, which is quantized; "
            "name the folder that it was made from with --peer-source"
        )
        raise OptionError(msg)
    config = read_config(source)
    if config.quantization is not None or config.vocab_size != llm.config.vocab_size:
        found = "one that is quantized itself" if config.quantization else f"{config.vocab_size} tokens"
        msg = f"peer-source: expected the plain checkpoint of {llm.path}, {llm.config.vocab_size} tokens, found {found}"
        raise OptionError(msg)
    return source


def _start_peer(spec: PeerSpec, source: Path, llm: LLM, options: PeerOptions, trace: StepTrace) -> Method:
    dtype = str(llm.dtype).removeprefix("torch.")
    peer = Peer(
        spec,
        source,
        draft=options.draft,
        dtype=dtype,
        threads=torch.get_num_threads() * llm.workers,
        cache=options.cache,
        python=options.pythons.get(spec.mode.engine),
    )
    try:
        peer.load()
    except PeerError as error:
        peer.close()
        trace.add(PeerRecord(str(spec), {"error": str(error)}))
        return Missing(spec, error)
    except BaseException:
        peer.close()
        raise
    trace.add(PeerRecord(str(spec), {**peer.versions, **peer.settings}))
    return PeerMethod(peer, llm.config.eos_ids)
