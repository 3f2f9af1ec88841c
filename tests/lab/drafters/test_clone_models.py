"""The lab's drafters outside a clone, where no drafter is found."""

from pathlib import Path

import pytest

from pronk import LLM, OptionError
from pronk.checkpoint.hub import clone_models
from pronk.checkpoint.hub.clone_models import tiny_model


def test_drafters_outside_a_clone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tiny_model()
    monkeypatch.setattr(clone_models, "_ROOT", tmp_path)
    llm = LLM(folder, drafter="auto")
    for drafter in ("cape", "staged"):
        with pytest.raises(
            OptionError, match=r'^draft_model: expected model="…", .* for this target, found none$'
        ):
            llm.get_proposer(drafter)
    kinds = {"medusa": "medusa", "glide": "glide", "kangaroo": "kangaroo", "multi_token": "heads"}
    for drafter, kind in kinds.items():
        message = (
            rf'^{drafter}: expected model="…", .* found none; use pronk train {kind} --target …$'
        )
        with pytest.raises(OptionError, match=message):
            llm.get_proposer(drafter)
    with pytest.raises(
        OptionError, match=r"^retrieval: expected a datastore, found none; build one with pronk"
    ):
        llm.get_proposer("retrieval")
    assert "cape" not in [part.name for part in llm.get_proposer("auto").parts]  # type: ignore[attr-defined]
