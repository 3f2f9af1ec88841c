"""Drafters' modules on the kernels against torch with the same weights, without caches.

In bfloat16 both are compared with the same weights in float32: the kernels' error must not be much
larger than torch's. Each test also measures the error of outputs without the compared part, so that
a comparison cannot be vacuous.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from covering import covering
from drafting import test_on_kernels as on_kernels
from lab.drafters.exits import WINDOWS, Slow, kangaroo_of
from lab.drafters.test_glide import model_of, record_rows
from lab.drafters.trained_glide import DenseGlide, glide_folder
from lab.drafters.trained_kangaroo import adapter_folder, calm_decoder, calm_module
from lab.drafters.trained_medusa import head_logits, medusa_folder, plain_heads
from lab.drafters.trained_multi_token import SHAPE, dense_heads, heads_folder
from pronk.base.arrays import BFLOAT16, FLOAT32, Array, DType
from pronk.drafting import make_drafter
from pronk.kernels.weights import PackedMatrix
from pronk.lab.drafters.kangaroo import EarlyExit, ExitDraft
from pronk.lab.drafters.modules.kangaroo import ADAPTERS
from pronk.lab.drafters.multi_token import _HeadsRunner
from pronk.models.decoder import Attention, Decoder
from pronk.models.linear import Linear, StackedLinear
from pronk.sampling.params import SamplingParams
from pronk.torch.convert import to_array, to_tensor
from pronk.train.modules.decoder import DecoderModule
from tiny_models import make_engine, make_request, run, tiny_decoder
from train.tiny_modules import tiny_module

PROMPTS = [[1, 2, 3], [(7 * i * i + 3 * i) % 131 for i in range(75)], [9]]
DTYPES = pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
# The comparison in bfloat16 needs a slow run by torch.
MOSTLY_FLOAT32 = pytest.mark.parametrize(
    "dtype", [FLOAT32, pytest.param(BFLOAT16, marks=pytest.mark.slow)], ids=["float32", "bfloat16"]
)
# Weights packed for the kernels, and plain ones for torch.
BOTH = (True, False)
PACKAGES = ("pronk.drafting.", "pronk.lab.drafters.")
Pairs = list[tuple[Array, Array]]


def widened(module: DecoderModule) -> DecoderModule:
    """Return the same weights in float32."""
    return deepcopy(module).float()


def serve(decoder: Decoder, spec: str, *, tokens: int = 12, **options: Any) -> None:
    """Decode the prompts in one batch."""
    engine = make_engine(decoder, **options)
    drafter = make_drafter(spec).bind(engine.target)
    requests = [
        make_request(prompt, SamplingParams(max_tokens=tokens), drafter) for prompt in PROMPTS
    ]
    run(engine, requests)


def error(pairs: Pairs) -> float:
    """Return the root of the mean square error, relative to the wanted values."""
    got, want = (np.stack([pair[i] for pair in pairs]).astype(np.float64) for i in (0, 1))
    return float(np.sqrt(((got - want) ** 2).mean() / (want**2).mean()))


def assert_close(said: dict[bool, Pairs], dtype: DType, without: Sequence[Array]) -> None:
    """Check errors of the kernels (``said[True]``) and of torch; ``without``: outputs that lack the
    tested part.
    """
    assert len(said[True]) > 10
    if dtype == FLOAT32:
        assert error(said[True]) < 1e-5
        # Chained heads amplify rounding: even torch's logits have errors of 1e-5 of the largest
        # logit.
        assert all(np.abs(got - want).max() < 1e-4 * np.abs(want).max() for got, want in said[True])
    else:
        assert error(said[True]) < 0.1
        assert error(said[True]) < 1.5 * error(said[False])
    wanted = [want for _, want in said[True]]
    assert error(list(zip(without, wanted, strict=True))) > 0.2
    assert any(not np.array_equal(one, wanted[0]) for one in wanted)


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], Array]]:
    """Record the texts and logits of early exits."""
    found: list[tuple[list[int], Array]] = []
    read = EarlyExit.next_logits

    def watched(self: EarlyExit, walks: Sequence[ExitDraft]) -> Array:
        texts = [list(walk.text) for walk in walks]
        logits = read(self, walks)
        found.extend(zip(texts, logits, strict=True))
        return logits

    monkeypatch.setattr(EarlyExit, "next_logits", watched)
    return found


TARGETS: dict[str, dict[str, Any]] = {
    "all": {},
    "window": {"windows": WINDOWS},
    "classic": {"classic": True},
}


@MOSTLY_FLOAT32
@pytest.mark.parametrize(("adapter", "shape"), covering(ADAPTERS, [*TARGETS], strength=1))
def test_kangaroo_adapters(
    adapter: str, shape: str, dtype: DType, exits: list[tuple[list[int], Array]]
) -> None:
    target = TARGETS[shape]
    said: dict[bool, Pairs] = {}
    without: list[Array] = []
    wide = widened(calm_module(dtype, **target))
    folder = adapter_folder(calm_decoder(dtype, **target), 2, adapter, noise=1.0, gain=8.0)
    spec = f"kangaroo(model={folder!r}, num_tokens=4, eta=0)"
    for packed in BOTH:
        decoder = calm_decoder(dtype, **target, packed=packed)
        exits.clear()
        serve(decoder, spec, prefill_chunk=16)
        drafter = make_drafter(spec).bind(make_engine(decoder).target)
        assert_packed(kangaroo_of(drafter).early_exit.adapter, packed=packed)
        slow = Slow(wide, drafter)
        said[packed] = [(logits, slow(text)) for text, logits in exits]
        if packed:
            slow.adapter.layers[0].forward = lambda x, *_: x  # type: ignore[method-assign]
            without = [slow(text) for text, _ in exits]
    assert_close(said, dtype, without)


def linears(part: Any) -> Iterator[Linear]:
    """Yield the linear layers of a module and of its parts."""
    if isinstance(part, Linear | StackedLinear):
        yield from part.parts
    elif isinstance(part, list | tuple):
        yield from (linear for each in part for linear in linears(each))
    elif isinstance(part, Decoder | Attention) or type(part).__module__.startswith(
        ("pronk.drafting.", "pronk.lab.drafters.")
    ):
        yield from linears(list(vars(part).values()))


def assert_packed(module: Any, *, packed: bool) -> None:
    """Check that all matrices are packed for the kernels, or that all are torch's."""
    assert {isinstance(each.packed, PackedMatrix) for each in linears(module)} == {packed}


