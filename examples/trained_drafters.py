"""Compare drafters that were trained on the target, by tokens per forward pass.

Run it with ``python examples/trained_drafters.py`` in a clone. For another model, train a drafter
(``pronk train kangaroo --help``) and pass both:
``python examples/trained_drafters.py ./checkpoint "kangaroo(model='run/export')"``.
"""

from __future__ import annotations

import sys

from pronk import LLM, SamplingParams

PROMPT = "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n"
DRAFTERS = (
    "multi_token",
    "medusa",
    "kangaroo",
    "glide",
    "vanilla",
    "cape(glide, max_nodes=15)",
    "threshold(kangaroo)",
)


def main(model: str | None = None, *drafters: str) -> None:
    llm = LLM(model, budget="all")
    params = SamplingParams(max_tokens=48, temperature=0.8, seed=7, ignore_eos=True)
    plain = llm.generate(PROMPT, params, drafter="autoregressive")
    for drafter in drafters or DRAFTERS:
        out = llm.generate(PROMPT, params, drafter=drafter)
        assert out.token_ids == plain.token_ids  # same seed, same text, whatever the drafter
        per_pass = f"{out.stats.step_compression:.2f} tokens per pass"
        print(f"{drafter:26} {per_pass}, {out.stats.drafted} draft tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])
