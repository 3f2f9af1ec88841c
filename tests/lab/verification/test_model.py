"""Verification of a correct model: it passes, and the report names all parts that were not
tested.
"""

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from lab.verification.cases import (
    DRAFTER,
    DRAWN,
    NO_PROPOSALS,
    QUICK,
    check,
    drafter_part,
    is_json,
    some_prompts,
    verify_model,
)
from pronk import Autoregressive, PromptLookup
from pronk.base.errors import OptionError, PromptError
from pronk.drafting import autoregressive, registry
from pronk.drafting.proposer import Proposer
from pronk.lab.verification import (
    NamedPrompt,
    VerifyReport,
    VerifySettings,
    fitting_drafters,
    verify_steps,
)
from pronk.lab.verification.equality import MODES
from pronk.lab.verification.table import show
from pronk.llm import LLM
from pronk.sampling.params import Rule
from pronk.sampling.tree import TokenTree
from tiny_models import assert_idle, kernels


def shown(report: VerifyReport) -> str:
    """Return the table in 80 columns; its lines wrap, so search for sentences in :func:`read`."""
    out = io.StringIO()
    show(report, Console(file=out, width=80, highlight=False))
    return out.getvalue()


def read(report: VerifyReport) -> str:
    return " ".join(shown(report).split())


@pytest.fixture(scope="module")
def report(llm: LLM) -> VerifyReport:
    return check(llm, settings=DRAWN)


def test_pronk_tiny(pronk_tiny: LLM) -> None:
    report = verify_model(
        pronk_tiny,
        ["prompt_lookup"],
        some_prompts(pronk_tiny)[:1],
        VerifySettings(max_tokens=16, samples=100),
    )
    assert report.passed
    assert drafter_part(report).tested


def test_everything_passes_and_was_tested(report: VerifyReport) -> None:
    assert report.passed
    assert report.complete
    assert (
        f"in bfloat16 with kernels {kernels().name}, which promises the same tokens to the bit"
        in read(report)
    )
    assert report.to_dict()["kernels"] == report.kernels
    assert (report.device, report.dtype, report.kernels, report.exact) == (
        "cpu",
        "bfloat16",
        kernels().name,
        True,
    )
    assert (report.prompts, report.too_long, report.vacuous, report.failed) == (2, 0, (), ())
    for each in report.drafters:
        assert each.equality is not None
        assert each.rescoring is not None
        assert each.distribution is not None
        assert each.equality.texts == each.equality.equal == 2 * 2 * len(MODES)
        assert each.rescoring.tokens >= 100
        assert (each.rescoring.wrong, each.rescoring.worst, each.rescoring.tolerance) == (
            0,
            0.0,
            0.0,
        )
        assert each.distribution.samples == DRAWN.samples
        assert each.distribution.cells > 3
        assert each.distribution.threshold == pytest.approx(5e-5)
        assert set(each.verdicts().values()) == {"passed"}
    strings = drafter_part(report).distribution
    assert strings is not None
    assert 0 < strings.accepted < strings.drafted
    assert 0 < drafter_part(report).accepted < drafter_part(report).drafted


