"""A draft model by torch, where the kernels do not fit."""

from pathlib import Path

import pytest

from drafting.drafting import decode
from drafting.from_draft.drafts import draft_folder, write_checkpoint
from pronk.base.errors import OptionError
from pronk.drafting import make_drafter
from tiny_models import make_engine, tiny_decoder, tiny_module


def test_int8_weights_need_the_kernels() -> None:
    drafter = make_drafter(f"draft_model(model={draft_folder(0.0)!r}, weights='int8')")
    with pytest.raises(
        OptionError, match="weights: expected pronk's kernels for int8, found torch on cpu"
    ):
        drafter.bind(make_engine(tiny_decoder(packed=False)).target)


def test_torch_computes_a_draft_without_kernels(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "wide", tiny_module(heads=1, kv_heads=1, head_dim=578))
    engine = make_engine(tiny_decoder())
    warning = (
        "draft_model: no kernels for heads of 578 in wide; torch computes the draft instead, slower"
    )
    with pytest.warns(UserWarning, match=f"^{warning}$"):
        drafter = make_drafter(f"draft_model(model={str(tmp_path / 'wide')!r})").bind(engine.target)
    (request,) = decode(engine, drafter, [[1, 2, 3]])
    assert request.stats.drafted > 0
