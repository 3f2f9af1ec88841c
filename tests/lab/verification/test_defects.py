"""Planted defects of the engine, the sampler and drafters, which the verification must find."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import pronk.engine.request_step
import pronk.sampling.sampler
from lab.verification.cases import (
    QUICK,
    check,
    drafter_part,
    is_json,
    nudged,
    some_prompts,
    verify_model,
)
from pronk.base.arrays import Array
from pronk.drafting import PromptLookup
from pronk.engine.request import Request
from pronk.lab.verification import VerifyReport, VerifySettings
from pronk.lab.verification.equality import MODES
from pronk.lab.verification.plain_decoding import LogitsRecorder, rounding, score_next
from pronk.lab.verification.table import show
from pronk.llm import LLM
from pronk.sampling.acceptance import ChooseToken, acceptance_rule
from pronk.sampling.noise import gumbel_noise
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import Sampler
from pronk.sampling.tree import DraftSample, TokenTree
from pronk.sampling.truncation import truncate
from pronk.sampling.verify import VerifiedPath, verify_tree

DRAWN = VerifySettings(max_tokens=3, samples=360)


def credulous(chance: float) -> Callable[..., VerifiedPath]:
    """Return a ``verify_tree`` that accepts a share ``chance`` of first children
    unconditionally.
    """

    def accept_too_much(tree: Any, choose: Callable[[int, int], int]) -> VerifiedPath:
        def choose_wrongly(node: int) -> int:
            token = choose(node)
            draft_tokens = [child for child, parent in enumerate(tree.parents) if parent == node]
            accepts = draft_tokens and (hash((tree.tokens, node)) % 1000) < 1000 * chance
            return tree.tokens[draft_tokens[0]] if accepts else token

        return verify_tree(tree, choose_wrongly)

    return accept_too_much


def check_plain(llm: LLM) -> VerifyReport:
    """Verify plain decoding: a defect that plain decoding has, too, shows only in the
    distribution.
    """
    return verify_model(llm, ["autoregressive"], some_prompts(llm), DRAWN)


@pytest.fixture(autouse=True)
def _chosen_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose every token in Python, where the defects are."""
    forward_batch = "pronk.models.forward_batch.ForwardBatch"
    monkeypatch.setattr(f"{forward_batch}.make_choices", lambda _: None)
    monkeypatch.setattr("pronk.engine.request_step.verify_in_library", lambda *_: None)


def first(report: VerifyReport) -> Any:
    equality = drafter_part(report).equality
    assert equality is not None
    return equality.divergences[0]


