"""Helpers for tests of early exits: a reference without caches, and costs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from drafting.drafting import Watched, sampler_at
from drafting.helpers import within
from lab.drafters.trained_kangaroo import adapter_folder
from pronk.base.arrays import Array
from pronk.base.convert import to_array
from pronk.drafting import make_drafter
from pronk.engine.engine import Engine
from pronk.engine.request import Request
from pronk.lab.drafters.kangaroo import KangarooProposer
from pronk.models.cost_model import CostCurve
from pronk.models.decoder import Decoder
from pronk.train.attention import compute_features
from pronk.train.modules.decoder import DecoderModule
from pronk.train.modules.drafters import KangarooModule
from pronk.train.students import dense_adapter
from tiny_models import make_engine

PROMPTS = [[1, 2, 3], [4, 5, 6, 7], list(range(40)), [9]]
WINDOWS = (24, 24, 24, 24)
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"temperature": 0.9},
    "cut": {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "penalties": {
        "temperature": 0.5,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
    },
    "bias": {"temperature": 0.8, "logit_bias": {3: 6.0, 50: 4.0, 90: -100.0}},
}


def named(
    decoder: Decoder,
    exit_layer: int = 2,
    adapter: str = "attention",
    *,
    noise: float = 0.02,
    **more: Any,
) -> str:
    """Return the spec of Kangaroo for ``decoder``; for a ``calm_decoder`` most draft tokens are
    right.
    """
    options = "".join(f", {name}={value!r}" for name, value in more.items())
    return f"kangaroo(model={adapter_folder(decoder, exit_layer, adapter, noise=noise)!r}{options})"


def watched(decoder: Decoder, made: str, **options: Any) -> tuple[Engine, Watched]:
    engine = make_engine(decoder, **options)
    return engine, Watched(make_drafter(made).bind(engine.target))


def kangaroo_of(drafter: Any) -> KangarooProposer:
    return within(drafter, KangarooProposer)[0]


def flat(seconds: float) -> CostCurve:
    """Return costs of forward passes that take ``seconds`` for any number of rows."""
    return CostCurve(seconds, 1.0, 1e-6)


class Slow:
    """Reference of the self-draft model in torch, without caches: computes the whole text for every
    call.

    ``target`` is the module with the weights of the drafter's target.
    """

    def __init__(self, target: DecoderModule, drafter: Any) -> None:
        found = kangaroo_of(drafter)
        self.target = target
        self.layer = found.early_exit.exit_layer
        self.adapter = KangarooModule(found.early_exit.adapter.shape, target.config)
        tensors = load_file(Path(str(found.options.model)) / "model.safetensors")
        self.adapter.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})

    def __call__(self, tokens: Sequence[int]) -> Array:
        """Return the logits ``[vocab]`` after ``tokens``."""
        layer = self.layer
        adapter = self.adapter
        early = compute_features(
            self.target, torch.tensor([tokens]), torch.float32, (layer,)
        ).hidden[layer]
        with torch.inference_mode():
            said = dense_adapter(adapter, self.target, early, 1, len(tokens))
            head = self.target.head if adapter.head is None else adapter.head
            return to_array(head(said[-1:])[0])


def slow_chain(
    slow: Slow, request: Request, tokens: Sequence[int], most: int, eta: float
) -> list[int]:
    """Return the draft tokens below ``tokens``, up to the first one with a confidence of at most
    ``eta``.
    """
    sampler = sampler_at(request, tokens)
    drafted = list[int]()
    while len(drafted) < most:
        logits = slow([*tokens, *drafted])
        drawn = sampler.draft_token(logits, 0)
        assert drawn is not None
        drafted.append(sampler.choose(logits))
        sampler.advance(drafted[-1])
        if drawn.confidence <= eta:
            break
    return drafted
