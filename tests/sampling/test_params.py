"""Sampling options, whose errors name option, range and value, and the statistics of the noise."""

import math
import re
from typing import Any

import numpy as np
import pytest

from chi_square import p_value
from pronk.base.arrays import Array
from pronk.base.errors import OptionError
from pronk.sampling.noise import derive_seed, gumbel_noise, random_seed
from pronk.sampling.params import SamplingParams

INTEGER = (1.5, "8", True)
NUMBER = (math.nan, math.inf, -math.inf, "0.5", True, None)

BAD: dict[str, tuple[str, tuple[Any, ...]]] = {
    "max_tokens": ("of at least 1", (0, -1, None, *INTEGER)),
    "min_tokens": ("of at least 0", (-1, None, *INTEGER)),
    "temperature": ("0..100", (-0.1, -1e-9, 100.5, *NUMBER)),
    "top_k": ("of at least 0", (-1, None, *INTEGER)),
    "top_p": ("above 0 and at most 1", (0.0, 0, -0.1, 1.0001, *NUMBER)),
    "min_p": ("0..1", (-0.1, 1.0001, *NUMBER)),
    "repetition_penalty": ("above 0 and at most 100", (0.0, -1.0, 101, *NUMBER)),
    "presence_penalty": ("-2..2", (-2.1, 2.1, *NUMBER)),
    "frequency_penalty": ("-2..2", (-2.1, 2.1, *NUMBER)),
    "seed": (f"0..{2**63 - 1}", (-1, 2**63, *INTEGER)),
    "n": ("1..1024", (0, 1025, None, *INTEGER)),
    "logprobs": ("0..64", (-1, 65, *INTEGER)),
    "prompt_logprobs": ("0..64", (-1, 65, *INTEGER)),
    "ignore_eos": ("true or false", (1, None, "yes")),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, (_, values) in BAD.items() for value in values]
)
def test_values_out_of_range(name: str, value: Any) -> None:
    with pytest.raises(OptionError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"{name}: expected")
    assert BAD[name][0] in message
    assert message.endswith(f"found {value!r}")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("logit_bias", {3: 101.0}, "-100..100, found 101.0"),
        ("logit_bias", {3: math.nan}, "-100..100, found nan"),
        ("logit_bias", {3: "1"}, "-100..100, found '1'"),
        ("logit_bias", {-3: 1.0}, "of at least 0, found -3"),
        ("logit_bias", {"3": 1.0}, "of at least 0, found '3'"),
        ("logit_bias", [(3, 1.0)], "found [(3, 1.0)]"),
        ("logit_bias", 3, "found 3"),
        ("stop_token_ids", [5, -1], "of at least 0, found -1"),
        ("stop_token_ids", ["5"], "of at least 0, found '5'"),
        ("stop_token_ids", [True], "of at least 0, found True"),
        ("stop_token_ids", 5, "found 5"),
        ("prediction", [5, -1], "of at least 0, found -1"),
        ("prediction", ["5"], "of at least 0, found '5'"),
        ("prediction", 5, "expected a text or a list of token ids, found 5"),
        ("prediction", b"text", "found b'text'"),
        ("logprob_token_ids", [-1], "of at least 0, found -1"),
        ("logprob_token_ids", [5], "expected logprobs with it"),
        ("stop_token_ids", None, "found None"),
        ("stop", "", "not empty, found ''"),
        ("stop", ["a", ""], "not empty, found ['a', '']"),
        ("stop", [b"a"], "found [b'a']"),
        ("stop", 5, "found 5"),
        ("stop", None, "found None"),
        ("bad_words", [""], "not empty, found ['']"),
        ("bad_words", "word", "found 'word'"),
        ("bad_words", [5], "found [5]"),
        ("bad_words", 5, "found 5"),
        ("bad_words", None, "found None"),
    ],
)
def test_collections_that_are_refused(name: str, value: Any, found: str) -> None:
    with pytest.raises(OptionError, match=re.escape(found)) as caught:
        SamplingParams(**{name: value})
    assert str(caught.value).startswith(f"{name}: expected")