def test_draft_tokens_compared_with_logits_one_row_off(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:

    def shifted(sampler: Sampler, tree: TokenTree, logits: Array, chosen: Any) -> ChooseToken:
        return acceptance_rule(sampler, tree, np.concatenate((logits[:1], logits[:-1])), chosen)

    monkeypatch.setattr("pronk.engine.request_step.acceptance_rule", shifted)
    report = check(llm, settings=replace(QUICK, max_tokens=48))
    assert not report.passed
    assert drafter_part(report).verdicts()["equality"] == "failed"
    assert first(report).expected.score > first(report).found.score
    assert is_json(report.to_dict())


def test_unverified_draft_tokens(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pronk.engine.request_step, "verify_tree", credulous(1.0))
    report = check(llm)
    assert not report.passed
    equality = drafter_part(report).equality
    assert equality is not None
    assert len(equality.divergences) == equality.texts - equality.equal > 6
    assert equality.near_ties < len(equality.divergences)
    assert {each.mode for each in equality.divergences} == set(MODES)
    assert {each.batch for each in equality.divergences} == {True, False}
    from rich.console import Console

    show(report, Console(width=80))
    text = capsys.readouterr().out
    for word in (
        "FAILED",
        "defect",
        "plain",
        "found",
        "logit",
        "gap",
        "more, which --json lists",
        "NOT verified",
    ):
        assert word in text


def test_sometimes_unverified_draft_tokens_change_the_distribution(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only strings with draft tokens have another distribution; those of plain decoding are
    right.
    """
    monkeypatch.setattr(pronk.engine.request_step, "verify_tree", credulous(0.5))
    strings = drafter_part(check(llm, settings=DRAWN)).distribution
    assert strings is not None
    assert strings.failed
    assert strings.accepted > 0


def test_rejection_without_normalization_changes_the_distribution(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probabilities after a rejection do not sum to 1, so a second draft token is accepted too
    rarely.
    """

    def rejection_sample(
        p: Array, draft_tokens: Sequence[DraftSample], accepts: Any, _: Any
    ) -> int:
        return next(
            (x for j, (x, _) in enumerate(draft_tokens) if accepts(j, float(p[x]))), int(p.argmax())
        )

    monkeypatch.setattr(pronk.sampling.sampler, "rejection_sample", rejection_sample)
    report = check(llm, settings=replace(DRAWN, rule="rejection"))
    assert not report.passed


@pytest.mark.parametrize("scale", [0.6, 1.6])
def test_wrong_temperature_fails_the_distribution_only(
    pronk_tiny: LLM, monkeypatch: pytest.MonkeyPatch, scale: float
) -> None:
    monkeypatch.setattr(
        pronk.sampling.sampler, "gumbel_noise", lambda *given: scale * gumbel_noise(*given)
    )
    report = verify_model(pronk_tiny, ["autoregressive"], some_prompts(pronk_tiny)[:1], DRAWN)
    assert not report.passed
    assert report.drafters[0].verdicts() == {
        "equality": "passed",
        "rescoring": "passed",
        "distribution": "failed",
    }


def test_correlated_positions_fail_the_distribution(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All positions have equal noise: each token has the right distribution, but strings do not."""
    monkeypatch.setattr(
        pronk.sampling.sampler,
        "gumbel_noise",
        lambda seed, _, tokens: gumbel_noise(seed, 0, np.arange(len(tokens))),
    )
    assert check_plain(llm).failed == ("autoregressive",)


def test_more_tokens_than_asked_for(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strings with a token that top-k should have dropped are counted as impossible."""

    def generous(scores: Array, params: SamplingParams) -> Any:
        return truncate(scores, replace(params, top_k=params.top_k and params.top_k + 1))

    monkeypatch.setattr("pronk.sampling.sampler.truncate", generous)
    report = check_plain(llm)
    strings = report.drafters[0].distribution
    assert strings is not None
    assert strings.impossible > 0
    assert not report.passed


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda done: replace(done, token_ids=done.token_ids[:-1]), "ends after"),
        (lambda done: replace(done, token_ids=[*done.token_ids, 5]), "goes on after"),
        (
            lambda done: replace(done, finish_reason="stop"),
            "finish ('stop', None), expected ('length', None)",
        ),
        (lambda done: replace(done, text=done.text + "!"), "another text of the same tokens"),
    ],
    ids=["shorter", "longer", "finish reason", "text"],
)
def test_other_ends(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any], what: str
) -> None:
    """The tokens agree up to the end of the shorter text; end, finish reason or text differ."""
    original = LLM.generate

    def generate(self: LLM, prompts: Any, params: Any = None, **given: Any) -> Any:
        done = original(self, prompts, params, **given)
        draft_tokens = (
            not isinstance(given["drafter"], str) and given["drafter"].name != "autoregressive"
        )
        return [change(each) for each in done] if draft_tokens and isinstance(done, list) else done

    monkeypatch.setattr(LLM, "generate", generate)
    # Near ties, which inexact kernels permit, do not explain these differences.
    monkeypatch.setattr(llm, "exact", False)
    report = check(llm)
    assert not report.passed
    equality = drafter_part(report).equality
    assert equality is not None
    ends = [each for each in equality.divergences if each.batch and not each.near_tie]
    assert what in {each.what for each in ends} or any(each.what.startswith(what) for each in ends)


