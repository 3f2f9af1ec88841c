"""EAGLE-3 and MTP with drafters of the lab."""

import pytest

from drafting.from_target.test_eagle3 import check_company, copying
from drafting.from_target.trained_eagle import bigram_decoder
from lab.drafters.trained_kangaroo import adapter_folder

COMPANY = {"cape": "cape({eagle3})", "first layers": "merged({eagle3}, {kangaroo})"}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", COMPANY)
def test_in_company(name: str, temperature: float) -> None:
    parts = {
        "eagle3": copying("eagle3"),
        "kangaroo": f"kangaroo(model={adapter_folder(bigram_decoder())!r}, num_tokens=4, eta=0.0)",
    }
    check_company(COMPANY[name].format(**parts), temperature)
