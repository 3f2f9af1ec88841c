"""Chains that the kernels extend in one call: the engine's test with drafters of the lab."""

from typing import Any

import pytest

from drafting.from_draft import test_growth as growth
from drafting.from_draft.test_growth import FAIR, OPTIONS, model, record_chains
from lab.drafters.trained_glide import glide_folder

GLIDES: dict[str, dict[str, Any]] = {
    "glide": {},
    "two layers": {"layers": 2},
    "window": {"layers": 2, "windows": (12, None)},
}


def spec(name: str) -> str:
    if name == "cape":
        return f"cape({model(FAIR)})"
    return f"glide(model={glide_folder(**GLIDES[name])!r}, num_tokens=4)"


@pytest.mark.few(6)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", ["cape", *GLIDES])
def test_one_call_gives_the_same_trees(
    name: str, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    growth.test_one_call_gives_the_same_trees(
        spec(name), options, record_chains(monkeypatch), monkeypatch
    )
