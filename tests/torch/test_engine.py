"""The engine's tests with models that torch computes."""

import pytest

from checkpoints import MakeCheckpoint
from engine import (
    test_drafter_inputs,
    test_embeddings,
    test_experts,
    test_first_layers,
    test_interruption,
    test_saved_features,
)
from engine.test_embeddings import FAMILIES, FURTHER


@pytest.mark.parametrize("windows", [(None, None), (24, 24)], ids=["all", "window"])
def test_saved_features_equal_those_of_a_dense_pass(windows: tuple[int | None, ...]) -> None:
    test_saved_features.test_saved_features_equal_those_of_a_dense_pass(windows, packed=False)


@pytest.mark.parametrize("cut", [1, 2])
def test_first_layers_run_on_their_own(cut: int) -> None:
    test_drafter_inputs.test_first_layers_run_on_their_own(cut, packed=False)


@pytest.mark.parametrize("special", ["", "convolutions"])
def test_first_layers_of_other_models(special: str) -> None:
    test_first_layers.test_first_layers_of_other_models(special, packed=False)


def test_first_layers_with_learned_positions_and_biases() -> None:
    test_first_layers.test_first_layers_with_learned_positions_and_biases(packed=False)


def test_passes_know_how_many_experts_they_read() -> None:
    test_experts.test_passes_know_how_many_experts_they_read(packed=False)


@pytest.mark.parametrize("family", [*FAMILIES, *FURTHER])
def test_embeddings_equal_transformers(family: str, checkpoint: MakeCheckpoint) -> None:
    test_embeddings.test_embeddings_equal_transformers(family, "torch", checkpoint)


WRITE = ("write", (1, 2, 7, 18))  # between two layers


def test_all_requests_are_aborted_after_an_interrupt() -> None:
    test_interruption.check_aborts(*WRITE, packed=False)


def test_other_requests_of_an_interrupted_step_go_on() -> None:
    test_interruption.check_others(*WRITE, packed=False)
