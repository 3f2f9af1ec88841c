from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pronk.errors import OptionError
from train.tiny import TINY, lm_trainer


def test_text_shorter_than_a_sequence_is_refused(new_run: Callable[[str], Path]) -> None:
    folder = new_run("run")
    with pytest.raises(OptionError, match="expected at least 65 tokens for sequences of 64"):
        lm_trainer(folder, replace(TINY, final_share=0.001))


def test_unknown_device_is_named(new_run: Callable[[str], Path]) -> None:
    with pytest.raises(
        OptionError, match="device: expected one that this machine has, for example cpu, found 'abacus'"
    ):
        lm_trainer(new_run("run"), replace(TINY, device="abacus"))