def test_min_tokens_within_max_tokens() -> None:
    with pytest.raises(OptionError, match="min_tokens: expected at most max_tokens = 4, found 5"):
        SamplingParams(max_tokens=4, min_tokens=5)


def test_values_at_the_ends_of_their_ranges() -> None:
    SamplingParams(
        max_tokens=1,
        min_tokens=1,
        top_k=10**9,
        logit_bias={0: -100, 5: 100.0},
        bad_words=("a",),
        stop="x",
    )
    SamplingParams(
        min_tokens=0, temperature=100, top_p=1, min_p=1, seed=2**63 - 1, n=1024, stop_token_ids=(0,)
    )
    SamplingParams(
        repetition_penalty=100,
        presence_penalty=-2,
        frequency_penalty=2,
        logprobs=0,
        prompt_logprobs=64,
    )


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


def test_only_temperature_zero_is_greedy() -> None:
    assert SamplingParams(min_tokens=1, repetition_penalty=2.0).greedy
    assert not SamplingParams(temperature=0.1, top_k=1).greedy


def test_options_as_json_values() -> None:
    options = SamplingParams(
        stop="a",
        bad_words=("b",),
        stop_token_ids=(3,),
        logit_bias={4: 1.0},
        seed=3,
        prediction=(1, 2),
    )
    values = options.to_dict()
    assert (values["stop"], values["bad_words"], values["stop_token_ids"]) == (["a"], ["b"], [3])
    assert values["logit_bias"] == {4: 1.0}
    assert values["prediction"] == [1, 2]
    assert SamplingParams(prediction="a").to_dict()["prediction"] == "a"
    assert "stops" not in values
    assert SamplingParams(**values).to_dict() == values


def uniform(seed: int, position: int, tokens: Array) -> Array:
    """Return the noise mapped back to [0, 1)."""
    return np.exp(-np.exp(-gumbel_noise(seed, position, tokens)))


TOKENS = np.arange(200_000)


def test_noise_is_a_pure_function() -> None:
    """The noise depends on seed, position and token only, not on order, shape or earlier calls."""
    every = gumbel_noise(5, 17, TOKENS[:1000])
    assert every.dtype == np.float64
    some = np.array([999, 3, 3, 500])
    assert np.array_equal(gumbel_noise(5, 17, some), every[some])
    assert np.array_equal(gumbel_noise(5, 17, some.reshape(2, 2)), every[some].reshape(2, 2))
    assert np.array_equal(gumbel_noise(5, 17, TOKENS[:1000]), every)
    assert gumbel_noise(5, 17, TOKENS[:0]).shape == (0,)
    assert np.array_equal(some, np.array([999, 3, 3, 500]))
    assert not np.array_equal(gumbel_noise(5, 18, some), every[some])
    assert not np.array_equal(gumbel_noise(6, 17, some), every[some])


def test_noise_is_the_same_in_every_release() -> None:
    got = [
        gumbel_noise(seed, place, np.array([0, 1, 70_000])) for seed, place in ((1, 5), (7, 123))
    ]
    want = [
        [2.972819510049, 2.745194340884, -0.420120577612],
        [1.871680839916, -0.066814095717, 0.537988758132],
    ]
    np.testing.assert_allclose(got, want, rtol=0.0, atol=1e-10)


@pytest.mark.parametrize(
    ("seed", "position"), [(0, 0), (0, 1), (1, 0), (2**63 - 1, 131_072), (2**32, 7), (42, 511)]
)
def test_noise_is_gumbel(seed: int, position: int) -> None:
    """Kolmogorov-Smirnov test, mean, variance, and equal counts in 1000 bins."""
    noise = gumbel_noise(seed, position, TOKENS)
    assert np.isfinite(noise).all()
    values = np.sort(uniform(seed, position, TOKENS))
    count = len(TOKENS)
    steps = np.arange(count + 1) / count
    distance = max(float((values - steps[:-1]).max()), float((steps[1:] - values).max()))
    assert distance * count**0.5 < 2.0  # p-value of 1/1500
    assert float(noise.mean()) == pytest.approx(0.57721566, abs=4 * 1.2825 / count**0.5)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, rel=0.03)
    assert p_value(np.histogram(values, 1000, (0.0, 1.0))[0], np.ones(1000)) > 1e-4


