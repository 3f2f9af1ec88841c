"""Continue a text, and print the statistics of its draft tokens.

Run it with ``python examples/generate.py``; give a folder or a Hub id to use another model.
"""

from __future__ import annotations

import sys

from pronk import LLM, SamplingParams

PROMPT = '''def mean(values):
    """Return the arithmetic mean."""
    return sum(values) / len(values)


def variance(values):
    """Return the'''


def main(model: str | None = None) -> None:
    llm = LLM(model)
    out = llm.generate(PROMPT, SamplingParams(max_tokens=64, logprobs=2))
    stats = out.stats
    print(PROMPT + out.text)
    passes = f"{stats.generated_tokens} tokens in {stats.target_steps} forward passes"
    print(f"\n{passes}: S = {stats.step_compression:.2f}")
    accepted = f"{stats.accepted} of {stats.drafted} draft tokens were accepted"
    print(f"{accepted}; finish reason: {out.finish_reason}")
    print(f"log-probabilities at the first token: {out.logprobs[0] if out.logprobs else {}}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
