"""Tiny random models, and the shortest way to run the engine on them without a checkpoint.

The weights are large enough that the likeliest token has a probability of about a half, as in a trained model, and that
greedy output does not fall into a loop, which would hide errors of position: no 4-gram of 100 greedy tokens repeats
(``tests/engine/test_equality.py`` checks it). The pool is poisoned from the start, not only where blocks are freed, and
it is no number, so a read of anything that was not written shows.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from guides import ToyFollower, with_forced
from pronk.architecture.config import ModelConfig
from pronk.architecture.rope import RopeConfig
from pronk.drafters import Proposer
from pronk.drafters.autoregressive import Autoregressive
from pronk.engine.engine import Engine
from pronk.engine.request import Request
from pronk.execution.attention import Segment
from pronk.execution.model_runner import ForwardJob, ModelRunner
from pronk.kernels.library import Kernels
from pronk.kernels.rounding import round_weights
from pronk.kv_cache.blocks import BlockAllocator, BlockTable
from pronk.kv_cache.layout import fill_poison
from pronk.kv_cache.paged import PagedCache
from pronk.models.decoder import Decoder, Layer, pack_linears
from pronk.models.kernels import load_kernels
from pronk.models.linear import KernelLinear, StackedLinear, choose_linear
from pronk.models.loader import compute_dtype
from pronk.quantization.formats.matrix import QuantizedMatrix
from pronk.sampling.noise import derive_seed
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import Sampler
from pronk.speculation.cost_model import CostCurve, CostModel
from pronk.speculation.tree import TokenTree

VOCAB = 131
POISON = float("nan")
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
    qk_norm: bool = False,
    dynamic: bool = False,
) -> ModelConfig:
    """One layer per window. ``classic`` has what GPT-2 has: learned positions, LayerNorm, biases, a tied head.

    ``dynamic``: rotations by *dynamic* scaling, which depend on more than the position.
    """
    family = {"norm": "layer", "activation": "gelu_tanh", "gated": False, "tied": True} if classic else {}
    biases = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), classic)
    scaling: dict[str, Any] = {"kind": "dynamic", "factor": 2.0, "original": 200} if dynamic else {}
    rope = None if classic else RopeConfig(head_dim, **scaling)
    inner = hidden * 4 if classic else hidden * 7 // 4
    shape = (vocab, hidden, inner, len(windows), heads, kv_heads, head_dim, 4096, 1e-5)
    made = {"rope": rope, "windows": windows, "qk_norm": qk_norm, **biases, **family}
    return ModelConfig("test", *shape, **made)  # type: ignore[arg-type]


@cache
def tiny_decoder(
    dtype: torch.dtype = torch.float32, *, packed: bool = True, weights: str = "plain", seed: int = 0, **shape: Any
) -> Decoder:
    """A decoder with random weights; decoders keep no state, so equal ones are shared.

    ``packed``: for the kernels, else for torch; ``weights`` as in :func:`~pronk.models.linear.choose_linear`; ``shape``
    as in :func:`tiny_config`.
    """
    config = tiny_config(**shape)
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
        if config.tied:
            decoder.norm.weight.mul_(
                4.0 * config.hidden_size**-0.5
            )  # the head is the embedding, which is larger than a head
    decoder.to(dtype).requires_grad_(requires_grad=False)
    if packed:
        pack_linears(decoder, choose_linear(kernels(), CPU, weights))
    return decoder.eval()


def several_forms(layer: Layer, by: Kernels) -> list[tuple[Tensor | QuantizedMatrix, Tensor | None]]:
    """The projections of a plain layer, weights and biases, each in a form of its own.

    Queries have 4 bits and minima, keys 8 bits and an order of their inputs, values are as they are.
    """
    c, bias = layer.config, layer.qkv.bias
    q, k, v = layer.qkv.weight.detach().split(c.qkv_sizes)
    low = round_weights(by, q, 4, 16)
    order = torch.randperm(c.hidden_size, generator=torch.Generator().manual_seed(7))
    keys = replace(round_weights(by, k[:, order], 8, 24), order=order)
    biases = [None] * 3 if bias is None else bias.detach().split(c.qkv_sizes)
    return list(zip((replace(low, minimum=low.scale * -8.0), keys, v), biases, strict=True))


def pack_several_forms(plain: Decoder, by: Kernels) -> Decoder:
    """The model for the kernels, the heads of all layers in :func:`several_forms`."""
    made = Decoder(plain.config).to(plain.embedding.dtype)
    made.load_state_dict(plain.state_dict())
    pack_linears(made, choose_linear(by, CPU))
    for layer, own in zip(plain.layers, made.layers, strict=True):
        layout = layer.layout("qkv")
        own.qkv = StackedLinear([KernelLinear(by, *part, layout) for part in several_forms(layer, by)])
    return made.requires_grad_(requires_grad=False).eval()


# The instruction set that the tests ask for: ``pytest --kernels=avx2``.
asked = "auto"


def kernels() -> Kernels:
    """The kernels that the tests run with."""
    return load_kernels(asked)


def make_cache(
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    num_blocks: int = 400,
    block_size: int = 16,
    poison: float | None = POISON,
    packed: bool = True,
    kv_dtype: torch.dtype | None = None,
    share_prefixes: bool = False,
    kind: type[PagedCache] = PagedCache,
) -> PagedCache:
    """A pool that is full of ``poison``, for the kernels or for torch."""
    if not packed and poison is not None:
        poison = 1e4  # torch multiplies what a mask hides by zero
    shape: dict[str, Any] = {"num_blocks": num_blocks, "block_size": block_size, "dtype": dtype, "device": CPU}
    made = kind(
        config,
        **shape,
        kv_dtype=kv_dtype,
        poison=poison,
        kernels=kernels() if packed else None,
        share_prefixes=share_prefixes,
    )
    for pool in (*made.keys, *made.values):
        if poison is not None:
            fill_poison(pool, poison)
    return made


class Clock:
    """Seconds that pass only where somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class GivenTimes(CostModel):
    """Passes that cost what they are said to, whatever they take."""

    def __init__(self, costs: CostCurve | None, rest: CostCurve | None = None) -> None:
        """``rest`` are the costs of passes whose first layers were computed before; by default the same."""
        super().__init__()
        self.given, self.given_rest = costs, rest

    def learn(self, rows: int, context: int, seconds: float) -> None:
        """Not from these."""

    def learn_rest(self, share: float, rows: int, context: int, seconds: float) -> None:
        """The same."""

    def costs(self, context: int, plain: int = 1) -> CostCurve | None:
        """What was given."""
        return self.given

    def rest(self, whole: CostCurve, share: float) -> CostCurve:
        """The same."""
        return whole if self.given_rest is None else self.given_rest


