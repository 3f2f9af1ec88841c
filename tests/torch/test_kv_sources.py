"""Layers that read keys and values of other layers, with torch: the engine's tests."""

import pytest

from models import test_kv_sources as sources
from pronk.base.arrays import FLOAT32
from pronk.models.backend import Backend
from pronk.torch.backend import TorchBackend


@pytest.fixture
def backend() -> Backend:
    return TorchBackend("cpu", FLOAT32)


@pytest.mark.parametrize("norms", ["", "heads", "whole"])
def test_prompts_in_chunks(backend: Backend, norms: str) -> None:
    sources.test_prompts_in_chunks(backend, norms)


def test_trees_of_several_requests(backend: Backend) -> None:
    sources.test_trees_of_several_requests(backend)


def test_trees_in_several_passes_and_accepted_paths(backend: Backend) -> None:
    sources.test_trees_in_several_passes_and_accepted_paths(backend)


def test_each_source_matters(backend: Backend) -> None:
    sources.test_each_source_matters(backend)


def test_a_model_without_keys_of_its_own_needs_no_blocks(backend: Backend) -> None:
    sources.test_a_model_without_keys_of_its_own_needs_no_blocks(backend)
