"""Torch computes where the kernels are missing, fail or do not fit; without torch the error is one
line.
"""

import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from checkpoints import MakeCheckpoint
from kernels.test_library import OPTIONS, one_line
from pronk import LLM, OptionError
from pronk.models import kernels as loading
from pronk.models.kernels import load_kernels


def fall_back(folder: Path, *words: str, **options: Any) -> None:
    """Check that loading the model warns once that torch computes, and that the model generates."""
    with pytest.warns(UserWarning, match="torch computes instead") as said:
        model = LLM(folder, **options)
    (message,) = [str(each.message) for each in said]
    assert "\n" not in message
    assert "torch computes instead, slower and without the promise of equal bits" in message
    assert all(word in message for word in words), message
    assert not model.exact
    assert model.kernels == "torch"
    assert model.engine.cache.kernels is None
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(model.generate("def add(a, b):", OPTIONS).token_ids) == 12


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("choice", ["auto", "portable"])
def test_torch_computes_without_a_library(
    choice: str,
    checkpoint: MakeCheckpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    damaged: bool,
) -> None:
    path = tmp_path / "lost.so"
    if damaged:
        path.write_text("not a library")
    monkeypatch.setattr("pronk.models.choice.load_kernels", partial(load_kernels, path=path))
    fall_back(checkpoint("llama"), "lost.so", "install pronk again", kernels=choice)


@pytest.mark.parametrize("options", [{}, {"kernels": "torch"}, {"device": "cuda"}], ids=str)
def test_missing_torch_is_one_line(
    options: dict[str, str],
    checkpoint: MakeCheckpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = partial(load_kernels, path=tmp_path / "lost.so")
    monkeypatch.setattr("pronk.models.choice.load_kernels", lost)
    for name in [name for name in sys.modules if name.startswith("pronk.torch")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        OptionError,
        match=r"^.+: expected torch, found none; run pip install '\.\[torch\]' in a clone of "
        r"pronk$",
    ) as error:
        LLM(checkpoint("llama"), **options)  # type: ignore[arg-type]
    one_line(error)


def test_torch_computes_when_all_checks_fail(
    checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "self_check", lambda _: "it is wrong")
    monkeypatch.setattr("pronk.models.choice.load_kernels", load_kernels.__wrapped__)
    fall_back(checkpoint("llama"), "the portable kernels fail their self-check: it is wrong")


def test_torch_computes_unsupported_heads(checkpoint: MakeCheckpoint) -> None:
    fall_back(checkpoint("gpt2", n_embd=20, n_head=4), "no kernels for heads of 5")


def test_torch_on_request(checkpoint: MakeCheckpoint) -> None:
    """``kernels="torch"`` gives no warning, and in float32 almost surely the tokens of the
    kernels.
    """
    by_torch = LLM(checkpoint("llama"), kernels="torch")
    by_kernels = LLM(checkpoint("llama"))
    assert (by_torch.exact, by_kernels.exact) == (False, True)
    assert (by_torch.kernels, by_kernels.kernels) == ("torch", tiny_models.kernels().name)
    first, second = (
        each.generate("The quick brown fox", OPTIONS) for each in (by_torch, by_kernels)
    )
    assert first.token_ids == second.token_ids
