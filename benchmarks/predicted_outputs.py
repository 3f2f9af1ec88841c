"""Edits of code with a prediction: forward passes and time, against plain decoding and ``auto``.

    python benchmarks/predicted_outputs.py MODEL.gguf --prompts code_edit.jsonl --limit 8

Each prompt asks for a change of the code in its first block of Markdown, which is the prediction.
An instruction asks for the code alone, as an editor needs it; ``--instruction ""`` leaves it out.
Printed for each prompt: tokens of the answer, how many are predicted, and forward passes.
The texts of all variants must be equal. The variants of a prompt are interleaved, and each runs
after a request that is not measured. Times are those after the first token. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import re
from math import exp, fsum, log
from pathlib import Path
from typing import NamedTuple

from pronk import LLM, Completion, SamplingParams
from pronk.lab.bench.machine import describe_hardware

_INSTRUCTION = "\n\nRespond only with the whole corrected code, without any explanation."
_CODE = re.compile(r"```\w*\n(.*?)```", re.DOTALL)
# Name of a variant, its drafter, and whether its requests have a prediction.
_VARIANTS = (
    ("plain", "autoregressive", False),
    ("auto", "auto", False),
    ("prediction", "prediction", True),
    ("auto with prediction", "auto", True),
)


class Run(NamedTuple):
    """Figures of one request: tokens, forward passes, and seconds after the first token."""

    tokens: int
    passes: int
    seconds: float


def measure(llm: LLM, prompt: str, drafter: str, code: str | None, max_tokens: int) -> Completion:
    """Return the greedy answer to a prompt; ``code`` is its prediction, ``None``: without one."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, prediction=code)
    return llm.chat([{"role": "user", "content": prompt}], params, drafter=drafter)


def figures(completion: Completion) -> Run:
    stats = completion.stats
    return Run(stats.generated_tokens, stats.target_steps, stats.total_seconds - stats.ttft)


def geometric_mean(ratios: list[float]) -> float:
    return exp(fsum(map(log, ratios)) / len(ratios))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--instruction", default=_INSTRUCTION)
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.prompts.read_text().splitlines()]
    stride = max(1, len(rows) // options.limit)
    # The prompt is read once, not once per variant.
    llm = LLM(options.model, threads=options.threads, prefix_cache=True)
    runs: dict[str, list[Run]] = {name: [] for name, _, _ in _VARIANTS}
    for number, row in enumerate(rows[::stride][: options.limit]):
        prompt = row["turns"][0] + options.instruction
        found = _CODE.search(prompt)
        assert found is not None, f"{row['id']}: expected a block of code, found none"
        texts = set[str]()
        num_found = 0
        for name, drafter, is_predicted in _VARIANTS:
            code = found[1] if is_predicted else None
            if number == 0:  # the costs of forward passes, and the drafters' first calls
                measure(llm, prompt, drafter, code, 16)
            completion = measure(llm, prompt, drafter, code, options.max_tokens)
            texts.add(completion.text)
            runs[name].append(figures(completion))
            if is_predicted:
                num_found = completion.stats.found_tokens
        assert len(texts) == 1, f"{row['id']}: expected equal texts, found {len(texts)}"
        line = ", ".join(f"{name} {runs[name][-1].passes}" for name, _, _ in _VARIANTS)
        num_tokens = runs["plain"][-1].tokens
        print(
            f"{row['id']}: {num_tokens} tokens, {num_found} predicted; passes: {line}", flush=True
        )
    summary = dict[str, dict[str, float]]()
    for name, _, _ in _VARIANTS:
        tokens = sum(run.tokens for run in runs[name])
        passes = sum(run.passes for run in runs[name])
        pairs = zip(runs["plain"], runs[name], strict=True)
        speedup = geometric_mean([plain.seconds / run.seconds for plain, run in pairs])
        summary[name] = {"tokens_per_pass": tokens / passes, "speedup": speedup}
        print(f"{name}: {tokens / passes:.2f} tokens per pass, {speedup:.2f} x plain")
    result = {
        "model": llm.path.name,
        "hardware": describe_hardware(llm.device),
        "prompts": options.limit,
    }
    print(json.dumps({**result, "variants": summary}))


if __name__ == "__main__":
    main()
