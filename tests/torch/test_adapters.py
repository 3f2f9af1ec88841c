"""LoRA adapters by torch: the engine's test of merged weights."""

import pytest

from models.test_adapters import test_logits_equal_those_of_merged_weights  # noqa: F401 - runs with the fixture below
from pronk.base.arrays import FLOAT32
from pronk.torch.backend import TorchBackend


@pytest.fixture
def backend() -> TorchBackend:
    return TorchBackend("cpu", FLOAT32)
