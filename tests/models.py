"""Tiny random models, and the shortest way to run the engine on them without a checkpoint.

The weights are large enough that the likeliest token has a probability of about a half, as in a trained model, and that
greedy output does not fall into a loop, which would hide errors of position: no 4-gram of 100 greedy tokens repeats
(``tests/engine/test_equality.py`` checks it). The pool is poisoned from the start, not only where blocks are freed, and
it is far from zero, so a read of anything that was not written shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from pronk.cache.blocks import BlockAllocator
from pronk.cache.paged import PagedCache
from pronk.choice import Chooser
from pronk.drafters import Drafter
from pronk.drafters.autoregressive import Autoregressive
from pronk.engine.engine import Engine
from pronk.engine.request import Request
from pronk.model.config import ModelConfig
from pronk.model.decoder import Decoder
from pronk.model.linear import PackedLinear, PlainLinear
from pronk.model.rope import RopeConfig
from pronk.sampling import SamplingParams, derive_seed

VOCAB = 131
POISON = 1e4
CPU = torch.device("cpu")


def tiny_config(
    *,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 16,
    hidden: int = 64,
    vocab: int = VOCAB,
    windows: tuple[int | None, ...] = (None, None),
    classic: bool = False,
) -> ModelConfig:
    """One layer per window. ``classic`` has what GPT-2 has: learned positions, LayerNorm, biases, a tied head."""
    family = {"norm": "layer", "activation": "gelu_tanh", "gated": False, "tied": True} if classic else {}
    biases = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), classic)
    rope = None if classic else RopeConfig(head_dim)
    inner = hidden * 4 if classic else hidden * 7 // 4
    shape = (vocab, hidden, inner, len(windows), heads, kv_heads, head_dim, 4096, 1e-5)
    return ModelConfig("test", *shape, rope=rope, windows=windows, **biases, **family)  # type: ignore[arg-type]


@cache
def tiny_decoder(
    dtype: torch.dtype = torch.float32,
    *,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 16,
    hidden: int = 64,
    vocab: int = VOCAB,
    windows: tuple[int | None, ...] = (None, None),
    classic: bool = False,
    packed: bool = True,
    seed: int = 0,
) -> Decoder:
    """A decoder with random weights; decoders keep no state, so equal ones are shared."""
    config = tiny_config(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, hidden=hidden, vocab=vocab, windows=windows, classic=classic
    )
    decoder = Decoder(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name in ("embedding", "positions"):
                parameter.normal_(0.0, 1.0, generator=generator)
            elif parameter.dim() > 1:
                gain = 4.0 if name.startswith("head") else 2.0
                parameter.normal_(0.0, gain * parameter.shape[1] ** -0.5, generator=generator)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.3, generator=generator)
            else:
                parameter.uniform_(0.5, 1.5, generator=generator)
        if classic:
            decoder.norm.weight.mul_(4.0 * hidden**-0.5)  # the head is the embedding, which is larger than a head
    decoder.to(dtype).requires_grad_(requires_grad=False)
    for layer in decoder.layers:
        for name in ("qkv", "out", "up", "down"):
            setattr(layer, name, _linear(getattr(layer, name), packed=packed))
    decoder.head = _linear(decoder.head, packed=packed)
    return decoder.eval()


def _linear(plain: PlainLinear, *, packed: bool) -> PackedLinear | PlainLinear:
    bias = None if plain.bias is None else plain.bias.detach()
    return (PackedLinear if packed else PlainLinear)(plain.weight.detach(), bias)


def make_cache(
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    num_blocks: int = 400,
    block_size: int = 16,
    poison: float | None = POISON,
) -> PagedCache:
    """A pool that is full of ``poison``."""
    made = PagedCache(config, num_blocks=num_blocks, block_size=block_size, dtype=dtype, device=CPU, poison=poison)
    for pool in (*made.keys, *made.values):
        pool.fill_(poison or 0.0)
    return made


def make_engine(
    decoder: Decoder,
    *,
    num_blocks: int = 400,
    block_size: int = 16,
    poison: float | None = POISON,
    **options: Any,
) -> Engine:
    """An engine with a pool of its own, in the dtype of the decoder; ``options`` are the engine's."""
    dtype = decoder.embedding.dtype
    pool = make_cache(decoder.config, dtype, num_blocks=num_blocks, block_size=block_size, poison=poison)
    pool.allocator = StrictAllocator(num_blocks, block_size)
    return Engine(decoder, pool, **options)


class StrictAllocator(BlockAllocator):
    """The engine forgets all blocks when nothing runs any more; here none may be left to forget."""

    def reset(self) -> None:
        assert not any(self.references)
        assert self.num_free == self.num_blocks
        super().reset()


class NullText:
    """Text output of a request whose text nobody reads."""

    def push(self, token: int) -> tuple[str, str | None]:
        return "", None

    def flush(self) -> tuple[str, str | None]:
        return "", None


def make_request(
    prompt: Sequence[int],
    params: SamplingParams,
    drafter: Drafter[Any] | None = None,
    *,
    ends: Iterable[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
    parent: Request | None = None,
    vocab: int = VOCAB,
) -> Request:
    """A request whose ``params`` have a seed, or that needs none."""
    seed = params.seed or 0
    ends = frozenset(ends)
    chooser = Chooser(params, seed, prompt, vocab, ends=sorted(ends), bad_words=bad_words)
    return Request(list(prompt), params, seed, drafter or Autoregressive(), chooser, NullText(), ends, parent)


def samples(prompt: Sequence[int], params: SamplingParams, drafter: Drafter[Any] | None = None) -> list[Request]:
    """The ``params.n`` samples of a prompt; the later ones start from the cache of the first."""
    made: list[Request] = []
    for sample in range(params.n):
        own = replace(params, seed=derive_seed(params.seed or 0, sample))
        made.append(make_request(prompt, own, drafter, parent=made[0] if made else None))
    return made


def run(engine: Engine, requests: Sequence[Request]) -> None:
    """Run the requests to their end, after which every block is free."""
    for request in requests:
        engine.add(request)
    steps = 0
    while any(request.finish_reason is None for request in requests):
        engine.step()
        steps += 1
        assert steps < 20_000, "the requests do not end"
    assert_idle(engine)


def assert_idle(engine: Engine) -> None:
    """Nothing runs or waits, and every block is free."""
    allocator = engine.cache.allocator
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting
    assert allocator.num_free == allocator.num_blocks
    assert not any(allocator.references)