@pytest.mark.parametrize("rule", ["rejection", pytest.param("block", marks=pytest.mark.slow)])
def test_rules_that_accept_by_chance(pronk_tiny: LLM, rule: Rule) -> None:
    """Greedy texts are compared; sampled texts are re-scored and tested by distribution."""
    settings = VerifySettings(max_tokens=32, samples=100, rule=rule)
    report = verify_model(pronk_tiny, [DRAFTER], some_prompts(pronk_tiny)[:1], settings)
    assert report.passed
    assert report.to_dict()["rule"] == rule
    each = drafter_part(report)
    assert each.equality is not None
    assert each.rescoring is not None
    assert each.distribution is not None
    assert each.equality.texts == each.equality.equal == 2
    assert each.rescoring.tokens >= 100
    # log-probabilities of the same text are equal to the bit
    assert each.rescoring.tolerance == 0.0
    assert each.rescoring.accepted > each.equality.accepted > 0
    assert 0 < each.distribution.accepted < each.distribution.drafted
    assert set(each.verdicts().values()) == {"passed"}
    text = read(report)
    assert "same greedy" in text
    assert (
        f"of those sampled by {rule}, only the distribution is independent of the drafter" in text
    )
    assert (
        f"{each.accepted} accepted draft tokens changed no greedy text and no distribution." in text
    )
    assert max(map(len, shown(report).splitlines()[3:])) <= 80
    untested = replace(
        report, drafters=tuple(replace(part, distribution=None) for part in report.drafters)
    )
    assert "the distribution of sampled texts was not tested" in read(untested)


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param("coupled", marks=pytest.mark.slow),
        pytest.param("rejection", marks=pytest.mark.slow),
        "block",
    ],
)
@pytest.mark.parametrize(
    "drafter",
    [
        "draft_model(num_tokens=3)",
        pytest.param("cape(threshold(draft_model), max_nodes=12)", marks=pytest.mark.slow),
        pytest.param("staged(num_nodes=6)", marks=pytest.mark.slow),
    ],
)
def test_sampled_draft_tokens_keep_the_distribution(
    pronk_tiny: LLM, drafter: str, rule: Rule
) -> None:
    """With draft tokens sampled from pronk-tiny-draft, strings have the distribution of
    pronk-tiny.
    """
    settings = VerifySettings(max_tokens=8, samples=400, rule=rule)
    report = verify_model(pronk_tiny, [drafter], some_prompts(pronk_tiny)[1:], settings)
    strings = drafter_part(report).distribution
    assert report.passed
    assert strings is not None
    assert strings.samples == 400
    assert 0 < strings.accepted < strings.drafted


def register(monkeypatch: pytest.MonkeyPatch, drafter: type[Proposer[Any]]) -> None:
    """Add a drafter to the registry, as a class of the module ``autoregressive``."""
    monkeypatch.setattr(autoregressive, drafter.__name__, drafter, raising=False)
    monkeypatch.setitem(
        registry.DRAFTERS, drafter.name, f"drafting.autoregressive:{drafter.__name__}"
    )