def set_costs(engine: Engine, costs: CostCurve | None, rest: CostCurve | None = None) -> None:
    """Let passes cost what they are said to."""
    times = GivenTimes(costs, rest)
    engine.runner.cost_model = times
    engine.target = replace(engine.target, cost_model=times)


def make_engine(
    decoder: Decoder,
    *,
    num_blocks: int = 400,
    block_size: int = 16,
    poison: float | None = POISON,
    kv_dtype: torch.dtype | None = None,
    share_prefixes: bool = False,
    costs: CostCurve | None = None,
    kind: type[PagedCache] = PagedCache,
    runner: Callable[[Decoder, PagedCache], ModelRunner] | None = None,
    **options: Any,
) -> Engine:
    """An engine with a pool of its own, in the dtype of the decoder; ``options`` are the engine's.

    With ``costs`` it drops guesses that do not pay at these. ``runner`` makes what makes its passes, if not one of this
    process alone; ``kind`` is that of its pool.
    """
    dtype = decoder.embedding.dtype
    packed = decoder.kernels is not None
    shape: dict[str, Any] = {"num_blocks": num_blocks, "block_size": block_size, "kv_dtype": kv_dtype, "kind": kind}
    pool = make_cache(decoder.config, dtype, **shape, poison=poison, packed=packed, share_prefixes=share_prefixes)
    pool.allocator = StrictAllocator(num_blocks, block_size)
    if pool.prefix_cache is not None:
        pool.prefix_cache.attach(pool.allocator)
    made = None if runner is None else runner(decoder, pool)
    engine = Engine(decoder, pool, runner=made, **({} if costs is None else {"budget": True}), **options)
    if costs is not None:
        set_costs(engine, costs)
    return engine


@torch.inference_mode()
def text_logits(
    decoder: Decoder,
    tokens: Sequence[int],
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
) -> Tensor:
    """Logits ``[len(tokens), vocab]`` of a whole text in one pass through the cache, as those of a prompt."""
    packed = decoder.kernels is not None
    shape: dict[str, Any] = {"num_blocks": len(tokens) // 16 + 1, "kv_dtype": kv_dtype}
    cache = make_cache(decoder.config, compute_dtype(dtype, decoder.kernels), **shape, packed=packed)
    block_table = BlockTable()
    cache.prepare(block_table, len(tokens))
    job = ForwardJob(Segment(block_table, TokenTree.chain(tokens)), range(len(tokens)), len(tokens))
    return ModelRunner(decoder, cache).forward([job]).logits[0]


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
    drafter: Proposer[Any] | None = None,
    *,
    stop_token_ids: Iterable[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
    parent: Request | None = None,
    vocab: int = VOCAB,
) -> Request:
    """A request whose ``params`` have a seed, or that needs none; a guide is that of :mod:`guides`."""
    seed = params.seed or 0
    stop_token_ids = frozenset(stop_token_ids)
    tokens = list(prompt)
    guide = None if params.guide is None else ToyFollower(vocab, stop_token_ids)
    if guide is not None and drafter is not None and params.guide_mode == "forced":
        drafter = with_forced(drafter)
    banned: dict[str, Any] = {"stop_token_ids": sorted(stop_token_ids), "bad_words": bad_words}
    sampler = Sampler(params, seed, tokens, vocab, **banned, kernels=kernels(), guide=guide)
    return Request(
        prompt, tokens, params, seed, drafter or Autoregressive(), sampler, NullText(), stop_token_ids, parent
    )


def samples(prompt: Sequence[int], params: SamplingParams, drafter: Proposer[Any] | None = None) -> list[Request]:
    """The ``params.n`` samples of a prompt; the later ones start from the cache of the first."""
    made: list[Request] = []
    for sample in range(params.n):
        own = replace(params, seed=derive_seed(params.seed or 0, sample))
        made.append(make_request(prompt, own, drafter, parent=made[0] if made else None))
    return made


def context_of(sampler: Sampler) -> list[int]:
    """The tokens that a chooser's next choice follows."""
    return sampler.context.last(len(sampler.context))


def run(engine: Engine, requests: Sequence[Request]) -> None:
    """Run the requests to their end, which none of them and no guesser fails; every block is free afterwards."""
    for request in requests:
        engine.add(request)
    steps = 0
    while not all(request.ended for request in requests):
        engine.step()
        steps += 1
        assert steps < 20_000, "the requests do not end"
    for request in requests:
        if request.error is not None:
            raise request.error
        assert request.stats.draft_error is None, request.stats.draft_error
    assert_idle(engine)


def assert_idle(engine: Engine) -> None:
    """Nothing runs or waits, and every block is free."""
    allocator = engine.cache.allocator
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting
    assert allocator.num_free == allocator.num_blocks
    assert not any(allocator.references)
