"""A fake Hub and an empty cache for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from fake_hub import FakeHub, hub_in_use


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of an empty cache."""
    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return folder


@pytest.fixture
def hub(cache: Path) -> Iterator[FakeHub]:
    with hub_in_use() as server:
        yield server
