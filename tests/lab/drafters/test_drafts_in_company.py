"""State that draft models, requests and steps must not share: the engine's tests with drafters of
the lab.
"""

from typing import Any

import pytest

from drafting.drafting import bound
from drafting.from_draft import test_drafts_in_company as in_company
from drafting.from_draft.test_drafts_in_company import FAIR, RIGHT, model
from pronk.drafting import PromptLookup, make_drafter
from tiny_models import make_engine, tiny_decoder


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "spec",
    [
        f"staged({model(FAIR)}, {model(RIGHT)})",
        f"staged({model(FAIR)}, staged({model(RIGHT)}, {model(FAIR)}))",
        f"cape(threshold({model(FAIR)}))",
    ],
    ids=["staged", "staged twice", "cape"],
)
@pytest.mark.parametrize("rule", [pytest.param("rejection", marks=pytest.mark.slow), "block"])
def test_random_numbers_of_drawn_draft_tokens_are_used_in_one_step(
    monkeypatch: pytest.MonkeyPatch, spec: str, rule: Any
) -> None:
    in_company.test_random_numbers_of_drawn_draft_tokens_are_used_in_one_step(
        monkeypatch, spec, rule
    )


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(f"cape(threshold({model(FAIR)}))", id="cape"),
        pytest.param(
            f"staged({model(FAIR)}, prompt_lookup(min_ngram=1))",
            id="staged",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_samplers_recover_from_an_interrupted_update(spec: str) -> None:
    in_company.test_samplers_recover_from_an_interrupted_update(spec)


def test_default_smaller_drafter_of_staged() -> None:
    assert make_drafter("staged") == make_drafter("staged(draft_model, prompt_lookup)")
    engine = make_engine(tiny_decoder())
    one, other = (
        bound(f"staged({model(FAIR)}{rest}, num_nodes=4)", engine)
        for rest in ("", ", prompt_lookup")
    )
    assert one.smaller_proposer == other.smaller_proposer == PromptLookup()
    assert one.options.num_nodes == other.options.num_nodes == 4
