"""Engines and draft models with recurrent layers, for tests of states in the engine."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from oracle import DenseModel
from pronk.base.arrays import FLOAT32, DType
from pronk.cache.blocks import BlockTable
from pronk.cache.paged import PagedCache
from pronk.cache.states import StatePool
from pronk.checkpoint.config import ModelConfig
from pronk.drafting.from_draft import draft_model
from pronk.engine.engine import Engine
from pronk.models import model_runner
from pronk.models.decoder import Decoder
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.models.model_runner import ModelRunner
from pronk.sampling.tree import TokenTree
from tiny_models import decoder_of, kernels, make_cache, make_engine, tiny_decoder, tiny_module

RECURRENT: dict[str, Any] = {"special": "recurrent", "windows": (None, None, None)}
# Draft models of the recurrent target: its own weights, which are always right, and the same with
# noise in the head.
RIGHT = "recurrent, right"
FAIR = "recurrent, fair"
_NOISE = {RIGHT: 0.0, FAIR: 0.15}


def engine(dtype: DType = FLOAT32, **settings: Any) -> Engine:
    """Return a new engine with the recurrent target."""
    return make_engine(tiny_decoder(dtype, **RECURRENT), **settings)


def pool_of(cache: PagedCache) -> StatePool:
    """Return the states of a cache."""
    assert cache.states is not None
    return cache.states


@cache
def noisy_module(noise: float) -> DenseModel:
    """Return the recurrent target's module with noise in its head."""
    module = deepcopy(tiny_module(**RECURRENT))
    generator = torch.Generator().manual_seed(1)
    weight = module.head.weight
    weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    return module


@cache
def draft_decoder(name: str) -> Decoder:
    """Return the draft model of a name."""
    return decoder_of(noisy_module(_NOISE[name]), kernels())


def draft_spec(name: str = FAIR, **options: Any) -> str:
    """Return the specification of a recurrent draft model, with :func:`use_draft_models`."""
    more = "".join(f", {option}={value!r}" for option, value in options.items())
    return f"draft_model(model={name!r}, dtype='float32'{more})"


def use_draft_models(patch: pytest.MonkeyPatch) -> None:
    """Let the drafter ``draft_model`` find the draft models by their names."""

    resolve_model = draft_model.resolve_model
    read_config = draft_model.read_config
    load_decoder = model_runner.load_decoder

    def resolve(name: str) -> Path:
        return Path(name) if name in _NOISE else resolve_model(name)

    def read(path: Path) -> ModelConfig:
        return draft_decoder(path.name).config if path.name in _NOISE else read_config(path)

    def load(path: Path, *arguments: Any, **options: Any) -> Decoder:
        if path.name in _NOISE:
            return draft_decoder(path.name)
        return load_decoder(path, *arguments, **options)

    patch.setattr(draft_model, "resolve_model", resolve)
    patch.setattr(draft_model, "read_config", read)
    patch.setattr(model_runner, "load_decoder", load)


class FreshStates:
    """States of texts that are read token by token, with a cache of its own."""

    def __init__(self, decoder: Decoder) -> None:
        dtype = decoder.embedding.dtype
        self.cache = make_cache(decoder.config, dtype)
        self.runner = ModelRunner(decoder, self.cache)

    def read(self, tokens: Sequence[int]) -> Iterator[bytes]:
        """Yield the state after each token."""
        table = BlockTable()
        pool = pool_of(self.cache)
        for token in tokens:
            self.cache.prepare(table, table.length + 1)
            entry = BatchEntry(table, TokenTree.chain([token]), num_final=table.length + 1)
            self.runner.forward(ForwardBatch([entry]))
            self.cache.commit_slots(table, range(1))
            assert table.states is not None
            yield pool.read_state(table.states.slot)
        self.cache.release(table)


class StateWatch:
    """Records the states of an engine's requests after passes, to compare them with a fresh
    reading.
    """

    def __init__(self, watched: Engine) -> None:
        self.engine = watched
        # bytes of states by text
        self.found: dict[tuple[int, ...], bytes] = {}

    def step(self) -> None:
        """Step the engine; record the states of its running requests."""
        self.engine.step()
        pool = pool_of(self.engine.cache)
        for request in self.engine.scheduler.running:
            table = request.block_table.states
            if table is not None and table.length:
                text = tuple(request.tokens[: table.length])
                self.record(text, pool.read_state(table.slot))

    def record(self, text: tuple[int, ...], state: bytes) -> None:
        """Add a state; one that was found before for this text must be equal."""
        assert self.found.setdefault(text, state) == state, f"two states of {len(text)} tokens"

    def check(self) -> int:
        """Compare all recorded states with a fresh reading; return their number."""
        fresh = FreshStates(self.engine.target.decoder)
        left = dict(self.found)
        while left:
            longest = max(left, key=len)
            for length, state in enumerate(fresh.read(longest), 1):
                found = left.pop(longest[:length], None)
                assert found is None or found == state, f"expected the state of {length} tokens"
        return len(self.found)
