"""Mixtures of experts: the lab's drafters that need no training for a model."""

import pytest

from checkpoints import MakeCheckpoint
from engine import test_experts as experts
from lab.drafters.cases import spec


@pytest.mark.parametrize("options", ["temperature", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["lookahead", "jacobi", "gauss_seidel", "merged"])
def test_drafters(name: str, options: str) -> None:
    experts.test_drafters(spec(name), options)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("weights", ["plain", "int4"])
def test_checkpoints_in_batches_chunks_and_trees(
    family: str, weights: str, checkpoint: MakeCheckpoint
) -> None:
    experts.check_checkpoint(family, weights, checkpoint, ["lookahead"])
