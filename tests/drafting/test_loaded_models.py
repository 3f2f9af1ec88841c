"""Tests of models that drafters share: loaded once, freed with the last user."""

from __future__ import annotations

import gc
import os
from pathlib import Path

from pronk.drafting.loaded_models import LoadedModels


class Model:
    """A stand-in for a loaded model."""


def test_a_model_is_loaded_once_for_each_kind(tmp_path: Path) -> None:
    models = LoadedModels()
    first = models.get_or_load(tmp_path, "float32", load=Model)
    assert models.get_or_load(tmp_path, "float32", load=Model) is first
    other = models.get_or_load(tmp_path, "bfloat16", load=Model)
    assert other is not first
    assert {*models} == {first, other}


def test_a_model_is_freed_with_its_last_user(tmp_path: Path) -> None:
    models = LoadedModels()
    model = models.get_or_load(tmp_path, load=Model)
    assert len(models) == 1
    del model
    gc.collect()
    assert len(models) == 0


def test_a_rewritten_file_is_loaded_again(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"first")
    models = LoadedModels()
    old = models.get_or_load(tmp_path, load=Model)
    assert models.is_current(old)
    os.utime(weights, ns=(1, 2**60))
    assert not models.is_current(old)
    new = models.get_or_load(tmp_path, load=Model)
    assert new is not old
    assert models.is_current(new)
    weights.unlink()
    assert models.is_current(new), "a deleted file cannot be loaded again"


def test_a_model_that_was_not_loaded_here_is_current() -> None:
    assert LoadedModels().is_current(Model())
