"""Verification that speculative decoding does not change the output of a model on a device.

::

    prompts = [NamedPrompt("mine", llm.tokenizer.encode("def f(x):"))]
    *_, report = verify_steps(llm, ["prompt_lookup"], prompts)
    report.passed

There are three checks:

- ``equality``: the tokens are those of plain decoding.
- ``rescoring``: the log-probabilities are those of one forward pass over the whole text.
- ``distribution``: sampled strings follow the model's distribution.

A check that passes without any accepted draft token is ``vacuous``.
"""

from __future__ import annotations

from pronk.lab.verification.prompts import NamedPrompt, VerifySettings
from pronk.lab.verification.run import DrafterReport, VerifyReport, fitting_drafters, verify_steps

__all__ = [
    "DrafterReport",
    "NamedPrompt",
    "VerifyReport",
    "VerifySettings",
    "fitting_drafters",
    "verify_steps",
]
