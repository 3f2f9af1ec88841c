"""Use a small model as the drafter of a large one in four ways, and count the tokens per pass.

Run it with ``python examples/draft_model.py`` in a clone, or with your own target and draft model:
``python examples/draft_model.py TARGET DRAFT``.
"""

from __future__ import annotations

import sys

from pronk import LLM, Cape, DraftModel, PromptLookup, SamplingParams, Staged, Threshold

PROMPT = "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n"


def main(model: str | None = None, draft: str | None = None) -> None:
    llm = LLM(model, budget="all")
    proposer = DraftModel(draft)
    params = SamplingParams(max_tokens=48, temperature=0.8, seed=7, ignore_eos=True)
    plain = llm.generate(PROMPT, params, drafter="autoregressive")
    for drafter in (
        proposer,
        Threshold((proposer,)),
        Cape((Threshold((proposer,)),), max_nodes=15),
        Staged((proposer, PromptLookup()), num_nodes=15),
    ):
        out = llm.generate(PROMPT, params, drafter=drafter)
        assert out.token_ids == plain.token_ids  # same seed, same text, whatever the drafter
        per_pass = f"{out.stats.step_compression:.2f} tokens per pass"
        print(f"{drafter.name:12} {per_pass}, {out.stats.drafted} draft tokens")


if __name__ == "__main__":
    main(*sys.argv[1:3])