def correlation(a: Array, b: Array) -> float:
    """Return the correlation, divided by its standard deviation for independent samples."""
    return float(np.corrcoef(a, b)[0, 1]) * len(a) ** 0.5


@pytest.mark.parametrize("lag", [1, 2, 3, 64, 4096])
def test_neighbouring_tokens_positions_and_seeds_are_independent(lag: int) -> None:
    here = uniform(12, 101, TOKENS)
    for there in (
        uniform(12, 101, TOKENS + lag),
        uniform(12, 101 + lag, TOKENS),
        uniform(12 + lag, 101, TOKENS),
    ):
        assert abs(correlation(here, there)) < 4.5
        pairs = np.bincount((here * 8).astype(int) * 8 + (there * 8).astype(int), minlength=64)
        assert p_value(pairs, np.ones(64)) > 1e-4


def test_noise_of_one_token_over_positions_and_seeds() -> None:
    token = np.array([17])
    for values in (
        np.concatenate([uniform(3, position, token) for position in range(4000)]),
        np.concatenate([uniform(seed, 3, token) for seed in range(4000)]),
        np.concatenate([uniform(seed, seed, token) for seed in range(4000)]),
    ):
        assert p_value(np.histogram(values, 50, (0.0, 1.0))[0], np.ones(50)) > 1e-4
        assert abs(correlation(values[:-1], values[1:])) < 4.5


def test_noise_never_repeats() -> None:
    """Seeds and positions differ in a few bits, are neighbours, or lie at the ends of the range."""
    seeds = (0, 1, 2, 3, 2**31, 2**32, 2**62, 2**63 - 2, 2**63 - 1)
    places = [
        (seed, position) for seed in seeds for position in (*range(40), 2**17, 2**31, 2**31 + 1)
    ]
    rows = np.stack([gumbel_noise(seed, position, TOKENS[:300]) for seed, position in places])
    assert len(np.unique(rows)) == rows.size


def test_noise_is_finite_at_both_ends() -> None:
    """The uniform number is never 0 or 1, whose logarithms would give infinite noise."""

    def undo_shift(x: int, bits: int) -> int:
        result = x
        for _ in range(64 // bits):
            result = x ^ (result >> bits)
        return result

    def token_of(bits: int, seed: int, position: int) -> int:
        """Return the token id with the hash ``bits``, by inverting each step of the hash."""
        x = undo_shift(bits, 31) * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
        x = undo_shift(x, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
        x = undo_shift(x, 30)
        key = key_of(seed, position)
        found = (x - key) * pow(0x9E3779B97F4A7C15, -1, 2**64) % 2**64
        return found - 2**64 if found >= 2**63 else found

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    def key_of(seed: int, position: int) -> int:
        return mix((mix(seed) + position * 0x9E3779B97F4A7C15) % 2**64)

    low, high = (gumbel_noise(5, 3, np.array([token_of(bits, 5, 3)])) for bits in (0, 2**64 - 1))
    assert -4.0 < float(low[0]) < -3.0
    assert 30.0 < float(high[0]) < 40.0


def test_derived_seeds() -> None:
    assert derive_seed(123, 0) == 123
    assert derive_seed(2**63 - 1, 0) == 2**63 - 1
    seeds, again = (
        [
            derive_seed(seed, sample)
            for seed in (0, 1, 2, 123, 2**63 - 1)
            for sample in range(1, 1024)
        ]
        for _ in range(2)
    )
    assert all(0 <= seed < 2**32 for seed in seeds)
    # two of 5,000 seeds of 32 bits are equal with probability 0.3 %
    assert len(set(seeds)) >= len(seeds) - 1
    assert seeds == again


def test_fresh_seeds_are_fresh_and_in_range() -> None:
    seeds = [random_seed() for _ in range(200)]
    assert len(set(seeds)) > 190
    assert all(SamplingParams(seed=seed).seed == seed for seed in seeds)
