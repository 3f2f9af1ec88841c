"""Chains that the kernels extend in one call: the engine's test with drafters of the lab."""

import pytest

from drafting.from_draft import test_growth as growth
from drafting.from_draft.test_growth import FAIR, OPTIONS, model, record_chains
from lab.drafters.trained_glide import glide_folder

SPECS = {
    "cape": f"cape({model(FAIR)})",
    "glide": f"glide(model={glide_folder()!r}, num_tokens=4)",
    "two layers": f"glide(model={glide_folder(layers=2)!r}, num_tokens=4)",
    "window": f"glide(model={glide_folder(layers=2, windows=(12, None))!r}, num_tokens=4)",
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", SPECS)
def test_one_call_gives_the_same_trees(
    name: str, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    growth.test_one_call_gives_the_same_trees(
        SPECS[name], options, record_chains(monkeypatch), monkeypatch
    )
