"""``benchmarks/sampling_limits.py``: its formulas against enumeration, its records of drafters."""

import importlib
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drafting.from_target.trained_eagle import write_random_head
from pronk import LLM, SamplingParams
from pronk.checkpoint.hub.clone_models import tiny_model
from pronk.sampling.noise import gumbel_noise

SCRIPTS = Path(__file__).parents[2] / "benchmarks"

# Distributions p and q over all tokens of tiny vocabularies; q is 0 for tokens that are no
# candidates.
PAIRS = [
    ((0.6, 0.4), (0.4, 0.6)),
    ((0.5, 0.3, 0.2), (0.1, 0.2, 0.7)),
    ((0.5, 0.3, 0.2), (0.6, 0.4, 0.0)),
    ((0.2, 0.0, 0.8), (0.3, 0.6, 0.1)),
    ((0.5, 0.3, 0.2), (0.0, 1.0, 0.0)),
    ((0.55, 0.25, 0.2), (0.55, 0.25, 0.2)),
]


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("sampling_limits")


def candidates_of(p: tuple[float, ...], q: tuple[float, ...]) -> tuple[Any, Any]:
    """Return p and q of the tokens that q allows."""
    allowed = np.array(q) > 0.0
    return np.array(p)[allowed], np.array(q)[allowed]


def enumerate_agreement(p: tuple[float, ...], q: tuple[float, ...], steps: int) -> float:
    """Return the share of noises on a grid for which both argmaxes are the same token.

    Each token's noise takes ``steps`` values of equal probability.
    """
    uniform = (np.arange(steps) + 0.5) / steps
    noise = -np.log(-np.log(uniform))
    grids = np.stack(np.meshgrid(*[noise] * len(p), indexing="ij"))
    shape = (len(p), *[1] * len(p))
    with np.errstate(divide="ignore"):
        log_p = np.log(p).reshape(shape)
        log_q = np.log(q).reshape(shape)
    return float(((log_p + grids).argmax(axis=0) == (log_q + grids).argmax(axis=0)).mean())


@pytest.mark.parametrize(("p", "q"), PAIRS)
def test_coupling_is_the_share_of_equal_argmaxes(
    limits: Any, p: tuple[float, ...], q: tuple[float, ...]
) -> None:
    found = limits.coupling(*candidates_of(p, q))
    assert found == pytest.approx(enumerate_agreement(p, q, 120), abs=0.01)
    # another weight of all candidates changes nothing
    own_p, own_q = candidates_of(p, q)
    assert limits.coupling(own_p, 7.0 * own_q) == pytest.approx(found)


def test_the_enumeration_tells_the_coupling_from_its_bounds() -> None:
    # 1 - TV is 0.5 here, and the lower bound (1 - TV) / (1 + TV) a third
    found = enumerate_agreement((0.5, 0.3, 0.2), (0.1, 0.2, 0.7), 120)
    assert 1 / 3 + 0.02 < found < 0.5 - 0.02


def test_coupling_by_the_noise_of_the_target(limits: Any) -> None:
    p = np.array([0.5, 0.3, 0.2])
    q = np.array([0.1, 0.2, 0.7])
    ids = np.arange(3)
    noises = [gumbel_noise(5, position, ids) for position in range(20_000)]
    same = [(np.log(p) + g).argmax() == (np.log(q) + g).argmax() for g in noises]
    assert limits.coupling(p, q) == pytest.approx(np.mean(same), abs=0.015)


@pytest.mark.parametrize(("p", "q"), PAIRS)
def test_overlap_is_that_of_a_maximal_coupling(
    limits: Any, p: tuple[float, ...], q: tuple[float, ...]
) -> None:
    distance = sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
    own_p, own_q = candidates_of(p, q)
    assert limits.overlap(own_p, 7.0 * own_q) == pytest.approx(1.0 - distance)
    bounds = ((1.0 - distance) / (1.0 + distance), 1.0 - distance)
    assert bounds[0] - 1e-12 <= limits.coupling(own_p, own_q) <= bounds[1] + 1e-12


def test_figures_of_a_position(limits: Any) -> None:
    p = np.array([0.3, 0.2])
    found = limits.figures(p, np.log([3.0, 2.0]) - 50.0, 0.125)
    assert found.without_noise == 0.125
    # q is p on the candidates: with noise, the draft token is right whenever a candidate is
    assert found.by_power[limits.POWERS.index(1.0)] == pytest.approx(0.5)
    assert found.maximal == pytest.approx(0.5)
    assert found.any == pytest.approx(0.5)
    squared = limits.coupling(p, np.array([9.0, 4.0]))
    assert found.by_power[limits.POWERS.index(2.0)] == pytest.approx(squared)
    assert squared < 0.49
    assert found.by_power[limits.POWERS.index(np.inf)] == 0.3


