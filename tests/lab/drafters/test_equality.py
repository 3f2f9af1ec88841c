"""Same seed, same tokens for all drafters of the lab: the engine's tests of equality."""

from collections.abc import Sequence
from typing import Any

import pytest

from engine import cases
from engine import test_equality as equality
from engine.test_equality import ALONE, SETTINGS_OF_READERS, SHIFTS, matrix
from lab.drafters.cases import DRAFTERS, spec
from pronk.base.arrays import BFLOAT16, FLOAT32, INT4, INT8, DType
from pronk.drafting import make_drafter
from tiny_models import make_engine, tiny_decoder

CLOSE = ("merged with trained",)
# Options that take different paths through the verification; the engine's drafters have all.
CLOSE_OPTIONS = ("temperature", "all", "guided all", "thinking", "repetitive", "stop")


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "options", "dtype"), matrix(DRAFTERS, CLOSE_OPTIONS, (), FLOAT32, CLOSE), ids=str
)
def test_ragged_batch(name: str, options: str, dtype: DType) -> None:
    equality.test_ragged_batch(spec(name), options, dtype)


@pytest.mark.few(6)
@SHIFTS
@pytest.mark.parametrize("name", [name for name in DRAFTERS if name not in CLOSE])
def test_options_beside_each_other(name: str, shifts: Sequence[int]) -> None:
    equality.test_options_beside_each_other(spec(name), shifts)


@pytest.mark.few(8)
@pytest.mark.parametrize(
    ("name", "options", "dtype"),
    matrix(DRAFTERS, ALONE, ("temperature",), BFLOAT16, CLOSE),
    ids=str,
)
def test_batch_of_one(name: str, options: str, dtype: DType) -> None:
    equality.test_batch_of_one(spec(name), options, dtype)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "dtype", [FLOAT32, pytest.param(BFLOAT16, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("variant", ["convolutions", "recurrent"])
@pytest.mark.parametrize("name", ["lookahead", "medusa", "kangaroo", "auto"])
def test_drafters_of_a_model_with_states(name: str, variant: str, dtype: DType) -> None:
    equality.test_drafters_of_a_model_with_states(spec(name), variant, dtype)


@pytest.mark.parametrize(
    "name",
    [
        name if name in (*CLOSE, "glide") else pytest.param(name, marks=pytest.mark.slow)
        for name in DRAFTERS
    ],
)
@pytest.mark.parametrize("kv_dtype", [INT8, pytest.param(INT4, marks=pytest.mark.slow)], ids=str)
def test_quantized_cache(name: str, kv_dtype: DType) -> None:
    equality.test_quantized_cache(spec(name), kv_dtype)


@pytest.mark.parametrize(
    ("window", "ngram", "options"), [(40, 6, "greedy"), (34, 16, "temperature")]
)
def test_windows_of_more_rows_than_by_default(window: int, ngram: int, options: str) -> None:
    """A window of 200 or 510 rows, with candidates beside it, changes no token."""
    prompts = cases.PROMPTS[:2]
    want = cases.plain(FLOAT32, options, prompts, 90)
    max_tree = 512
    engine = make_engine(tiny_decoder(), num_blocks=1000, max_tree=max_tree)
    sizes = set[int]()
    cases.watch(engine, lambda batch, _: sizes.update(len(each.tree) for each in batch.entries))
    name = f"lookahead(window={window}, ngram={ngram}, warm_up='random')"
    got = equality.decode(engine, [make_drafter(name)], options, prompts, 90)
    cases.assert_same(got, want)
    assert window * (ngram - 1) <= max(sizes) <= max_tree
    assert cases.total(got, "drafted") > 0


@pytest.mark.parametrize("options", ["greedy", "penalties"])
def test_committed_tokens_never_change(options: str) -> None:
    equality.test_committed_tokens_never_change(spec("merged"), options)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", ["jacobi", "gauss_seidel", "lookahead", "merged"])
@SETTINGS_OF_READERS
def test_drafters_that_read_logits(
    name: str, windows: tuple[int | None, ...], settings: dict[str, Any]
) -> None:
    equality.test_drafters_that_read_logits(spec(name), windows, settings)