def test_drafters_that_do_not_fit_the_rule(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class Coupled(PromptLookup):
        name = "coupled_only"

        def propose(self, contexts: Any) -> list[TokenTree]:
            if any(each.params.rejects for each in contexts):
                msg = "rule: expected coupled"
                raise OptionError(msg)
            return super().propose(contexts)

    register(monkeypatch, Coupled)
    monkeypatch.setattr(
        registry,
        "DRAFTERS",
        {name: registry.DRAFTERS[name] for name in ("prompt_lookup", Coupled.name)},
    )
    monkeypatch.setattr(registry, "guests", lambda _: {})
    prompt = some_prompts(llm)[0]
    assert fitting_drafters(llm, prompt) == (["prompt_lookup", "coupled_only"], {})
    for rule in ("rejection", "block"):
        fit = fitting_drafters(llm, prompt, rule)  # type: ignore[arg-type]
        assert fit == (["prompt_lookup"], {"coupled_only": "rule: expected coupled"})


def test_report_as_json_and_as_table(report: VerifyReport) -> None:
    assert is_json(report.to_dict())
    assert report.to_dict()["drafters"][1]["verdict"] == "passed"
    text = shown(report)
    assert max(map(len, text.splitlines())) <= 80
    assert "16/16" in text
    assert (
        f"Verified: {drafter_part(report).accepted} accepted draft tokens changed nothing." in text
    )


def test_verdicts_are_the_same_each_time(llm: LLM, report: VerifyReport) -> None:
    again = check(llm, settings=DRAWN)
    assert again.to_dict() == report.to_dict()


def test_the_cache_is_left_clean(llm: LLM, report: VerifyReport) -> None:
    assert_idle(llm.engine)


def test_a_drafter_that_never_proposes_is_not_verified(llm: LLM) -> None:
    report = check(llm, NO_PROPOSALS)
    assert report.complete
    assert report.vacuous == (NO_PROPOSALS,)
    assert not report.failed
    assert not report.passed
    assert drafter_part(report).verdicts() == {
        "equality": "vacuous",
        "rescoring": "vacuous",
        "distribution": "skipped",
    }
    assert report.to_dict()["drafters"][1]["verdict"] == "vacuous"
    assert f"{NO_PROPOSALS}: not tested: no draft token was accepted" in read(report)
    assert f"NOT verified: no draft token was accepted of {NO_PROPOSALS}" in read(report)
    assert not replace(report, required=False).passed


def test_unasked_drafters_may_stay_silent_beside_others(llm: LLM) -> None:
    report = verify_model(llm, [DRAFTER, NO_PROPOSALS], some_prompts(llm), QUICK, required=False)
    assert report.passed
    assert report.vacuous == (NO_PROPOSALS,)
    assert "Not tested, because no draft token was accepted" in read(report)
    assert not replace(report, required=True).passed


def test_plain_decoding_alone_needs_no_draft_tokens(llm: LLM) -> None:
    report = verify_model(llm, ["autoregressive", Autoregressive()], some_prompts(llm), QUICK)
    assert report.passed
    assert [each.drafter for each in report.drafters] == ["autoregressive"]


def test_drafters_as_objects_and_twice(llm: LLM) -> None:
    report = verify_model(
        llm, [PromptLookup(min_ngram=1), DRAFTER, DRAFTER], some_prompts(llm), QUICK
    )
    assert [each.drafter for each in report.drafters] == [
        "autoregressive",
        "prompt_lookup",
        DRAFTER,
    ]
    assert report.passed


def test_prompts_that_do_not_fit(llm: LLM) -> None:
    long = NamedPrompt("long", [1] * (llm.config.context - QUICK.max_tokens))
    empty = NamedPrompt("empty", [])
    report = verify_model(llm, ["autoregressive"], [long, *some_prompts(llm), empty], QUICK)
    assert (report.prompts, report.too_long) == (2, 2)
    assert "2 too long" in shown(report)
    for prompts in ([], [long]):
        with pytest.raises(PromptError, match="expected prompts of at most"):
            verify_model(llm, [DRAFTER], prompts, QUICK)


def test_steps_show_what_was_verified_so_far(llm: LLM) -> None:
    told: list[tuple[str, int, int]] = []
    reports = list(
        verify_steps(
            llm, [DRAFTER], some_prompts(llm), QUICK, progress=lambda *each: told.append(each)
        )
    )
    assert len(reports) == 2 * 2 * len(MODES) + 1
    assert not any(report.complete or report.passed for report in reports[:-1])
    assert reports[-1].passed
    assert "Interrupted: the checks above" in read(reports[4])
    assert "unfinished" in shown(reports[4])
    done = [count for _, count, _ in told]
    assert done == sorted(done)
    assert done[-1] == told[-1][2]


def test_registered_drafters_that_fit(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(PromptLookup):
        name = "refusing"

        def bind(self, target: object) -> None:
            msg = "refusing: expected a checkpoint"
            raise OptionError(msg)

    register(monkeypatch, Refusing)
    fit, reasons = fitting_drafters(llm, some_prompts(llm)[0])
    assert {"autoregressive", "prompt_lookup"} <= set(fit)
    assert reasons["refusing"] == "refusing: expected a checkpoint"
    report = verify_model(llm, ["autoregressive"], some_prompts(llm), QUICK, left_out=reasons)
    note = re.search(r": ([^:]*); --json has the reasons", " ".join(shown(report).split()))
    assert note is not None
    assert "refusing" in note[1].split(", ")
    assert report.left_out["refusing"].startswith("refusing: expected a checkpoint")


@pytest.mark.parametrize(
    "wrong",
    [
        {"rule": "luck"},
        {"max_tokens": 0},
        {"samples": 99},
        {"samples": -1},
        {"seed": -1},
        {"seed": 2**63},
    ],
)
def test_settings_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        VerifySettings(**wrong)
