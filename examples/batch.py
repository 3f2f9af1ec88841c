"""Decode a batch of prompts with several drafters, and compare their tokens.

Run it with ``python examples/batch.py``; give a folder or a Hub id to use another model.
"""

from __future__ import annotations

import sys

from pronk import LLM, SamplingParams

PROMPTS = [
    "import os\nimport sys\nimport",
    "The sea was calm. The sea was",
    "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return",
]
DRAFTERS = [
    "autoregressive",
    "prompt_lookup",
    "prompt_lookup(max_ngram=2, min_ngram=1, num_tokens=12)",
]


def main(model: str | None = None) -> None:
    llm = LLM(model)
    params = SamplingParams(max_tokens=48, temperature=0.8, seed=7)
    expected: list[list[int]] | None = None
    for drafter in DRAFTERS:
        completions = llm.generate(PROMPTS, params, drafter=drafter)
        tokens = [out.token_ids for out in completions]
        passes = [out.stats.target_steps for out in completions]
        expected = expected or tokens
        verdict = "the same" if tokens == expected else "OTHER"
        print(f"{drafter}: forward passes {passes}, {verdict} tokens")


if __name__ == "__main__":
    main(*sys.argv[1:2])