def test_wrong_log_probabilities(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens are right; log-probabilities of accepted draft tokens are off by 1e-6."""
    original = Request.append

    def append(
        self: Request, token: int, *, source: str | None, logprobs: dict[int, float] | None
    ) -> bool:
        off = (
            {key: value - 1e-6 for key, value in logprobs.items()}
            if source and logprobs
            else logprobs
        )
        return original(self, token, source=source, logprobs=off)

    monkeypatch.setattr(Request, "append", append)
    report = check(llm)
    part = drafter_part(report)
    assert part.verdicts() == {
        "equality": "passed",
        "rescoring": "failed",
        "distribution": "skipped",
    }
    assert part.rescoring is not None
    assert part.rescoring.worst == pytest.approx(1e-6, rel=1e-3)
    assert 0 < part.rescoring.wrong < part.rescoring.tokens
    assert not report.passed
    monkeypatch.setattr(llm, "exact", False)  # inexact kernels round differently
    assert not drafter_part(check(llm)).rescoring.failed  # type: ignore[union-attr]


def test_near_ties_are_allowed_where_equality_is_not_promised(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits that differ by a unit in the last place change some choices, all between near ties."""
    monkeypatch.setattr("pronk.engine.request_step.verify_draft", nudged(llm, 1.0))
    exact = drafter_part(check(llm)).equality
    assert exact is not None
    assert exact.failed
    assert exact.near_ties > 0
    monkeypatch.setattr(llm, "exact", False)
    report = check(llm)
    equality = drafter_part(report).equality
    assert equality is not None
    assert equality.near_ties == len(equality.divergences) > 0
    assert report.passed
    for each in equality.divergences:
        assert each.gap is not None
        assert each.tolerance is not None
        assert 0.0 <= each.gap * (MODES[each.mode].get("temperature") or 1.0) <= 2 * each.tolerance


def test_large_differences_are_no_near_ties(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pronk.engine.request_step.verify_draft", nudged(llm, 1000.0))
    monkeypatch.setattr(llm, "exact", False)
    report = check(llm)
    equality = drafter_part(report).equality
    assert equality is not None
    assert equality.near_ties < len(equality.divergences)
    assert not report.passed


def test_tolerance_is_a_few_units_in_the_last_place(llm: LLM) -> None:
    (judge,) = score_next(llm, some_prompts(llm)[0].ids, [[]], SamplingParams())
    largest = float(np.abs(judge.logits).max())
    assert 1.0 < rounding(llm, largest) / (largest * 2.0**-7) < 4.0


def recorder(logits: list[float], **options: Any) -> LogitsRecorder:
    made = LogitsRecorder(SamplingParams(seed=3, **options), 3, [1], len(logits))
    made.logits = np.array(logits, np.float32)
    return made


def test_tokens_that_rounding_could_choose() -> None:
    greedy = recorder([5.0, 4.9, 1.0])
    assert greedy.could_choose(1, 0, 0.06)
    assert not greedy.could_choose(1, 0, 0.04)
    assert not greedy.could_choose(2, 0, 0.06)
    # The third token is just below top-k's limit, so rounding could also let it through top-k.
    for rival in range(2):
        edge = recorder([5.0, 3.0, 2.95], temperature=100.0, top_k=2)
        noise = gumbel_noise(3, 1, np.arange(3))
        if noise[2] > noise.min():
            assert edge.scores(edge.logits)[2] == -np.inf
            assert edge.could_choose(2, rival, 0.05) == (
                int(noise.argmax()) == 2 or rival == 1 or noise[2] > noise[0]
            )


def test_choices_are_the_argmax_of_the_scores(llm: LLM) -> None:
    ids = some_prompts(llm)[0].ids
    for index, options in enumerate([*MODES.values(), {"temperature": 1.5, "top_k": 4}]):
        params = SamplingParams(max_tokens=12, seed=index, **options)
        done = llm.generate(ids, params)
        for place, token in enumerate(done.token_ids):
            (judge,) = score_next(llm, ids, [done.token_ids[:place]], params)
            assert int(judge.scores(judge.logits).argmax()) == token


def test_without_samples_the_distribution_is_skipped(llm: LLM) -> None:
    assert QUICK.samples == 0
    assert check(llm).drafters[0].distribution is None


def test_a_drafter_that_raises_does_not_pass(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests continue without draft tokens, so their texts are right, but nothing was
    tested.
    """
    original = PromptLookup.propose

    def propose(drafter: PromptLookup, contexts: Any) -> Any:
        if any(len(context.tokens) % 7 == 0 for context in contexts):
            raise ArithmeticError("by design")
        return original(drafter, contexts)

    report = check(llm)
    assert report.passed
    monkeypatch.setattr(PromptLookup, "propose", propose)
    report = check(llm)
    assert not report.passed
    assert first(report).what == "its drafter raised ArithmeticError: by design"
