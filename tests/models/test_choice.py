"""Missing, damaged and failing kernels, and models that they do not compute: errors of one line."""

from functools import partial
from pathlib import Path

import pytest

from checkpoints import MakeCheckpoint
from kernels.test_library import one_line
from pronk import LLM, ConfigError, OptionError
from pronk.base.arrays import BFLOAT16, FLOAT16, FLOAT32
from pronk.cli.main import main
from pronk.drafting import make_drafter
from pronk.models import kernels as loading
from pronk.models.choice import choose_bits, compute_dtype
from pronk.models.kernels import load_kernels
from tiny_models import make_engine, tiny_decoder


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("choice", ["auto", "portable"])
def test_a_library_that_cannot_be_loaded(
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
    with pytest.raises(OptionError) as caught:
        LLM(checkpoint("llama"), kernels=choice)
    one_line(caught, "kernels: ", "lost.so", "install pronk again")


def test_no_instruction_set_passes_its_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loading, "self_check", lambda _: "it is wrong")
    monkeypatch.setattr("pronk.models.choice.load_kernels", load_kernels.__wrapped__)
    monkeypatch.setattr(loading, "_passed_marker", lambda _: Path("/nowhere/marker"))
    with pytest.raises(SystemExit, match="2"):
        main(["generate", "--model", "pronk-tiny", "def f"])
    error = capsys.readouterr().err
    assert error.startswith("pronk: error: kernels: ")
    assert error.endswith("the portable kernels fail their self-check: it is wrong\n")
    assert error.count("\n") == 1


def test_heads_that_the_kernels_lack(checkpoint: MakeCheckpoint) -> None:
    folder = checkpoint("llama", head_dim=578)
    message = r"^head_dim: expected an even number of at most 576, found 578; use another model$"
    with pytest.raises(ConfigError, match=message):
        LLM(folder)
    with pytest.raises(ConfigError, match=message):
        make_drafter(f"draft_model(model={str(folder)!r})").bind(make_engine(tiny_decoder()).target)


def test_bits_and_dtypes() -> None:
    assert choose_bits("auto", BFLOAT16, quantized=False) == "fast"
    assert choose_bits("auto", BFLOAT16, quantized=True) == "portable"
    assert choose_bits("auto", FLOAT32, quantized=False) == "portable"
    assert choose_bits("fast", FLOAT32, quantized=True) == "fast"
    assert [compute_dtype(each) for each in (FLOAT32, BFLOAT16, FLOAT16)] == [
        FLOAT32,
        BFLOAT16,
        FLOAT32,
    ]
