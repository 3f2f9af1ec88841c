"""Generate JSON that fits a schema, then compare the probabilities of three texts.

Run it with ``python examples/guided.py`` after ``pip install '.[guided]'``; the argument is another
model.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

from pronk import LLM, Guide, SamplingParams

TICKET = {
    "type": "object",
    "properties": {
        "summary": {"type": "string", "maxLength": 40},
        "severity": {"enum": ["low", "medium", "high"]},
        "reproducible": {"type": "boolean"},
    },
    "required": ["summary", "severity", "reproducible"],
    "additionalProperties": False,
}


def main(model: str | None = None) -> None:
    llm = LLM(model, budget="all")
    params = SamplingParams(temperature=0.8, seed=3, guide=Guide(json=TICKET))
    plain_params = replace(params, guide_mode="plain")
    plain = llm.generate("A ticket: ", plain_params, drafter="autoregressive")
    out = llm.generate("A ticket: ", params)
    assert out.token_ids == plain.token_ids  # draft tokens change the speed, never the text
    print(json.loads(out.text))
    passes = f"{out.stats.target_steps} forward passes"
    print(f"{passes}, {plain.stats.target_steps} without draft tokens")

    ticket = "A ticket: it crashes whenever I click. Severity:"
    found = llm.choose(ticket, [" low", " medium", " high"])
    for option, share in zip(found.options, found.probabilities, strict=True):
        print(f"{option} {share:.0%}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
