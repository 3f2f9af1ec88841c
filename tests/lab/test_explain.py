"""``explain``: the trace of each step agrees with the request's statistics, and the text is
unchanged.
"""

from pathlib import Path

import pytest

from pronk import LLM, OptionError, SamplingParams
from pronk.lab.explain import Explanation, explain
from pronk.models.cost_model import CostCurve
from pronk.testing import tiny_checkpoint
from tiny_models import set_costs

TEXT = "the cat and the dog and the cat and the dog and the cat and the"
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    made = LLM(tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny", seed=1))
    set_costs(made.engine, CostCurve(10.0, 0.99, 0.01))  # so slow that drafting is almost free
    # as if the engine had run for so long that it may lose 10,000 s
    made.engine.speculator.ledger.elapsed = 1e6
    return made


def check(found: Explanation, llm: LLM, drafter: str) -> None:
    want = llm.generate(TEXT, PARAMS, drafter="autoregressive")
    assert (
        found.completion.token_ids
        == want.token_ids
        == [token for step in found.steps for token in step.tokens]
    )
    assert len(found.steps) == found.completion.stats.target_steps
    assert sum(step.counts[1] for step in found.steps) == found.completion.stats.drafted > 0
    assert sum(len(step.path) for step in found.steps) == found.completion.stats.accepted > 0
    assert sum(share.accepted for share in found.shares) == found.completion.stats.accepted
    assert sum(share.drafted for share in found.shares) == found.completion.stats.drafted
    for step in found.steps:
        assert step.counts[2] <= step.counts[1] <= step.counts[0]
        assert set(step.verified.tokens) <= set(step.proposed.tokens)
        assert [step.verified.tokens[node] for node in step.path] == list(
            step.tokens[: len(step.path)]
        )
        assert step.plain == pytest.approx(10.0)
        assert step.expected == pytest.approx(10.0 + 0.1 * step.verified.num_draft_tokens)
        assert step.seconds > 0
    assert f"{len(want.token_ids)} tokens in {len(found.steps)} steps" in found.summary, drafter


def test_auto_reports_the_asked_sources_and_their_gains(llm: LLM) -> None:
    found = explain(llm, TEXT, PARAMS)
    check(found, llm, "auto")
    asked = [each for step in found.steps for each in step.reports]
    assert {each.drafter for each in asked} >= {"suffix", "recycling"}
    assert {each.reason for each in asked} <= {"pays", "learns"}
    for step in found.steps:
        for before, after in zip(step.reports, step.reports[1:], strict=False):
            assert before.after == after.before
        if step.reports:
            assert step.reports[0].before == (1.0, 10.0)
            last = step.reports[-1].after
            assert last is not None
            assert step.gain == pytest.approx(last[0])
            assert step.value == pytest.approx(last[0] * 10.0 / last[1])
    (suffix,) = [share for share in found.shares if share.drafter == "suffix"]
    assert suffix.asked == sum(each.drafter == "suffix" for each in asked) > 0
    assert "suffix proposed in" in found.summary


@pytest.mark.parametrize(
    "drafter", ["suffix(store_tokens=0)", "merged(suffix(store_tokens=0), recycling)"]
)
def test_other_drafters_have_a_trace_too(llm: LLM, drafter: str) -> None:
    found = explain(llm, TEXT, PARAMS, drafter)
    check(found, llm, drafter)
    name = drafter.partition("(")[0]
    assert {each.drafter for step in found.steps for each in step.reports} == {name}
    assert f"{name} proposed in" in found.summary


def test_summary_without_draft_tokens(llm: LLM) -> None:
    found = explain(llm, TEXT, PARAMS, "autoregressive")
    assert not found.shares
    assert all(step.tokens == step.tokens[:1] and not step.path for step in found.steps)
    assert "39 of 39 steps after the first had no draft tokens" in found.summary


def test_other_requests_have_no_trace(llm: LLM) -> None:
    (request,) = llm.request_factory.create_samples(
        llm.request_factory.encode_prompt(TEXT), PARAMS, llm.get_proposer()
    )
    llm.engine.run([request])
    assert request.speculation.trace is None


def test_text_of_one_token(tmp_path: Path) -> None:
    llm = LLM(tiny_checkpoint(tmp_path / "tiny"))
    found = explain(llm, "x", SamplingParams(max_tokens=1, ignore_eos=True))
    assert len(found.steps) == 1
    assert found.speed is None
    assert found.summary.startswith("1 token in 1 step: 1.00 tokens per step")


def test_several_samples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"n: expected an integer in 1\.\.1, found 2"):
        explain(LLM(tiny_checkpoint(tmp_path / "tiny")), "x", SamplingParams(n=2))
