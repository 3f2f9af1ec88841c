"""Heads that keep features in the target's KV cache need a target in one process."""

from pathlib import Path

import pytest

from drafting.from_target.trained_eagle import Form, random_head, write_head
from pronk.base.errors import OptionError
from pronk.drafting import make_drafter
from pronk.parallel.mirrored_cache import MirroredCache
from tiny_models import make_engine, tiny_decoder

EAGLE = Form()


def test_a_target_on_several_processes(tmp_path: Path) -> None:
    engine = make_engine(tiny_decoder(windows=(None,) * 4), kind=MirroredCache)
    with pytest.raises(OptionError, match="eagle3: expected a target in one process"):
        make_drafter(f"eagle3(model={str(write_head(random_head(EAGLE), tmp_path))!r})").bind(
            engine.target
        )
