"""A proof, on the user's own model and device, that guessing does not change what the model says.

::

    report = verify_model(llm, ["prompt_lookup"], [NamedPrompt("mine", llm.tokenizer.encode("def f(x):"))])
    report.passed

Four questions: are the *tokens* those of plain decoding (``equality``), are their *log-probabilities* those of scoring
the text in one pass (``rescoring``), do sampled strings follow the *law* of the model (``distribution``), and did any
guess take part in it (``vacuous`` if not).
"""

from __future__ import annotations

from pronk.verification.prompts import NamedPrompt, VerifySettings
from pronk.verification.report import DrafterReport, VerifyReport
from pronk.verification.run import fitting_drafters, verify_model, verify_steps

__all__ = [
    "DrafterReport",
    "NamedPrompt",
    "VerifyReport",
    "VerifySettings",
    "fitting_drafters",
    "verify_model",
    "verify_steps",
]
