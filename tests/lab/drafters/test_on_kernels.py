"""Drafters' modules on the kernels against torch with the same weights, without caches.

In bfloat16 they are compared with the same weights in float32. Each test also measures the error of
outputs without the compared part, so that a comparison cannot be vacuous.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from covering import covering
from drafting import test_on_kernels as on_kernels
from lab.drafters.exits import WINDOWS, Slow
from lab.drafters.test_glide import model_of, record_rows
from lab.drafters.trained_glide import DenseGlide, glide_folder
from lab.drafters.trained_kangaroo import adapter_folder, calm_decoder, calm_module
from lab.drafters.trained_medusa import head_logits, medusa_folder, plain_heads
from lab.drafters.trained_multi_token import SHAPE, dense_heads, heads_folder
from pronk.base.arrays import BFLOAT16, FLOAT32, Array, DType
from pronk.base.convert import to_array, to_tensor
from pronk.drafting import make_drafter
from pronk.lab.drafters.kangaroo import EarlyExit, ExitDraft
from pronk.lab.drafters.modules.kangaroo import ADAPTERS
from pronk.lab.drafters.multi_token import _HeadsRunner
from pronk.models.decoder import Decoder
from pronk.sampling.params import SamplingParams
from pronk.train.modules.decoder import DecoderModule
from tiny_models import make_engine, make_request, run, tiny_decoder
from train.tiny_modules import tiny_module

PROMPTS = [[1, 2, 3], [(7 * i * i + 3 * i) % 131 for i in range(75)], [9]]
DTYPES = pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
MOSTLY_FLOAT32 = pytest.mark.parametrize(
    "dtype", [FLOAT32, pytest.param(BFLOAT16, marks=pytest.mark.slow)], ids=["float32", "bfloat16"]
)
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


def assert_close(said: Pairs, dtype: DType, without: Sequence[Array]) -> None:
    """Check errors of the kernels; ``without``: outputs that lack the tested part."""
    assert len(said) > 10
    if dtype == FLOAT32:
        assert error(said) < 1e-5
        # Chained heads amplify rounding: torch's logits, too, have errors of 1e-5 of the largest.
        assert all(np.abs(got - want).max() < 1e-4 * np.abs(want).max() for got, want in said)
    else:
        assert error(said) < 0.1
    wanted = [want for _, want in said]
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


@pytest.mark.few(1)
@MOSTLY_FLOAT32
@pytest.mark.parametrize(("adapter", "shape"), covering(ADAPTERS, [*TARGETS], strength=1))
def test_kangaroo_adapters(
    adapter: str, shape: str, dtype: DType, exits: list[tuple[list[int], Array]]
) -> None:
    target = TARGETS[shape]
    without: list[Array] = []
    wide = widened(calm_module(dtype, **target))
    folder = adapter_folder(calm_decoder(dtype, **target), 2, adapter, noise=1.0, gain=8.0)
    spec = f"kangaroo(model={folder!r}, num_tokens=4, eta=0)"
    decoder = calm_decoder(dtype, **target)
    exits.clear()
    serve(decoder, spec, prefill_chunk=16)
    drafter = make_drafter(spec).bind(make_engine(decoder).target)
    slow = Slow(wide, drafter)
    said = [(logits, slow(text)) for text, logits in exits]
    slow.adapter.layers[0].forward = lambda x, *_: x  # type: ignore[method-assign]
    without = [slow(text) for text, _ in exits]
    assert_close(said, dtype, without)


@DTYPES
@pytest.mark.parametrize("classic", [False, True], ids=["", "classic"])
@pytest.mark.parametrize("unembeddings", ["shared", "replicated"])
def test_medusa_heads(unembeddings: str, dtype: DType, *, classic: bool) -> None:
    folder = medusa_folder(unembeddings)
    wide = widened(tiny_module(dtype, classic=classic))
    states = np.random.default_rng(0).normal(size=(20, wide.config.hidden_size)).astype(dtype)
    exact = to_tensor(states).float()
    engine = make_engine(tiny_decoder(dtype, classic=classic))
    loaded = make_drafter(f"medusa(model={folder!r})").bind(engine.target)
    rows = np.concatenate([loaded.logits(list(part)) for part in np.split(states, (1, 4))])
    want = to_array(head_logits(plain_heads(folder), wide.norm(exact), wide.head)).swapaxes(0, 1)
    said = list(zip(np.concatenate(rows), np.concatenate(want), strict=True))
    target = to_array(wide.logits(exact))
    assert_close(said, dtype, [row for row in target for _ in range(3)])


VARIANTS = {
    **{f"{kind} {order}": replace(SHAPE, kind=kind, order=order)
       for kind in ("transformer", "linear") for order in ("parallel", "causal", "anticausal")},
    "replicated": replace(SHAPE, unembeddings="replicated"),
    "linear replicated": replace(SHAPE, kind="linear", unembeddings="replicated", layer=1),
    "classic": replace(SHAPE, order="causal"),
}  # fmt: skip


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("variant", "dtype"), covering([*VARIANTS], [FLOAT32, BFLOAT16], strength=1), ids=str
)
def test_multi_token_heads(variant: str, dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = VARIANTS[variant]
    classic = variant == "classic"
    read = _HeadsRunner.next_logits
    found = list[tuple[list[int], Array]]()

    def watched(self: _HeadsRunner, contexts: Any, count: int) -> Array:
        logits = read(self, contexts, count)
        found.extend((list(each.tokens), rows) for each, rows in zip(contexts, logits, strict=True))
        return logits

    monkeypatch.setattr(_HeadsRunner, "next_logits", watched)
    wide = widened(tiny_module(dtype, classic=classic))
    without = list[Array]()
    dense = cache(lambda text: dense_heads(wide, shape, [*text], classic=classic))
    found.clear()
    spec = f"multi_token(model={heads_folder(shape, classic=classic)!r})"
    serve(tiny_decoder(dtype, classic=classic), spec, prefill_chunk=16)
    said: Pairs = []
    for text, rows in found:
        wanted = [each[len(text) - 2] for each in dense(tuple(text))]
        said += zip(rows, wanted, strict=True)
        # A head is replaced by another head.
        without += [*wanted[1:], wanted[0]]
    assert_close(said, dtype, without)


@pytest.mark.few(1)
@MOSTLY_FLOAT32
@pytest.mark.parametrize(
    ("windows", "layers"),
    covering([(None, None), (None, 12), (12, 12)], [1, 2], strength=1),
    ids=str,
)
def test_glide_cross_attention(layers: int, windows: tuple[int | None, ...], dtype: DType) -> None:
    folder = glide_folder(layers=layers, windows=windows)
    target = widened(tiny_module(dtype, windows=windows))
    wide = DenseGlide(folder, target, layers)
    without = list[Array]()
    engine = make_engine(tiny_decoder(dtype, windows=windows), prefill_chunk=32)
    drafter = make_drafter(f"glide(model={folder!r}, num_tokens=4)").bind(engine.target)
    notes = record_rows(model_of(drafter))
    run(
        engine,
        [make_request(prompt, SamplingParams(max_tokens=9), drafter) for prompt in PROMPTS],
    )
    said = [(each.logits, wide(each.text, each.verified, each.oldest)) for each in notes]
    without += [wide(each.text, 0) for each in notes]
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
