"""Measure the acceptance of a finished head, and write the counts into its folder.

    python tools/head_acceptance.py MODEL.gguf HEAD --prompts questions.jsonl --limit 32

Each line of the prompts is a JSON object with a question, the first of ``turns``. The target
answers each of them at the temperatures 0 and 0.7, and verifies every draft token. Take texts that
are not used to judge the head.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pronk import LLM, SamplingParams
from pronk.drafting import ACCEPTANCE_FILE, Eagle3, head_acceptance_document

_TEMPERATURES = (0.0, 0.7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("head", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=96)
    options = parser.parse_args()
    path = options.head / ACCEPTANCE_FILE
    path.unlink(missing_ok=True)  # or the new counts would begin with the old ones
    llm = LLM(options.model, budget="all")
    drafter = Eagle3(model=str(options.head))
    rows = [json.loads(line) for line in options.prompts.read_text().splitlines()]
    stride = max(1, len(rows) // options.limit)
    for row in rows[::stride][: options.limit]:
        messages = [{"role": "user", "content": row["turns"][0]}]
        for temperature in _TEMPERATURES:
            params = SamplingParams(max_tokens=options.max_tokens, temperature=temperature, seed=0)
            llm.chat(messages, params, drafter=drafter).stats.check_proposer()
    stats = llm.calibration.stats
    assert stats is not None
    counts = stats.take(llm.get_proposer(drafter).label)
    document = head_acceptance_document(counts)
    rows_text = ",\n".join(json.dumps(row) for row in document["counts"])
    head = json.dumps(document["format"])
    path.write_text(f'{{"format": {head}, "counts": [\n{rows_text}\n]}}\n')
    print(f"{path}: {len(counts)} counts")


if __name__ == "__main__":
    main()