def test_a_row_of_the_table(limits: Any) -> None:
    q = limits.Candidates([7, 8], np.zeros(2))
    one = limits.Candidates([7], np.zeros(1))
    both = limits.figures(np.array([0.5, 0.25]), q.log_q, 0.5)
    positions = [
        limits.Position(7, 0.5, {"suffix": limits.Draft(7, q)}, {"suffix": both}),
        limits.Position(9, 0.5, {"suffix": limits.Draft(7, q)}, {"suffix": both}),
        limits.Position(
            7,
            0.75,
            {"suffix": limits.Draft(7, one)},
            {"suffix": limits.figures(np.array([0.25]), one.log_q, 0.25)},
        ),
        limits.Position(7, 0.9, {"suffix": limits.Draft(None, None)}, {"suffix": None}),
    ]
    cells = limits.table_row(0.7, "suffix", positions)
    assert len(cells) == len(limits.COLUMNS)
    assert cells[:6] == ["0.7", "suffix", "3 (75%)", "67%", "0.667", "**0.417**"]
    coupled = (2 * limits.coupling(np.array([0.5, 0.25]), np.ones(2)) + 0.25) / 3
    assert cells[6] == f"{coupled:.3f}"
    assert cells[7].startswith(f"{coupled - 1.25 / 3:+.3f} ± ")
    assert cells[-3:] == ["0.583", "0.583", "0.583"]
    assert limits.table_row(0.7, "suffix", positions[3:])[2:5] == ["0 (0%)", "–", "–"]
    by_power = limits.power_row(0.7, "suffix", positions)
    assert by_power[2 + limits.POWERS.index(1.0)] == cells[7]
    assert by_power[2 + limits.POWERS.index(np.inf)] == "+0.000 ± 0.000"
    assert limits.power_row(0.7, "suffix", positions[3:])[2:] == ["–"] * len(limits.POWERS)


def test_drafters_propose_what_their_candidates_say(limits: Any, tmp_path: Path) -> None:
    folder = tiny_model()
    assert folder is not None
    llm = LLM(str(folder), drafter="autoregressive", budget="all", threads=1)
    vocab = llm.config.vocab_size
    head = write_random_head(llm, tmp_path)
    drafters = limits.find_drafters(llm, None, folder / "datastore")
    recorder = limits.Recorder(llm, {**drafters, "eagle3": f"eagle3(model={str(head)!r})"})
    assert {*recorder.names} == {*limits.SOURCES}
    prompt = llm.tokenizer.encode("def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return")
    params = SamplingParams(max_tokens=64, temperature=0.5, seed=11)
    ids, positions = limits.record(llm, recorder, prompt, params)
    plain = llm.generate(prompt, replace(params, logprobs=0, logprob_token_ids=range(vocab)))
    assert ids == plain.token_ids
    logprobs = plain.logprobs
    assert logprobs is not None
    # the engine drafts neither the first nor the last token
    assert [position.token for position in positions] == ids[1:-1]
    text = [*prompt, *ids]
    found = Counter[str]()
    several = Counter[str]()
    for number, position in enumerate(positions, len(prompt) + 1):
        reported = logprobs[number - len(prompt)]
        p = np.exp(np.array([reported[token] for token in range(vocab)]) / params.temperature)
        p /= p.sum()
        assert position.max_p == pytest.approx(p.max(), rel=1e-4)
        for name, (token, candidates) in position.drafts.items():
            if candidates is None:
                assert position.figures[name] is None
                assert token is None
                continue
            found[name] += 1
            several[name] += len(candidates.ids) > 1
            tokens = np.asarray(candidates.ids, np.int64)
            assert len({*tokens.tolist()}) == len(tokens)
            assert candidates.log_q[0] == candidates.log_q.max()
            if limits.SOURCES[name].uses_noise:
                noisy = candidates.log_q + gumbel_noise(11, number, tokens)
                assert token == tokens[noisy.argmax()]
            else:
                assert token in tokens.tolist()
            first = tokens[0] if limits.SOURCES[name].uses_noise else token
            own = position.figures[name]
            assert own.without_noise == pytest.approx(p[first], rel=1e-4)
            assert own.any == pytest.approx(p[tokens].sum(), rel=1e-4)
            if name in {"suffix", "recycling"}:
                # both know tokens that followed the last token before
                assert text[number - 1] in text[: number - 1]
        _check_counts(limits, text[:number], position.drafts["prompt_lookup"].candidates)
    assert {*found} == {*limits.SOURCES}
    assert min(several[name] for name in ("suffix", "recycling", "retrieval", "eagle3")) > 0


def _check_counts(limits: Any, text: list[int], candidates: Any) -> None:
    """Compare the candidates of prompt lookup with a slow search for the longest n-gram."""
    if candidates is None:
        assert tuple(text[-2:]) not in {*pairwise(text[:-1])}
        return
    for size in (4, 3, 2):
        ends = [end for end in range(size, len(text)) if text[end - size : end] == text[-size:]]
        if ends:
            counts = Counter(text[end] for end in ends)
            found = dict(zip(candidates.ids, np.exp(candidates.log_q).tolist(), strict=True))
            assert found == pytest.approx(dict(counts))
            return
    pytest.fail("expected a match, found none")