@DTYPES
@pytest.mark.parametrize("classic", [False, True], ids=["", "classic"])
@pytest.mark.parametrize("unembeddings", ["shared", "replicated"])
def test_medusa_heads(unembeddings: str, dtype: DType, *, classic: bool) -> None:
    folder = medusa_folder(unembeddings)
    said = dict[bool, Pairs]()
    wide = widened(tiny_module(dtype, classic=classic))
    states = np.random.default_rng(0).normal(size=(20, wide.config.hidden_size)).astype(dtype)
    exact = to_tensor(states).float()
    for packed in BOTH:
        engine = make_engine(tiny_decoder(dtype, classic=classic, packed=packed))
        loaded = make_drafter(f"medusa(model={folder!r})").bind(engine.target)
        assert_packed(loaded.heads, packed=packed)
        rows = np.concatenate([loaded.logits(list(part)) for part in np.split(states, (1, 4))])
        want = to_array(head_logits(plain_heads(folder), wide.norm(exact), wide.head)).swapaxes(
            0, 1
        )
        said[packed] = list(zip(np.concatenate(rows), np.concatenate(want), strict=True))
    target = to_array(wide.logits(exact))
    assert_close(said, dtype, [row for row in target for _ in range(3)])


VARIANTS = {
    **{f"{kind} {order}": replace(SHAPE, kind=kind, order=order)
       for kind in ("transformer", "linear") for order in ("parallel", "causal", "anticausal")},
    "replicated": replace(SHAPE, unembeddings="replicated"),
    "linear replicated": replace(SHAPE, kind="linear", unembeddings="replicated", layer=1),
    "classic": replace(SHAPE, order="causal"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("variant", "dtype"), covering([*VARIANTS], [FLOAT32, BFLOAT16], strength=1), ids=str
)
def test_multi_token_heads(variant: str, dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = VARIANTS[variant]
    said = dict[bool, Pairs]()
    classic = variant == "classic"
    read = _HeadsRunner.next_logits
    found = list[tuple[list[int], Array]]()

    def watched(self: _HeadsRunner, contexts: Any, count: int) -> Array:
        logits = read(self, contexts, count)
        assert_packed(self.heads, packed=packed)
        found.extend((list(each.tokens), rows) for each, rows in zip(contexts, logits, strict=True))
        return logits

    monkeypatch.setattr(_HeadsRunner, "next_logits", watched)
    wide = widened(tiny_module(dtype, classic=classic))
    without = list[Array]()
    # both back ends have most texts
    dense = cache(lambda text: dense_heads(wide, shape, [*text], classic=classic))
    for packed in BOTH:
        found.clear()
        spec = f"multi_token(model={heads_folder(shape, classic=classic)!r})"
        serve(tiny_decoder(dtype, classic=classic, packed=packed), spec, prefill_chunk=16)
        said[packed] = []
        for text, rows in found:
            wanted = [each[len(text) - 2] for each in dense(tuple(text))]
            said[packed] += zip(rows, wanted, strict=True)
            # A head is replaced by another head.
            without += [*wanted[1:], wanted[0]] if packed else []
    assert_close(said, dtype, without)


@MOSTLY_FLOAT32
@pytest.mark.parametrize(
    ("windows", "layers"),
    covering([(None, None), (None, 12), (12, 12)], [1, 2], strength=1),
    ids=str,
)
def test_glide_cross_attention(layers: int, windows: tuple[int | None, ...], dtype: DType) -> None:
    folder = glide_folder(layers=layers, windows=windows)
    said = dict[bool, Pairs]()
    target = widened(tiny_module(dtype, windows=windows))
    wide = DenseGlide(folder, target, layers)
    without = list[Array]()
    for packed in BOTH:
        engine = make_engine(tiny_decoder(dtype, windows=windows, packed=packed), prefill_chunk=32)
        drafter = make_drafter(f"glide(model={folder!r}, num_tokens=4)").bind(engine.target)
        assert_packed(model_of(drafter).runner.decoder, packed=packed)
        notes = record_rows(model_of(drafter))
        run(
            engine,
            [make_request(prompt, SamplingParams(max_tokens=9), drafter) for prompt in PROMPTS],
        )
        said[packed] = [
            (each.logits, wide(each.text, each.verified, each.oldest)) for each in notes
        ]
        without += [wide(each.text, 0) for each in notes] if packed else []
    assert_close(said, dtype, without)


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        (lambda: f"medusa(model={medusa_folder()!r})", "norm"),
        (lambda: f"medusa(model={medusa_folder()!r})", "linear"),
        (lambda: f"kangaroo(model={adapter_folder(adapter='mlp', noise=1.0)!r}, eta=0)", "norm"),
        (lambda: f"multi_token(model={heads_folder()!r})", "mlp"),
    ],
    ids=["medusa", "medusa's heads", "kangaroo", "multi_token"],
)
def test_an_interrupted_program_is_built_again(spec: Callable[[], str], part: str) -> None:
    on_kernels.test_an_interrupted_program_is_built_again(spec, part)
